"""What the admin tools found, as JSON for programs. Sizes in bytes, times in seconds."""

from __future__ import annotations

import dataclasses
from typing import Any

from lmcache_redis.admin.doctor import Diagnosis
from lmcache_redis.admin.inspect import ChunkReport, OtherKey, Summary
from lmcache_redis.admin.names import show_key
from lmcache_redis.admin.purge import Plan, Removal
from lmcache_redis.admin.stripes import Stripe

Json = dict[str, Any]


def chunk_json(report: ChunkReport | OtherKey) -> Json:
    """`inspect KEY`."""
    if isinstance(report, OtherKey):
        return {
            "ours": False,
            "key": show_key(report.key),
            "reason": report.reason,
            "type": report.kind,
            "value_bytes": report.value_bytes,
        }
    name, header = report.name, report.headed.header if report.headed else None
    world, rank, local_world, local_rank = name.ranks
    return {
        "ours": True,
        "chunk_key_hex": name.chunk_key.hex(),
        "key_prefix": show_key(name.prefix)[1:-1],
        "model": name.key.model_name,
        "layout": name.layout,
        "chunk_hash": name.key.chunk_hash.hex(),
        "world_size": world,
        "rank": rank,
        "local_world_size": local_world,
        "local_rank": local_rank,
        "stripe_asked": report.stripe_index,
        "verdict": report.verdict.name.lower(),
        "verified": report.verified,
        "stripe_count": report.stripe_count,
        "stripes_present": report.present,
        "chunk_bytes": header.chunk_bytes if header else None,
        "fingerprint": header.fingerprint.hex() if header else None,
        "memory_format": header.metadata.fmt.name if header else None,
        "stored_unix_s": header.created_unix_ms / 1000 if header else None,
        "stripes": [_stripe_json(stripe) for stripe in report.stripes],
    }


def summary_json(summary: Summary) -> Json:
    """`inspect` without a key."""
    return {
        "whole": summary.survey.whole,
        "keys_looked_at": summary.survey.looked_at,
        "database_keys": summary.survey.database_keys,
        "other_keys": len(summary.survey.other_keys),
        "verified": summary.verified,
        "groups": [
            {
                "model": group.model,
                "layout": group.layout,
                "workers": len(group.workers),
                "chunks": group.chunks,
                "stripes": group.stripes,
                "value_bytes": group.value_bytes,
                "chunks_of_unknown_size": group.unknown_size,
                "incomplete": group.incomplete,
                "without_stripe_0": group.no_first,
                "damaged": group.damaged if summary.verified else None,
                "idle_s": _spread(group.idle_s),
                "frequency": _spread(group.frequencies),
                "stored_unix_s": _spread(group.stored_unix_s),
            }
            for group in summary.groups
        ],
    }


def plan_json(plan: Plan) -> Json:
    """What a purge would remove."""
    return {
        "chunks": len(plan.chunks),
        "stripes": plan.stripes,
        "value_bytes": plan.value_bytes or None,
        "groups": [
            {"model": model, "layout": layout, "chunks": chunks}
            for (model, layout), chunks in sorted(plan.by_group().items())
        ],
    }


def removal_json(removal: Removal) -> Json:
    """What a purge removed."""
    return {
        "chunks": removal.chunks,
        "stripes": removal.stripes,
        "value_bytes": removal.value_bytes,
        "vanished": removal.vanished,
        "used_again": removal.used_again,
        "stored_again": removal.stored_again,
        "left": dict(removal.left),
        "left_examples": [show_key(key) for key in removal.examples],
        "seconds": removal.seconds,
    }


def diagnosis_json(diagnosis: Diagnosis) -> Json:
    """`doctor`."""
    findings = []
    for finding in diagnosis.findings:
        row = dataclasses.asdict(finding)
        row["severity"] = finding.severity.name.lower()
        findings.append(row)
    facts = []
    for each in diagnosis.facts:
        row = dataclasses.asdict(each)
        row["transport"] = each.transport.value
        facts.append(row)
    return {"exit_status": diagnosis.exit_status, "findings": findings, "facts": facts}


def _stripe_json(stripe: Stripe) -> Json:
    return {
        "index": stripe.index,
        "state": stripe.state.name.lower(),
        "detail": stripe.detail,
        "value_bytes": stripe.value_bytes,
        "store_id": stripe.header.store_id.hex() if stripe.header else None,
        "stored_unix_s": stripe.header.created_unix_ms / 1000 if stripe.header else None,
        "idle_s": stripe.use.idle_s,
        "frequency": stripe.use.frequency,
        "expires_in_s": stripe.expires_in_s,
    }


def _spread(values: list[int] | list[float]) -> Json | None:
    """Smallest, median and largest; None where there is nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {"min": ordered[0], "median": ordered[len(ordered) // 2], "max": ordered[-1]}

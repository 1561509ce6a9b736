# SPDX-License-Identifier: Apache-2.0
"""What an agent exposes over HTTP beside its counters: values of its status, pages and documents.

`/status.json` and `/why.json` are what the agent answers to STATUS, WHY and LAYOUTS. Ids of
requests are in `/why.json` and on the page, both only with `--expose-requests`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent, status_report
from lmcache_redis.agent.peers import Reply
from lmcache_redis.agent.reports.history import SAMPLE_S, History, Minute
from lmcache_redis.agent.reports.page import HEADERS, PRIVATE, page
from lmcache_redis.agent.reports.words import tiers_of
from lmcache_redis.agent.sessions import PastRequest
from lmcache_redis.agent.uses import TenantUse
from lmcache_redis.metrics.exporter import (
    OwnerCollector,
    WsgiApp,
    ask_on,
    gauge,
    labelled,
    plain_text,
    read_on,
)

# Fields of `ModelUse`.
_OF_MODELS: Final = {
    "lookups": "lookups answered",
    "lookup_tokens": "prompt tokens asked for by lookups, in whole chunks",
    "hit_tokens": "prompt tokens found by lookups",
    "retrieved_bytes": "bytes scattered into blocks of its engines",
    "gathered_bytes": "bytes gathered from blocks of its engines",
    "saved_tokens": "prompt tokens loaded into blocks of its engines instead of computed",
}
# Fields of `TenantUse`, by the name of the metric.
_OF_TENANTS: Final = {
    "lookups": ("lookups", "lookups answered"),
    "lookup_tokens": ("lookup_tokens", "prompt tokens asked for by lookups, in whole chunks"),
    "hit_tokens": ("hit_tokens", "prompt tokens found by lookups"),
    "saved_tokens": ("saved_tokens", "prompt tokens loaded into blocks instead of computed"),
    "saved_prefill_seconds": (
        "highest_saved_s", "prefill of saved tokens, less the wait for their loads",
    ),
    "retrieved_bytes": ("retrieved_bytes", "bytes scattered into blocks of engines"),
    "gathered_bytes": ("gathered_bytes", "bytes gathered from blocks of engines"),
    "dropped_chunks": ("dropped_chunks", "chunks not written because of --tenant-bytes"),
    "stored_bytes": ("stored_bytes", "payload bytes written to Redis, as they lie"),
}  # fmt: skip
_MOST_MISSES = 10
_MOST_REQUESTS = 200
# How long Redis may take for what `why` asks it.
_WHY_S = 2.0
_NOT_EXPOSED: Final = "this agent does not show requests: start it with --expose-requests"
_Ask = Callable[[m.Question, Reply], None]


def collector_of(agent: Agent) -> OwnerCollector:
    def read() -> Iterator[Metric]:
        yield from metrics_of(status_report(agent))
        yield from tenants_of(agent.peers.tenants.rows())

    return OwnerCollector(agent.loop.post, read)


def pages_of(agent: Agent, ask: _Ask) -> dict[str, WsgiApp]:
    """By path. Each may raise `NoReading`. The loop keeps an hour for the page from now on.

    ask: answers a question of a tool, on the loop.
    """
    exposed, history, metrics = agent.config.expose_requests, History(), agent.cache.metrics

    def sample() -> None:
        history.take(metrics.snapshot(), agent.loop.now())

    sample()
    agent.loop.every(SAMPLE_S, sample)

    def for_people(_: Mapping[str, Any], start: Any) -> list[bytes]:
        status, hour, misses = read_on(agent.loop.post, read)
        start("200 OK", [*HEADERS])
        return [page(status, hour, misses, time.time(), exposed).encode("utf-8", "replace")]

    def read() -> tuple[dict[str, Any], list[Minute], list[PastRequest]]:
        status = status_report(agent)
        hour = history.minutes(status["counters"], agent.loop.now())
        return status, hour, last_misses(agent)

    def status_json(_: Mapping[str, Any], start: Any) -> list[bytes]:
        return answer(start, m.Status(1))

    def why_json(environ: Mapping[str, Any], start: Any) -> list[bytes]:
        if not exposed:
            return plain_text(start, "403 Forbidden", _NOT_EXPOSED)
        try:
            return answer(start, _question(environ["QUERY_STRING"]))
        except (ValueError, msgspec.ValidationError) as error:
            return plain_text(start, "400 Bad Request", str(error))

    def answer(start: Any, question: m.Question) -> list[bytes]:
        found = ask_on(agent.loop.post, partial(ask, question), _WHY_S)
        if not isinstance(found, m.StatusReport):
            return plain_text(start, "503 Service Unavailable", "the agent does not answer now")
        start("200 OK", [("Content-Type", "application/json"), *PRIVATE])
        return [found.report]

    return {"/": for_people, "/status.json": status_json, "/why.json": why_json}


def _question(query: str) -> m.Question:
    """Of `request=ID&most=N`, or `layouts=A&layouts=B`. Raises what a wrong one deserves."""
    found = parse_qs(query, keep_blank_values=True, max_num_fields=16)
    if "layouts" in found:
        return msgspec.convert({"call_id": 1, "wanted": found["layouts"]}, m.Layouts)
    fields: dict[str, Any] = {
        name: found[name][-1] for name in ("request", "most") if name in found
    }
    asked = msgspec.convert({"call_id": 1, **fields}, m.Why, strict=False)
    # The loop makes the answer, and lookups wait meanwhile.
    return msgspec.structs.replace(asked, most=min(asked.most, _MOST_REQUESTS))


def last_misses(agent: Agent) -> list[PastRequest]:
    history = agent.sessions.history
    found = (each for each in history if each.lookup is not None and each.lookup.first_miss)
    return [*islice(found, _MOST_MISSES)]


def metrics_of(status: Mapping[str, Any]) -> Iterator[Metric]:
    """status: a STATUS document."""
    pool, loads = status["pool"], status["loads"]
    slot_bytes = pool["slot_bytes"]
    used_bytes, pinned_bytes = pool["used_slots"] * slot_bytes, pool["pinned_slots"] * slot_bytes
    gauges = partial(labelled, GaugeMetricFamily)
    yield gauges("info", "1; the version of the agent", ["version"], {(status["version"],): 1})
    rows = [
        ("pool_size_bytes", "size of the host pool", pool["slots"] * slot_bytes),
        ("pool_used_bytes", "slots of the host pool in use; a full pool is normal", used_bytes),
        ("pool_pinned_bytes", "slots that requests, loads or stores hold now", pinned_bytes),
        (
            "pool_locked_bytes", "bytes of the host pool that are page-locked for GPUs",
            pool["locked_bytes"],
        ),
        ("queue_bytes", "chunks that wait to be written to Redis", status["queues"]["write_bytes"]),
        (
            "queue_limit_bytes", "limit of the chunks that wait to be written to Redis",
            status["write_queue_bytes"],
        ),
        ("waiting_lookups", "lookups that wait for room in the host pool", loads["waiting"]),
        ("sessions", "requests that the agent knows", status["sessions"]),
        (
            "distrusted_layouts",
            "layouts of which nothing is loaded, because canaries have found other KV than was "
            "cached", len(status["canaries"]["distrusted"]),
        ),
    ]  # fmt: skip
    for kind, tier in tiers_of(status):
        said = f"1 if {kind.title} answers, 0 while nothing is asked of it"
        rows.append((f"{kind.name}_up", said, tier["up"]))
        if tier["used_bytes"] is not None:
            said = f"bytes that chunks take {kind.place}"
            rows.append((f"{kind.name}_used_bytes", said, tier["used_bytes"]))
    for row in rows:
        yield gauge(*row)
    tiers = {(name,): tier for name, tier in loads["tiers"].items()}
    yield gauges(
        "load_bytes_per_second",
        "measured rate of loads, 0 before the first",
        ["tier"],
        {label: tier["bytes_per_s"] for label, tier in tiers.items()},
    )
    yield gauges(
        "tier_slow",
        "1 while nothing is loaded from the tier because computing is faster",
        ["tier"],
        {label: tier["is_slow"] for label, tier in tiers.items()},
    )
    yield labelled(
        CounterMetricFamily,
        "redis_replies_refused",
        "error replies of Redis, by their code",
        ["reason"],
        {(reason,): n for reason, n in status["redis"]["refused"].items()},
    )
    engines = Counter(
        (each["model"], each["layout"], "yes" if each["ready"] else "no")
        for each in status["engines"]
    )
    yield gauges(
        "engines", "registered workers, ready or not", ["model", "layout", "ready"], engines
    )
    for name, meaning in _OF_MODELS.items():
        used = {(model,): use[name] for model, use in status["models"].items()}
        yield labelled(CounterMetricFamily, f"model_{name}", meaning, ["model"], used)


def tenants_of(rows: Mapping[str, TenantUse]) -> Iterator[Metric]:
    """rows: by the value of the label."""
    for name, (field, meaning) in _OF_TENANTS.items():
        counted = {(tenant,): getattr(use, field) for tenant, use in rows.items()}
        yield labelled(CounterMetricFamily, f"tenant_{name}", meaning, ["tenant"], counted)

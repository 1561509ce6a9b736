# SPDX-License-Identifier: Apache-2.0
"""What programs read of a chunk and of a server; docs/reference/json.md names the other fields."""

from __future__ import annotations

from typing import Any

from lmcache_redis.admin.doctor import Diagnosis, findings_of
from lmcache_redis.admin.facts import Facts
from lmcache_redis.admin.inspect import explain, summarise
from lmcache_redis.admin.report import as_json
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.resp.net.endpoint import Transport
from tests.admin.cache import STORED_UNIX_MS, Cached


def names(found: Any) -> str:
    return " ".join(as_json(found))


def test_the_fields_of_a_chunk_are_these(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(3, prefix=b"\xff:")
    chunk.put(client)
    report = explain(server, chunk.keys[1], chunk.prefix, False)
    assert names(report) == (
        "chunk_key_hex key_prefix model layout chunk_hash world_size rank local_world_size "
        "local_rank stripe_asked verdict verified opened sealed_with tenant stripe_count "
        "stripes_present chunk_bytes value_bytes plain_bytes fingerprint memory_format shapes "
        "dtypes stored_unix_s stripes"
    )
    stripe = as_json(report)["stripes"][0]
    assert names(stripe) == (
        "index state detail value_bytes payload_bytes store_id stored_unix_s idle_s expires_in_s"
    )


def test_values_as_programs_take_them(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(3, rank=1, prefix=b"\xff:")
    chunk.put(client)
    client.delete(chunk.keys[2])
    report = as_json(explain(server, chunk.keys[0], chunk.prefix, False))
    assert report["key_prefix"] == r"\xff:"
    assert (report["world_size"], report["rank"]) == (2, 1)
    assert report["chunk_key_hex"] == chunk.name.chunk_key.hex()
    assert (report["verdict"], report["memory_format"]) == ("incomplete", "PAGES")
    assert (report["shapes"], report["dtypes"]) == ([[chunk.chunk_bytes]], ["uint8"])
    assert report["stored_unix_s"] == STORED_UNIX_MS / 1000
    assert [stripe["state"] for stripe in report["stripes"]] == ["whole", "whole", "missing"]
    gone = as_json(explain(server, Cached(9).keys[0], b"", False))
    assert (gone["chunk_bytes"], gone["fingerprint"], gone["stored_unix_s"]) == (None, None, None)
    group = as_json(summarise(server, chunk.prefix, everything=True, verify=False))["groups"][0]
    assert (group["workers"], group["damaged"]) == (1, None)
    assert names(group["idle_s"]) == "min median max"


def test_a_diagnosis_has_every_fact() -> None:
    facts = (Facts(where="a", transport=Transport.TLS, version=(7, 2)),)
    report = as_json(Diagnosis(facts, findings_of(facts)))
    assert names(report) == "exit_status findings facts rights node"
    assert names(report["findings"][0]) == "severity topic seen why change where"
    assert report["findings"][0]["severity"] == "critical"
    (seen,) = report["facts"]
    assert set(seen) == set(Facts.__dataclass_fields__)
    assert (seen["transport"], seen["version"]) == ("rediss", [7, 2])
    assert names(seen["need"]) == (
        "kv_bytes_per_token prefill_tokens_per_s prompt_tokens memory_per_token loaded_per_token "
        "of is_known"
    )

# SPDX-License-Identifier: Apache-2.0
"""A whole diagnosis of a real server, and that it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_redis.admin import doctor
from lmcache_redis.admin.doctor import (
    Diagnosis,
    diagnose,
    examine,
    findings_of,
    measure_bandwidth,
    measure_ping,
    probe_keys,
)
from lmcache_redis.admin.facts import Facts, Need
from lmcache_redis.admin.report import as_json, diagnosis_lines
from lmcache_redis.admin.rules import Severity, judge
from lmcache_redis.admin.server import Primary, PrimaryServers, open_server
from lmcache_redis.admin.sizes.sizing import SizeOptions, size_model
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import RedisFull, RedisUnavailable
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.endpoint import Transport
from tests.acl import PASSWORD, documented_url
from tests.admin.cache import Cached, everything
from tests.servers import RedisServer

# Whatever this machine does just now, it is enough.
LITTLE = Need(1, 1.0)


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MEASURE_S", 0.02)


def test_a_diagnosis_changes_nothing(
    server: PrimaryServers, client: Any, redis_server: RedisServer
) -> None:
    Cached(1, prefix=b"p:").put(client)
    client.set("other", "x")
    before = everything(redis_server)
    settings = client.config_get("*")
    diagnosis = diagnose(server, b"p:", LITTLE, bandwidth=True)
    assert everything(redis_server) == before
    assert client.config_get("*") == settings
    (facts,) = diagnosis.facts
    assert facts.ping_s
    assert facts.read_bytes_per_s
    assert facts.write_bytes_per_s
    topics = [finding.topic for finding in diagnosis.findings]
    assert topics[:2] == ["maxmemory", "maxmemory-policy"]
    assert {"load bandwidth", "store bandwidth", "latency"} <= set(topics)
    assert {finding.where for finding in diagnosis.findings} == {server.where}
    assert diagnosis.exit_status == 1


def test_probes_expire_by_themselves(
    server: PrimaryServers, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if killed in the middle: what was written goes without us."""

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_read", killed)
    monkeypatch.setattr(Primary, "ask_all", lambda self, commands: [])
    with pytest.raises(KeyboardInterrupt):
        measure_bandwidth(server, server.nodes[0], b"p:")
    keys = client.keys("*")
    assert len(keys) == doctor.STRIPES
    assert all(key.startswith(b"p:lmcr2:doctor:") for key in keys)
    assert all(0 < client.ttl(key) <= doctor.EXPIRES_S for key in keys)


def test_probes_are_on_the_node_that_is_measured() -> None:
    keys = probe_keys(b"p:", lambda key: key[-1] in b"0")
    assert len(set(keys)) == doctor.STRIPES
    assert {key[-1:] for key in keys} == {b"0"}
    with pytest.raises(RedisUnavailable, match="key prefix"):
        probe_keys(b"p:", lambda key: False)


def test_rights_of_an_agent_are_enough(own_server: RedisServer) -> None:
    documented_url(own_server, "agent", "~p:lmcr2:*")
    options = RedisOptions(own_server.unix_url, b"p:", username="agent", password=PASSWORD)
    with open_server(options) as server:
        measured = measure_bandwidth(server, server.nodes[0], b"p:")
        assert min(measured) > 0
        assert own_server.command("DBSIZE") == 0
        assert measure_ping(server.nodes[0], 3) > 0
    diagnosis = examine(options, LITTLE, bandwidth=True)
    assert [f.topic for f in diagnosis.findings if f.severity is Severity.HINT][-1] == "not seen"
    (found,) = [each for each in diagnosis.findings if each.topic == "rights"]
    assert found.severity is Severity.OK
    assert found.seen.startswith("agent may send what agents send: PING, SET, GET")


def test_a_full_server_is_a_finding(own_server: RedisServer) -> None:
    own_server.config_set("maxmemory", "2mb")
    with open_server(RedisOptions(own_server.unix_url)) as server:
        with pytest.raises(RedisFull):
            measure_bandwidth(server, server.nodes[0], b"")
        findings = diagnose(server, b"", LITTLE, bandwidth=True).findings
    (finding,) = [finding for finding in findings if finding.topic == "bandwidth"]
    assert finding.severity is Severity.WARNING
    assert "could not be measured: Redis says: OOM" in finding.seen
    assert own_server.command("DBSIZE") == 0


def test_several_servers_are_told_apart() -> None:
    facts = [Facts(where=where, role=role) for where, role in (("a", "master"), ("b", "slave"))]
    findings = findings_of(facts)
    assert [finding.where for finding in findings if finding.topic == "role"] == ["b"]
    assert [f.severity for f in findings] == sorted(f.severity for f in findings)
    for each in facts:
        own = [finding.topic for finding in findings if finding.where == each.where]
        assert own == [finding.topic for finding in judge(each)]
    text = "\n".join(diagnosis_lines(Diagnosis(tuple(facts), findings)))
    assert "CRITICAL  b: role: the server is a slave" in text


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("compress", ["off", "lossless"])
def test_the_need_of_an_engine_is_that_of_its_model(nodes: int, compress: str) -> None:
    """Windows and states as `size` counts them; and of two ranks, one may be on another node."""
    config = {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba"] * 3 + ["attention"],
        **{"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8},
        **{"num_key_value_heads": 2, "mamba_n_heads": 16, "mamba_d_head": 64},
        **{"mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_d_conv": 4},
    }

    def of(is_packed: bool) -> SizeOptions:
        return SizeOptions(tp=2, prompt_tokens=32768, compress=is_packed)

    size = size_model(config, "org/model", of(compress == "lossless"))
    workers = [
        {
            **{"engine_id": "e", "model": "org/model", "world_size": 2},
            "chunk_tokens": size.chunk_tokens,
            "groups": [
                {
                    "layout": f"{rank} {group.kind}",
                    "part_bytes": group.part.part_bytes,
                    "reach": group.reach.kind,
                    "reach_tokens": group.reach.tokens,
                    "dtypes": ["bfloat16"],
                }
                for group in size.groups
            ],
        }
        for rank in range(2 // nodes)
    ]
    pool = {"slot_bytes": DEFAULT_SLOT_BYTES}
    report: dict[str, Any] = {"engines": workers, "pool": pool, "redis": {"compress": compress}}
    need = doctor._as_registered(Need(prompt_tokens=32768), report)
    tokens = size.chunks * size.chunk_tokens
    assert need.kv_bytes_per_token == round(size.payload_bytes / tokens)
    assert need.memory_per_token == pytest.approx(size.stored_bytes / tokens)
    assert need.loaded_per_token == pytest.approx(size.loaded_bytes_per_token)
    assert (need.of, need.is_known) == ("org/model, as registered with the agent", True)
    del report["redis"]["compress"]  # an older agent's
    plain = size_model(config, "org/model", of(False))
    need = doctor._as_registered(Need(prompt_tokens=32768), report)
    assert need.loaded_per_token == pytest.approx(plain.loaded_bytes_per_token)


def test_shares_of_one_layout_are_added_up() -> None:
    """And those that two ranks have are counted once."""

    def need_of(*ranks: Sequence[int]) -> float:
        share = {
            "layout": "one", "part_bytes": 1 << 20, "reach": "all", "reach_tokens": 0, "dtypes": [],
        }  # fmt: skip
        workers = [
            {
                **{"engine_id": "e", "model": "org/model", "world_size": len(ranks)},
                "chunk_tokens": 256,
                "groups": [{**share, "kv_rank": rank} for rank in held],
            }
            for held in ranks
        ]
        report = {"engines": workers, "pool": {"slot_bytes": DEFAULT_SLOT_BYTES}, "redis": {}}
        return doctor._as_registered(Need(prompt_tokens=32768), report).kv_bytes_per_token

    assert need_of([0, 1, 2, 3]) == need_of([0, 1], [2, 3]) == 4 * need_of([0])
    assert need_of([0], [0], [1], [1]) == need_of([0, 1])


def test_the_need_of_what_is_packed(own_server: RedisServer) -> None:
    chunks = [Cached(number, packed_bytes=1000, stripe_count=5) for number in range(3)]
    with own_server.client() as client:
        for chunk in chunks:
            chunk.put(client)
    with open_server(RedisOptions(own_server.unix_url)) as server:
        need, _, _ = doctor.sample(server, b"", Need(), {"chunk_size_tokens": 256})
    assert need.is_known
    assert need.kv_bytes_per_token == chunks[0].chunk_bytes // 256
    assert need.loaded_per_token == pytest.approx((4 * 1000 + 100) / 256, rel=1e-2)
    assert need.memory_per_token < 0.7 * need.kv_bytes_per_token


def test_a_diagnosis_has_every_fact() -> None:
    facts = (Facts(where="a", transport=Transport.TLS, version=(7, 2)),)
    report = as_json(Diagnosis(facts, findings_of(facts)))
    assert " ".join(report) == "exit_status findings facts rights node"
    assert " ".join(report["findings"][0]) == "severity topic seen why change where"
    assert report["findings"][0]["severity"] == "critical"
    (seen,) = report["facts"]
    assert set(seen) == set(Facts.__dataclass_fields__)
    assert (seen["transport"], seen["version"]) == ("rediss", [7, 2])
    assert " ".join(seen["need"]) == (
        "kv_bytes_per_token prefill_tokens_per_s prompt_tokens memory_per_token loaded_per_token "
        "of is_known"
    )

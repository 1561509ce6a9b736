# SPDX-License-Identifier: Apache-2.0
"""Whose requests they are: every face of an agent says it, and no salt."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lmcache_redis import tenants
from lmcache_redis.chunks.frame import describe_header
from lmcache_redis.chunks.names import account_keys, tenant_digest
from lmcache_redis.cli.why import request_lines
from lmcache_redis.client.control import ControlClient
from tests.agent.starts import Starts
from tests.harness import block_hashes, wait_until
from tests.scraping import get, port_in, samples_in
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers
SALT = "the salt of a user"
CHUNK_TOKENS = 64


def stored_by(server: RedisServer) -> dict[bytes, bytes | None]:
    """By chunk hash, the digest of who has stored it."""
    with server.client() as client:
        values = [client.get(key) for key in stripe_keys(client)]
    headers = [describe_header(value) for value in values]
    return {each.chunk_hash: each.tenant for each in headers}


@pytest.mark.parametrize("compress", ["off", "lossless"])
def test_values_say_who_has_stored_them(
    start: Starts, redis_server: RedisServer, compress: str
) -> None:
    """By the digest that accounts have. Who loads a chunk of another changes nothing."""
    by_salt = tenants.of_salt(SALT)
    given = {"one": "team a", "two": by_salt, "three": ""}
    agent = start.agent(compress=compress)
    engine = start.engine(agent, width=256)
    for prompt, tenant in given.items():
        engine.tenant = tenant
        engine.randomize(range(8))
        engine.store(prompt, block_hashes(prompt, 8), range(8))
        agent.wait_idle()
    other = start.agent("other")
    engine = start.engine(other, width=256)
    engine.tenant = "team b"
    for prompt in given:
        assert engine.lookup(prompt, block_hashes(prompt, 8)) == 2 * CHUNK_TOKENS
        assert not engine.retrieve(prompt, block_hashes(prompt, 8), range(8, 16))
    other.wait_idle()
    found = stored_by(redis_server)
    for prompt, tenant in given.items():
        digest = tenant_digest(tenants.shown(tenant))[:8] if tenant else None
        chunks = [each for each in block_hashes(prompt, 8) if each in found]
        assert len(chunks) == 2
        assert {found[each] for each in chunks} == {digest}
    (account,) = account_keys("team a", [7], b"")
    assert tenant_digest("team a").hex().encode() in account


def test_figures_by_tenant(start: Starts) -> None:
    by_salt = tenants.of_salt(SALT)
    digest = tenants.shown(by_salt)
    prompt = block_hashes("shared", 8)
    agent, engine = start(metrics="127.0.0.1:0")
    assert engine.lookup("r0", block_hashes("nobody's", 8)) == 0
    assert "Tenants" not in get(port_in(agent.log), "/")[1], "nobody has named one"
    engine.tenant = "team a"
    assert engine.lookup("r1", prompt) == 0
    engine.store("r1", prompt, range(8))
    engine.tenant = by_salt
    assert engine.lookup("r2", prompt, token_s=0.5) == 2 * CHUNK_TOKENS, "not in the keys"
    assert not engine.retrieve("r2", prompt, range(8, 16))
    wait_until(lambda: agent.counter("stored_chunks") == 2, what="the chunks in Redis")
    counters, found = agent.counters(), agent.status()["tenants"]
    nbytes = counters["gathered_bytes"]
    stored_bytes = counters["stored_bytes"]
    assert 0 < stored_bytes < nbytes, "packed, as by default"
    mine = {each: found["team a"][each] for each in ("lookups", "lookup_tokens", "hit_tokens")}
    assert mine == {"lookups": 1, "lookup_tokens": 2 * CHUNK_TOKENS, "hit_tokens": 0}
    assert found["team a"]["gathered_bytes"] == nbytes
    assert found["team a"]["stored_bytes"] == stored_bytes
    assert found[digest]["hit_tokens"] == found[digest]["saved_tokens"] == 2 * CHUNK_TOKENS
    assert found[digest]["saved_prefill_s"] > 0
    assert (found[digest]["retrieved_bytes"], found[digest]["stored_bytes"]) == (nbytes, 0)
    assert found[tenants.NONE]["lookups"] == 1
    samples = samples_in(get(port_in(agent.log), "/metrics")[1])
    assert samples["lmcache_redis_tenant_hit_tokens_total", (digest,)] == 2 * CHUNK_TOKENS
    assert samples["lmcache_redis_tenant_saved_prefill_seconds_total", (digest,)] > 0
    assert samples["lmcache_redis_tenant_stored_bytes_total", ("team a",)] == stored_bytes
    page = get(port_in(agent.log), "/")[1]
    assert "team a" in page
    report = ControlClient(agent.endpoint, 10).why("r1", 1)
    assert "  tenant    team a" in [*request_lines(report, time.time())]
    shown = f"{json.dumps(agent.status())}{samples}{page}{agent.log}"
    assert digest in shown
    assert SALT not in shown
    assert by_salt[1:] not in shown


def test_an_agent_takes_no_other_names(start: Starts) -> None:
    agent, engine = start()
    for name in ("none", "a\n", "#salt"):
        engine.tenant = name
        assert engine.lookup(f"of {name!r}", block_hashes("prompt", 8)) == 0
    assert agent.counter("wire_errors") == 3
    assert agent.status()["tenants"] == {}


def test_agents_that_seal_show_other_digests(start: Starts, key_file: Path) -> None:
    agent, engine = start(seal_key_file=key_file)
    engine.tenant = tenants.of_salt(SALT)
    engine.lookup("r", block_hashes("prompt", 8))
    (name,) = agent.status()["tenants"]
    assert len(name) == 8
    assert name != tenants.shown(engine.tenant)

"""`warm` as a user runs it: a real agent and a real server, engines that hit what was warmed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lmcache_redis.chunks.frame import describe_header
from lmcache_redis.chunks.keys import parse_stripe_key
from lmcache_redis.chunks.names import opaque_pages
from lmcache_redis.client.control import ControlClient
from lmcache_redis.messages import WarmChunk
from tests.admin.cache import age
from tests.agent.test_path_of_a_chunk import assert_blocks_equal
from tests.cli.test_admin import COMMAND, TIMEOUT_S, environment, one_sentence, run
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

CHUNKS = 8
TOKENS = CHUNKS * 64
CHUNK_BYTES = 96 << 10
SLOTS = 2  # of a chunk
HASHES = block_hashes("prompt", CHUNKS * 4)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", redis_server.unix_url) as server:
        yield server


def store(agent: AgentServer, engine: Engine, hashes: Sequence[bytes] = HASHES) -> None:
    engine.randomize(range(len(hashes)))
    engine.store("store", hashes, range(len(hashes)))
    agent.wait_idle()


def stored(agent: AgentServer, **engine: Any) -> None:
    """An engine stores a prompt, and the agent is replaced by one with an empty host pool."""
    with Engine(agent.endpoint, **engine) as each:
        store(agent, each)
    agent.restart()


def words(agent: AgentServer, server: RedisServer, *more: str) -> list[str]:
    return ["warm", "--endpoint", agent.endpoint, "--redis-url", server.unix_url, *more]


def warm(agent: AgentServer, server: RedisServer, *more: str) -> dict[str, Any]:
    done = run(*words(agent, server, "--json", *more))
    assert (done.returncode, done.stderr) == (0, "")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def first_stripes(server: RedisServer) -> dict[bytes, bytes]:
    """The key of the first stripe of each chunk, by its hash."""
    with server.client() as client:
        keys = client.keys("*")
    parsed = {key: parse_stripe_key(key) for key in keys}
    return {each.chunk_hash: key for key, (_, each, index) in parsed.items() if index == 0}


def test_lookups_hit_the_host_pool(agent: AgentServer, redis_server: RedisServer) -> None:
    with Engine(agent.endpoint) as engine:
        store(agent, engine)
        agent.restart()
        engine.wait_ready()
        report = warm(agent, redis_server)
        assert report["chunks"] == {"loaded": CHUNKS}
        assert report["loaded_bytes"] == CHUNKS * CHUNK_BYTES
        assert (report["left"], report["unfit"]) == (0, {})
        before, loaded = engine.snapshot(), agent.counter("loaded_chunks")
        assert loaded == agent.counter("warmed_chunks") == CHUNKS
        assert engine.lookup("r", HASHES) == TOKENS
        assert engine.retrieve("r", HASHES, range(16, 48)) == set()
        assert_blocks_equal(engine, before, {n: 16 + n for n in range(32)})
        assert agent.counter("hit_chunks_pool") == CHUNKS
        assert agent.counter("loaded_chunks") == loaded
        # A second time there is nothing to do.
        assert warm(agent, redis_server)["chunks"] == {"held": CHUNKS}


def test_the_pool_is_filled_and_nothing_is_evicted(
    tmp_path: Path, agent: AgentServer, redis_server: RedisServer
) -> None:
    slots = 5 * SLOTS + 1
    with (
        Engine(agent.endpoint) as engine,
        AgentServer(
            tmp_path / "small", redis_server.unix_url, pool_bytes=slots * (64 << 10)
        ) as small,
        Engine(small.endpoint) as other,
    ):
        store(agent, engine)
        # What an engine has loaded before stays.
        assert other.lookup("r1", HASHES[:8]) == 128
        other.scheduler.end_session("r1")
        report = warm(small, redis_server)
        assert report["chunks"]["loaded"] == 3
        assert report["is_full"]
        assert small.counter("evictions") == small.status()["pool"]["evictions"] == 0
        assert small.status()["pool"]["used_slots"] == slots - 1
        loaded = small.counter("loaded_chunks")
        assert other.lookup("r2", HASHES[:8]) == 128
        assert small.counter("loaded_chunks") == loaded
        # Engines may have all of the memory.
        assert other.lookup("r3", HASHES[:20]) == 320


def test_the_least_idle_are_loaded_within_a_limit(
    agent: AgentServer, redis_server: RedisServer
) -> None:
    stored(agent)
    first = first_stripes(redis_server)
    recent = HASHES[11::4][:3]
    with redis_server.client() as client:
        for chunk_hash, key in first.items():
            age(client, key, 100 if chunk_hash in recent else 10_000)
    limit = str(3 * CHUNK_BYTES + 1000)
    dry = warm(agent, redis_server, "--limit-bytes", limit, "--dry-run")
    assert (dry["chunks"], dry["chunk_bytes"]) == (3, 3 * CHUNK_BYTES)
    assert agent.status()["pool"]["used_slots"] == 0
    report = warm(agent, redis_server, "--limit-bytes", limit)
    assert report["chunks"] == {"loaded": 3}
    assert (report["is_limited"], report["left"]) == (True, CHUNKS - 3)
    with redis_server.client() as client:  # the others are no hits any more
        for chunk_hash in {*first} - {*recent}:
            client.delete(first[chunk_hash])
    with Engine(agent.endpoint) as engine:
        for chunk_hash in first:
            blocks = [b"any"] * 3 + [chunk_hash]
            assert engine.lookup(chunk_hash.hex(), blocks) == (64 if chunk_hash in recent else 0)
    assert agent.counter("hit_chunks_pool") == 3


def test_chunks_that_cannot_be_used_are_skipped_and_said(
    agent: AgentServer, redis_server: RedisServer
) -> None:
    with Engine(agent.endpoint) as engine:
        store(agent, engine)
        agent.restart()
        engine.wait_ready()
        keys = [first_stripes(redis_server)[each] for each in HASHES[3::4]]
        with redis_server.client() as client:
            client.setrange(keys[5], 5000, b"damaged")
            client.delete(keys[7][:-1] + b"\1")
        done = run(*words(agent, redis_server))
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert lines[0].startswith("loaded 6 chunks (576 KiB) from ")
        assert lines[1:] == [
            "1 chunk not loaded: damaged, or of something else",
            "1 chunk cannot be loaded: incomplete, or cut for another --slot-bytes than the "
            "agent's",
        ]
        assert agent.counter("miss_corrupt") == 1
        before = engine.snapshot()
        assert engine.lookup("r", HASHES) == 5 * 64
        assert engine.retrieve("r", HASHES[:20], range(16, 36)) == set()
        assert_blocks_equal(engine, before, {n: 16 + n for n in range(20)})


def test_the_agent_trusts_no_size_and_no_fingerprint(
    agent: AgentServer, redis_server: RedisServer
) -> None:
    stored(agent)
    key = first_stripes(redis_server)[HASHES[3]]
    with redis_server.client() as client:
        values = {each: client.get(each) for each in client.keys("*")}
    header = describe_header(values[key])
    name = parse_stripe_key(key)[1]
    right = WarmChunk(
        name.model_name, name.kv_rank, header.fingerprint, name.chunk_hash,
        header.metadata.serialize(),
    )  # fmt: skip
    wrong = [
        replace(right, metadata=opaque_pages(right.chunk_bytes - 64).serialize()),
        replace(right, metadata=opaque_pages(right.chunk_bytes // 2).serialize()),
        replace(right, metadata=opaque_pages(right.chunk_bytes).serialize()),
        replace(right, fingerprint=right.fingerprint[:8] + bytes(24)),  # has the same key
        replace(right, chunk_hash=bytes(32)),
        replace(right, kv_rank=right.kv_rank + 1),
    ]
    agents = ControlClient(agent.endpoint)
    outcomes = []
    for each in wrong:
        outcomes += agents.warm([each])
        # A chunk that is found to be cut otherwise is removed, as after a lookup.
        kept = len(values) - (SLOTS if each.chunk_bytes != right.chunk_bytes else 0)
        wait_until(lambda kept=kept: redis_server.command("DBSIZE") == kept, "a removal")
        with redis_server.client() as client:
            client.mset(values)
    assert outcomes == ["damaged"] * 4 + ["missing"] * 2
    assert agent.status()["pool"]["chunks"] == 0
    assert agents.warm([right, right]) == ("loaded", "held")


def test_the_disk_gets_the_chunks(
    tmp_path: Path, agent: AgentServer, redis_server: RedisServer
) -> None:
    with Engine(agent.endpoint) as engine:
        store(agent, engine)
    other = AgentServer(
        tmp_path / "other", redis_server.unix_url, disk_path=tmp_path / "disk", disk_size="64MiB"
    )
    with other:
        assert warm(other, redis_server)["chunks"] == {"loaded": CHUNKS}
        other.wait_idle()
        assert other.counter("disk_stored_chunks") == CHUNKS
        assert other.counter("drop_disk") == other.counter("stored_chunks") == 0
        other.restart()
        # From there they are loaded the next time.
        assert warm(other, redis_server)["chunks"] == {"loaded": CHUNKS}
        assert other.counter("disk_loaded_chunks") == CHUNKS
        assert other.counter("loaded_chunks") == 0


def test_models_and_the_agents_key_prefix(tmp_path: Path, redis_server: RedisServer) -> None:
    server = AgentServer(tmp_path / "agent", redis_server.unix_url, key_prefix="ours:")
    with server as agent:
        with (
            Engine(agent.endpoint, model_name="org/a") as a,
            Engine(agent.endpoint, model_name="org/b") as b,
        ):
            store(agent, a)
            store(agent, b, HASHES[:8])
        agent.restart()
        unknown = one_sentence(run(*words(agent, redis_server, "--model", "org/c")), 2)
        assert "has no chunks of the model org/c; it has chunks of org/a, org/b" in unknown
        dry = run(*words(agent, redis_server, "--dry-run"))
        assert dry.stdout.splitlines()[0].endswith(
            ": 10 chunks (960 KiB) of 10 (960 KiB), the most used ones"
        )
        assert [line.split()[::2] for line in dry.stdout.splitlines()[1:]] == [
            ["model", "chunks"],
            ["org/a", "8", "KiB"],
            ["org/b", "2", "KiB"],
        ]
        assert warm(agent, redis_server, "--model", "org/b")["chunks"] == {"loaded": 2}
        assert agent.status()["pool"]["chunks"] == 2


def test_a_terminal_shows_how_far_it_is(agent: AgentServer, redis_server: RedisServer) -> None:
    stored(agent)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, *words(agent, redis_server, "--bytes-per-second", "1MiB")],
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=TIMEOUT_S,
        env=environment(),
    )
    os.close(theirs)
    seen = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert [line.strip() for line in seen.split("\r") if line.strip()] == [
        f"{done} KiB of 768 KiB" for done in (192, 384, 576, 768)
    ]


def started(agent: AgentServer, server: RedisServer) -> subprocess.Popen[str]:
    """A warming that takes seconds, after its first chunk."""
    process = subprocess.Popen(
        [*COMMAND, *words(agent, server, "--bytes-per-second", "100KiB")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    wait_until(lambda: agent.counter("warmed_chunks"), "a chunk", TIMEOUT_S)
    return process


def test_an_agent_that_dies_meanwhile(agent: AgentServer, redis_server: RedisServer) -> None:
    stored(agent)
    process = started(agent, redis_server)
    agent.kill()
    said, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    (line,) = errors.splitlines()
    assert "no agent answers at" in line or "went away before it answered" in line
    assert said.startswith("loaded ")
    assert "less used chunks left: the warming ended early" in said


def test_an_interrupt_ends_it_and_the_agent_goes_on(
    agent: AgentServer, redis_server: RedisServer
) -> None:
    stored(agent)
    process = started(agent, redis_server)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0
    assert "Traceback" not in errors
    assert said.startswith("loaded ")
    warmed = agent.counter("warmed_chunks")
    assert 1 <= warmed < CHUNKS
    with Engine(agent.endpoint) as engine:
        assert engine.lookup("r", HASHES) == TOKENS
        assert agent.counter("hit_chunks_pool") + agent.counter("hit_chunks_redis") == CHUNKS
        assert agent.counter("warmed_chunks") == warmed


def test_what_is_wrong_is_one_sentence(
    agent: AgentServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    nobody = ["warm", "--endpoint", f"ipc://{tmp_path}/nobody.sock"]
    here = ["warm", "--endpoint", agent.endpoint]
    url = ["--redis-url", redis_server.unix_url]
    assert "no agent answers at" in one_sentence(run(*nobody, *url), 1)
    assert "no server is named: give --redis-url" in one_sentence(run(*here), 2)
    assert "--limit-bytes: 'much'" in one_sentence(run(*here, *url, "--limit-bytes", "much"), 2)
    slow = one_sentence(run(*here, *url, "--bytes-per-second", "1"), 2)
    assert "set it to 1KiB or more" in slow
    assert "--layout 'x' is not a layout" in one_sentence(run(*here, *url, "--layout", "x"), 2)
    empty = run(*here, *url)
    assert empty.stdout.startswith("nothing to load from ")
    assert (empty.returncode, empty.stderr) == (0, "")


def test_another_server_than_the_agents(
    agent: AgentServer, redis_server: RedisServer, tmp_path: Path
) -> None:
    stored(agent)
    done = run("warm", "--endpoint", agent.endpoint, "--redis-url", redis_server.url)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert f"the agent loads from unix:{redis_server.socket_path}, and the chunks are" in line
    assert line.endswith(f"127.0.0.1:{redis_server.port}: is that the same Redis?")
    assert done.stdout.startswith(f"loaded {CHUNKS} chunks ")
    redis_server.kill()
    wait_until(lambda: not agent.status()["redis"]["up"], "a server that is down")
    down = one_sentence(run("warm", "--endpoint", agent.endpoint, "--redis-url", "redis://x"), 1)
    assert "the agent cannot use its Redis: " in down


@pytest.mark.servers
def test_help() -> None:
    done = run("warm", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in ("--model", "--limit-bytes", "--bytes-per-second", "--dry-run", "--json"):
        assert option in done.stdout

# SPDX-License-Identifier: Apache-2.0
"""Store, lookup and retrieve through a real agent and a real Redis, with bytes compared."""

from __future__ import annotations

import threading

import torch

from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer


def assert_blocks_equal(
    engine: Engine, source: list[dict[str, torch.Tensor]], pairs: dict[int, int]
) -> None:
    """Block ``to`` holds the bytes of ``from``; every other block is unchanged."""
    for rank, caches in enumerate(engine.caches):
        for name, tensor in caches.items():
            expected = source[rank][name].clone()
            for origin, target in pairs.items():
                expected[target] = source[rank][name][origin]
            assert torch.equal(tensor, expected), f"rank {rank}, {name}"


def test_a_chunk_comes_back_from_the_host_pool_and_from_redis(
    agent: AgentServer, engine: Engine
) -> None:
    hashes = block_hashes("prompt", 8)
    engine.randomize(range(48))
    engine.store("r1", hashes, range(8))
    agent.wait_idle()
    assert agent.counter("stored_chunks") == 2

    before = engine.snapshot()
    assert engine.lookup("r2", hashes) == 128
    assert engine.retrieve("r2", hashes, range(20, 28)) == set()
    assert_blocks_equal(engine, before, {n: 20 + n for n in range(8)})
    assert agent.counter("hit_chunks_host") == 2
    assert agent.counter("loaded_chunks") == 0

    agent.restart()  # the host pool is empty now
    engine.wait_ready()
    before = engine.snapshot()
    assert engine.lookup("r3", hashes) == 128
    assert agent.counter("hit_chunks_redis") == 2
    assert engine.retrieve("r3", hashes, range(30, 38)) == set()
    assert_blocks_equal(engine, before, {n: 30 + n for n in range(8)})


def test_another_engine_finds_the_prefix_that_both_share(start: Starts, agent: AgentServer) -> None:
    hashes = block_hashes("prompt", 12)
    first = start.engine(agent)
    second = start.engine(agent)
    first.randomize(range(48))
    first.store("r1", hashes[:8], range(8))
    assert second.lookup("r2", hashes) == 128  # the third chunk was never stored
    before = second.snapshot()
    assert second.retrieve("r2", hashes[:8], range(8)) == set()
    for name, tensor in second.caches[0].items():
        assert torch.equal(tensor[:8], first.caches[0][name][:8])
        assert torch.equal(tensor[8:], before[0][name][8:])
    assert second.lookup("r3", block_hashes("other", 8)) == 0


def test_blocks_that_others_read_are_skipped(agent: AgentServer, engine: Engine) -> None:
    hashes = block_hashes("prompt", 8)
    engine.randomize(range(48))
    engine.store("r1", hashes, range(8))
    before = engine.snapshot()
    # 96 of 128 tokens are computed locally: blocks 20 to 25 are shared, 26 and 27 are ours.
    assert engine.lookup("r2", hashes, first_chunk=1) == 128
    failed = engine.retrieve("r2", hashes[4:], range(24, 28), skip_first_n_tokens=32)
    assert failed == set()
    assert_blocks_equal(engine, before, {6: 26, 7: 27})


def test_what_changes_the_bytes_is_another_key(
    start: Starts, agent: AgentServer, engine: Engine
) -> None:
    hashes = block_hashes("prompt", 4)
    engine.randomize(range(4))
    engine.store("r1", hashes, range(4))
    differences: list[dict[str, object]] = [
        {"dtype": torch.bfloat16},
        {"dtype": torch.int32},
        {"model_name": "another/model"},
        {"layers": 2},
        {"identity": {"revision": "b"}},
    ]
    for difference in differences:
        assert start.engine(agent, **difference).lookup("r2", hashes) == 0, difference
    assert start.engine(agent).lookup("r2", hashes) == 64


def test_two_requests_share_one_load(agent: AgentServer, engine: Engine) -> None:
    hashes = block_hashes("prompt", 16)
    engine.randomize(range(16))
    engine.store("r1", hashes, range(16))
    agent.wait_idle()
    agent.restart()
    # Asked of the new agent: the engine may not have noticed yet that the old one has ended.
    wait_until(lambda: any(each["ready"] for each in agent.status()["engines"]))
    engine.wait_ready()
    for request_id in ("a", "b", "c"):
        engine.scheduler.begin_lookup(request_id, engine.chunks(hashes))
    for request_id in ("a", "b", "c"):
        assert engine.lookup(request_id, hashes) == 256
    assert agent.counter("loaded_chunks") == 4


def test_pins_hold_until_they_are_given_back(agent: AgentServer, engine: Engine) -> None:
    hashes = block_hashes("prompt", 8)
    engine.store("r1", hashes, range(8))
    agent.wait_idle()
    slots = agent.status()["pool"]["used_slots"]

    def pinned() -> int:
        return int(agent.status()["pool"]["pinned_slots"])

    assert pinned() == 0
    assert engine.lookup("r2", hashes) == 128
    assert pinned() == slots
    engine.scheduler.release_lookup("r2")
    wait_until(lambda: pinned() == 0, what="released chunks")
    assert engine.lookup("r4", hashes) == 128
    engine.scheduler.end_session("r4")
    wait_until(lambda: pinned() == 0, what="an ended session")
    assert engine.lookup("r3", hashes) == 128
    engine.retrieve("r3", hashes[:4], range(4))
    wait_until(lambda: pinned() == slots // 2, what="a retrieved chunk")


def test_a_chunk_is_stored_once(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    def sets() -> int:
        with redis_server.client() as client:
            return int(client.info("commandstats")["cmdstat_set"]["calls"])

    hashes = block_hashes("prompt", 8)
    for request_id in ("r1", "r2", "r3"):
        engine.store(request_id, hashes, range(8))
    agent.wait_idle()
    assert agent.counter("stored_chunks") == 2
    sent = sets()
    agent.restart()
    engine.wait_ready()
    engine.store("r4", hashes, range(8))
    agent.wait_idle()
    assert agent.counter("gathered_chunks") == 2  # the engine did not wait for Redis
    assert agent.counter("stored_chunks") == 0
    assert agent.counter("skipped_chunks") == 2
    assert sets() == sent + 2, "the claims"


def test_many_engines_at_once(agent: AgentServer) -> None:
    errors: list[BaseException] = []

    def one(name: str) -> None:
        hashes = block_hashes(name, 4)
        try:
            with Engine(agent.endpoint) as engine:
                engine.randomize(range(4))
                engine.store(name, hashes, range(4))
                for turn in range(5):
                    before = engine.snapshot()
                    assert engine.lookup(f"{turn}", hashes) == 64
                    assert engine.retrieve(f"{turn}", hashes, range(8, 12)) == set()
                    assert_blocks_equal(engine, before, {n: 8 + n for n in range(4)})
                    engine.scheduler.end_session(f"{turn}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(f"p{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    wait_until(lambda: agent.status()["sessions"] == 0, what="ended sessions")

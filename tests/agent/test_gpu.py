# SPDX-License-Identifier: Apache-2.0
"""Whole agents over the driver of the tests: what they keep when either side dies, hangs or fails.

Delays are random; the seed is in the name of each test, or printed.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from lmcache_redis.agent.main import EXIT_GPU_LOST
from lmcache_redis.client.control import ControlClient
from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.device import driver
from tests import cuda_driver, forks
from tests.agent.on_gpus import (
    BY_KERNELS,
    DIRECT,
    HASHES,
    SOURCE,
    TARGET,
    TOKENS,
    Node,
    assert_hit,
    blocks_of,
    either_way,
    equal,
    in_agents,
    needs_the_driver,
    set_in_agents,
    store,
)
from tests.cuda_driver.engine import GpuEngine, gpus
from tests.cuda_driver.played import PROGRAM
from tests.harness import WAIT_S, AgentServer, StartedAgent, block_hashes, wait_until
from tests.servers import RedisServer

pytestmark = needs_the_driver


@pytest.fixture(scope="module", autouse=True)
def players_start_at_once() -> None:
    forks.preload(PROGRAM)


@pytest.fixture
def agent(node: Node) -> AgentServer:
    """By kernels."""
    return node.agent()


@pytest.fixture
def engine(agent: AgentServer, node: Node) -> GpuEngine:
    engine = node.engine(agent)
    engine.randomize(SOURCE)
    return engine


def wait_exit(agent: AgentServer) -> int:
    return agent.process.wait(WAIT_S)


def assert_the_next_agent_serves(agent: AgentServer, engine: GpuEngine) -> None:
    """From Redis."""
    agent.start()
    engine.wait_ready()
    assert_hit(engine, "again")
    assert agent.counter("hit_chunks_redis") == 4


# ------------------------------------------------------------- the path of a chunk


@either_way
def test_chunks_come_from_the_pool_and_from_redis(direct: int, node: Node) -> None:
    agent = node.agent(direct)
    engine = node.engine(agent, world_size=2, gpus=(0, 1))
    store(engine)
    assert_hit(engine, "pool")
    agent.wait_idle()
    agent.kill()
    assert_the_next_agent_serves(agent, engine)


@pytest.mark.parametrize(
    ("frozen", "direct"), [(False, DIRECT), (True, BY_KERNELS)], ids=["direct", "frozen, kernels"]
)
def test_an_engine_sleeps_and_wakes_amid_transfers(frozen: bool, direct: int, node: Node) -> None:
    """What vLLM 0.33's hooks do. It wakes with other memory at the same addresses."""
    late, new = block_hashes("a late prompt", 16), block_hashes("a new prompt", 16)
    agent = node.agent(direct)
    engine = node.engine(agent, memory="pieces")
    (worker,), (caches,) = engine.workers, engine.caches
    engine.randomize(SOURCE)
    engine.store("first", HASHES, SOURCE)
    stored = blocks_of(engine, SOURCE)
    assert engine.lookup("load", HASHES) == TOKENS
    if frozen:
        agent.stop()
    (load,) = engine.begin_retrieves("load", HASHES, TARGET)
    (late_store,) = worker.begin_stores(["late"], [engine.op(late, SOURCE)], worker.signal())
    assert worker.unregister(0.2 if frozen else 60.0) is not frozen
    node.host.sleep()
    node.host.wake()
    worker.register_groups(
        [CacheGroup(caches, "float32", 16)], num_blocks=48, identity={"rank": "0"}
    )
    engine.randomize(range(48))
    awake = blocks_of(engine, range(48))
    if frozen:
        agent.cont()
    wait_until(lambda: load.over and late_store.over, what="the ends of the transfers")
    engine.wait_ready()
    assert equal(blocks_of(engine, range(48)), awake)
    engine.store("new", new, SOURCE)
    computed = blocks_of(engine, SOURCE)
    for hashes, wanted in ((HASHES, stored), (late, stored), (new, computed)):
        request = f"again {hashes[0].hex()}"
        if engine.lookup(request, hashes) == TOKENS:
            engine.zero(TARGET)
            assert engine.retrieve(request, hashes, TARGET) == set()
            assert equal(blocks_of(engine, TARGET), wanted)
        else:
            assert hashes is late  # a store may be dropped


def test_an_agent_needs_no_torch(node: Node, tmp_path: Path, redis_server: RedisServer) -> None:
    """As users start it: other agents of the tests are forked where more has been imported."""
    with (
        StartedAgent(tmp_path / "agent", redis_server.unix_url) as agent,
        GpuEngine(agent.endpoint, node.host) as engine,
    ):
        store(engine)
        assert_hit(engine, "load")
        mapped = Path(f"/proc/{agent.pid}/maps").read_text()
        assert "libcuda.so.1" in mapped
        assert not [name for name in ("torch", "triton", "cudart") if name in mapped]


def test_engines_play_on_shared_gpus(node: Node) -> None:
    """Two on one GPU, and one on two GPUs, with a pool that evicts."""
    agent = node.agent(DIRECT, pool_bytes=8 << 20)
    players = [
        node.player(agent, 1),
        node.player(agent, 2, memory="pieces"),
        node.player(agent, 3, world_size=2, memory="segment"),
    ]
    for player in players:
        player.wait_for("loaded", 8)
        player.wait_for("checks")
    for player in players:
        player.finish()
    wait_until(lambda: not agent.status()["engines"], "players that have left")
    assert agent.status()["pool"]["evictions"] > 0


# ------------------------------------------------------------------------- deaths


@either_way
def test_an_engine_that_is_killed_leaves_nothing(direct: int, node: Node) -> None:
    agent = node.agent(direct)
    dies, lives = node.player(agent, 11, delay_us=2000), node.player(agent, 21)
    dies.wait_for("loaded", 4)
    dies.kill()
    lives.wait_for("loaded", 8)
    wait_until(lambda: len(agent.status()["engines"]) == 1, "a forgotten engine")
    lives.finish()
    wait_until(lambda: not agent.status()["engines"], "no engine")
    wait_until(lambda: "opened" not in cuda_driver.counts(in_agents()), "closed handles")
    counts = cuda_driver.counts(in_agents())
    assert set(counts) <= {"contexts", "modules", "pinned"}, counts
    # The scheduler of a killed engine is missed when it has been silent for long enough.
    wait_until(lambda: agent.status()["pool"]["pinned_slots"] == 0, "unpinned slots")
    assert agent.terminate() == 0


def test_an_agent_that_is_killed_is_replaced(node: Node) -> None:
    agent = node.agent(DIRECT)
    player = node.player(agent, 21, delay_us=2000)
    for _ in range(2):
        player.wait_for("loaded", 8)
        agent.kill()
        player.wait_for("requests", 3)
        agent.start()


# ---------------------------------------------------------------------- lost GPUs


def test_a_lost_gpu_ends_the_agent_and_costs_only_hits(
    agent: AgentServer, engine: GpuEngine
) -> None:
    engine.store("store", HASHES, SOURCE)
    cuda_driver.fail("cuLaunchKernel", 700, environment=in_agents())
    assert engine.lookup("lost", HASHES) == TOKENS
    failed = engine.retrieve("lost", HASHES, TARGET)
    assert failed == set(TARGET)
    assert wait_exit(agent) == EXIT_GPU_LOST
    assert agent.log.count("a GPU is lost") == 1
    assert "CUDA error 700" in agent.log
    assert "were not written" not in agent.log
    assert "Traceback" not in agent.log
    cuda_driver.fail("cuLaunchKernel", 0, environment=in_agents())
    assert engine.lookup("offline", HASHES) == 0
    assert_the_next_agent_serves(agent, engine)


def test_a_load_ends_with_the_agent_that_lost_its_gpu(
    agent: AgentServer, engine: GpuEngine, redis_server: RedisServer
) -> None:
    """Until then the GPU may write to its blocks. Queued chunks take their time meanwhile."""
    engine.store("store", HASHES, SOURCE)
    assert engine.lookup("lost", HASHES) == TOKENS
    agent.wait_idle()
    redis_server.stop()
    more = block_hashes("more", 16)
    engine.store("queued", more, SOURCE)
    cuda_driver.fail("cuLaunchKernel", 719, environment=in_agents())
    (load,) = engine.begin_retrieves("lost", HASHES, TARGET)
    wait_until(lambda: "stopping:" in agent.log, "an agent that ends")
    began_s = time.monotonic()
    assert engine.lookup("meanwhile", HASHES) == 0
    assert agent.running
    assert not load.over
    redis_server.cont()
    assert wait_exit(agent) == EXIT_GPU_LOST
    assert time.monotonic() - began_s < 5
    wait_until(lambda: load.over, "the end of the load")
    assert load.failed_blocks == set(TARGET)
    cuda_driver.fail("cuLaunchKernel", 0, environment=in_agents())
    agent.start()
    engine.wait_ready()
    assert engine.lookup("written", more) == TOKENS


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("cuIpcOpenMemHandle_v2", 999),
        ("cuDevicePrimaryCtxRetain", 214),
        ("cuMemHostRegister_v2", 702),
        ("cuModuleLoadData", 715),
    ],
)
def test_a_gpu_that_is_lost_while_an_engine_registers(
    function: str, code: int, agent: AgentServer, node: Node
) -> None:
    """The answer may or may not have been sent: the engine registers with the next agent."""
    cuda_driver.fail(function, code, environment=in_agents())
    engine = node.engine(agent, wait=False)
    assert wait_exit(agent) == EXIT_GPU_LOST
    assert agent.log.count("a GPU is lost") == 1
    assert f"CUDA error {code}" in agent.log
    cuda_driver.fail(function, 0, environment=in_agents())
    agent.start()
    engine.wait_ready()
    store(engine)
    assert_hit(engine, "load")


@pytest.mark.parametrize("function", ["cuIpcCloseMemHandle", "cuStreamDestroy_v2"])
def test_a_gpu_that_is_lost_while_an_engine_leaves(
    function: str, agent: AgentServer, engine: GpuEngine
) -> None:
    engine.store("store", HASHES, SOURCE)
    cuda_driver.fail(function, 714, environment=in_agents())
    engine.close()
    assert wait_exit(agent) == EXIT_GPU_LOST
    assert agent.log.count("a GPU is lost") == 1


def test_players_outlive_lost_gpus(node: Node) -> None:
    agent = node.agent(DIRECT)
    players = [node.player(agent, 31, delay_us=1000), node.player(agent, 32, world_size=2)]
    for code in (700, 214):
        for player in players:
            player.wait_for("loaded", 4)
        set_in_agents("lose", code)
        assert wait_exit(agent) == EXIT_GPU_LOST
        agent.start()
    for player in players:
        player.wait_for("loaded", 4)


# ------------------------------------------------------------- GPUs that hang or refuse


def test_a_gpu_that_hangs_delays_no_other_and_not_the_end(node: Node) -> None:
    agent = node.agent(shutdown_deadline_s=1.0)
    hung = node.engine(agent, gpus=(0,), model_name="hung")
    other = node.engine(agent, gpus=(1,), model_name="other")
    for engine in (hung, other):
        store(engine)
    assert hung.lookup("hung", HASHES) == TOKENS
    set_in_agents("hang_gpu", 1)
    (load,) = hung.begin_retrieves("hung", HASHES, TARGET)
    assert_hit(other, "meanwhile")
    assert not load.over
    agent.process.terminate()
    assert wait_exit(agent) == 0
    assert "does not answer" in agent.log
    wait_until(lambda: load.over, "the end of the load")
    set_in_agents("hang_gpu", 0)
    assert_the_next_agent_serves(agent, hung)


SOON_OVERDUE = {"lmcache_redis.agent.closing._LIMIT_S": 1.0}


def test_closes_that_do_not_return_end_an_idle_agent(node: Node) -> None:
    """And delay no store meanwhile."""
    agent = node.agent(constants=SOON_OVERDUE, shutdown_deadline_s=1.0)
    engine = node.engine(agent)
    store(engine)
    assert engine.lookup("held", HASHES) == TOKENS
    set_in_agents("cuIpcCloseMemHandle.hang", 1)
    for _ in range(3):  # more than gather threads
        GpuEngine(agent.endpoint, node.host).close()
    engine.store("more", block_hashes("more", 16), SOURCE)
    assert engine.lookup("stored", block_hashes("more", 16)) == TOKENS
    engine.scheduler.end_session("stored")
    assert_hit(engine, "meanwhile")
    wait_until(lambda: agent.log.count("cannot be closed") == 3, "lines of the log")
    time.sleep(1)
    assert agent.running  # while a request has a hit
    engine.scheduler.end_session("held")
    assert wait_exit(agent) == EXIT_GPU_LOST
    assert agent.log.count("a GPU is lost") == 1
    set_in_agents("cuIpcCloseMemHandle.hang", 0)
    assert_the_next_agent_serves(agent, engine)


def test_a_close_that_returns_late_ends_nothing(node: Node) -> None:
    agent = node.agent(constants=SOON_OVERDUE)
    engine = node.engine(agent)
    store(engine)
    assert engine.lookup("held", HASHES) == TOKENS
    set_in_agents("cuIpcCloseMemHandle.hang", 1)
    GpuEngine(agent.endpoint, node.host).close()
    wait_until(lambda: "cannot be closed" in agent.log, "a line of the log")
    set_in_agents("cuIpcCloseMemHandle.hang", 0)
    wait_until(lambda: "is closed after all" in agent.log, "its end")
    engine.scheduler.end_session("held")
    assert_hit(engine, "again")
    engine.close()
    assert agent.terminate() == 0


@pytest.mark.parametrize(
    ("batch", "direct"), [("refused", DIRECT), ("off", BY_KERNELS)], ids=["refused", "off"]
)
def test_an_agent_without_batches_serves(batch: str, direct: int, node: Node) -> None:
    set_in_agents("batch_most", 1)
    off = {"batch_copies": "off"} if batch == "off" else {}
    agent = node.agent(direct, slot_bytes=64 << 10, **off)
    engine = node.engine(agent)
    wait_until(lambda: agent.status()["pool"]["locked_bytes"] == 64 << 20, "a pinned pool")
    store(engine)
    assert_hit(engine, "load")
    asked = cuda_driver.get("cuMemcpyBatchAsync.called", in_agents())
    assert bool(asked) == (batch != "off")
    assert agent.log.count("copies one by one from now on") == (batch != "off")


def test_a_dead_engines_signals_block_nobody(agent: AgentServer, node: Node) -> None:
    """Its stores wait for a signal that never comes, and end with it, not with their leases."""
    dies = node.player(agent, 41, delay_us=500_000)
    engine = node.engine(agent)
    dies.wait_for("requests", 3)
    time.sleep(0.5)
    dies.kill()
    began_s = time.monotonic()
    store(engine)
    assert_hit(engine, "load")
    wait_until(lambda: len(agent.status()["engines"]) == 1, "a forgotten engine")
    assert time.monotonic() - began_s < 5


def test_a_pool_that_cannot_be_pinned_serves(node: Node) -> None:
    set_in_agents("pin_most_mib", 1)
    agent = node.agent()
    engine = node.engine(agent)
    wait_until(lambda: agent.status()["pool"]["lock_failure"], "a failure")
    assert "CUDA error 2" in agent.status()["pool"]["lock_failure"]
    assert agent.status()["pool"]["locked_bytes"] == 0
    store(engine)
    assert_hit(engine, "load")
    assert agent.log.count("are pinned, and the rest") == 1


def test_the_answer_comes_before_the_pool_is_pinned(node: Node) -> None:
    """And the copies of the first requests do not wait for it; nor does the end of the agent."""
    set_in_agents("pin_us_per_mib", 50_000)  # 3 s for the pool
    agent = node.agent()
    engine = node.engine(agent)
    assert agent.status()["pool"]["locked_bytes"] == 0
    store(engine)
    assert_hit(engine, "load")
    assert agent.status()["pool"]["locked_bytes"] == 0
    assert agent.terminate() == 0
    assert "stays pinned" not in agent.log


def test_a_slow_registration_is_told(agent: AgentServer, node: Node) -> None:
    cuda_driver.set("cuIpcOpenMemHandle_v2.takes_us", 300_000, in_agents())
    client = ControlClient(agent.endpoint, timeout_s=10.0)
    assert not client.ping()[0].mapping
    engine = node.engine(agent, wait=False)
    wait_until(lambda: client.ping()[0].mapping, "a registration in progress")
    engine.wait_ready()
    assert not client.ping()[0].mapping
    assert "lost the agent" not in agent.log


def test_instances_of_mig_have_agents_of_their_own(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    mine, other = f"MIG-{'1' * 32}", f"MIG-{'2' * 32}"
    with gpus() as host:
        assert driver.device_uuids()  # this process has its GPU, and the agent has others
        seen = cuda_driver.environment(uuids=f"{mine},{other}")
        with (
            mock.patch.dict(os.environ, {**seen, "CUDA_VISIBLE_DEVICES": other}),
            AgentServer(tmp_path / "agent", redis_server.unix_url) as agent,
            GpuEngine(agent.endpoint, host, wait=False) as engine,
        ):
            wait_until(lambda: "is not visible here" in agent.log, "a refusal")
            assert not engine.workers[0].ready
            assert engine.lookup("miss", HASHES) == 0
            assert agent.running


def test_other_workers_keep_what_they_have(agent: AgentServer, node: Node) -> None:
    stays = node.engine(agent)
    store(stays)
    wait_until(lambda: agent.status()["pool"]["locked_bytes"] == 64 << 20, "a pinned pool")
    before = cuda_driver.counts(in_agents())
    stopping = threading.Event()

    def loads() -> None:
        number = 0
        while not stopping.is_set():
            assert_hit(stays, f"load {number}")
            number += 1

    thread = threading.Thread(target=loads)
    thread.start()
    try:
        for seed in (50, 51):
            goes = node.player(agent, seed)
            goes.wait_for("loaded", 3)
            goes.finish()
    finally:
        stopping.set()
        thread.join()
    wait_until(lambda: len(agent.status()["engines"]) == 1, "a forgotten engine")
    opened = before["opened"]
    wait_until(lambda: cuda_driver.get("opened", in_agents()) == opened, "closed handles")
    after = cuda_driver.counts(in_agents())
    assert after["streams"] <= 4, "as many as copy threads"
    # Made for calls at once, and kept.
    for name in ("allocations", "pinned", "streams", "events"):
        assert after.pop(name) >= before.pop(name)
    assert after == before

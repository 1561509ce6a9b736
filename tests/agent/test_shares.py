# SPDX-License-Identifier: Apache-2.0
"""Engines of several TP sizes, whose KV is cut into shares: each loads what others have stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from lmcache_redis.chunks.keys import share_rank
from lmcache_redis.chunks.names import Reach, parse_stripe_key
from lmcache_redis.cli.status import rows
from lmcache_redis.cli.why import request_lines
from lmcache_redis.client.control import ControlClient
from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.device.shares import HeadShares, default_shares, shares_of_rank
from tests import cuda_driver
from tests.agent import test_removals as removals
from tests.agent.on_gpus import Node
from tests.agent.starts import Starts
from tests.agent.test_disk import agent_with_disk
from tests.agent.test_nodes import PATIENT, check_unpinned
from tests.agent.test_watching import check_evictions_from_disk
from tests.cuda_driver.engine import GpuEngine
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers

HASHES = block_hashes("prompt", 16)  # 4 chunks
NAMES = HASHES[3::4]
STORED, LOADED = range(16), range(20, 36)
LAYERS, TOKENS, SIZE = 3, 16, 16
WINDOW = Reach("window", 70)  # the last two chunks of a prefix


class ShardedEngine(Engine):
    """Engine of one model with ``heads`` KV heads, head-major, over ``ranks`` ranks.

    beside: a second group, of a sliding window over as many heads, or of states, which are not cut.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        ranks: int,
        heads: int = 8,
        *,
        shares: int | None = None,
        beside: Literal["", "window", "state"] = "",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.heads, self.ranks = heads, ranks
        self._shares = shares or default_shares(heads)
        self._beside = beside
        self._layers = [f"layer.{number}" for number in range(LAYERS * (1 + bool(beside)))]
        super().__init__(
            endpoint,
            world_size=ranks,
            layers=len(self._layers),
            dtype=dtype,
            identity={"rank": "any"},
            **options,
        )

    def new_caches(
        self, rank: int, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        local = max(1, self.heads // self.ranks)
        shape = (self.num_blocks, local, 2, TOKENS, SIZE)
        return super().new_caches(rank, names, shape, dtype)

    def groups_of(self, rank: int, caches: dict[str, torch.Tensor], dtype: str) -> list[CacheGroup]:
        shares = shares_of_rank(self.heads, self._shares, rank, self.ranks)
        heads = HeadShares(dict.fromkeys(caches, 1), shares, self._shares)
        replicas = max(1, self.ranks // self.heads)
        cut: dict[str, Any] = {"heads": heads, "replica": (rank % replicas, replicas)}
        first, others = (
            {name: caches[name] for name in names}
            for names in (self._layers[:LAYERS], self._layers[LAYERS:])
        )
        groups = [CacheGroup(first, dtype, TOKENS, **cut)]
        if self._beside == "window":
            groups.append(CacheGroup(others, dtype, TOKENS, WINDOW, **cut))
        elif self._beside == "state":
            own = {"tensor_parallel": str(self.ranks), "rank": str(rank)}
            groups.append(CacheGroup(others, dtype, TOKENS, Reach("state"), own))
        return groups

    def ops(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], skip_first_n_tokens: int = 0
    ) -> list[TransferOp]:
        op = self.op(hashes, block_ids, skip_first_n_tokens)
        if len(self._layers) == LAYERS:
            return [op]
        if self._beside == "window":
            return [op, replace(op, group=1)]
        # A chunk's part has the state after its last block.
        return [op, TransferOp(op.block_ids[3::4], op.hashes, group=1)]

    def fill(self, model: torch.Tensor, blocks: Sequence[int]) -> None:
        """model: of all heads, [layer, block, head, ...]."""
        for rank, caches in enumerate(self.caches):
            first = rank * self.heads // self.ranks
            for layer, cache in enumerate(caches.values()):
                cache[list(blocks)] = model[layer, :, first : first + cache.shape[1]]

    def holds(self, model: torch.Tensor, blocks: Sequence[int]) -> bool:
        """Whether these blocks have the model's KV, and all others nothing."""
        for rank, caches in enumerate(self.caches):
            first = rank * self.heads // self.ranks
            for layer, cache in enumerate(caches.values()):
                expected = torch.zeros_like(cache)
                expected[list(blocks)] = model[layer, :, first : first + cache.shape[1]]
                if not torch.equal(cache, expected):
                    return False
        return True


class GpuShardedEngine(ShardedEngine, GpuEngine):
    """On a GPU of the tests' driver, which writes late."""

    def fill(self, model: torch.Tensor, blocks: Sequence[int]) -> None:
        for rank, caches in enumerate(self.caches):
            first = rank * self.heads // self.ranks
            for layer, cache in enumerate(caches.values()):
                for number, block in enumerate(blocks):
                    own = model[layer, number, first : first + cache.shape[1]]
                    self._host.write(cache[block], own)

    def holds(self, model: torch.Tensor, blocks: Sequence[int]) -> bool:
        self._host.synchronize()
        return super().holds(model, blocks)


def kv(heads: int, layers: int = LAYERS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((layers, len(STORED), heads, 2, TOKENS, SIZE)).to(dtype)


def store(agent: AgentServer, engine: ShardedEngine, model: torch.Tensor) -> None:
    engine.fill(model, STORED)
    engine.store("r", HASHES, STORED)
    agent.wait_idle()


def check_hit(engine: ShardedEngine, model: torch.Tensor) -> None:
    assert engine.lookup("r", HASHES) == 256
    assert engine.retrieve("r", HASHES, LOADED) == set()
    assert engine.holds(model, LOADED)


def values(redis_server: RedisServer) -> int:
    with redis_server.client() as client:
        return len(stripe_keys(client))


@pytest.mark.parametrize(
    ("heads", "shares", "sizes"),
    [
        (8, 8, (1, 2)),
        (8, 4, (4, 1)),
        (2, 2, (1, 4)),  # fewer heads than ranks
        (2, 2, (4, 2)),
    ],
)
def test_one_size_loads_what_another_has_stored(
    start: Starts, redis_server: RedisServer, heads: int, shares: int, sizes: tuple[int, int]
) -> None:
    model, one, two = kv(heads), start.agent("one"), start.agent("two")
    store(one, start.enter(ShardedEngine(one.endpoint, sizes[0], heads, shares=shares)), model)
    assert one.counter("stored_chunks") == 4 * min(heads, sizes[0])
    assert (stored := values(redis_server)) == 4 * shares, "each share once"
    engine = start.enter(ShardedEngine(two.endpoint, sizes[1], heads, shares=shares))
    check_hit(engine, model)
    assert two.counter("loaded_chunks") == 4 * min(heads, sizes[1])
    # What it computes is there already.
    engine.store("r", HASHES, LOADED)
    two.wait_idle()
    assert values(redis_server) == stored


@pytest.mark.skipif(cuda_driver.missing() is not None, reason=f"{cuda_driver.missing()}")
@pytest.mark.parametrize("direct", [1024, 1 << 20], ids=["direct", "kernels"])
def test_shares_on_gpus(node: Node, direct: int) -> None:
    model = kv(4)

    def engine_of(agent: AgentServer, ranks: int) -> GpuShardedEngine:
        both = {"host": node.host, "gpus": (0, 1)}
        return node.start.enter(GpuShardedEngine(agent.endpoint, ranks, 4, **both))

    agent = node.agent(direct)
    store(agent, engine_of(agent, 1), model)
    agent.restart()  # the host pool is empty now
    other = engine_of(agent, 2)
    check_hit(other, model)


def test_shares_are_packed_and_sealed(start: Starts, key_file: Path) -> None:
    model = kv(4, dtype=torch.bfloat16)
    options = {"compress": "lossless", "seal_key_file": key_file}
    agent, other = start.agent("one", **options), start.agent("two", **options)
    engine = start.enter(ShardedEngine(agent.endpoint, 1, 4, dtype=model.dtype))
    store(agent, engine, model)
    assert agent.counter("stored_bytes") < 0.9 * agent.counter("plain_bytes")
    check_hit(start.enter(ShardedEngine(other.endpoint, 4, 4, dtype=model.dtype)), model)


def test_sizes_share_one_disk_without_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    model = kv(4)
    with agent_with_disk(tmp_path, redis_server) as agent:
        for ranks in (2, 1, 4):
            with ShardedEngine(agent.endpoint, ranks, 4) as engine:
                if ranks == 2:
                    store(agent, engine, model)
                    redis_server.kill()
                    continue
                check_hit(engine, model)
        assert agent.counter("hit_chunks_disk") == 4 + 4


def test_a_chunk_has_left_the_disk_with_its_first_share_that_has(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with (
        agent_with_disk(tmp_path, redis_server, disk_size="1MiB") as agent,
        ShardedEngine(agent.endpoint, 1, 4) as engine,
    ):
        check_evictions_from_disk(agent, engine)


def test_why_says_a_layout_once_and_where_each_part_is(
    start: Starts, agent: AgentServer, redis_server: RedisServer
) -> None:
    model, tools = kv(4), ControlClient(agent.endpoint, 10)
    engine = start.enter(ShardedEngine(agent.endpoint, 2, 4))
    start.enter(ShardedEngine(agent.endpoint, 1, 4))
    other = start.enter(ShardedEngine(agent.endpoint, 1, 4, shares=2))
    engine.fill(model, STORED)
    engine.store("r", HASHES, STORED)
    other.store("r", HASHES[:4], STORED[:4])
    agent.wait_idle()
    assert len({each["layout"] for each in tools.layouts()["layouts"]}) == 2
    agent.restart()
    engine.wait_ready()
    other.wait_ready()
    layout, apart = (each["layouts"][0] for each in agent.status()["sharing"])
    with redis_server.client() as client:
        for key in stripe_keys(client):
            _, name, _ = parse_stripe_key(key)
            # The first share of the second rank.
            is_lost = name.chunk_hash == HASHES[3] and name.kv_rank == share_rank(4, 2)
            if is_lost and layout.encode().startswith(key[6:22]):
                client.delete(key)
    assert engine.lookup("lost", HASHES) == 0
    report = tools.why("lost")
    miss = report["requests"][0]["lookup"]["first_miss"]
    assert (miss["reason"], miss["now"]) == ("in_part", ["redis", None])
    assert miss["other_layouts"] == [apart]
    said = "\n".join(request_lines(report, 0.0))
    assert f"layout {layout[:16]}\n" in said
    assert "1 of its 2 parts are there now" in said


def test_status_says_who_shares(start: Starts, agent: AgentServer) -> None:
    start.enter(ShardedEngine(agent.endpoint, 2, 4))
    start.enter(ShardedEngine(agent.endpoint, 1, 4))
    start.enter(ShardedEngine(agent.endpoint, 1, 4, shares=2))
    start.engine(agent, model_name="other/model")
    status = agent.status()
    first, *others = status["sharing"]
    assert (len(first["engines"]), first["shares"], first["apart"]) == (2, 4, [])
    layout = first["layouts"][0][:16]
    apart, alone = sorted(others, key=lambda each: str(each["model"]), reverse=True)
    assert (len(apart["engines"]), apart["shares"]) == (1, 2)
    assert apart["apart"][0] == "kv_shares"
    assert (alone["model"], alone["shares"], alone["apart"]) == ("other/model", 1, [])
    said = [text for _, text, _ in rows(status)]
    assert f"test/model, layout {layout}, in 4 shares; 2 engines share" in said
    (text,) = (each for each in said if "does not share" in each)
    assert f", in 2 shares: does not share with {layout} (kv_shares, " in text
    assert f"other/model, layout {alone['layouts'][0][:16]}" in said


def test_groups_beside_each_other_are_cut_each_for_itself(start: Starts) -> None:
    model = kv(4, 2 * LAYERS)
    one, two = start.agent("one"), start.agent("two")
    store(one, start.enter(ShardedEngine(one.endpoint, 2, 4, beside="window")), model)
    engine = start.enter(ShardedEngine(two.endpoint, 1, 4, beside="window"))
    assert engine.lookup("first", HASHES) == 256
    # Of four chunks all that full attention needs, and what the window does: two.
    assert two.counter("loaded_chunks") == 4 + 2
    check_hit(engine, model)


def test_windows_of_ranks_on_other_nodes(start: Starts, redis_server: RedisServer) -> None:
    model = kv(4, 2 * LAYERS)
    agents = [start.agent(name, **PATIENT) for name in ("one", "two")]
    places = [each.endpoint for each in agents]
    with ShardedEngine(places, 2, 4, beside="window") as first:
        for agent in agents:
            store(agent, first, model)
    for agent in agents:
        agent.restart()
    engine = start.enter(ShardedEngine(places, 2, 4, beside="window"))
    assert engine.lookup("first", HASHES) == 256
    # Of four chunks all that full attention needs, and what the window does, on each node.
    assert agents[0].counter("loaded_chunks") == 4 + 2
    check_hit(engine, model)
    for request_id in ("first", "r"):
        engine.scheduler.end_session(request_id)

    # The other node's window of the last chunk is gone: the prefix is one chunk shorter.
    groups = [group for each in agents[1].status()["engines"] for group in each["groups"]]
    (layout,) = {each["layout"] for each in groups if each["reach"] == "window"}
    gone = []
    for key in stripe_keys(redis_server):
        namespace, name, _ = parse_stripe_key(key)
        is_of_it = name.chunk_hash == NAMES[3] and layout.encode().startswith(namespace)
        if is_of_it and name.kv_rank in (share_rank(4, 2), share_rank(4, 3)):
            gone.append(key)
    assert redis_server.command("DEL", *gone) == len(gone) == 2
    assert engine.lookup("shorter", HASHES) == 192
    engine.scheduler.end_session("shorter")
    check_unpinned(agents)


def test_states_beside_shares_are_for_engines_of_one_size(
    start: Starts, agent: AgentServer
) -> None:
    model = kv(4, 2 * LAYERS)
    engine = start.enter(ShardedEngine(agent.endpoint, 2, 4, beside="state"))
    like = start.enter(ShardedEngine(agent.endpoint, 2, 4, beside="state"))
    other = start.enter(ShardedEngine(agent.endpoint, 1, 4, beside="state"))
    store(agent, engine, model)
    assert like.lookup("r", HASHES) == 256
    assert other.lookup("r", HASHES) == 0
    other.fill(model, STORED)
    other.store("r", HASHES, STORED)
    assert other.lookup("again", HASHES) == 256
    # Its shares were there.
    agent.wait_idle()
    assert agent.counter("stored_chunks") == 4 * 2 + 4 * 2 + 4


def test_other_shares_are_another_layout(start: Starts, agent: AgentServer) -> None:
    model = kv(8)
    one, other = (start.enter(ShardedEngine(agent.endpoint, 1, shares=shares)) for shares in (8, 4))
    store(agent, one, model)
    assert other.lookup("r", HASHES) == 0
    store(agent, other, model)
    assert other.lookup("again", HASHES) == 256
    assert "Traceback" not in agent.log


def test_a_canary_compares_every_share(
    start: Starts, agent: AgentServer, redis_server: RedisServer
) -> None:
    model = kv(4)
    with ShardedEngine(agent.endpoint, 2, 4) as engine:
        store(agent, engine, model)
    with ShardedEngine(agent.endpoint, 1, 4) as one:
        assert one.lookup("r", HASHES) == 256
        model[0, 5, 3] += 1  # a head of a block of the second chunk
        one.fill(model, LOADED)
        op = one.op(HASHES, LOADED)
        (compared,) = one.workers[0].begin_stores(["r"], [op], compare=True)
        assert compared.call.wait(60)
        assert agent.counter("compared_chunks") == 4
        assert agent.counter("differing_chunks") == 1
        # All shares of it are gone, and what the other engine has left in memory.
        agent.wait_idle()
        assert values(redis_server) == 3 * 4
    ControlClient(agent.endpoint).trust()
    engine = start.enter(ShardedEngine(agent.endpoint, 2, 4))
    assert engine.lookup("again", HASHES) == 64


def test_routers_learn_that_a_share_was_evicted(tmp_path: Path) -> None:
    with (
        RedisServer(tmp_path, args=("--notify-keyspace-events", "Egex")) as server,
        AgentServer(tmp_path / "agent", server.unix_url) as agent,
        ShardedEngine(agent.endpoint, 1, 4) as engine,
    ):
        watcher = removals.stored(engine, server)
        for number, name in enumerate(removals.NAMES):
            share = sorted(removals.keys_of(server, name))[-1 - number]
            with server.client() as client:
                # After a deletion the agent looks whether all are there.
                client.pexpire(share, 1) if number else client.delete(share)
            watcher.wait(0, "redis", removals.NAMES[number + 1 :])


def test_routers_of_every_size_learn_of_an_expired_share(tmp_path: Path) -> None:
    """A share is the whole part of one engine, and a share of that of another."""
    with (
        RedisServer(tmp_path, args=("--notify-keyspace-events", "Egex")) as server,
        AgentServer(tmp_path / "agent", server.unix_url) as agent,
        ShardedEngine(agent.endpoint, 4, 4) as engine,
        ShardedEngine(agent.endpoint, 1, 4) as one,
    ):
        watcher = removals.stored(engine, server)
        agent.wait_idle()
        other = removals.watched(one)
        assert one.lookup("r", removals.HASHES) == 3 * 64
        other.wait(0, "redis", removals.NAMES)
        keys = sorted(removals.keys_of(server, removals.NAMES[0]))
        with server.client() as client:
            client.pexpire(keys[2], 1)
        other.wait(0, "redis", removals.NAMES[1:])
        watcher.wait(2, "redis", removals.NAMES[1:])
        watcher.wait(1, "redis", removals.NAMES)


def missed(agent: AgentServer) -> int:
    """Loads of parts that were not there."""
    reads: dict[str, int] = agent.status()["redis"]["reads"]
    return sum(n for outcome, n in reads.items() if outcome != "loaded")


def test_a_decoder_waits_for_the_shares_of_every_rank(
    start: Starts, redis_server: RedisServer
) -> None:
    """Those of the second rank come later: the first share alone does not make a chunk."""
    model = kv(4)
    prefill, agent = (start.agent(name, lookup_deadline_s=60.0) for name in ("prefill", "decode"))
    store(prefill, start.enter(ShardedEngine(prefill.endpoint, 2, 4)), model)
    one = start.enter(ShardedEngine(agent.endpoint, 1, 4))
    with redis_server.client() as client:
        keys = sorted(stripe_keys(client))
        late = {key: client.get(key) for key in keys if key[22:26] >= b"\4\2\4\2"}
        assert len(late) == len(keys) // 2
        client.delete(*late)
        one.scheduler.begin_lookup("r", one.chunks(HASHES), token_s=60.0, stored_tokens=256)
        wait_until(lambda: missed(agent), "a load of a chunk that is not whole")
        client.mset(late)
        wait_until(lambda: one.scheduler.hit_tokens("r", wait_s=0.05) == 256, "a hit")
    assert agent.counter("awaited_chunks") == 4
    assert one.retrieve("r", HASHES, LOADED) == set()
    assert one.holds(model, LOADED)


def test_a_new_agent_is_filled_with_shares(start: Starts) -> None:
    model, one = kv(4), start.agent("one")
    store(one, start.enter(ShardedEngine(one.endpoint, 2, 4)), model)
    agent = start.agent("two", warm_bytes="1GiB")
    engine = start.enter(ShardedEngine(agent.endpoint, 1, 4))
    other = start.enter(ShardedEngine(agent.endpoint, 2, 4))
    wait_until(lambda: agent.status()["warm"]["done"], "a filled host pool")
    wait_until(lambda: agent.status()["warm"]["chunks"] == 4 + 8, "both sizes")
    assert other.lookup("r", HASHES) == 256
    check_hit(engine, model)
    assert agent.counter("hit_chunks_host") == 8

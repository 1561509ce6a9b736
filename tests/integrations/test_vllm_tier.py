# SPDX-License-Identifier: Apache-2.0
"""The tier in Redis behind vLLM's own manager, region and layouts, with a real server."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.v1.kv_offload.base import LookupResult

from lmcache_redis.errors import ConfigError
from lmcache_redis.regions import RegionStore
from tests.integrations.tiers import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    TierEngine,
    key,
    make_files,
)
from tests.servers import RedisServer, stripe_keys, wait_until

pytestmark = pytest.mark.servers

KEYS = [key(number) for number in range(3)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_files(tmp_path / "model")


Start = Callable[..., TierEngine]


@pytest.fixture
def start(model: Path, redis_server: RedisServer) -> Start:
    return partial(TierEngine, model, redis_server.unix_url)


def stored(start: Start, **named: Any) -> bytes:
    """The content of three chunks that an engine has stored."""
    with start(**named) as engine:
        content = random.Random(1).randbytes(len(KEYS) * engine.chunk_bytes)
        assert engine.hits(KEYS) == [False] * 3
        engine.put(KEYS, engine.write(content))
    return content


def test_an_engine_loads_what_another_stored(start: Start) -> None:
    content = stored(start)
    with start() as engine:
        said = engine.lookup([*KEYS, key(9)])
        assert said[:3] == [[LookupResult.RETRY, LookupResult.HIT_PENDING, LookupResult.HIT]] * 3
        assert said[3] == [LookupResult.RETRY, LookupResult.MISS]
        assert engine.read(KEYS) == content
        counted = engine.tier._cache.store.metrics.snapshot()
        assert (counted["loaded_chunks"], counted["stored_chunks"]) == (3, 0)
        values = engine.tier.get_stats().data["data"]
        assert values["lmcache_redis_tier_chunks"]["redis", "loaded_chunks"] == 3
        assert values["lmcache_redis_tier_up"] == {("redis",): 1}
        assert engine.tier.get_stats().data["data"].keys() == {"lmcache_redis_tier_up"}


def test_other_weights_dtypes_or_chunks_are_misses(
    start: Start, model: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    stored(start)
    others: list[tuple[Path, dict[str, Any]]] = [
        (make_files(tmp_path / "other" / "model"), {}),
        (model, {"dtype": "bfloat16"}),
        (model, {"layout": "LBNHC"}),
        (model, {"ranks": 2}),
        (model, {"blocks_per_chunk": 4}),
        (model, {"tier": {"weights_id": "v2"}}),
    ]
    for path, named in others:
        with TierEngine(path, redis_server.unix_url, **named) as engine:
            assert engine.hits(KEYS) == [False] * 3, named
    same = shutil.copytree(model, tmp_path / "copy" / "model")
    with TierEngine(same, redis_server.unix_url) as engine:
        assert engine.hits(KEYS) == [True] * 3


def test_a_damaged_or_evicted_chunk_is_computed_again(
    start: Start, redis_server: RedisServer
) -> None:
    content = stored(start)
    with redis_server.client() as client:
        by_chunk = {
            each: [found for found in stripe_keys(client) if each[:-4].hex().encode() in found]
            for each in KEYS
        }
        assert all(by_chunk.values())
        client.setrange(by_chunk[KEYS[0]][0], 2000, b"damage")
        client.delete(*by_chunk[KEYS[1]])
    with start() as engine:
        assert engine.hits(KEYS) == [False, False, True]
        size = engine.chunk_bytes
        assert engine.read(KEYS[2:]) == content[2 * size :]
        assert engine.hits(KEYS[:2]) == [False, False]
        engine.put(KEYS[:2], engine.write(content))
    with start() as engine:
        assert engine.hits(KEYS) == [True] * 3
        assert engine.read(KEYS) == content


def test_a_chunk_lost_after_its_lookup_fails_alone(start: Start, redis_server: RedisServer) -> None:
    """vLLM keeps what was loaded of a job, and the rest is a miss at once."""
    content = stored(start)
    with start() as engine:
        context = engine.request()

        def are_there() -> bool:
            engine.step()
            return all(engine.tier.lookup(each, context) is LookupResult.HIT for each in KEYS)

        wait_until(are_there, "hits")
        with redis_server.client() as client:
            for each in stripe_keys(client):
                if KEYS[1][:-4].hex().encode() in each:
                    client.delete(each)
        for each in KEYS:
            assert engine.manager.lookup(each, context) is LookupResult.HIT_PENDING
        engine.settle()
        found = [engine.manager.lookup(each, context) for each in KEYS]
        assert found == [LookupResult.HIT, LookupResult.MISS, LookupResult.HIT]
        size = engine.chunk_bytes
        assert engine.read([KEYS[0], KEYS[2]]) == content[:size] + content[2 * size :]


def test_a_lost_server_is_a_miss_at_once_until_it_is_back(
    start: Start, redis_server: RedisServer
) -> None:
    with start() as engine:
        content = bytes(range(250)) * engine.chunk_bytes
        redis_server.stop()
        wait_until(lambda: engine.tier._cache.store.why_down, "Redis known to be down")
        assert engine.lookup(KEYS) == [[LookupResult.MISS]] * 3
        engine.put(KEYS, engine.write(content))
        assert engine.tier.get_stats().data["data"]["lmcache_redis_tier_up"] == {("redis",): 0}
        redis_server.cont()
        wait_until(lambda: not engine.tier._cache.store.why_down, "Redis known to be up")
        engine.put([key(7)], engine.write(content))
    with start() as engine:
        assert engine.hits([key(7), *KEYS]) == [True, False, False, False]


def test_a_reset_waits_for_transfers_and_keeps_redis(start: Start) -> None:
    with start() as engine:
        content = random.Random(2).randbytes(3 * engine.chunk_bytes)
        context = engine.request()
        rows = engine.manager.prepare_store(KEYS, context).store_spec.chunk_ids
        engine.write(content)([int(row) for row in rows])
        engine.manager.complete_store(KEYS, context)
        engine.manager.reset_cache()  # asserts that no job is left
        if hasattr(engine.manager, "on_reset_flushed"):
            engine.manager.on_reset_flushed()
        assert engine.hits(KEYS) == [True] * 3
        assert engine.read(KEYS) == content


def test_new_weights_in_memory_do_not_use_old_chunks(start: Start) -> None:
    stored(start)
    with start() as engine:
        pool, before = engine.scheduler.kv_cache_manager.block_pool, engine.request()
        assert engine.hits(KEYS[:1]) == [True]
        assert pool.reset_prefix_cache()  # the weights are the same
        assert engine.hits(KEYS[1:2]) == [True]
        with torch.no_grad():
            engine.parameters.weight.add_(1)
        assert pool.reset_prefix_cache()
        assert engine.hits(KEYS[2:]) == [False]
        # Of a request that began before, nothing is kept: part of it is of the old weights.
        engine.tier.submit_store(_job(engine, KEYS[0], before))
        (result,) = engine.tier.get_finished_jobs()
        assert not result.success
        engine.collective_rpc("update_weights")
        assert engine.hits([key(5)]) == [False]


@pytest.mark.parametrize("is_load", [True, False])
def test_a_transfer_that_cannot_begin_ends_as_failed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: Any,
    is_load: bool,
) -> None:  # fmt: skip
    def fail(*given: Any) -> None:
        raise RuntimeError("a fault of our own")

    stored(start)
    with start() as engine:
        assert engine.hits(KEYS[:1]) == [True]
        monkeypatch.setattr(RegionStore, "load" if is_load else "store", fail)
        job = _job(engine, KEYS[0], engine.request(), is_load)
        (engine.tier.submit_load if is_load else engine.tier.submit_store)(job)
        engine.tier.drain_jobs()
        (result,) = engine.tier.get_finished_jobs()
        assert (result.job_id, result.success) == (1, False)
        assert result.successful_keys == (() if is_load else None)
        monkeypatch.undo()
        assert engine.hits(KEYS[1:]) == [True, True]
    assert "a fault of our own" in caplog.text


def _job(engine: TierEngine, of: Any, context: Any, is_load: bool = False) -> Any:
    from vllm.v1.kv_offload.tiering.base import TransferJob

    return TransferJob(1, [of], engine.rows([of]), is_load, context)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("LBNHC", (1, 2)), ("LBHNC", (2, 1)), ("LBNHC", (4, 1)), ("LBHNC", (2, 4))],
)
def test_a_canonical_chunk_serves_other_tensor_parallel_sizes(
    start: Start, layout: str, sizes: tuple[int, int]
) -> None:
    """Each rank gets its heads of what another number of ranks has stored."""
    torch.manual_seed(0)
    whole = {layer: torch.randn(4, HEADS, BLOCK, 2 * HEAD_SIZE) for layer in LAYERS}
    storing, loading = sizes
    with start(ranks=storing, layout=layout, canonical_layout=True) as engine:
        for rank, caches in enumerate(engine.caches):
            for layer in LAYERS:
                caches[layer][2:6] = _heads(whole[layer], rank, storing)
        keys = KEYS[:2]
        engine.put(keys, lambda rows: engine.copy([2, 3, 4, 5], rows, to_region=True))
    with start(ranks=loading, layout=layout, canonical_layout=True) as engine:
        assert engine.hits(keys) == [True, True]
        engine.copy([7, 1, 3, 2], engine.rows(keys), to_region=False)
        for rank, caches in enumerate(engine.caches):
            for layer in LAYERS:
                ours = caches[layer]
                assert torch.equal(ours[[7, 1, 3, 2]], _heads(whole[layer], rank, loading))
                assert not ours[[0, 4, 5, 6]].any()


def _heads(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The heads of a rank: more ranks than heads have copies."""
    each = max(1, HEADS // ranks)
    first = rank * HEADS // ranks
    return whole[:, first : first + each]


def test_blocks_inside_a_chunk_are_copied(start: Start) -> None:
    """A hit may begin in the middle of a chunk; two ranks lie side by side in it."""
    with start(ranks=2) as engine:
        for rank, caches in enumerate(engine.caches):
            for number, layer in enumerate(LAYERS):
                caches[layer][:] = torch.arange(8).view(8, 1, 1, 1) + 100 * rank + 10 * number
        engine.copy([0, 1, 2, 3], [5, 6], to_region=True)
        expected = [{layer: each[layer].clone() for layer in LAYERS} for each in engine.caches]
        # The last block of chunk 5, and the first of 6.
        engine.copy([6, 7], [5, 6], to_region=False, skip=1)
        for caches, were in zip(engine.caches, expected, strict=True):
            for layer in LAYERS:
                assert torch.equal(caches[layer][6:], were[layer][1:3])
                assert torch.equal(caches[layer][:6], were[layer][:6])


def test_impossible_settings_of_the_tier_are_named(model: Path) -> None:
    with pytest.raises(ConfigError, match="hots"):
        TierEngine(model, "redis://127.0.0.1:1", tier={"hots": "x"})


def test_weights_without_a_name_turn_the_tier_off(
    start: Start, model: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "model.safetensors").unlink()
    with start() as engine:
        assert engine.lookup(KEYS) == [[LookupResult.MISS]] * 3
        engine.put(KEYS, lambda rows: None)
    assert "stays off" in caplog.text
    assert "weights_id" in caplog.text
    with start(tier={"weights_id": "v1"}) as engine:
        engine.put(KEYS, engine.write(bytes(3 * engine.chunk_bytes)))
        with redis_server.client() as client:
            assert len(stripe_keys(client)) >= 3


def test_workers_that_cannot_be_asked_turn_the_tier_off(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    def fail(worker: Any) -> dict[str, str]:
        raise RuntimeError("a worker of another kind")

    monkeypatch.setattr("lmcache_redis.integrations.vllm_tier.tier.describe_worker", fail)
    with start() as engine:
        assert engine.hits(KEYS) == [False] * 3
    assert "a worker of another kind" in caplog.text


def test_adapters_turn_the_tier_off(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """A key has the name of an adapter alone: another replica's may have other weights."""
    from vllm.config import LoRAConfig

    with start(lora=LoRAConfig(max_lora_rank=8)) as engine:
        assert engine.lookup(KEYS) == [[LookupResult.MISS]] * 3
    assert "--enable-lora" in caplog.text

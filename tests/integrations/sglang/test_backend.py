# SPDX-License-Identifier: Apache-2.0
"""The door between SGLang's own host pools and a real Redis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lmcache_redis.errors import ConfigError
from tests.servers import RedisServer, stripe_keys, wait_until

pytestmark = pytest.mark.servers

LAYERS, PAGE, PAGES = 3, 16, 8
# Above what an unreachable server may cost a caller, far below every deadline.
AT_ONCE_S = 0.5
CONFIG = {
    "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
    "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
    "model_name": "org/model",
}  # fmt: skip
DYNAMIC = {
    "backend_name": "redis",
    "module_path": "lmcache_redis.integrations.sglang",
    "class_name": "RedisHiCache",
    "interface_v1": 1,
}
KEYS = ["a" * 64, "b" * 64, "c" * 64, "d" * 64]

Open = Callable[..., Any]


@pytest.fixture
def open_door(redis_server: RedisServer) -> Iterator[Open]:
    opened: list[Any] = []

    def make(pool: Any, extra: dict[str, Any] | None = None, **config: Any) -> Any:
        """By SGLang's factory, with its registration of a pool."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        given = {**DYNAMIC, "url": redis_server.unix_url, **(extra or {})}
        described = HiCacheStorageConfig(**{**CONFIG, **config}, extra_config=given)
        door = StorageBackendFactory.create_backend("dynamic", described, pool)
        opened.append(door)
        door.register_mem_pool_host(pool)
        door.on_host_pools_registered()
        return door

    yield make
    for door in opened:
        door.close()


def mha(layout: str = "page_first", dtype: Any = torch.bfloat16, page: int = PAGE) -> Any:
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    rows = tuple(torch.zeros(page, 2, 32, dtype=dtype) for _ in range(LAYERS))
    none = torch.zeros(LAYERS, dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=rows, v=rows, k_data_ptrs=none, v_data_ptrs=none, layout=KVBufferLayout.NHD
        ),
        page_size=page, head_num=2, head_dim=32, v_head_dim=32, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    return built(MHATokenToKVPoolHost, info, layout, page)


def mla(layout: str = "page_first") -> Any:
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    info = MLABufferInfo(
        buffers=tuple(torch.zeros(PAGE, 1, 48, dtype=torch.bfloat16) for _ in range(LAYERS)),
        data_ptrs=torch.zeros(LAYERS, dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=32, qk_rope_head_dim=16,
        kv_cache_dim=48, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    return built(MLATokenToKVPoolHost, info, layout, PAGE, target_layer_num=LAYERS)


def built(kind: Any, info: Any, layout: str, page: int, **more: Any) -> Any:
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope

    with host_memory_budget_scope(1 << 30):
        pool = kind(
            info, 1.0, 0, page, layout, False, "cpu", device_capacity_tokens=PAGE, start_layer=0,
            end_layer=LAYERS, host_token_capacity=PAGES * page, **more,
        )  # fmt: skip
    pool.kv_buffer.view(torch.uint8).zero_()
    return pool


def mamba() -> Any:
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 4, 2, 8, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, 4, 6, dtype=torch.bfloat16),),
    )
    with host_memory_budget_scope(1 << 30):
        return MambaPoolHost(info, 2.0, 0, device_capacity=4, pin_memory=False, layout="page_first")


def indices(*pages: int, page: int = PAGE) -> torch.Tensor:
    return torch.cat([torch.arange(each * page, (each + 1) * page) for each in pages])


def fill(pool: Any, *pages: int) -> None:
    for each in pages:
        flat = torch.randn(pool.get_dummy_flat_data_page().numel(), dtype=torch.float32)
        pool.set_from_flat_data_page(each * pool.page_size, flat.to(pool.dtype))


def page_of(pool: Any, page: int) -> bytes:
    flat = pool.get_data_page(page * pool.page_size).contiguous().view(torch.uint8)
    return bytes(flat.numpy())


def stored(door: Any, pool: Any, keys: list[str] = KEYS[:2]) -> None:
    pages = [*range(len(keys))]
    fill(pool, *pages)
    assert door.batch_set_v1(keys, indices(*pages, page=pool.page_size)) == [True] * len(keys)


def behind(
    open_door: Open, extra: dict[str, Any] | None = None, pool: Any = None, **config: Any
) -> tuple[Any, Any]:
    """A door behind which two pages lie, and its pool."""
    pool = mha() if pool is None else pool
    door = open_door(pool, extra, **config)
    stored(door, pool)
    return door, pool


POOLS = [
    (mha, "page_first"), (mha, "layer_first"), (mha, "page_first_direct"),
    (mla, "page_first"), (mla, "layer_first"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "layout"), POOLS)
def test_pages_come_back_and_neighbours_stay(open_door: Open, make: Any, layout: str) -> None:
    door, pool = behind(open_door, pool=make(layout), is_mla_model=make is mla)
    fill(pool, 6)
    before = [page_of(pool, each) for each in range(PAGES)]
    assert door.batch_exists(KEYS) == 2
    assert door.batch_exists([KEYS[2], KEYS[0]]) == 0, "only a leading run counts"
    found = door.batch_get_v1([KEYS[1], KEYS[3], KEYS[0]], indices(5, 6, 3))
    assert found == [True, False, True]
    after = [page_of(pool, each) for each in range(PAGES)]
    assert before[0] != before[1]
    assert (after[5], after[3]) == (before[1], before[0])
    unchanged = (0, 1, 2, 4, 7)
    assert [after[each] for each in unchanged] == [before[each] for each in unchanged]


def test_whatever_decides_the_bytes_makes_a_miss(
    open_door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind(open_door)
    assert open_door(mha()).batch_exists(KEYS) == 2
    ranks = {"tp_size": 2}, {"pp_size": 2}, {"attn_cp_size": 2}, {"tp_size": 2, "tp_rank": 1}
    for config in (*ranks, {"model_name": "org/other"}):
        assert open_door(mha(), **config).batch_exists(KEYS) == 0, config
    for extra in ({"weights_id": "v2"}, {"key_prefix": "x:"}):
        assert open_door(mha(), extra).batch_exists(KEYS) == 0, extra
    # Two pages of 8 tokens of float32 are as large as one of 16 of bfloat16.
    for other in (mha(dtype=torch.float16), mha("layer_first"), mha(dtype=torch.float32, page=8)):
        assert open_door(other).batch_exists(KEYS) == 0
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    assert open_door(mha()).batch_exists(KEYS) == 0


@pytest.fixture
def server_has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Publishes what a server's own resolution of its arguments says of adapters."""

    def publish(**settings: Any) -> None:
        from sglang.srt.runtime_context import _ConfigBag, get_context

        lora = _ConfigBag("lora")
        for name, value in settings.items():
            lora._set(name, value)
        monkeypatch.setattr(get_context(), "_config_bags", {"lora": lora})

    return publish


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_lora": True, "lora_paths": ["tuned=/adapter"]},
        {"enable_lora": True, "lora_paths": None},  # it is given some by /load_lora_adapter
        {"enable_lora": None, "lora_paths": ["/adapter"]},
        {"renamed": True},
    ],
)
def test_with_adapters_the_door_is_off(
    open_door: Open,
    redis_server: RedisServer,
    server_has: Callable[..., None],
    settings: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server_has(**settings)
    pool = mha()
    door = open_door(pool)
    assert "set lora_id" in caplog.text
    assert door.batch_set_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert door.batch_exists(KEYS) == 0
    assert door.batch_get_v1(KEYS[:2], indices(4, 5)) == [False, False]
    door.clear()
    with redis_server.client() as client:
        assert len(stripe_keys(client)) == 0


def test_named_adapters_are_another_model(open_door: Open, server_has: Callable[..., None]) -> None:
    """And a server without adapters needs no name for them."""
    behind(open_door)
    for settings in (
        {"enable_lora": False, "lora_paths": ["/ignored"]},
        {"enable_lora": None, "lora_paths": None},
    ):
        server_has(**settings)
        assert open_door(mha()).batch_exists(KEYS) == 2
    server_has(enable_lora=True, lora_paths=["tuned=/adapter"])
    assert open_door(mha(), {"lora_id": "v1"}).batch_exists(KEYS) == 0
    behind(open_door, {"lora_id": "v1"})
    assert open_door(mha(), {"lora_id": "v1"}).batch_exists(KEYS) == 2
    assert open_door(mha(), {"lora_id": "v2"}).batch_exists(KEYS) == 0
    with pytest.raises(ConfigError, match="lora_id"):
        open_door(mha(), {"lora_id": 7})


def test_ranks_share_pages_of_mla(open_door: Open) -> None:
    behind(open_door, pool=mla(), is_mla_model=True, tp_size=2)
    for rank in (0, 1):
        assert open_door(mla(), is_mla_model=True, tp_size=2, tp_rank=rank).batch_exists(KEYS) == 2
    assert open_door(mla(), is_mla_model=True, pp_size=2).batch_exists(KEYS) == 0


def test_a_dead_redis_is_misses_at_once(open_door: Open, redis_server: RedisServer) -> None:
    door, _ = behind(open_door)
    redis_server.kill()
    wait_until(lambda: door._store.why_down, "the loss to be seen")
    started_s = time.monotonic()
    assert door.batch_exists(KEYS) == 0
    assert door.batch_get_v1(KEYS[:1], indices(4)) == [False]
    assert door.batch_set_v1(KEYS[2:3], indices(0)) == [False]
    assert door.batch_exists_v2(KEYS, []).kv_hit_pages == 0
    assert time.monotonic() - started_s < AT_ONCE_S
    redis_server.start()
    wait_until(lambda: not door._store.why_down, "the return to be seen")
    assert door.batch_set_v1(KEYS[:1], indices(0)) == [True]


def test_a_stopped_redis_costs_a_deadline(open_door: Open, redis_server: RedisServer) -> None:
    times = {f"{name}_timeout_s": 0.3 for name in ("lookup", "load", "store")}
    door, _ = behind(open_door, times)
    redis_server.stop()
    started_s = time.monotonic()
    assert door.batch_exists(KEYS) == 0
    assert door.batch_get_v1(KEYS[:1], indices(4)) == [False]
    assert door.batch_set_v1(KEYS[2:3], indices(0)) == [False]
    assert time.monotonic() - started_s < 5
    redis_server.cont()


def hybrid(open_door: Open) -> tuple[Any, Any, Any]:
    from sglang.srt.mem_cache.hicache_storage import PoolName

    pool, states = mha(), mamba()
    door = open_door(pool)
    door.register_mem_host_pool_v2(pool, PoolName.KV)
    door.register_mem_host_pool_v2(states, PoolName.MAMBA)
    return door, pool, states


def transfer(keys: list[str], pages: list[int], policy: str = "trailing_pages") -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    where = torch.tensor(pages, dtype=torch.int64)
    return PoolTransfer(PoolName.MAMBA, where, keys=keys, hit_policy=PoolHitPolicy(policy))


def test_states_of_mamba_come_back_by_v2(open_door: Open) -> None:
    door, _, states = hybrid(open_door)
    states.temporal_buffer[1] = 7
    states.conv_buffer[0][1] = 5
    assert door.batch_set_v2([transfer(KEYS[:1], [1])]) == {"mamba": [True]}
    assert door.batch_get_v2([transfer(KEYS[:2], [3, 2])]) == {"mamba": [True, False]}
    assert bool((states.temporal_buffer[3] == 7).all() and (states.conv_buffer[0][3] == 5).all())
    assert not states.temporal_buffer[[0, 2]].any()
    assert door.batch_get_v2([transfer(KEYS[:2], [3])]) == {"mamba": [False, False]}


def test_hit_policies_decide_where_to_go_on(open_door: Open) -> None:
    door, pool, _ = hybrid(open_door)
    stored(door, pool, KEYS)
    door.batch_set_v2([transfer([KEYS[0], KEYS[2]], [0, 1])])

    def found(asked: Any) -> tuple[int, list[int], dict[str, int]]:
        result = door.batch_exists_v2(KEYS, [asked])
        hits = {str(name): pages for name, pages in result.extra_pool_hit_pages.items()}
        return result.kv_hit_pages, result.restorable_prefix_pages, hits

    assert found(transfer(KEYS[:1], [0])) == (3, [1, 3], {"kv": 4, "mamba": 3})
    assert found(transfer(KEYS[:2], [0, 1])) == (1, [1], {"kv": 4, "mamba": 1})
    assert found(transfer(KEYS, [0], "all_pages")) == (1, [1], {"kv": 4, "mamba": 1})
    assert found(transfer(KEYS, [0], "block_groups")) == (4, [1, 2, 3, 4], {"kv": 4})
    assert door.batch_exists_v2(KEYS[::-1][:0], [transfer(KEYS[:1], [0])]).kv_hit_pages == 0


def test_a_pool_without_memory_follows_the_others(open_door: Open) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    anchor = LogicalHostPool(PAGES * PAGE, PAGE)
    door = open_door(anchor)
    door.register_mem_host_pool_v2(mamba(), PoolName.MAMBA)
    assert door.batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert door.batch_exists(KEYS) == 0, "nothing is stored"
    assert door.batch_exists_v2(KEYS, []).kv_hit_pages == 0
    door.batch_set_v2([transfer(KEYS[:2], [0, 1])])
    assert door.batch_exists_v2(KEYS, [transfer([], [], "all_pages")]).kv_hit_pages == 2


def test_clear_removes_pages_of_this_identity(open_door: Open, redis_server: RedisServer) -> None:
    door, pool = behind(open_door)
    other, _ = behind(open_door, {"weights_id": "v2"}, pool)
    door.clear()
    assert (door.batch_exists(KEYS), other.batch_exists(KEYS)) == (0, 2)


def test_pools_that_do_not_tell_enough_are_refused(open_door: Open) -> None:
    with pytest.raises(ConfigError, match="kv_dtype"):
        open_door(mha(dtype=torch.uint8))
    doors = [open_door(mha(dtype=torch.uint8), {"kv_dtype": f"fp8_{x}"}) for x in ("e4m3", "e5m2")]
    pool = mha(dtype=torch.uint8)
    assert doors[0].batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert [door.batch_exists(KEYS) for door in doors] == [1, 0]
    pool.layout = None
    with pytest.raises(ConfigError, match="page_first"):
        open_door(pool)
    with pytest.raises(ConfigError, match="names no model"):
        open_door(mha(), model_name=None)
    with pytest.raises(ConfigError, match='set "interface_v1": 1'):
        open_door(mha(), {"interface_v1": 0})
    with pytest.raises(ConfigError, match="unknown field `host`"):
        open_door(mha(), {"host": "x"})

# SPDX-License-Identifier: Apache-2.0
"""What the door needs of SGLang. A release that moves any of it fails here, by name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

pytestmark = pytest.mark.servers  # SGLang starts processes while it is imported

# Of SGLang 0.5.23.
ABSTRACT = {
    "get": ["key", "target_location", "target_sizes"],
    "batch_get": ["keys", "target_locations", "target_sizes"],
    "set": ["key", "value", "target_location", "target_sizes"],
    "batch_set": ["keys", "values", "target_locations", "target_sizes"],
    "exists": ["key"],
}
OPTIONAL = {
    "register_mem_pool_host": ["mem_pool_host"],
    "register_mem_host_pool_v2": ["host_pool", "host_pool_name"],
    "on_host_pools_registered": [],
    "batch_exists": ["keys", "extra_info"],
    "batch_get_v1": ["keys", "host_indices", "extra_info"],
    "batch_set_v1": ["keys", "host_indices", "extra_info"],
    "batch_exists_v2": ["keys", "pool_transfers", "extra_info"],
    "batch_get_v2": ["transfers", "extra_info"],
    "batch_set_v2": ["transfers", "extra_info"],
    "clear": [],
}
UNUSED = {"get_stats"}
CONFIG = (
    "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size is_mla_model enable_storage_metrics "
    "is_page_first_layout model_name tp_lcm_size should_split_heads dp_rank extra_config dcp_size "
    "dcp_rank logical_page_size"
)
TRANSFER = (
    "name host_indices device_indices keys hit_policy nodes_to_load indices_from_pool block_pages "
    "group_pages"
)


def parameters(of: Any) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name != "self"]


def fields(of: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(of)]


def test_every_method_of_sglang_is_known_and_written() -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from lmcache_redis.integrations.sglang import RedisHiCache

    assert HiCacheStorage.__abstractmethods__ == {*ABSTRACT}, "SGLang wants other methods"
    public = {name for name in vars(HiCacheStorage) if not name.startswith("_")}
    assert public == {*ABSTRACT, *OPTIONAL, *UNUSED}, "SGLang's interface has moved"
    for name, wanted in {**ABSTRACT, **OPTIONAL}.items():
        assert parameters(getattr(HiCacheStorage, name)) == wanted, name
        if name in OPTIONAL:
            assert parameters(getattr(RedisHiCache, name)) == wanted, name


def test_types_say_what_they_said() -> None:
    from sglang.srt.mem_cache import hicache_storage as storage

    assert fields(storage.HiCacheStorageConfig) == CONFIG.split(), (
        "what SGLang says of a rank has changed: so must the identity of a page"
    )
    assert fields(storage.PoolTransfer) == TRANSFER.split()
    policies = {each.value for each in storage.PoolHitPolicy}
    assert policies == {"all_pages", "trailing_pages", "block_groups"}

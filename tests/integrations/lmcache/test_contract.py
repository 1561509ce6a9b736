# SPDX-License-Identifier: Apache-2.0
"""What the door needs of LMCache. A release that moves any of it fails here, by name."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from benchmarks.lmcache_l2 import PLUGIN
from lmcache_redis.errors import ConfigError

pytestmark = [
    pytest.mark.usefixtures("lmcache"),
    pytest.mark.filterwarnings("ignore:.*LoggingHandler:DeprecationWarning"),
]

# Of LMCache 0.5.6; the last are of 0.5.7.
ABSTRACT = {
    "get_store_event_fd": [],
    "get_lookup_and_lock_event_fd": [],
    "get_load_event_fd": [],
    "submit_store_task": ["keys", "objects"],
    "pop_completed_store_tasks": [],
    "submit_lookup_and_lock_task": ["keys", "group_layout_descs"],
    "query_lookup_and_lock_result": ["task_id"],
    "submit_unlock": ["keys"],
    "submit_load_task": ["keys", "objects"],
    "query_load_result": ["task_id"],
    "close": [],
}
LATER = {"get_memory_tags": [], "submit_touch": ["keys"]}
OPTIONAL = {"delete": ["keys"], "report_status": []}


def parameters(of: Any) -> list[str]:
    return [name for name in inspect.signature(of).parameters if name != "self"]


def config_of(**spec: Any) -> Any:
    """By LMCache's parser of `--l2-adapter`."""
    import argparse

    from lmcache.v1.distributed.l2_adapters import config

    parser = config.add_l2_adapters_args(argparse.ArgumentParser())
    words = ["--l2-adapter", json.dumps({**PLUGIN, **spec})]
    return config.parse_args_to_l2_adapters_config(parser.parse_args(words)).adapters[0]


def test_every_abstract_method_is_known_and_written() -> None:
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    from lmcache_redis.integrations.lmcache import RedisL2Adapter

    abstract = L2AdapterInterface.__abstractmethods__
    assert not abstract - {*ABSTRACT, *LATER}, "LMCache wants methods that the door does not have"
    assert not {*ABSTRACT} - abstract, "LMCache does not call these any more"
    assert not RedisL2Adapter.__abstractmethods__
    for name, wanted in {**ABSTRACT, **OPTIONAL}.items():
        assert parameters(getattr(L2AdapterInterface, name)) == wanted, name
        assert parameters(getattr(RedisL2Adapter, name)) == wanted, name
    for name, wanted in LATER.items():
        assert parameters(getattr(RedisL2Adapter, name)) == wanted, name


def test_keys_say_what_they_said() -> None:
    from lmcache.v1.distributed.api import ObjectKey

    assert {"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"} == {
        *parameters(ObjectKey)
    }, "what LMCache's keys say has changed: so must the identity of a chunk"


@pytest.mark.parametrize("named", [{}, {"config_class_name": "RedisL2AdapterConfig"}])
def test_its_factory_finds_class_and_config(named: dict[str, str]) -> None:
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter

    from lmcache_redis.integrations.lmcache import RedisL2Adapter

    config = config_of(adapter_params={"url": "redis://127.0.0.1:1"}, **named)
    adapter = create_l2_adapter(config, L1MemoryDesc(ptr=0, size=0, align_bytes=4096))
    try:
        assert type(adapter) is RedisL2Adapter
        fds = adapter.get_store_event_fd(), adapter.get_load_event_fd()
        assert len({*fds, adapter.get_lookup_and_lock_event_fd()}) == 3
        assert not adapter.supports_global_eviction
        assert adapter.report_status()["is_healthy"] is False
    finally:
        adapter.close()


def test_a_wrong_setting_gets_one_sentence() -> None:
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter

    with pytest.raises(ConfigError, match="unknown field `host`") as raised:
        create_l2_adapter(config_of(adapter_params={"url": "redis://h", "host": "x"}))
    assert "\n" not in str(raised.value)

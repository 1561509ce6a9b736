# SPDX-License-Identifier: Apache-2.0
"""LMCache's L2 adapters, driven as its controllers do: submit, poll, take the result.

They come from the wheel that `fetch` unpacks, or from an installed LMCache, by its own factory.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.fetch import HOW_TO_FETCH, find_package
from benchmarks.servers import ServerFailed

_WAIT_MS = 60_000
PLUGIN = {
    "type": "plugin",
    "module_path": "lmcache_redis.integrations.lmcache",
    "class_name": "RedisL2Adapter",
}


def import_lmcache() -> None:
    """Makes `lmcache` importable from now on. Raises ServerFailed if there is none."""
    package = find_package()
    if package is None:
        raise ServerFailed(HOW_TO_FETCH)
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    sys.path.append(str(package))
    try:
        importlib.import_module("lmcache.v1.distributed.l2_adapters")
    finally:
        sys.path.remove(str(package))


def create_adapter(spec: Mapping[str, Any]) -> Any:
    """The adapter of an ``--l2-adapter`` option, as a server makes it."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    config = get_l2_adapter_config_class(str(spec["type"])).from_dict(dict(spec))
    return create_l2_adapter(config)


def memory_object(shape: Sequence[int], dtype: str = "bfloat16", fill: int = 0) -> Any:
    """An object of LMCache in memory of its own, each byte ``fill``."""
    import torch
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    kind, size = getattr(torch, dtype), torch.Size(shape)
    nbytes = size.numel() * kind.itemsize
    described = MemoryObjMetadata(size, kind, 0, nbytes, 1, shapes=[size], dtypes=[kind])
    return TensorMemoryObj(torch.full((nbytes,), fill, dtype=torch.uint8), described, None)


def layouts_of(some: Any, group: int = 0) -> dict[int, Any]:
    """What a lookup says of objects like this one."""
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    return {group: MemoryLayoutDesc(some.metadata.shapes, some.metadata.dtypes)}


class L2Caller:
    """An adapter's calls, each with its result. One thread."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def store(self, keys: Sequence[Any], objects: Sequence[Any]) -> Any:
        """The ``L2StoreResult``."""
        task = self.adapter.submit_store_task(list(keys), list(objects))
        done: dict[int, Any] = {}
        while task not in done:
            _wait(self.adapter.get_store_event_fd())
            done |= self.adapter.pop_completed_store_tasks()
        return done[task]

    def lookup(self, keys: Sequence[Any], layouts: Mapping[int, Any]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), dict(layouts))
        fd, take = self.adapter.get_lookup_and_lock_event_fd(), self.adapter
        found = _bits(fd, take.query_lookup_and_lock_result, task, len(keys))
        self.adapter.submit_unlock(list(keys))
        return found

    def load(self, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        fd = self.adapter.get_load_event_fd()
        return _bits(fd, self.adapter.query_load_result, task, len(keys))


def _bits(fd: int, query: Any, task: int, count: int) -> list[bool]:
    result = None
    while result is None:
        _wait(fd)
        result = query(task)
    return [result.test(index) for index in range(count)]


def _wait(fd: int) -> None:
    from lmcache.v1.platform import consume_fd

    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(_WAIT_MS):
        raise ServerFailed("an L2 adapter did not complete a task within a minute")
    consume_fd(fd)

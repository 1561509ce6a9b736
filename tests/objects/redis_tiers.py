# SPDX-License-Identifier: Apache-2.0
"""Backends over Redis for tests, with a check that they release threads and descriptors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lmcache_redis.objects import ChunkBackend, in_redis
from lmcache_redis.resp import RedisPlane
from tests.resp.helpers import open_streams
from tests.servers import RedisServer
from tests.servers import wait_until as wait_until

SLOT = 4096


@contextmanager
def tier(url: Any, *, counts_descriptors: bool = True, **settings: Any) -> Iterator[ChunkBackend]:
    """A backend that is closed at the end and leaves no thread and no descriptor.

    counts_descriptors: False if a proxy or another backend opens descriptors too.
    """
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    settings.setdefault("slot_bytes", SLOT)
    backend = ChunkBackend([in_redis(url, **settings)])
    try:
        yield backend
    finally:
        backend.close()
    left = set(threading.enumerate()) - threads
    assert not [thread for thread in left if thread.name.startswith("lmcr-")]
    assert open_streams(plane_of(backend)) == 0
    assert not counts_descriptors or len(os.listdir("/proc/self/fd")) <= descriptors


def plane_of(backend: ChunkBackend) -> RedisPlane:
    plane = backend._objects.cache.tiers[-1]
    assert isinstance(plane, RedisPlane)
    return plane


def stripes_in(server: RedisServer) -> list[bytes]:
    with server.client() as client:
        return sorted(client.keys("*"))

# SPDX-License-Identifier: Apache-2.0
"""LMCache's multiprocess mode with its Redis adapter, as a peer of an agent under a real vLLM.

It runs from the wheel that `fetch` unpacks, or from an installed LMCache. Its settings are its
defaults, with these exceptions:

    shared memory     the server shares its pool with the engine; otherwise bytes go through pickle
    pool at start     the pool is allocated at start, as an agent's is, and not as it fills
    no observability  the wheel's metrics need packages that are not installed, and cost CPU time
    buffer            a pool that holds few requests is a buffer only: a chunk leaves it when Redis
                      has it (`skip_l1`). By default the pool evicts above 80 %, once a second, and
                      stores all chunks of a request or none: between 80 % and the room for a
                      request such a pool stays full for good, and nothing more is stored or loaded

Its Redis must not evict: a chunk that is evicted between its lookup and its load can make it hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fetch import HOW_TO_FETCH, find_package
from benchmarks.servers import ServerFailed, free_port, running_module, wait_for

_HTTP_TIMEOUT_S = 10.0
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class LMCacheServer:
    """A running server. port: where engines connect; http_port: where it shows its status."""

    port: int
    http_port: int
    pid: int
    environment: Mapping[str, str]

    @property
    def kv_transfer(self) -> dict[str, Any]:
        """The engine's connector, which needs ``environment`` too."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
            },
        }

    def wait_engine(self) -> None:
        """Returns at once: the engine itself waits at its start until it is registered."""

    def wait_idle(self) -> None:
        """Waits until every chunk stored so far is in Redis or was dropped."""
        wait_for(self._settled, "LMCache's server to be idle", 0.05)

    def counters(self) -> dict[str, int]:
        """Nothing: they come with its observability."""
        return {}

    def adapter_status(self) -> dict[str, Any]:
        """What its L2 adapter reports."""
        reported: dict[str, Any] = self._storage()["l2_adapters"][0]
        return reported

    def _settled(self) -> bool:
        # Chunks pass from one queue to the next: idle once may be between two queues.
        if not self._idle():
            return False
        time.sleep(_SETTLE_S)
        return self._idle()

    def _idle(self) -> bool:
        storage = self._storage()
        stores = storage["store_controllers"].values()
        waiting = sum(each["pending_keys_count"] + each["in_flight_task_count"] for each in stores)
        return not waiting and not storage["prefetch_controller"]["in_flight_request_count"]

    def _storage(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.http_port}/status"
        with urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S) as answer:
            storage: dict[str, Any] = json.load(answer)["storage_manager"]
        return storage


@contextlib.contextmanager
def running_lmcache(
    redis_port: int,
    pool_bytes: int,
    log: Path,
    *,
    chunk_tokens: int = 256,
    buffer: bool = False,
    adapter: Mapping[str, Any] | None = None,
) -> Iterator[LMCacheServer]:
    """`lmcache server` during the block. Raises ServerFailed if there is none, or it fails.

    buffer: see the module. adapter: its L2 adapter; None: its own for Redis.
    """
    package = find_package()
    if package is None:
        raise ServerFailed(HOW_TO_FETCH)
    port, http_port = free_port(), free_port()
    adapter = adapter or {"type": "resp", "host": "127.0.0.1", "port": redis_port}
    words = ["lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--chunk-size", str(chunk_tokens)]
    words += ["--http-port", str(http_port), "--disable-observability"]
    words += ["--l1-size-gb", str(pool_bytes / (1 << 30)), "--no-l1-use-lazy"]
    words += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"bench-{port}"]
    words += ["--eviction-policy", "noop" if buffer else "LRU"]
    words += ["--l2-store-policy", "skip_l1" if buffer else "default"]
    words += ["--l2-adapter", json.dumps(adapter)]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {
        "PYTHONPATH": os.pathsep.join([*paths, str(package)]),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }
    with running_module("LMCache's server", words, http_port, log, environment) as process:
        yield LMCacheServer(port, http_port, process.pid, environment)

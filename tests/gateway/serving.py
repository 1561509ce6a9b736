"""A gateway on a loop of its own thread, and a tier that is a dict."""

from __future__ import annotations

import asyncio
import builtins
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from lmcache_redis.backends.interface import Allocate, LMCBackendInterface
from lmcache_redis.gateway.config import GatewayConfig
from lmcache_redis.gateway.server import Gateway
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from tests.gateway.wire import Client

WAIT_S = 20.0
_Result = TypeVar("_Result")


class DictBackend(LMCBackendInterface):
    """Chunks in a dict. Clear `open` to make every call wait; set `error` to make it raise."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: dict[ObjectKey, tuple[RemoteMetadata, bytes]] = {}
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.calls = 0

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        self._enter()
        data = b"".join(payload)
        assert len(data) == metadata.length
        self.chunks[key] = metadata, data
        return True

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        self._enter()
        if key not in self.chunks:
            return None
        metadata, data = self.chunks[key]
        views = allocate(metadata)
        if views is None:
            return None
        assert sum(map(len, views)) == metadata.length
        for view in views:
            view[:], data = data[: len(view)], data[len(view) :]
        return metadata

    def contains(self, key: ObjectKey) -> bool:
        self._enter()
        return key in self.chunks

    def remove(self, key: ObjectKey) -> bool:
        return self.chunks.pop(key, None) is not None

    def list(self) -> builtins.list[ObjectKey]:
        self._enter()
        return [*self.chunks]

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass

    def _enter(self) -> None:
        self.calls += 1
        assert self.open.wait(WAIT_S)
        if self.error is not None:
            raise self.error


class Serving:
    """A started gateway; ends it at the end of the block, and says when slots were lost."""

    def __init__(
        self,
        backend: LMCBackendInterface,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        **settings: Any,
    ) -> None:
        settings = {
            "listen": "lm://127.0.0.1:0", "buffer_bytes": 1 << 20, "slot_bytes": 4096,
            "max_payload_bytes": 1 << 19, "shutdown_deadline_s": 2.0, **settings,
        }  # fmt: skip
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._stopped = False
        try:
            self.gateway = Gateway(backend, GatewayConfig(**settings))
            self._thread.start()
            self.run(self.gateway.start())
        except BaseException:
            self._end_loop()
            raise
        self.port = self.gateway.address[1]

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def stop(self) -> None:
        self._stopped = True
        self.run(self.gateway.stop())

    def client(self, **more: Any) -> Client:
        return Client(self.port, **more)

    def stats(self) -> dict[str, int]:
        return self.gateway.stats()

    def until(self, **expected: int) -> None:
        """Waits until these figures are as expected."""
        deadline_s = time.monotonic() + WAIT_S
        while (stats := self.stats()) | expected != stats:
            assert time.monotonic() < deadline_s, (expected, stats)
            time.sleep(0.005)

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if not self._stopped:
                self.stop()
            if error is None:
                assert self.stats()["slots_in_use"] == 0
                assert self.stats()["open_connections"] == 0
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(WAIT_S)
        self._loop.close()

"""Our client: the plane, used as the agent uses it. Chunks together, a callback for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers.base import ScanningClient
from lmcache_redis.bench.plane.values import Values
from lmcache_redis.errors import RedisUnavailable
from lmcache_redis.keys import key_stem, stripe_key
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.outcomes import CallOutcome, ChunkIO, ReadOutcome, ScanResult, WriteOutcome
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.stripe import ChunkFrame, stripe_payload_bytes

_DEADLINE_S = 60.0
_OP_TIMEOUT_S = 10.0
_START_S = 10.0


class OurClient(ScanningClient):
    """The plane. Raises RedisUnavailable where the server or a single chunk fails."""

    def __init__(self, url: str, setting: Setting) -> None:
        self._slot_bytes = setting.slot_bytes
        self._chunks: list[tuple[bytes, ChunkFrame, list[memoryview]]] = []
        self._keys: list[bytes] = []
        self._plane = RedisPlane(
            RedisOptions(
                url,
                get_connections=setting.get_connections,
                set_connections=setting.set_connections,
                network_threads=setting.threads,
                op_timeout_s=_OP_TIMEOUT_S,
                verify_checksums=setting.checksums,
            )
        )
        self._plane.start()
        state = self._plane.wait_probed(_START_S)
        if not state.up:
            self.close()
            raise RedisUnavailable(state.reason)

    def close(self) -> None:
        self._plane.close(1.0)

    def prepare(self, name: str, values: Values) -> None:
        chunk_bytes, slot_bytes = values.value_bytes, self._slot_bytes
        # Sizes do not share keys: what one wrote the other would refuse.
        fingerprint = b"bench" + chunk_bytes.to_bytes(8, "big") + slot_bytes.to_bytes(19, "big")
        metadata = RemoteMetadata(chunk_bytes, [(chunk_bytes,)], ["uint8"], MemoryFormat.PAGES)
        serialized = metadata.serialize()
        stripe_bytes = stripe_payload_bytes(chunk_bytes, slot_bytes)
        stem = key_stem(fingerprint[:16], f"{name}-{slot_bytes}", 0, 32)
        self._chunks = []
        for number, slots in enumerate(values.slots):
            chunk_hash = number.to_bytes(32, "big")
            frame = ChunkFrame(fingerprint, chunk_hash, chunk_bytes, stripe_bytes, serialized)
            self._chunks.append((stem + chunk_hash, frame, slots))

    def store(self, fresh: bool) -> None:
        self._move(self._plane.write_all, WriteOutcome.STORED)

    def load(self) -> None:
        self._move(self._plane.read_all, ReadOutcome.LOADED)

    def prepare_scan(self, count: int) -> Sequence[bytes]:
        stem = key_stem(bytes(16), "bench-scan", 0, 32)
        self._keys = [stripe_key(stem + n.to_bytes(32, "big"), 0) for n in range(count)]
        return self._keys

    def scan(self) -> int:
        finished = threading.Event()
        results: list[ScanResult] = []

        def done(result: ScanResult) -> None:
            results.append(result)
            finished.set()

        self._plane.scan(self._keys, time.monotonic() + _DEADLINE_S, done)
        finished.wait()
        if results[0].outcome is not CallOutcome.DONE:
            raise RedisUnavailable(f"a scan failed: {results[0].outcome.value}")
        return results[0].prefix_length

    def _move(self, submit: Callable[..., None], good: object) -> None:
        finished = threading.Event()
        outcomes: list[object] = []

        def done(_: ChunkIO, outcome: object) -> None:
            outcomes.append(outcome)
            if len(outcomes) == len(self._chunks):
                finished.set()

        deadline = time.monotonic() + _DEADLINE_S
        submit([ChunkIO(key, frame, slots, deadline) for key, frame, slots in self._chunks], done)
        finished.wait()
        bad = [outcome for outcome in outcomes if outcome is not good]
        if bad:
            raise RedisUnavailable(f"{len(bad)} of {len(outcomes)} chunks failed: {bad[0]}")

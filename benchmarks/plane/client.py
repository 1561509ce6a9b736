# SPDX-License-Identifier: Apache-2.0
"""The data plane, used as an agent uses it: chunks together, a callback for each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from benchmarks.plane.values import Values
from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import FINGERPRINT_BYTES, ChunkFrame
from lmcache_redis.chunks.keys import NAMESPACE_BYTES
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import key_stem
from lmcache_redis.errors import RedisUnavailable
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.tiers import CallOutcome, ChunkIO, ReadOutcome, ScanResult, WriteOutcome

_HASH_BYTES = 32
_DEADLINE_S = 60.0
_START_S = 10.0


class PlaneClient:
    """Moves and looks up the chunks that `prepare` names. Close it with `close`.

    slot_bytes: the maximum payload of a stripe. Every method but `close` raises RedisUnavailable
    if the server, or a single chunk, fails.
    """

    def __init__(self, options: RedisOptions, slot_bytes: int) -> None:
        self._options = options
        self._slot_bytes = slot_bytes
        self._chunks: list[tuple[bytes, ChunkFrame, list[memoryview]]] = []
        self._plane = RedisPlane(options)
        self._plane.start()
        state = self._plane.wait_probed(_START_S)
        if not state.up:
            self.close()
            raise RedisUnavailable(state.reason)

    @property
    def where(self) -> str:
        """The server, without credentials."""
        return self._plane.deployment.url

    def close(self) -> None:
        self._plane.close(1.0)

    def prepare(self, name: str, values: Values) -> None:
        """The chunks that the next calls store from ``values``, or load into them."""
        chunk_bytes, slot_bytes = values.value_bytes, self._slot_bytes
        # Other sizes have other keys: their chunks would be FOREIGN.
        sizes = chunk_bytes.to_bytes(8, "big") + slot_bytes.to_bytes(8, "big")
        fingerprint = sizes.ljust(FINGERPRINT_BYTES, b"\0")
        metadata = RemoteMetadata(chunk_bytes, [(chunk_bytes,)], ["uint8"], MemoryFormat.PAGES)
        serialized = metadata.serialize()
        stripe_bytes = stripe_payload_bytes(chunk_bytes, slot_bytes)
        namespace = fingerprint[:NAMESPACE_BYTES]
        stem = key_stem(namespace, name, 0, _HASH_BYTES, self._options.key_prefix)
        self._chunks = []
        for number, slots in enumerate(values.slots):
            chunk_hash = _chunk_hash(number)
            frame = ChunkFrame(fingerprint, chunk_hash, chunk_bytes, stripe_bytes, serialized)
            self._chunks.append((stem + chunk_hash, frame, slots))

    def keys(self) -> list[bytes]:
        """The keys of the prepared chunks."""
        return [key for key, _, _ in self._chunks]

    def absent_keys(self, name: str, count: int) -> list[bytes]:
        """The keys of ``count`` chunks that do not exist."""
        stem = key_stem(bytes(NAMESPACE_BYTES), name, 0, _HASH_BYTES, self._options.key_prefix)
        return [stem + _chunk_hash(number) for number in range(count)]

    def store(self) -> None:
        """Stores the prepared chunks; on return the server has acknowledged them."""
        self._move(self._plane.store_all, WriteOutcome.STORED)

    def load(self) -> None:
        self._move(self._plane.load_all, ReadOutcome.LOADED)

    def scan(self, keys: Sequence[bytes]) -> int:
        """How many of the chunks exist, from the first on without a gap."""
        results: SimpleQueue[ScanResult] = SimpleQueue()
        self._plane.scan(keys, time.monotonic() + _DEADLINE_S, results.put)
        result = results.get()
        if result.outcome is not CallOutcome.DONE:
            raise RedisUnavailable(f"a lookup failed: {result.outcome.value}")
        return result.prefix_length

    def _move(self, submit: Callable[..., None], good: object) -> None:
        finished = threading.Event()
        outcomes: list[ReadOutcome | WriteOutcome] = []

        def done(_: ChunkIO, outcome: ReadOutcome | WriteOutcome) -> None:
            outcomes.append(outcome)
            if len(outcomes) == len(self._chunks):
                finished.set()

        deadline = time.monotonic() + _DEADLINE_S
        submit([ChunkIO(key, frame, slots, deadline) for key, frame, slots in self._chunks], done)
        finished.wait()
        bad = [outcome for outcome in outcomes if outcome is not good]
        if bad:
            evicted = bad[0] in (ReadOutcome.MISSING, ReadOutcome.INCOMPLETE)
            hint = " (evicted: move fewer at a time)" if evicted else ""
            many = f"{len(bad)} of {len(outcomes)}"
            raise RedisUnavailable(f"{many} chunks failed: {bad[0].value}{hint}")


def _chunk_hash(number: int) -> bytes:
    return number.to_bytes(_HASH_BYTES, "big")

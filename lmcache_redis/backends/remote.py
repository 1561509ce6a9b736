"""A tier in Redis or Valkey: one server, a Sentinel's master, or a cluster.

Payloads go through the data plane (docs/data-plane.md) between sockets and the caller's buffers,
without a copy where a stripe lies within one buffer; `catalog` has keys and headers.

A get first asks for the header of stripe 0 (a GETRANGE), which has the chunk's metadata and says
how it was cut; then `allocate` is called and all stripes are read. What is not whole, of two
stores, damaged or not ours is a miss. A get, a put and a removal of one key do not overlap within
one tier object (`turns`); where other processes write or remove it meanwhile, the get is a miss
and the chunk may be lost, but never a wrong byte is given.

Every call ends within `deadline_s` (`list`: `list_deadline_s`), with the name look-up and the
connection that it may need; a wait on a socket may overrun it by milliseconds. While the server is
down all of them answer at once: False, None, nothing. Beside what the plane needs, the server must
allow GETRANGE.
"""

from __future__ import annotations

import builtins
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Sequence

from lmcache_redis.backends.catalog import Catalog
from lmcache_redis.backends.checks import allocated_views, payload_views
from lmcache_redis.backends.interface import Allocate, LMCBackendInterface
from lmcache_redis.backends.pending import PendingPuts
from lmcache_redis.backends.transfers import Load, ResultT, Store, Transfer
from lmcache_redis.backends.turns import Turns
from lmcache_redis.errors import ConfigError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.resp import CallOutcome, ExistsResult, RedisOptions, RedisPlane
from lmcache_redis.resp.commands import CommandClient
from lmcache_redis.stripe import FINGERPRINT_BYTES, ChunkFrame

logger = logging.getLogger(__name__)

# A stripe with its header stays under 1 MiB: why is in docs/data-plane.md.
DEFAULT_SLOT_BYTES = (1 << 20) - 4096
DEFAULT_PENDING_BYTES = 256 << 20
DEFAULT_DEADLINE_S = 5.0
DEFAULT_LIST_DEADLINE_S = 60.0
_CLOSE_WRITES_S = 1.0


class LMCRemoteBackend(LMCBackendInterface):
    """See the module. Thread-safe.

    redis: a URL, or options with one. deadline_s: the longest that a call takes, and that an
    accepted put is tried. slot_bytes: most payload of a stripe that is written; what others cut
    otherwise is read all the same. pending_bytes: copies of accepted puts; what does not fit
    beside them is not accepted. layout: the fingerprint, 32 bytes, of an engine's KV cache; then
    the chunks are those that agents keep of it. What is put is for agents to read where it is one
    group of uint8 with MemoryFormat.PAGES, and slot_bytes theirs.

    Raises ConfigError for a URL that names no server, and for numbers that make no sense; connects
    in the background.
    """

    def __init__(
        self,
        redis: RedisOptions | str,
        dst_device: str = "cpu",
        fmt: MemoryFormat = MemoryFormat.UNDEFINED,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        list_deadline_s: float = DEFAULT_LIST_DEADLINE_S,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        pending_bytes: int = DEFAULT_PENDING_BYTES,
        layout: bytes | None = None,
    ) -> None:
        super().__init__(dst_device, fmt)
        if deadline_s < 0.01 or list_deadline_s < deadline_s:
            raise ConfigError("deadline_s is at least 0.01, list_deadline_s at least deadline_s")
        if slot_bytes < 64 or pending_bytes < 0:
            raise ConfigError("slot_bytes is at least 64, pending_bytes at least 0")
        if layout is not None and len(layout) != FINGERPRINT_BYTES:
            raise ConfigError(f"layout is a fingerprint of {FINGERPRINT_BYTES} bytes")
        options = RedisOptions(redis) if isinstance(redis, str) else redis
        self._deadline_s = deadline_s
        self._list_deadline_s = list_deadline_s
        # A connection that is being made keeps no deadline of a call: it is given half of it.
        step_s = deadline_s / 2
        self._client = CommandClient(
            dataclasses.replace(
                options,
                connect_timeout_s=min(options.connect_timeout_s, step_s),
                op_timeout_s=min(options.op_timeout_s, step_s),
            )
        )
        self._catalog = Catalog(self._client, options.key_prefix, slot_bytes, layout)
        self._turns: Turns[ObjectKey] = Turns()
        self._plane = RedisPlane(options)
        self._pending = PendingPuts(self._plane, self._turns, pending_bytes)
        self._probed = False
        self._closed = False
        self._close_lock = threading.Lock()
        self._plane.start()

    # ---------------------------------------------------------------- bytes

    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        """See the interface."""
        views = payload_views(metadata, payload)
        frame = self._catalog.frame(key, metadata)
        deadline = self._begin()
        if not self._is_up(deadline):
            return False
        if not blocking:
            return self._pending.add(key, self._catalog.chunk_key(key), frame, views, deadline)
        store = self._begin_store(key, frame, views, deadline)
        return store is not None and self._waited_for(store)

    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        """See the interface."""
        (load,) = self._begin_loads((key,), (allocate,), self._begin())
        return None if load is None else self._waited_for(load)

    def contains(self, key: ObjectKey) -> bool:
        """See the interface. Whether stripe 0 is there, which is written last."""
        name = self._catalog.first_key(key)
        deadline = self._begin()
        if not self._is_up(deadline):
            return False
        is_answered = threading.Event()
        results: list[ExistsResult] = []

        def answer(result: ExistsResult) -> None:
            results.append(result)
            is_answered.set()

        self._plane.exists((name,), deadline, answer)
        is_answered.wait()
        (result,) = results
        return result.outcome is CallOutcome.DONE and result.present[0]

    def remove(self, key: ObjectKey) -> bool:
        """See the interface. Where the server does not answer, the chunk may still be there.

        What is under the key but is no chunk goes too.
        """
        deadline = self._begin()
        was_waiting = self._pending.drop(key)
        if not self._is_up(deadline) or not self._turns.enter(key, deadline, exclusive=True):
            return was_waiting
        try:
            return self._catalog.remove(key, deadline) or was_waiting
        finally:
            self._turns.leave(key)

    def list(self) -> builtins.list[ObjectKey]:
        """See the interface. SCANs of the whole database, in steps that block nobody.

        Where a server does not answer in time, the keys found so far and a line in the log.
        """
        deadline = self._begin() - self._deadline_s + self._list_deadline_s
        if not self._is_up(deadline):
            logger.warning("no chunks can be listed: %s", self._plane.state.reason)
            return []
        return [*dict.fromkeys(self._catalog.keys(deadline))]

    def flush(self, timeout_s: float) -> bool:
        """See the interface."""
        self._begin()
        return self._pending.flush(timeout_s)

    def close(self) -> None:
        """See the interface. Calls under way on other threads end soon, as misses."""
        self._closed = True
        with self._close_lock:
            self._pending.flush(self._deadline_s)
            self._pending.close()
            self._client.close()
            self._plane.close(_CLOSE_WRITES_S)

    # --------------------------------------------------------------- inside

    def _begin(self) -> float:
        """The deadline of a call that begins now."""
        self._check_open()
        return time.monotonic() + self._deadline_s

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the tier is closed")

    def _is_up(self, deadline: float) -> bool:
        """Whether a server is worth asking; the first call waits until one was tried."""
        if not self._probed:
            left_s = max(0.0, deadline - time.monotonic())
            self._probed = self._plane.wait_probed(left_s).probed
        return self._plane.state.up

    def _waited_for(self, transfer: Transfer[ResultT]) -> ResultT:
        """Its result. Where the wait is interrupted, its buffers are let go of first."""
        try:
            return transfer.wait()
        except BaseException:
            self._plane.cancel(transfer.io)
            transfer.wait()
            raise

    def _begin_loads(
        self,
        keys: Sequence[ObjectKey],
        allocates: Sequence[Allocate],
        deadline: float,
        *,
        wait: bool = True,
        room_bytes: float = math.inf,
    ) -> builtins.list[Load | None]:
        """Begin to load the first of the keys, as many as can be had together; None: a miss.

        wait: for the turn of the first, whose answer is then among them if it has room. It never
        waits for a turn while it holds another of which no read has been begun: that could wait
        for itself. The headers are asked for together. room_bytes: most that is begun.
        """
        if not self._is_up(deadline):
            return [None] * len(keys)
        held: builtins.list[ObjectKey] = []
        loads: builtins.list[Load | None] = []
        is_begun = False
        try:
            for key in keys:
                if not self._turns.try_enter(key, exclusive=False) and (
                    held or not wait or not self._turns.enter(key, deadline, exclusive=False)
                ):
                    break
                held.append(key)
            if wait and not held:
                return [None]
            frames = self._catalog.find(held, deadline)
            for key, frame, allocate in zip(held, frames, allocates, strict=False):
                room_bytes -= frame.chunk_bytes if frame is not None else 0
                if room_bytes < 0:
                    break
                loads.append(self._prepared(key, frame, allocate, deadline))
            by_io = {load.io: load for load in loads if load is not None}
            self._plane.read_all([*by_io], lambda io, outcome: by_io[io].answer(outcome))
            is_begun = True
            return loads
        finally:
            # Those that were begun leave when they are answered.
            for number, key in enumerate(held):
                if not is_begun or number >= len(loads) or loads[number] is None:
                    self._turns.leave(key)

    def _prepared(
        self, key: ObjectKey, frame: ChunkFrame | None, allocate: Allocate, deadline: float
    ) -> Load | None:
        """A load with buffers, not begun yet."""
        if frame is None:
            return None
        metadata = RemoteMetadata.deserialize(frame.metadata)
        views = allocated_views(metadata, allocate)
        if views is None:
            return None
        chunk_key = self._catalog.chunk_key(key)
        return Load(self._turns, key, chunk_key, frame, metadata, views, deadline)

    def _begin_store(
        self, key: ObjectKey, frame: ChunkFrame, views: Sequence[memoryview], deadline: float
    ) -> Store | None:
        """Begin to store a chunk; None: its turn did not come in time."""
        if not self._turns.enter(key, deadline, exclusive=True):
            return None
        is_begun = False
        try:
            chunk_key = self._catalog.chunk_key(key)
            store = Store(self._turns, key, chunk_key, frame, views, deadline)
            self._plane.write(store.io, lambda _, outcome: store.answer(outcome))
            is_begun = True
            return store
        finally:
            if not is_begun:
                self._turns.leave(key)

"""What connections do with the tiers: load, list, and store what they receive.

A tier that lends what it has in memory saves a copy and a hop to a thread, in both directions;
every other tier copies from and to slots.

A memory tier has a received chunk at once, those below it need longer. So a client's next request
is read as soon as GETs find the chunk, and its next payload received while this one is still
being written through: one PUT of a connection at most, whose slots count until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from lmcache_redis.backends.interface import LMCBackendInterface
from lmcache_redis.backends.lending import Lender
from lmcache_redis.errors import FormatError
from lmcache_redis.gateway.shared import Shared
from lmcache_redis.gateway.slots import Lease
from lmcache_redis.gateway.wire import key_text_of, reply_of
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata


def borrowed(
    backend: LMCBackendInterface, key: ObjectKey, most_bytes: int
) -> tuple[bytes, memoryview] | None:
    """The reply and the payload, in the memory of a tier; None: `load` has to be asked."""
    lent = backend.borrow(key) if isinstance(backend, Lender) else None
    if lent is None or lent.metadata.length > most_bytes:
        return None
    try:
        return reply_of(lent.metadata), lent.payload
    except FormatError:
        return None


def listed(backend: LMCBackendInterface) -> bytes:
    """The key texts of all chunks that a GET could name. On a thread."""
    texts = []
    for key in backend.list():
        with contextlib.suppress(FormatError):
            texts.append(key_text_of(key))
    return "\n".join(texts).encode("utf-8")


class Loading:
    """An `Allocate` that takes slots, or notes how many bytes it would have needed.

    lease: slots that were waited for, if any. Afterwards the one to send from and to release.
    """

    def __init__(self, shared: Shared, lease: Lease | None) -> None:
        self._shared = shared
        self.lease = lease
        self.needed: int | None = None
        self.reply = b""

    def __call__(self, metadata: RemoteMetadata) -> Sequence[memoryview] | None:
        length = metadata.length
        try:
            self.reply = reply_of(metadata)
        except FormatError:
            return None  # another protocol's chunk: for this client it is not there
        if length > self._shared.max_payload_bytes:
            return None
        if self.lease is None:
            self.lease = self._shared.slots.try_take(length)
        if self.lease is None or self.lease.nbytes != length:
            self.needed = length
            return None
        return self.lease.views


class Receiving:
    """Room for one payload: slots, or memory of a tier for which they count."""

    def __init__(self, shared: Shared, metadata: RemoteMetadata) -> None:
        self.lease = shared.slots.empty()
        self.metadata = metadata
        self._backend = shared.backend
        self._lent: memoryview | None = None  # that memory, once the first slots are there

    def try_next(self, rest: int) -> Sequence[memoryview]:
        """See `stream.Room`."""
        return self._views(self.lease.try_extend(rest), rest)

    async def next(self, rest: int) -> Sequence[memoryview]:
        """See `stream.Room`."""
        return self._views(await self.lease.extend(rest), rest)

    def store(self, key: ObjectKey, visible: Callable[[], None]) -> bool:
        """Stores what was received; whether that was done. On a thread.

        visible: called as soon as a `borrowed` finds it, if that is before the end.
        """
        try:
            if self._lent is not None and isinstance(self._backend, Lender):
                return self._backend.keep(key, self.metadata, self._lent, visible)
            return self._backend.put_bytes(key, self.metadata, self.lease.views)
        except FormatError:
            return False  # no encoding in a tier

    def _views(self, views: Sequence[memoryview], rest: int) -> Sequence[memoryview]:
        length = self.metadata.length
        if views and rest == length and isinstance(self._backend, Lender):
            self._lent = self._backend.room(self.metadata)
        if not views or self._lent is None:
            return views
        return [self._lent[length - rest : self.lease.nbytes]]


class Storing:
    """A received payload in flight to the tiers. Begins at once, releases the lease at the end."""

    def __init__(self, shared: Shared, key: ObjectKey, payload: Receiving) -> None:
        self._loop = asyncio.get_running_loop()
        self._visible: asyncio.Future[None] = self._loop.create_future()
        self._stored = asyncio.ensure_future(self._store(shared, key, payload))
        self._stored.add_done_callback(self._see)

    async def visible(self) -> None:
        """Returns when GETs find the chunk, or it was not stored. Raises for a fault of a tier."""
        await self._visible
        if self._stored.done():
            await self._stored

    async def done(self) -> None:
        """Returns when all tiers have it, or have not taken it. Raises for a fault of a tier."""
        await self._stored

    def abandon(self) -> None:
        """Wait no longer: the gateway stops, and what it shares is not used again."""
        self._stored.cancel()

    async def _store(self, shared: Shared, key: ObjectKey, payload: Receiving) -> None:
        with payload.lease:
            stored = await shared.threads.call(payload.store, key, self._seen)
        if stored:
            shared.counters.stored += 1
            return
        shared.counters.not_stored += 1
        nbytes = payload.metadata.length
        shared.log.warning(
            "not stored", "a chunk of %d bytes is not stored: no tier took it", nbytes
        )

    def _seen(self) -> None:
        """On the thread of the tier."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the gateway has stopped
            self._loop.call_soon_threadsafe(self._see)

    def _see(self, _: object = None) -> None:
        if not self._visible.done():
            self._visible.set_result(None)

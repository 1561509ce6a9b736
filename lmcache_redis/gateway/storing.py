"""A PUT: its payload while it is received, and on its way into the tiers then.

A memory tier has the chunk at once, those below it need longer. So a client's next request is
read as soon as gets find the chunk, and its next payload received while this one is still being
written through: one PUT of a connection is, at most, and its slots count until it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

from lmcache_redis.gateway.shared import Shared
from lmcache_redis.gateway.slots import Lease
from lmcache_redis.gateway.tiers import keep, room_for, store
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata


class Receiving:
    """Room for one payload: slots, or memory of a tier for which they count.

    room: that memory, once the first slots are there; None where the slots have the payload.
    """

    def __init__(self, shared: Shared, metadata: RemoteMetadata) -> None:
        self.lease = shared.slots.empty()
        self.room: memoryview | None = None
        self._shared = shared
        self._metadata = metadata

    def try_next(self, rest: int) -> Sequence[memoryview]:
        """See `stream.Room`."""
        return self._views(self.lease.try_extend(rest), rest)

    async def next(self, rest: int) -> Sequence[memoryview]:
        """See `stream.Room`."""
        return self._views(await self.lease.extend(rest), rest)

    def _views(self, views: Sequence[memoryview], rest: int) -> Sequence[memoryview]:
        length = self._metadata.length
        if views and rest == length:
            self.room = room_for(self._shared.backend, self._metadata)
        if not views or self.room is None:
            return views
        return [self.room[length - rest : self.lease.nbytes]]


class Storing:
    """Begins at once. lease: counts for the payload and is released at the end.

    room: memory of a tier that has the payload; None where the slots have it.
    """

    def __init__(
        self,
        shared: Shared,
        key: ObjectKey,
        metadata: RemoteMetadata,
        lease: Lease,
        room: memoryview | None,
    ) -> None:
        self._shared = shared
        self._loop = asyncio.get_running_loop()
        self._visible: asyncio.Future[None] = self._loop.create_future()
        self._stored = asyncio.ensure_future(self._store(key, metadata, lease, room))
        self._stored.add_done_callback(self._see)

    @property
    def is_done(self) -> bool:
        return self._stored.done()

    async def visible(self) -> None:
        """Returns when gets find the chunk, or it was not stored. Raises for a fault of a tier."""
        await self._visible
        if self.is_done:
            await self._stored

    async def done(self) -> None:
        """Returns when all tiers have it, or have not taken it. Raises for a fault of a tier."""
        await self._stored

    def abandon(self) -> None:
        """Wait no longer: the gateway stops, and what it shares is not used again."""
        self._stored.cancel()

    async def _store(
        self, key: ObjectKey, metadata: RemoteMetadata, lease: Lease, room: memoryview | None
    ) -> None:
        shared = self._shared
        with lease:
            if room is None:
                call = partial(store, shared.backend, key, metadata, lease.views)
            else:
                call = partial(keep, shared.backend, key, metadata, room, self._seen)
            stored = await shared.on_thread(call)
        if stored:
            shared.counters.stored += 1
        else:
            shared.counters.not_stored += 1
            shared.log.warning(
                "not stored", "a chunk of %d bytes is not stored: no tier took it", metadata.length
            )

    def _seen(self) -> None:
        """On the thread of the tier."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._see)

    def _see(self, _: object = None) -> None:
        if not self._visible.done():
            self._visible.set_result(None)

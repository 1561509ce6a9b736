"""What connections do with the tiers. All but `borrowed` and `room_for` block: see each.

A tier that lends what it has in memory saves a copy and a way to a thread, in both directions;
every other tier copies from and to slots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from lmcache_redis.errors import FormatError
from lmcache_redis.gateway.keytext import key_text_of
from lmcache_redis.gateway.payloads import reply_of
from lmcache_redis.gateway.slots import Lease, SlotPool
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.storage.interface import LMCBackendInterface
from lmcache_redis.storage.lending import Lender


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


def room_for(backend: LMCBackendInterface, metadata: RemoteMetadata) -> memoryview | None:
    """Memory of a tier to receive a payload into; None: it goes through slots."""
    return backend.room(metadata) if isinstance(backend, Lender) else None


def keep(
    backend: LMCBackendInterface,
    key: ObjectKey,
    metadata: RemoteMetadata,
    room: memoryview,
    visible: Callable[[], None],
) -> bool:
    """Stores what was received into memory of a tier; whether that was done. On a thread.

    visible: called as soon as a `borrowed` finds it.
    """
    if not isinstance(backend, Lender):
        raise TypeError(f"{type(backend).__name__} has no room to give")
    try:
        return backend.keep(key, metadata, room, visible)
    except FormatError:
        return False  # no encoding in a tier


def store(
    backend: LMCBackendInterface,
    key: ObjectKey,
    metadata: RemoteMetadata,
    views: Sequence[memoryview],
) -> bool:
    """Stores what was received into slots; whether that was done. On a thread."""
    try:
        return backend.put_bytes(key, metadata, views)
    except FormatError:
        return False  # no encoding in that tier


def load(backend: LMCBackendInterface, key: ObjectKey, loading: Loading) -> bool:
    """Whether there was such a chunk, and slots for it. On a thread."""
    return backend.get_bytes(key, loading) is not None


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

    def __init__(self, slots: SlotPool, lease: Lease | None, most_bytes: int) -> None:
        self._slots = slots
        self._most_bytes = most_bytes
        self.lease = lease
        self.needed: int | None = None
        self.reply = b""

    def __call__(self, metadata: RemoteMetadata) -> Sequence[memoryview] | None:
        length = metadata.length
        try:
            self.reply = reply_of(metadata)
        except FormatError:
            return None  # somebody else's chunk: for this client it is not there
        if length > self._most_bytes:
            return None
        if self.lease is None:
            self.lease = self._slots.try_take(length)
        if self.lease is None or self.lease.nbytes != length:
            self.needed = length
            return None
        return self.lease.views

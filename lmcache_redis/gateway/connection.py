"""One client: its requests, each finished before the next is read.

A PUT has no reply, so one that cannot be stored (a malformed key, an unknown dtype, no room in
the tiers) is received, dropped and counted, and the stream stays in step. GET and EXIST answer
FAIL for what they cannot understand; LIST and HEALTH look at nothing but the command. Where the
end of a request cannot be known, or is not worth waiting for, the connection is closed: an
unknown command, after a FAIL, and a PUT whose length is negative or over the limit.

Tiers block, so they are called on the threads of `Shared.threads`. The slots of a payload are
taken before it is received, and for a GET while the tier waits; a GET that finds no slots free
gives its thread back, waits for its turn and asks the tier again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from lmcache_redis.errors import FormatError
from lmcache_redis.gateway.counting import Counters, QuietLog
from lmcache_redis.gateway.keytext import key_text_of, object_key_of
from lmcache_redis.gateway.payloads import (
    FAILED,
    SUCCEEDED,
    list_reply_of,
    metadata_of,
    reply_of,
)
from lmcache_redis.gateway.slots import Lease, SlotPool
from lmcache_redis.gateway.stream import Gone, Stream
from lmcache_redis.keys import ObjectKey
from lmcache_redis.lm_wire import ClientCommand, ClientMetaMessage
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.storage.interface import LMCBackendInterface

HEADER_BYTES = ClientMetaMessage.packlength()
# A chunk may be replaced by a larger one between two tries of a GET.
_TRIES = 4
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of a server have in common."""

    backend: LMCBackendInterface
    slots: SlotPool
    threads: Executor
    counters: Counters
    log: QuietLog
    max_payload_bytes: int
    one_list: asyncio.Lock  # a LIST may take long and much memory: one at a time
    dropped: memoryview  # where bytes go that nobody wants; anything may be in it


class OutOfStep(Exception):
    """Where the next request begins cannot be known."""


class Connection:
    """Serves one stream. peer: who it is, for log lines."""

    def __init__(self, stream: Stream, peer: str, shared: Shared) -> None:
        self.stream = stream
        self.peer = peer
        self._shared = shared
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._busy = False
        self._stopping = False

    async def serve(self) -> None:
        """Until the client ends, breaks the protocol, or `stop` was called."""
        counters = self._shared.counters
        try:
            while not self._stopping:
                await self.stream.receive([self._header], idle=True)
                self._busy = True
                await self._answer()
                self._busy = False
        except Gone:
            if self._busy or self.stream.in_message:
                counters.abandoned += 1
        except OutOfStep as problem:
            self._complain("closed", "%s; the connection is closed", problem)

    def stop(self) -> None:
        """No request after the one that is under way."""
        self._stopping = True
        if not self._busy and not self.stream.in_message:
            self.stream.close()

    # ------------------------------------------------------------ requests

    async def _answer(self) -> None:
        command, length = ClientMetaMessage.command_and_length(self._header)
        counters, send = self._shared.counters, self.stream.send
        if command == ClientCommand.PUT:
            counters.puts += 1
            await self._put(length)
        elif command == ClientCommand.GET:
            counters.gets += 1
            await self._get()
        elif command == ClientCommand.EXIST:
            counters.exists += 1
            key = self._key()
            there = key is not None and await self._on_thread(self._shared.backend.contains, key)
            await send([SUCCEEDED if there else FAILED])
        elif command == ClientCommand.LIST:
            counters.lists += 1
            await self._list()
        elif command == ClientCommand.HEALTH:
            counters.healths += 1
            await send([SUCCEEDED])
        else:
            await send([FAILED])
            raise OutOfStep(f"unknown command {command}")

    async def _put(self, length: int) -> None:
        shared = self._shared
        if not 0 <= length <= shared.max_payload_bytes:
            raise OutOfStep(
                f"a PUT of {length} bytes, allowed are 0 to {shared.max_payload_bytes} "
                "(--max-payload-bytes)"
            )
        try:
            message = ClientMetaMessage.deserialize(self._header)
            key, metadata = object_key_of(message.key), metadata_of(message)
        except FormatError as problem:
            self._complain("put", "a PUT is dropped: %s", problem)
            await self._drop(length)
            return
        with await shared.slots.take(length) as lease:
            await self.stream.receive(lease.views)
            shared.counters.payload_bytes_in += length
            if await self._on_thread(_store, shared.backend, key, metadata, lease.views):
                shared.counters.stored += 1
            else:
                shared.counters.not_stored += 1
                shared.log.warning(
                    "not stored", "a chunk of %d bytes is not stored: no tier took it", length
                )

    async def _drop(self, length: int) -> None:
        while length:
            part = self._shared.dropped[:length]
            await self.stream.receive([part])
            length -= len(part)

    async def _get(self) -> None:
        shared, key = self._shared, self._key()
        needed: int | None = None
        for _ in range(_TRIES if key is not None else 0):
            loading = _Loading(shared, None if needed is None else await shared.slots.take(needed))
            try:
                found = await self._on_thread(_load, shared.backend, key, loading)
                if found and loading.lease is not None:
                    shared.counters.hits += 1
                    await self._send_payload(loading.reply, loading.lease)
                    return
            finally:
                if loading.lease is not None:
                    loading.lease.release()
            needed = loading.needed
            if needed is None:
                break
        shared.counters.misses += 1
        await self.stream.send([FAILED])

    async def _list(self) -> None:
        async with self._shared.one_list:
            lease = await self._list_into_slots()
        # Outside of the lock: a client that reads slowly keeps slots and nothing else.
        if lease is None:
            await self.stream.send([FAILED])
            return
        with lease:
            await self._send_payload(list_reply_of(lease.nbytes), lease)

    async def _list_into_slots(self) -> Lease | None:
        text = await self._on_thread(_listed, self._shared.backend)
        if len(text) > self._shared.max_payload_bytes:
            self._complain("list", "a LIST of %d bytes is over --max-payload-bytes", len(text))
            return None
        lease = await self._shared.slots.take(len(text))
        at = 0
        for view in lease.views:
            view[:] = text[at : at + len(view)]
            at += len(view)
        return lease

    async def _send_payload(self, header: bytes, lease: Lease) -> None:
        await self.stream.send([header, *lease.views])
        self._shared.counters.payload_bytes_out += lease.nbytes

    # ------------------------------------------------------------ inside

    def _key(self) -> ObjectKey | None:
        """The key of a request without payload; None where it is malformed."""
        try:
            return object_key_of(ClientMetaMessage.deserialize(self._header).key)
        except FormatError as problem:
            self._complain("request", "a request fails: %s", problem)
            return None

    def _complain(self, kind: str, message: str, *args: object) -> None:
        self._shared.counters.malformed += 1
        self._shared.log.warning(kind, f"%s: {message}", self.peer, *args)

    async def _on_thread(self, call: Callable[..., _Result], *args: object) -> _Result:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._shared.threads, call, *args)


class _Loading:
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
            return None  # somebody else's chunk: for this client it is not there
        if length > self._shared.max_payload_bytes:
            return None
        if self.lease is None:
            self.lease = self._shared.slots.try_take(length)
        if self.lease is None or self.lease.nbytes != length:
            self.needed = length
            return None
        return self.lease.views


def _store(
    backend: LMCBackendInterface,
    key: ObjectKey,
    metadata: RemoteMetadata,
    views: Sequence[memoryview],
) -> bool:
    try:
        return backend.put_bytes(key, metadata, views)
    except FormatError:
        return False  # no encoding in that tier


def _load(backend: LMCBackendInterface, key: ObjectKey, loading: _Loading) -> bool:
    return backend.get_bytes(key, loading) is not None


def _listed(backend: LMCBackendInterface) -> bytes:
    """The key texts of all chunks that a GET could name."""
    texts = []
    for key in backend.list():
        with contextlib.suppress(FormatError):
            texts.append(key_text_of(key))
    return "\n".join(texts).encode("utf-8")

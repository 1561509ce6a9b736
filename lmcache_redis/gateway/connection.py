"""One client: its requests, one after the other.

A PUT has no reply, so one that cannot be stored (a malformed key, an unknown dtype, no room in
the tiers) is received, dropped and counted, and the stream stays in step. GET and EXIST answer
FAIL for what they cannot understand; LIST and HEALTH look at nothing but the command. Where the
end of a request cannot be known, or is not worth waiting for, the connection is closed: an
unknown command, after a FAIL, and a PUT whose length is negative or over the limit.

A request is finished before the next is read, with one exception: a PUT that is in memory is
written through to the tiers below (`tiers.Storing`) until the connection has another PUT to store,
or a question that these tiers answer.

Tiers block, so they are called on threads; only what one has in memory is sent
from there at once. The slots of a payload are taken as its bytes come, and for a GET while the
tier waits; a GET that finds no slots free gives its thread back, waits for its turn and asks the
tier again.
"""

from __future__ import annotations

import asyncio
import functools

from lmcache_redis.errors import FormatError
from lmcache_redis.gateway.shared import Shared
from lmcache_redis.gateway.slots import Lease
from lmcache_redis.gateway.stream import Gone, Stream
from lmcache_redis.gateway.tiers import Loading, Receiving, Storing, borrowed, listed
from lmcache_redis.gateway.wire import (
    FAILED,
    SUCCEEDED,
    list_reply_of,
    metadata_of,
    object_key_of,
)
from lmcache_redis.keys import ObjectKey
from lmcache_redis.lm_wire import ClientCommand, ClientMetaMessage

_HEADER_BYTES = ClientMetaMessage.packlength()
# A chunk may be replaced by a larger one between two tries of a GET.
_TRIES = 4


@functools.lru_cache(maxsize=4096)
def _key_of(header: bytes) -> ObjectKey:
    """The key of a request; reading it takes longer than all else about a small GET."""
    return object_key_of(ClientMetaMessage.deserialize(header).key)


class OutOfStep(Exception):
    """Where the next request begins cannot be known."""


class Connection:
    """Serves one stream. peer: the client's address, for log lines."""

    def __init__(self, stream: Stream, peer: str, shared: Shared) -> None:
        self.stream = stream
        self.peer = peer
        self._shared = shared
        self._header = memoryview(bytearray(_HEADER_BYTES))
        self._busy = False
        self._stopping = False
        self._storing: Storing | None = None

    async def serve(self) -> None:
        """Until the client ends, breaks the protocol, or `stop` was called."""
        counters = self._shared.counters
        try:
            while not self._stopping:
                await self.stream.receive_header(self._header)
                self._busy = True
                await self._answer()
                self._busy = False
        except Gone:
            if self._busy or self.stream.in_message:
                counters.abandoned += 1
        except OutOfStep as problem:
            self._complain("closed", "%s; the connection is closed", problem)
        except asyncio.CancelledError:
            if self._storing is not None:
                self._storing.abandon()
            raise
        finally:
            await self._written_through()

    def stop(self) -> None:
        """The request in flight is finished; no later one is served."""
        self._stopping = True
        if not self._busy and not self.stream.in_message:
            self.stream.end_requests()

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
            await self._written_through()
            shared = self._shared
            there = key is not None and await shared.threads.call(shared.backend.contains, key)
            await send([SUCCEEDED if there else FAILED])
        elif command == ClientCommand.LIST:
            counters.lists += 1
            await self._written_through()
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
            await self.stream.receive_payload(length, shared.dropped)
            return
        payload = Receiving(shared, metadata)
        try:
            await self.stream.receive_payload(length, payload)
            shared.counters.payload_bytes_in += length
            await self._written_through()
        except BaseException:
            payload.lease.release()
            raise
        self._storing = Storing(shared, key, payload)
        await self._storing.visible()

    async def _get(self) -> None:
        shared, key = self._shared, self._key()
        found = key and borrowed(shared.backend, key, shared.max_payload_bytes)
        if found:
            shared.counters.hits += 1
            await self._send_payload(*found)
        elif key is None or not await self._get_through_slots(key):
            shared.counters.misses += 1
            await self.stream.send([FAILED])

    async def _get_through_slots(self, key: ObjectKey) -> bool:
        shared = self._shared
        await self._written_through()
        needed: int | None = None
        for _ in range(_TRIES):
            lease = None if needed is None else await shared.slots.take(needed)
            loading = Loading(shared, lease)
            try:
                found = await shared.threads.call(shared.backend.get_bytes, key, loading)
                if found is not None and loading.lease is not None:
                    shared.counters.hits += 1
                    await self._send_payload(loading.reply, *loading.lease.views)
                    return True
            finally:
                if loading.lease is not None:
                    loading.lease.release()
            needed = loading.needed
            if needed is None:
                break
        return False

    async def _list(self) -> None:
        async with self._shared.one_list:
            lease = await self._list_into_slots()
        # Outside of the lock: a client that reads slowly keeps slots and nothing else.
        if lease is None:
            await self.stream.send([FAILED])
            return
        with lease:
            await self._send_payload(list_reply_of(lease.nbytes), *lease.views)

    async def _list_into_slots(self) -> Lease | None:
        text = await self._shared.threads.call(listed, self._shared.backend)
        if len(text) > self._shared.max_payload_bytes:
            self._complain("list", "a LIST of %d bytes is over --max-payload-bytes", len(text))
            return None
        lease = await self._shared.slots.take(len(text))
        at = 0
        for view in lease.views:
            view[:] = text[at : at + len(view)]
            at += len(view)
        return lease

    async def _send_payload(self, header: bytes, *views: memoryview) -> None:
        await self.stream.send([header, *views])
        self._shared.counters.payload_bytes_out += sum(map(len, views))

    # ------------------------------------------------------------ inside

    async def _written_through(self) -> None:
        """Returns when the PUT before, if it is in flight, is in all tiers."""
        storing, self._storing = self._storing, None
        if storing is not None:
            await storing.done()

    def _key(self) -> ObjectKey | None:
        """The key of a request without payload; None where it is malformed."""
        try:
            return _key_of(bytes(self._header))
        except FormatError as problem:
            self._complain("request", "a request fails: %s", problem)
            return None

    def _complain(self, kind: str, message: str, *args: object) -> None:
        self._shared.counters.malformed += 1
        self._shared.log.warning(kind, f"%s: {message}", self.peer, *args)

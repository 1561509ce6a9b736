"""One client: its requests, one after the other.

A PUT has no reply. One that cannot be stored (a malformed key, an unknown dtype, no memory) is
received, dropped and counted, and the stream stays in step. GET and EXIST answer FAIL to a
malformed request; LIST and HEALTH read nothing but the command. HEALTH succeeds if the last tier is
up. A location names one tier, memory or disk; a request for one that is not there is malformed. GET
and EXIST look only there, a PUT is written to every tier. The connection is closed when the end of
a request is unknown or too far away: after an unknown command (answered with FAIL) and after a PUT
whose length is negative or over the limit.

A request ends before the next one is read, with one exception: a PUT that the memory tier keeps
is written through in the background. The connection waits for it before it publishes its next PUT
and before a question that the other tiers answer. Its share of the budget is released when all
tiers have it.

A PUT is received into the memory of its future entry, and a GET is sent from the entry. A chunk in
memory is sent at once. Any other GET asks the tiers, waits for its share of the budget, and loads.
"""

from __future__ import annotations

import asyncio
import functools

from lmcache_redis.errors import FormatError
from lmcache_redis.gateway.chunks import (
    Places,
    Receiving,
    contains,
    listed,
    load,
    places_of,
    reply_to,
)
from lmcache_redis.gateway.shared import Shared
from lmcache_redis.gateway.stream import Gone, Stream
from lmcache_redis.gateway.wire import FAILED, SUCCEEDED, list_reply_of, metadata_of, object_key_of
from lmcache_redis.keys import ObjectKey
from lmcache_redis.lm_wire import ClientCommand, ClientMetaMessage

_HEADER_BYTES = ClientMetaMessage.packlength()


@functools.lru_cache(maxsize=4096)
def _wanted(header: bytes) -> tuple[ObjectKey, str | None]:
    """Key and location of a request. Parsing them would be the largest cost of a small GET."""
    message = ClientMetaMessage.deserialize(header)
    return object_key_of(message.key), message.location


class OutOfStep(Exception):
    """The beginning of the next request is unknown."""


class Connection:
    """Serves one stream. peer: the client's address, for log lines."""

    def __init__(self, stream: Stream, peer: str, shared: Shared) -> None:
        self.stream = stream
        self.peer = peer
        self._shared = shared
        self._header = memoryview(bytearray(_HEADER_BYTES))
        self._busy = False
        self._stopping = False
        self._written: asyncio.Future[None] | None = None  # the write-through of the previous PUT

    async def serve(self) -> None:
        """Serves requests until the client disconnects or breaks the protocol, or after `stop`."""
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
        await self._written_through()

    def stop(self) -> None:
        """Finishes the request in flight and serves no other."""
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
            wanted = self._wanted()
            if wanted is None or not await self._send_chunk(*wanted):
                counters.misses += 1
                await send([FAILED])
        elif command == ClientCommand.EXIST:
            counters.exists += 1
            wanted = self._wanted()
            await self._written_through()
            there = wanted is not None and await contains(self._shared.cache, *wanted)
            await send([SUCCEEDED if there else FAILED])
        elif command == ClientCommand.LIST:
            counters.lists += 1
            await self._written_through()
            await self._list()
        elif command == ClientCommand.HEALTH:
            counters.healths += 1
            await send([SUCCEEDED if self._shared.cache.is_up else FAILED])
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
            places_of(shared, message.location)
        except FormatError as problem:
            self._complain("put", "a PUT is dropped: %s", problem)
            await self.stream.receive_payload(length, Receiving(shared, None))
            return
        room = Receiving(shared, metadata)
        try:
            await self.stream.receive_payload(length, room)
            shared.counters.payload_bytes_in += length
            await self._written_through()
        except BaseException:
            room.abandon()
            raise
        self._written = room.publish(key)
        if length > shared.memory_bytes:
            await self._written_through()

    async def _send_chunk(self, key: ObjectKey, places: Places) -> bool:
        """Sends the reply to a GET. False: a miss, and nothing was sent."""
        shared = self._shared
        held, share = shared.cache.hold(key) if places.memory else None, None
        if held is None:
            await self._written_through()
            loaded = await load(shared, key, places)
            if loaded is None:
                return False
            held, share = loaded
        try:
            length = held.metadata.length
            if (reply := reply_to(held.metadata, shared.max_payload_bytes)) is None:
                return False
            if share is None:
                share = shared.lent.try_take(length) or await shared.budget.take(length)
            shared.counters.hits += 1
            await self._send_payload(reply, held.payload)
            return True
        finally:
            shared.cache.release(held)
            if share is not None:
                share.release()

    async def _list(self) -> None:
        shared = self._shared
        async with shared.one_list:
            text = memoryview(await listed(shared.cache))
            is_small = len(text) <= shared.max_payload_bytes
            share = await shared.budget.take(len(text) if is_small else 0)
        # Outside the lock: a slow client holds its share and nothing else.
        try:
            if is_small:
                return await self._send_payload(list_reply_of(len(text)), text)
            self._complain("list", "a LIST of %d bytes is over --max-payload-bytes", len(text))
            await self.stream.send([FAILED])
        finally:
            share.release()

    async def _send_payload(self, header: bytes, payload: memoryview) -> None:
        await self.stream.send([header, payload])
        self._shared.counters.payload_bytes_out += len(payload)

    async def _written_through(self) -> None:
        """Waits until every tier has answered for the previous PUT."""
        written, self._written = self._written, None
        if written is not None:
            await written

    def _wanted(self) -> tuple[ObjectKey, Places] | None:
        """What a request without payload asks for, and where; None if it is malformed."""
        try:
            key, location = _wanted(bytes(self._header))
            return key, places_of(self._shared, location)
        except FormatError as problem:
            self._complain("request", "a request fails: %s", problem)
            return None

    def _complain(self, kind: str, message: str, *args: object) -> None:
        self._shared.counters.malformed += 1
        self._shared.log.warning(kind, f"%s: {message}", self.peer, *args)

# SPDX-License-Identifier: Apache-2.0
"""One client: its requests, one after the other, and what they do with the cache.

A PUT has no reply. One that cannot be stored (a malformed key, an unknown dtype, no memory) is
received, dropped and counted, and the stream stays in step. GET and EXIST answer FAIL to a
malformed request; LIST and HEALTH read nothing but the command. HEALTH succeeds if the last tier is
up. A location is read and not used: GET and EXIST look in every tier. The connection is closed when
the end of a request is unknown or too far away: after an unknown command (answered with FAIL) and
after a PUT whose length is negative or over the limit.

A PUT is received into the memory of its future entry, once there is room for it. From then on
requests find it; the tiers are written in the background, and its room is given back when all have
answered. The connection's next PUT is received meanwhile, and waits for that before it is found.

A GET is sent from the entry, once there is room for the whole payload. A GET of a chunk that is not
in memory asks the tiers, waits for room, and loads. A LIST is complete or fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import RemoteMetadata
from lmcache_redis.compat.gateway.stream import ClientStream, Gone
from lmcache_redis.compat.gateway.wire import (
    FAILED,
    SUCCEEDED,
    key_text_of,
    list_reply_of,
    metadata_of,
    object_key_of,
    reply_of,
)
from lmcache_redis.compat.lm_wire import (
    REQUEST_BYTES,
    ClientCommand,
    command_and_length,
    unpacked_request,
)
from lmcache_redis.errors import FormatError
from lmcache_redis.objects.cache import HeldChunk, ObjectCache

_COUNTED = {int(each): f"requests_{each.name.lower()}" for each in ClientCommand}
_SILENCE_S = 10.0
# For one question to the tiers, or one load.
_TIER_TIMEOUT_S = 5.0
_LIST_TIMEOUT_S = 60.0
# Memory that a LIST may take for each key, text included.
_LISTED_KEY_BYTES = 1024
# Receives payloads that are not stored.
_DROPPED = memoryview(bytearray(256 << 10))

_Answer = TypeVar("_Answer")


class QuietLog:
    """Logs one warning of a kind per `_SILENCE_S` at most."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._until_s: dict[str, float] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """kind: one of a few constants, never text of a client."""
        now_s = time.monotonic()
        if now_s >= self._until_s.get(kind, 0.0):
            self._until_s[kind] = now_s + _SILENCE_S
            self._logger.warning(message, *args)


class Room:
    """A bound for payload bytes in flight: a semaphore of bytes, first come first served.

    The memory belongs to the cache. A payload takes all of its bytes before the first one moves,
    and nothing that holds bytes waits for more of them to give them back. The loop's thread only.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._turn = asyncio.Lock()
        self._given_back = asyncio.Event()

    async def take(self, nbytes: int) -> None:
        """Waits for `nbytes`, at most `size_bytes`. The caller gives them back."""
        async with self._turn:
            while self.used_bytes + nbytes > self.size_bytes:
                self._given_back.clear()
                await self._given_back.wait()
            self.used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self.used_bytes -= nbytes
        self._given_back.set()


@dataclass(frozen=True, slots=True)
class Shared:
    """What the connections of a gateway share. The loop's thread only.

    room: `--buffer-bytes`. one_list: held by a LIST while it collects keys.
    """

    cache: ObjectCache
    room: Room
    max_payload_bytes: int
    log: QuietLog
    counters: dict[str, int]
    one_list: asyncio.Lock = field(default_factory=asyncio.Lock)


@functools.lru_cache(maxsize=4096)
def _key_in(header: bytes) -> ObjectKey:
    """The key of a request. Parsing it would be the largest cost of a small GET."""
    _, text, _ = unpacked_request(header)
    return object_key_of(text)


class ClientConnection:
    """Serves one stream. peer: host and port, for log lines."""

    def __init__(self, stream: ClientStream, peer: str, shared: Shared) -> None:
        self.stream = stream
        self.peer = peer
        self._shared = shared
        self._cache = shared.cache
        self._room = shared.room
        self._header = memoryview(bytearray(REQUEST_BYTES))
        self._stopping = False
        self._written: asyncio.Future[None] | None = None  # the previous PUT, to all tiers

    async def serve(self) -> None:
        """Serves requests until the client disconnects or breaks the protocol, or after `stop`."""
        try:
            while not self._stopping:
                await self.stream.receive_header(self._header)
                await self._answer()
        except Gone:
            if self.stream.in_message:
                self._shared.counters["closed_connections_abandoned"] += 1
        except FormatError as problem:
            self._complain("closed", "%s; the connection is closed", problem)

    def stop(self) -> None:
        """Finishes the request in flight and serves no other."""
        self._stopping = True
        if not self.stream.in_message:
            self.stream.end_requests()

    # ------------------------------------------------------------ requests

    async def _answer(self) -> None:
        """Raises FormatError if the beginning of the next request is unknown."""
        command, length = command_and_length(self._header)
        counters, send = self._shared.counters, self.stream.send
        if command not in _COUNTED:
            await send(FAILED)
            raise FormatError(f"unknown command {command}")
        counters[_COUNTED[command]] += 1
        if command == ClientCommand.PUT:
            await self._put(length)
        elif command == ClientCommand.GET:
            key = self._wanted_key()
            if key is None or not await self._send_chunk(key):
                counters["gets_miss"] += 1
                await send(FAILED)
        elif command == ClientCommand.EXIST:
            key = self._wanted_key()
            there = key is not None and await _ask(partial(self._cache.contains, key, _deadline()))
            await send(SUCCEEDED if there else FAILED)
        elif command == ClientCommand.LIST:
            await self._list()
        else:
            await send(SUCCEEDED if self._cache.is_up else FAILED)

    async def _put(self, length: int) -> None:
        shared = self._shared
        if not 0 <= length <= shared.max_payload_bytes:
            raise FormatError(
                f"a PUT of {length} bytes, allowed are 0 to {shared.max_payload_bytes} "
                "(a quarter of --buffer-bytes)"
            )
        try:
            _, text, payload = unpacked_request(self._header)
            key, metadata = object_key_of(text), metadata_of(payload)
        except FormatError as problem:
            self._complain("put", "a PUT is dropped: %s", problem)
            return await self._receive_and_drop(length)
        await self._room.take(length)
        held: HeldChunk | None = None
        try:
            held = self._cache.reserve(key, metadata)
            if held is None:
                await self._receive_and_drop(length)
            else:
                await self.stream.receive(held.payload)
            shared.counters["payload_bytes_in"] += length
            if self._written is not None:
                await self._written
        except BaseException:
            if held is not None:
                self._cache.abandon(held)
            self._room.give_back(length)
            raise
        self._written = self._publish(key, held, length)

    async def _receive_and_drop(self, length: int) -> None:
        for at in range(0, length, len(_DROPPED)):
            await self.stream.receive(_DROPPED[: length - at])

    def _publish(self, key: ObjectKey, held: HeldChunk | None, length: int) -> asyncio.Future[None]:
        """Makes the chunk visible to GETs. The future is done when every tier has answered."""
        counters = self._shared.counters
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def written(stored: bool) -> None:
            self._room.give_back(length)
            if not ended.done():
                ended.set_result(None)
            if stored:
                counters["puts_stored"] += 1
                return
            counters["puts_not_stored"] += 1
            self._shared.log.warning(
                "not stored", "a chunk of %d bytes is not stored: no tier took it", length
            )

        if held is None:
            written(False)
        else:
            self._cache.publish(key, held, written)
        return ended

    async def _send_chunk(self, key: ObjectKey) -> bool:
        """Sends the reply to a GET. False: a miss, and nothing was sent.

        Room for a chunk that is not in memory is taken before a tier is read.
        """
        cache, room = self._cache, self._room
        held, room_bytes = cache.hold(key), 0
        if held is None:
            found = await _ask(partial(cache.find, key, _deadline()))
            if found is None or self._reply_to(found.metadata) is None:
                return False
            room_bytes = found.metadata.length
            await room.take(room_bytes)
            try:
                held = await _ask(partial(cache.load, key, found, _deadline()))
            finally:
                if held is None:
                    room.give_back(room_bytes)
            if held is None:
                return False
        try:
            if (reply := self._reply_to(held.metadata)) is None:
                return False
            if not room_bytes:
                await room.take(held.metadata.length)
                room_bytes = held.metadata.length
            self._shared.counters["gets_hit"] += 1
            await self._send_payload(reply, held.payload)
            return True
        finally:
            cache.release(held)
            room.give_back(room_bytes)

    def _reply_to(self, metadata: RemoteMetadata) -> bytes | None:
        """The header of a reply; None for a chunk that cannot be sent: a miss."""
        is_sent = metadata.length <= self._shared.max_payload_bytes
        return reply_of(metadata) if is_sent else None

    async def _list(self) -> None:
        shared = self._shared
        limit = max(1, shared.max_payload_bytes // _LISTED_KEY_BYTES)
        async with shared.one_list:
            text = await asyncio.to_thread(self._listed, self._cache.pooled_keys(), limit)
            if text is None:
                self._complain(
                    "list", "a LIST fails: a tier did not answer, or there are more than %d keys",
                    limit,
                )  # fmt: skip
                return await self.stream.send(FAILED)
            await self._room.take(len(text))
        # Outside the lock: a slow client holds its room and nothing else.
        try:
            await self._send_payload(list_reply_of(len(text)), memoryview(text))
        finally:
            self._room.give_back(len(text))

    def _listed(self, pooled: set[bytes], limit: int) -> bytes | None:
        """The key texts of all chunks that a GET can name, one a line; None if some are missing."""
        found = self._cache.listed(pooled, _deadline(_LIST_TIMEOUT_S), limit)
        texts = []
        for key in found.keys:
            with contextlib.suppress(FormatError):
                texts.append(key_text_of(key))
        return None if found.why_not else "\n".join(texts).encode("utf-8")

    async def _send_payload(self, header: bytes, payload: memoryview) -> None:
        await self.stream.send(header, payload)
        self._shared.counters["payload_bytes_out"] += len(payload)

    def _wanted_key(self) -> ObjectKey | None:
        """What a request without payload asks for; None if it is malformed."""
        try:
            return _key_in(bytes(self._header))
        except FormatError as problem:
            self._complain("request", "a request fails: %s", problem)
            return None

    def _complain(self, kind: str, message: str, *args: object) -> None:
        self._shared.counters["malformed_requests"] += 1
        self._shared.log.warning(kind, f"%s: {message}", self.peer, *args)


async def _ask(begin: Callable[[Callable[[_Answer], None]], None]) -> _Answer:
    """The result of an asynchronous call to the cache. begin: the call without its `done`.

    A task is cancelled only when the gateway stops: an answer then has no reader, and the cache
    is closed with what it has pinned.
    """
    answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

    def done(result: _Answer) -> None:
        if not answer.done():
            answer.set_result(result)

    begin(done)
    return await answer


def _deadline(timeout_s: float = _TIER_TIMEOUT_S) -> float:
    return time.monotonic() + timeout_s

# SPDX-License-Identifier: Apache-2.0
"""Chunks in flight: what their stripes are sent as, and what follows from the end of each.

**From Redis into slots.** Stripes are taken from one queue in chunk order, so that the stripes of a
chunk arrive over all connections at once. One GET is outstanding on each: a server that has to
queue copies of values is slower. A chunk is LOADED if all its stripes are good and of one store. A
reader deletes nothing: whoever computes the chunk that it missed stores it again.

**From slots into Redis.** Stripe 0 is stored last and makes the chunk visible. While the last
stripes of one chunk are acknowledged, those of the next are sent: waiting costs no round trip. One
thread sends all stripes of a chunk that go to one server.

A server that restarts loses what it acknowledged, and all its connections. So when a connection is
lost, nothing is sent until every reply in flight has arrived or is lost, too. Then the thread
replaces all its connections. Chunks of which a stripe was acknowledged on the old connections fail.
No connection is added while a chunk is half stored: the server could have been restarted in the
meantime.

A chunk that fails after something was sent leaves a partial write: stripes that no reader sees, or,
if it was to replace an older store, a mixture that readers refuse (TORN). It stays until the chunk
is stored again, or the server evicts it: writers delete nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.errors import (
    RedisClusterDown,
    RedisError,
    RedisProtocolError,
    RedisTimeout,
    RedisUnavailable,
    RedisWriteRefused,
)
from lmcache_redis.resp.bulk import Request, StripeFailure
from lmcache_redis.resp.codecs import Found, StripeIO, codec_of
from lmcache_redis.resp.health import DataServer, stop_for
from lmcache_redis.resp.jobs import ChunkJob, StripeTask
from lmcache_redis.resp.net.connection import Connection
from lmcache_redis.resp.net.wire import end_of_command, get_command, set_prefix, value_head
from lmcache_redis.tiers import (
    CallOutcome,
    ChunkIO,
    Operation,
    ReadDone,
    ReadOutcome,
    WriteDone,
    WriteOutcome,
)

# Stripes, each with what a mover says of it: its store id, or its header if it is sealed.
Results = Sequence[tuple[StripeTask, bytes]]
_UNANSWERED = (ReadOutcome.TIMED_OUT, ReadOutcome.UNAVAILABLE, ReadOutcome.CANCELLED)


class Read(ChunkJob[ReadOutcome]):
    """One chunk being read."""

    __slots__ = ("_store_id",)
    good = ReadOutcome.LOADED
    operation = Operation.LOAD

    def __init__(self, chunk: ChunkIO, done: ReadDone) -> None:
        super().__init__(chunk, done)
        self._store_id = b""

    @property
    def has_verdict(self) -> bool:
        return self.outcome not in _UNANSWERED

    def ended(self, index: int, found: Found) -> bool:
        """Under the lock: stripe `index` was in flight. False: no other stripe is due now."""
        self.in_flight -= 1
        if isinstance(found, bytes):
            self._store_id = self._store_id or found
            self.advance(None if found == self._store_id else ReadOutcome.TORN)
        elif found is ReadOutcome.INCOMPLETE and index == 0:
            # Of several servers another may say first that a later stripe is missing.
            self.advance(ReadOutcome.MISSING)
        else:
            self.advance(found)
        return False


class Write(ChunkJob[WriteOutcome]):
    """One chunk being written. nodes: the node of each stripe. stored: the bytes of each."""

    __slots__ = ("created_unix_ms", "store_id", "stored")
    good = WriteOutcome.STORED
    operation = Operation.STORE

    def __init__(
        self, chunk: ChunkIO, done: WriteDone, store_id: bytes, created_unix_ms: int
    ) -> None:
        super().__init__(chunk, done)
        self.store_id = store_id
        self.created_unix_ms = created_unix_ms
        self.stored = [0] * chunk.frame.stripe_count
        chunk.stored_bytes = 0

    def ended(self, index: int, found: bytes) -> bool:
        """Under the lock: a stripe is stored. Whether it is the turn of stripe 0."""
        self.in_flight -= 1
        if self.outcome is None:  # else the chunk may have been let go
            self.chunk.stored_bytes += self.stored[index]
        self.advance()
        return self.steps_left == 1 and self.outcome is None

    def put_first(self) -> None:
        """Queue stripe 0, which makes the chunk visible."""
        self.nodes[0].put_writes(((self, 0),), urgent=True)


class Transfers(ABC):
    """What the lanes of a thread move.

    codec: of the thread. may_send: False while what is in flight ends, and then all connections are
    replaced. may_widen: whether a connection may be added.
    """

    operation: ClassVar[Operation]
    may_send = True
    may_widen = True

    def __init__(self, server: DataServer) -> None:
        packs = server.options.packs and not self.is_load
        self.codec = codec_of(server.options.seal_keys, packs)
        self._server = server
        self._options = server.options

    @property
    def is_load(self) -> bool:
        return self.operation is Operation.LOAD

    @abstractmethod
    def pack(self, task: StripeTask) -> Request:
        """What a mover needs to move a stripe."""

    @property
    def refusal(self) -> WriteOutcome | None:
        """What transfers end with that have not begun; None: they may begin."""
        return None

    def unpacked(self, done: Results) -> Iterator[Sequence[tuple[StripeTask, Found]]]:
        """Stripes that a mover is done with: all at once, unless unpacking them takes time."""
        if done:
            yield done

    def judge(self, task: StripeTask, failure: StripeFailure) -> Found | None:
        """What was found for a stripe that has failed; None: the failure is not the value's."""
        return None

    @abstractmethod
    def ended(self, jobs: Collection[Any]) -> None:
        """Jobs of which a stripe has ended, and that were told so."""

    @abstractmethod
    def failed(
        self, error: RedisError, connection: Connection
    ) -> CallOutcome | WriteOutcome | None:
        """What the job of a stripe ends with, which was in flight; None: it is tried again."""

    def closed(self) -> tuple[Collection[Any], CallOutcome]:
        """All connections are. The jobs that end with them, and how."""
        return (), CallOutcome.UNAVAILABLE


class Gets(Transfers):
    """GETs."""

    operation = Operation.LOAD

    def pack(self, task: StripeTask) -> Request:
        job, index = task
        # A server that takes no writes takes no GETEX either.
        refreshes = self._options.ttl_refresh and job.chunk.is_asked_for
        ttl_s = self._options.ttl_s if refreshes and self._server.refusal is None else 0
        stripe = StripeIO.of(job.chunk, index)
        expected = value_head(HEADER_BYTES + stripe.payload.nbytes) + self.codec.expected(stripe)
        room = self.codec.room_for(stripe)
        return get_command(stripe.key, ttl_s), expected, stripe.payload, room

    def unpacked(self, done: Results) -> Iterator[Sequence[tuple[StripeTask, Found]]]:
        if not self.codec.is_sealed:
            yield from super().unpacked(done)
            return
        # The headers are the expected ones.
        for task, header in done:
            yield ((task, self.codec.unpack(StripeIO.of(task[0].chunk, task[1]), header)),)

    def judge(self, task: StripeTask, failure: StripeFailure) -> Found | None:
        return self.codec.judge(StripeIO.of(task[0].chunk, task[1]), failure)

    def ended(self, jobs: Collection[Read]) -> None:
        """Nothing follows."""

    def failed(
        self, error: RedisError, connection: Connection
    ) -> CallOutcome | WriteOutcome | None:
        if isinstance(error, RedisWriteRefused) and self._options.ttl_refresh:
            # It refuses the GETEX: a GET follows.
            self._server.refuses_writes(error)
            return None
        self._server.judge(error, connection, Operation.LOAD)
        return stop_for(error)


class Sets(Transfers):
    """SETs."""

    operation = Operation.STORE

    def __init__(self, server: DataServer) -> None:
        super().__init__(server)
        # Jobs of which the server has a stripe, until the first connection is lost; and why those
        # fail then. None: nothing was lost.
        self._acknowledged: set[Write] = set()
        self._loss: CallOutcome | None = None

    def pack(self, task: StripeTask) -> Request:
        job, index = task
        stripe = StripeIO.of(job.chunk, index)
        header, stored = self.codec.pack(stripe, job.store_id, job.created_unix_ms)
        job.stored[index] = stored.nbytes
        ttl_s = self._options.ttl_s
        prefix = set_prefix(stripe.key, HEADER_BYTES + stored.nbytes, ttl_s)
        return prefix, header, stored, end_of_command(ttl_s)

    @property
    def refusal(self) -> WriteOutcome | None:
        return self._server.refusal

    @property
    def may_send(self) -> bool:  # type: ignore[override]
        return self._loss is None

    @property
    def may_widen(self) -> bool:  # type: ignore[override]
        """No chunk is half stored."""
        return all(job.outcome is not None for job in self._acknowledged)

    def ended(self, jobs: Collection[Write]) -> None:
        self._acknowledged.update(jobs)
        self._acknowledged = {job for job in self._acknowledged if job.outcome is None}

    def failed(
        self, error: RedisError, connection: Connection
    ) -> CallOutcome | WriteOutcome | None:
        is_lost = isinstance(error, (RedisTimeout, RedisUnavailable, RedisProtocolError))
        # The server would answer any request so, unless its cluster is down.
        if not is_lost or isinstance(error, RedisClusterDown):
            return self._server.refuses_writes(error)
        # The connection is unusable, and the others are replaced with it.
        self._server.judge(error, connection, Operation.STORE)
        if self._loss is None:
            self._loss = stop_for(error)
        return stop_for(error)

    def closed(self) -> tuple[Collection[Write], CallOutcome]:
        """Also chunks that the connections acknowledged in part fail."""
        acknowledged, loss = self._acknowledged, self._loss
        self._acknowledged, self._loss = set(), None
        return acknowledged, loss or CallOutcome.UNAVAILABLE

"""Jobs that copy chunks between an engine's blocks and the host pool: what they have in common.

A job is split into device calls of one or more chunks. Every chunk of a job ends exactly once, even
after a bug of ours. The engine is answered when the last chunk has ended or, for a store, when the
last block has been read: an earlier answer would free blocks that are still in use. A retrieve
whose GPU is lost is never answered: the end of the agent's process frees the blocks.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.history import PartCounts
from lmcache_redis.agent.peers import ModelUse, Registration, Reply
from lmcache_redis.agent.sessions import Session
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.device.calls import ChunkCopy, CopyCall
from lmcache_redis.errors import DeviceError, GpuLost

logger = logging.getLogger(__name__)


def because(reasons: Collection[str]) -> str:
    """The end of a log line that says why less was done than asked for."""
    return f", because {', '.join(sorted(reasons))}" if reasons else ""


@dataclass(frozen=True)
class CopyRequest:
    """A worker's question, whose names and blocks were checked, and where it belongs."""

    session: Session
    registration: Registration
    question: m.Store | m.Retrieve
    reply: Reply


class CopyJob(ABC):
    """One store, retrieve or comparison of one worker, from the question to the answer."""

    def __init__(self, agent: Agent, request: CopyRequest) -> None:
        self._agent = agent
        self._cache = agent.cache
        self._session, self._registration = request.session, request.registration
        self._question, self._reply = request.question, request.reply
        self._hashes = request.question.hashes
        self._group = request.registration.groups[request.question.group]
        self._form = self._group.form
        self._pending: set[int] = set()  # chunks that have not ended
        self._reasons: set[str] = set()  # why chunks were not copied
        self._started_s = time.monotonic()

    @property
    def _use(self) -> ModelUse:
        return self._agent.peers.use_of(self._form.model_name)

    @property
    def _past(self) -> PartCounts:
        """What is kept of the request's parts."""
        return self._agent.sessions.history.parts_of(self._session.key)

    @property
    def _skip_blocks(self) -> int:
        """The first blocks of the question that are not written."""
        return 0

    @property
    def _queue(self) -> Callable[..., None]:
        """Where its copies wait for a thread."""
        return self._agent.copies.gather

    def _pinned(self) -> dict[int, Entry]:
        """The chunks in the host pool, each with the pin of the request's lookup or a new one."""
        found = {}
        for chunk, chunk_hash in enumerate(self._hashes):
            key, pool = self._form.key(chunk_hash), self._cache.pool
            part = (self._registration.worker_id, self._question.group)
            entry = self._session.take(chunk_hash, part)
            if entry is not None and entry.key != key:
                # Pinned for a layout that the worker no longer has, or never had.
                pool.unpin(entry)
                entry = None
            if entry is None:
                # On another node than the scheduler's, no lookup pins anything.
                entry = pool.get(key)
                if entry is None or entry.state is not EntryState.READY:
                    continue
                pool.pin(entry)
            found[chunk] = entry
        return found

    # How jobs differ. All but `_move` run on the loop thread.

    @abstractmethod
    def start(self) -> None:
        """Decides what becomes of each chunk, and calls `_begin`."""

    @abstractmethod
    def _take(self, chunk: int) -> Entry | None:
        """The chunk's entry, with a pin for the device call; None if it cannot be copied."""

    @abstractmethod
    def _move(self, chunks: Sequence[int], call: CopyCall) -> bool:
        """Makes a call for these chunks; returns whether it was in time. Raises ``DeviceError``."""

    @abstractmethod
    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        """The chunk's call has ended: releases the pin of `_take`."""

    @abstractmethod
    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        """The chunk has ended."""

    @abstractmethod
    def _finish(self) -> None:
        """Every chunk has ended."""

    def _begin(self, chunks: Sequence[int], later: Sequence[int] = ()) -> None:
        """Queues calls for the chunks; the job ends with the last of them and of ``later``."""
        self._session.busy += 1
        if not chunks and not later:
            self._close()
            return
        self._pending.update(chunks, later)
        # The threads of a device that hangs never take another copy from its queue.
        self._cache.owner.at(self._question.lease_ns / 1e9, self._agent.copies.drop_late)
        self._begin_calls(chunks)

    def _begin_calls(self, chunks: Sequence[int]) -> None:
        per_call = max(1, -(-self._registration.device.call_bytes // self._form.chunk_bytes))
        for first in range(0, len(chunks), per_call):
            self._begin_call(chunks[first : first + per_call])

    def _begin_call(self, chunks: Sequence[int]) -> None:
        entries: dict[int, Entry] = {}
        try:
            for chunk in chunks:
                if (entry := self._take(chunk)) is not None:
                    entries[chunk] = entry
            if entries:
                self._submit(entries)
        except Exception:
            logger.exception("a call to a device failed")  # our own bug: only this call fails
            self._copied(entries, CopyOutcome.FAILED)
        for chunk in chunks:
            if chunk not in entries:
                self._end(chunk, CopyOutcome.FAILED)

    def _submit(self, entries: Mapping[int, Entry]) -> None:
        question, per_chunk = self._question, self._group.blocks_per_part
        copies = []
        for chunk, entry in entries.items():
            first = chunk * per_chunk
            block_ids = question.block_ids[first : first + per_chunk]
            skip_blocks = min(max(0, self._skip_blocks - first), per_chunk)
            copies.append(ChunkCopy(block_ids, self._cache.views(self._form, entry), skip_blocks))
        call = CopyCall(
            copies,
            self._form.stripe_payload_bytes,
            question.group,
            question.after,
            question.lease_ns,
        )
        self._queue(
            self._registration.place,
            partial(self._copy, tuple(entries), call),
            lambda outcome: self._cache.owner.post(partial(self._copied, entries, outcome)),
            question.lease_ns,
        )

    def _copy(self, chunks: Sequence[int], call: CopyCall) -> CopyOutcome:
        # On a copy thread. After the lease expires the blocks may belong to another request.
        try:
            if self._move(chunks, call):
                return CopyOutcome.DONE
        except GpuLost:
            raise
        except DeviceError:
            if time.monotonic_ns() <= self._question.lease_ns:
                raise
        return CopyOutcome.CANCELLED

    def _copied(self, entries: Mapping[int, Entry], outcome: CopyOutcome) -> None:
        for chunk, entry in entries.items():
            try:
                self._release(chunk, entry, outcome)
            except Exception:
                logger.exception("a chunk was lost")  # our own bug: only this chunk
            self._end(chunk, outcome)

    def _end(self, chunk: int, outcome: CopyOutcome) -> None:
        self._pending.remove(chunk)
        try:
            self._ended(chunk, outcome)
        finally:
            if not self._pending:
                self._close()

    def _close(self) -> None:
        try:
            self._finish()
        finally:
            self._agent.sessions.finish(self._session)

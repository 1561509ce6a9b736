"""Retrieves: chunks are copied into blocks of an engine, and loaded before if they have to be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.copies import CopyOutcome
from lmcache_redis.agent.jobs import CopyJob, CopyRequest, because
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.cache.pool import Entry
from lmcache_redis.chunks.names import FULL_REACH
from lmcache_redis.device.calls import CopyCall

logger = logging.getLogger(__name__)

# A piece that is loaded while another is copied, and room for other requests.
_PIECES_IN_THE_POOL = 4


class RetrieveJob(CopyJob):
    """Scatters chunks into blocks.

    A lookup has pinned the chunks, but not those at the end of a prefix that is larger than the
    host pool, nor any at the agent of another node than the scheduler's. This job loads these in
    pieces, each while the one before it is copied. It waits for room before all lookups, and holds
    no chunk that it does not copy, so the room that it frees is the room that it gets. The first
    chunk that does not arrive in time ends the loads: it and those after it are failed chunks.
    """

    def __init__(self, agent: Agent, request: CopyRequest) -> None:
        super().__init__(agent, request)
        self._failed: list[int] = []
        self._load = request.session.load if self._hashes else None
        self._lost = False  # the GPU: it may still write to the blocks
        self._entries: dict[int, Entry] = {}  # pinned, until their copies take over the pins
        self._missing: list[int] = []  # chunks that are not in memory, and are not being loaded

    @property
    def _queue(self) -> Callable[..., None]:
        return self._agent.copies.scatter

    @property
    def _skipped_tokens(self) -> int:
        assert isinstance(self._question, m.Retrieve)
        return self._question.skip_first_n_tokens

    @property
    def _skip_blocks(self) -> int:
        layouts = self._registration.device.layouts
        return self._skipped_tokens // layouts[self._question.group].block_size_tokens

    def start(self) -> None:
        """Queues the copies of the chunks in memory, and begins to load the others."""
        if self._load is not None:
            self._load.begun(self._started_s)
        self._entries = self._pinned()
        self._missing = [each for each in range(len(self._hashes)) if each not in self._entries]
        self._begin([*self._entries], self._missing)
        self._load_piece()

    def _load_piece(self) -> None:
        """Loads the next missing chunks and queues their copies; then continues."""
        if not self._missing:
            return
        pool_units, chunk_units = self._cache.pool.capacity, self._cache.units(self._form)
        count = max(1, pool_units // _PIECES_IN_THE_POOL // chunk_units)
        piece, self._missing = self._missing[:count], self._missing[count:]

        def loaded(found: PrefixLookup) -> None:
            held = found.take()
            self._entries.update((piece[index], entry) for (index, _), entry in held.items())
            self._reasons |= found.end.reasons
            self._begin_calls(piece)
            if self._failed:
                self._give_up()
            else:
                self._load_piece()

        lease_s = self._question.lease_ns / 1e9
        deadline_s = min(lease_s, time.monotonic() + self._agent.config.lookup_deadline_s)
        form = replace(self._form, reach=FULL_REACH)
        hashes = [self._hashes[chunk] for chunk in piece]
        request = LookupRequest([form], hashes, deadline_s, urgent=True)
        lookup = PrefixLookup(self._cache, request, loaded)
        try:
            lookup.start()
        except Exception:
            logger.exception("chunks were not loaded")  # our own bug: only these fail
            lookup.cancel()
            self._missing += piece
            self._give_up()

    def _give_up(self) -> None:
        missing, self._missing = self._missing, []
        for chunk in missing:
            self._end(chunk, CopyOutcome.FAILED)

    def _take(self, chunk: int) -> Entry | None:
        return self._entries.pop(chunk, None)

    def _move(self, chunks: Sequence[int], call: CopyCall) -> bool:
        self._registration.device.scatter(call)
        return True

    def _release(self, chunk: int, entry: Entry, outcome: CopyOutcome) -> None:
        self._cache.pool.unpin(entry)

    def _ended(self, chunk: int, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            self._failed.append(chunk)
        self._lost = self._lost or outcome is CopyOutcome.LOST

    def _finish(self) -> None:
        copied = len(self._hashes) - len(self._failed)
        took_s = time.monotonic() - self._started_s
        self._cache.metrics.count("retrieves")
        self._cache.metrics.observe("retrieve_seconds", took_s)
        self._cache.metrics.count("retrieves_failed", bool(self._failed))
        self._cache.metrics.count("retrieved_chunks", copied)
        self._cache.metrics.count("retrieved_bytes", copied * self._form.chunk_bytes)
        self._use.retrieved_bytes += copied * self._form.chunk_bytes
        self._count_saving()
        self._note(copied, took_s)
        logger.debug(
            "request %s: %d of %d chunks copied into blocks in %.1f ms%s",
            self._question.request_id, copied, len(self._hashes), took_s * 1e3,
            because(self._reasons),
        )  # fmt: skip
        if not self._lost:
            self._reply(m.RetrieveResult(0, tuple(sorted(self._failed))))

    def _count_saving(self) -> None:
        """Counts what the load has saved, if this was its last retrieve."""
        session, load = self._session, self._load
        if load is None or session.ended:  # the request was aborted
            return
        worker_id, tokens = self._registration.worker_id, None
        if not self._failed and all(each in session.positions for each in self._hashes):
            chunks = [session.positions[each] for each in self._hashes]
            tokens = load.tokens_of(self._form.reach, chunks, self._skipped_tokens)
        saving = load.ended(worker_id, tokens, time.monotonic())
        if saving is not None:
            session.load = None
            self._use.add(saving)
            peers, metrics = self._agent.peers, self._cache.metrics
            metrics.count("saved_tokens", saving.tokens)
            metrics.count("saved_untimed_tokens", saving.untimed_tokens)
            metrics.raise_to("saved_prefill_seconds", peers.saved_prefill_s)

    def _note(self, copied: int, took_s: float) -> None:
        past = self._past
        past.loaded += copied
        past.failed += len(self._failed)
        past.load_s = max(past.load_s, took_s)
        past.add_reasons(self._reasons)

# SPDX-License-Identifier: Apache-2.0
"""Write-behind: chunks of the host pool are written to a tier in the background.

Each tier has one queue, bounded in bytes and by what the tier can write before the deadlines of
what is queued. A full queue drops what would be written last. What is dropped, or not stored, stays
in the host pool and is counted; the next store of the chunk enqueues it again. A chunk is pinned
from when it is enqueued until the tier is done.

When it is a chunk's turn (`schedule`), the tier is asked whether it has the chunk, since it evicts,
expires and loses chunks; if so, it is not written again. If the tier does not say, it is asked a
few times more, and then the chunk is dropped: a write could tear what others use. What the tier has
of some chunks is doubted (`doubted`): their next writes are made without asking.

Agents that compute one prompt at the same time store it at the same time, and would tear each
other's chunks. So whoever asks also claims the chunk, for as long as the write may take. A writer
without the claim asks again later. One whose claim has run out does not end its write: stripe 0,
which makes a chunk visible, is not sent.

Requests for a chunk in the host pool do not reach the tiers, which would evict or expire exactly
the hottest chunks. So after a lookup they are told to keep its chunks.

`write` replaces what the tier has under the key and `remove` removes it, both without asking first.
Writes and removals of one key run one after the other, in the order of the calls. A write whose
entry is discarded before it begins is skipped. A removal is one attempt; that of a wrong chunk is
tried again (`doubted`).
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

from lmcache_redis.cache.doubted import DoubtedChunks, WrongChunk
from lmcache_redis.cache.pacing import TransferRate
from lmcache_redis.cache.pool import Entry, EntryState, HostPool
from lmcache_redis.cache.schedule import PendingWrite, WriteScheduler
from lmcache_redis.cache.threads import Action, OneTimer, Owner, posting
from lmcache_redis.metrics import Metrics
from lmcache_redis.tiers import (
    Backing,
    CallOutcome,
    Done,
    ExistsResult,
    RemoveResult,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

# For a chunk to wait in a queue and to be written, in total.
WRITE_DEADLINE_S = 30.0
# That a tier is told to keep at a time.
_BATCH_CHUNKS = 256
# How often a tier is asked whether it has a chunk, if it does not say, and the pause after the
# first time. It doubles: in all as long as a slot takes to move, or a replica to take over.
_MOST_QUESTIONS = 4
_ASK_AGAIN_S = 0.5
# While others have claimed it: as long as it may wait.
_MOST_PAUSE_S = 2.0
# Of the time of a claim.
_CLAIM_USED = 0.75


# Of what is under a key: a write, or what begins a removal.
_Change = PendingWrite | Action


class WriteBehind:
    """The queue to tier number ``index``. loads: those from it, which its writes give way to."""

    def __init__(
        self,
        backing: Backing,
        index: int,
        owner: Owner,
        pool: HostPool,
        metrics: Metrics,
        loads: TransferRate,
    ) -> None:
        self.queued_bytes = 0
        self._backing = backing
        self._index = index
        self._owner = owner
        self._pool = pool
        self._metrics = metrics
        self._writes: dict[Entry, PendingWrite] = {}  # that have not ended
        self._changes: dict[bytes, list[_Change]] = {}  # of a key; the first is with the tier
        self.schedule = WriteScheduler(loads, backing.write_limit_bytes)
        self._timer = OneTimer(owner, self.begin_ready)
        self.doubted = DoubtedChunks(backing.tier, owner, metrics, self._remove_wrong)
        self._warned_of: WriteOutcome | None = None

    def __len__(self) -> int:
        """Writes and removals that have not ended."""
        changes = chain.from_iterable(self._changes.values())
        return len(self._writes) + sum(not isinstance(each, PendingWrite) for each in changes)

    def distrust(self, key: bytes) -> None:
        """What the tier has under the key is doubtful: the next write of it does not ask."""
        self.doubted.distrust(key)

    def enqueue(self, entry: Entry, delay_s: float = 0.0) -> None:
        """Pins a READY entry to be written, unless the index has it or the queue is full."""
        if entry in self._writes:
            return
        if not self._is_doubted(entry.key) and self._backing.tier.lookup(entry.key):
            return
        if self._admits(entry) and self._has_room(entry.form.chunk_bytes, entry.position):
            write = self._add(entry, WRITE_DEADLINE_S)
            write.due_s = self._owner.now() + delay_s
            self.schedule.add(write)
            self._timer.fire_by(write.due_s)

    def _admits(self, entry: Entry) -> bool:
        """Whether the chunk may be written; if not, it is counted, once."""
        account = self._backing.account
        if account is None:
            return True
        is_admitted = account.admits(entry.tenant)
        if not is_admitted and not entry.is_over_limit:
            self._metrics.count("drop_quota")
            account.dropped(entry.tenant)
        entry.is_over_limit = not is_admitted
        return is_admitted

    def keep(self, entries: Sequence[Entry]) -> None:
        """Tells the tier to keep what the host pool serves, and enqueues what it lacks."""
        some, others = entries[:_BATCH_CHUNKS], entries[_BATCH_CHUNKS:]
        if some and self._backing.tier.state.up:
            self._backing.tier.refresh(
                [(entry.key, entry.form.stripe_count) for entry in some],
                self._owner.now() + self._backing.ask_timeout_s,
                posting(self._owner, partial(self._kept, some, others)),
            )

    def _kept(self, some: Sequence[Entry], others: Sequence[Entry], result: ExistsResult) -> None:
        if result.outcome is CallOutcome.DONE:
            for entry, found in zip(some, result.present, strict=True):
                if found is None:
                    continue
                present = found and not self.is_removing(entry.key)
                self._pool.seen(self._index, (entry.key,), there=present)
                is_lacking = not present and entry.state is EntryState.READY
                if is_lacking and not entry.is_held_back:
                    self.enqueue(entry)
        self.keep(others)

    def write(self, entry: Entry, timeout_s: float, done: Callable[[WriteOutcome], None]) -> None:
        """Writes a READY entry at once, in place of what the tier has under its key.

        done: called once, while the entry is still pinned. UNAVAILABLE: also if it is dropped.
        """
        if self._has_room(entry.form.chunk_bytes):
            write = self._add(entry, timeout_s)
            write.done = done
            self._write([write])
        else:
            done(WriteOutcome.UNAVAILABLE)

    def remove(
        self,
        key: bytes,
        deadline_s: float,
        done: Done[RemoveResult],
        stripe_count: int = 0,
        newest_unix_ms: int | None = None,
    ) -> None:
        """Removes a chunk from the tier after earlier writes of it; cancels one in flight.

        stripe_count, newest_unix_ms: see `Tier.remove`.
        """
        first = self._changes.get(key, [None])[0]
        if isinstance(first, PendingWrite):
            self._backing.tier.cancel(first)
        self._pool.seen(self._index, (key,), there=False)

        def begin() -> None:
            end = partial(self._removed, key, done)
            told = posting(self._owner, end)
            try:
                self._backing.tier.remove(key, deadline_s, told, stripe_count, newest_unix_ms)
            except Exception:
                end(RemoveResult(CallOutcome.UNAVAILABLE))
                raise  # our own bug; the owner logs it

        if self._is_first(key, begin):
            begin()

    def is_removing(self, key: bytes) -> bool:
        """Whether it is being removed, or to be because it is wrong: the tier may still find it."""
        changes = self._changes.get(key, ())
        is_begun = any(not isinstance(each, PendingWrite) for each in changes)
        return is_begun or key in self.doubted.wrong

    def _is_doubted(self, key: bytes) -> bool:
        return key in self.doubted or self.is_removing(key)

    def _remove_wrong(self, chunk: WrongChunk) -> bool:
        if chunk.has_failed and chunk.key in self._changes:
            return False
        newest_unix_ms = chunk.newest_unix_ms if chunk.has_failed else None
        deadline_s, ended = self._owner.now() + WRITE_DEADLINE_S, partial(self.doubted.ended, chunk)
        self.remove(chunk.key, deadline_s, ended, chunk.stripe_count, newest_unix_ms)
        return True

    def cancel(self, entry: Entry) -> None:
        """Cancels the write of a discarded entry."""
        write = self._writes.get(entry)
        if write is not None:
            if self.schedule.remove(write):
                self._end(write, WriteOutcome.CANCELLED)
            else:
                self._backing.tier.cancel(write)

    def after_writes(self, entries: Sequence[Entry], action: Action) -> None:
        """Runs ``action`` once no discarded entry is being written any longer: now, or later."""
        left = {each for each in entries if each in self._writes}

        def ended(
            entry: Entry, done: Callable[[WriteOutcome], None], outcome: WriteOutcome
        ) -> None:
            left.remove(entry)
            if not left:
                self._owner.post(action)
            done(outcome)

        for each in left:
            write = self._writes[each]
            write.done = partial(ended, each, write.done)
        if not left:
            action()

    def begin_all(self) -> None:
        """Starts all writes now, because the owner is stopping."""
        self.schedule.is_stopping = True
        self.begin_ready()
        self.doubted.try_all()

    def begin_ready(self) -> None:
        """Begins the writes whose turn it is."""
        now_s = self._owner.now()
        for write in self.schedule.expired(now_s):
            self._drop(write)
        writes = []
        for write in self.schedule.begin(now_s):
            # Once more: what was written since it was enqueued may have used up a limit.
            if self._admits(write.entry):
                writes.append(write)
            else:
                self._release(write)
        self._timer.fire_by(self.schedule.next_s(now_s))
        self.schedule.loads.on_idle = self.begin_ready if self.schedule else None
        self._ask([each for each in writes if not self._is_doubted(each.key)])
        self._write([each for each in writes if self._is_doubted(each.key)])

    def _ask(self, writes: Sequence[PendingWrite]) -> None:
        """Asks the tier which of the chunks it has; writes those that it lacks."""
        if not writes:
            return
        tier = self._backing.tier
        with self._ended_on_error(writes):
            if tier.lookup(writes[0].key) is not None:
                present = [bool(tier.lookup(each.key)) for each in writes]
                self._asked(writes, math.inf, ExistsResult(CallOutcome.DONE, present))
                return
            # From when the question is answered; a command may reach the server late.
            claim_s, ask_s = self.schedule.claim_s(), self._backing.ask_timeout_s
            until_s = self._owner.now() + ask_s + claim_s * _CLAIM_USED
            tier.refresh(
                [(each.key, len(each.slots)) for each in writes],
                self._owner.now() + ask_s,
                posting(self._owner, partial(self._asked, writes, until_s)),
                ask_s + claim_s,
            )

    def _asked(
        self, writes: Sequence[PendingWrite], claimed_until_s: float, result: ExistsResult
    ) -> None:
        now_s = self._owner.now()
        claims = self.schedule.claims
        ours = [each.key for each, is_ours in zip(writes, result.claimed, strict=False) if is_ours]
        claims.add(ours, claimed_until_s, now_s)
        lacking: list[PendingWrite] = []
        not_known: list[PendingWrite] = []
        of_others: list[PendingWrite] = []
        every = result.present or [None] * len(writes), result.claimed or [True] * len(writes)
        for write, present, is_claimed in zip(writes, *every, strict=True):
            is_discarded = write.entry.state is EntryState.DISCARDED
            is_doubted = self._is_doubted(write.key)
            if is_discarded or result.outcome is CallOutcome.CANCELLED:
                self._end(write, WriteOutcome.CANCELLED)
            elif not is_doubted and (present is None or (is_claimed is None and not present)):
                not_known.append(write)
            elif present and not is_doubted:
                self._pool.seen(self._index, (write.entry.key,))
                self._give_back_claim(write.key)
                self._release(write)
                if self._backing.kind.is_shared:
                    self._metrics.count("skipped_chunks")
            else:
                if present is not None:
                    self._pool.seen(self._index, (write.key,), there=False)
                until_s = claims.until_s(write.key)
                if until_s > now_s:
                    write.deadline = min(write.deadline, until_s)
                may_write = until_s > now_s or is_doubted or not result.claimed
                (lacking if may_write else of_others).append(write)
        self._ask_later(not_known)
        self._ask_later(of_others, sys.maxsize)
        self._write(lacking)

    def _ask_later(self, writes: Sequence[PendingWrite], most: int = _MOST_QUESTIONS) -> None:
        """The tier does not say whether it has the chunks, or others are writing them: a write may
        damage what others use.
        """
        now_s, again = self._owner.now(), []
        is_up = self._backing.tier.state.up
        may_ask = is_up and not self.schedule.is_stopping
        for write in writes:
            pause_s = min(_ASK_AGAIN_S * 2**write.questions, _MOST_PAUSE_S)
            write.due_s = now_s + pause_s * random.uniform(0.5, 1.0)
            write.questions += 1
            if may_ask and write.questions < most and write.due_s < write.deadline:
                again.append(write)
            else:
                self._end(write, WriteOutcome.NOT_KNOWN if is_up else WriteOutcome.UNAVAILABLE)
        if again:
            self.schedule.add_again(again)
            self._timer.fire_by(min(write.due_s for write in again))

    def _write(self, writes: Sequence[PendingWrite]) -> None:
        """Begins the writes whose keys have no other change now, and the others after it."""
        now = [each for each in writes if self._is_first(each.key, each)]
        if now:
            self._begin_writes(now)

    def _begin_writes(self, writes: Sequence[PendingWrite]) -> None:
        now_s = self._owner.now()
        for each in writes:
            self.schedule.given(each.nbytes, now_s)
        with self._ended_on_error(writes):
            self._backing.tier.store_all(writes, posting(self._owner, self._written))

    def _removed(self, key: bytes, done: Done[RemoveResult], result: RemoveResult) -> None:
        self._begin_next(key)
        if result.outcome is CallOutcome.DONE:
            self._pool.seen(self._index, (key,), there=False)
        done(result)

    # ----------------------------------------------------- the changes of a key

    def _is_first(self, key: bytes, change: _Change) -> bool:
        """Enters a change; whether it begins now. If not, `_begin_next` begins it."""
        changes = self._changes.setdefault(key, [])
        changes.append(change)
        return len(changes) == 1

    def _begin_next(self, key: bytes) -> None:
        """The first change of the key has ended."""
        changes = self._changes[key]
        del changes[0]
        if changes:
            # Posted: if many wait, calling each from here would nest them.
            self._owner.post(partial(self._begin_waiting, key, changes[0]))
        else:
            del self._changes[key]

    def _begin_waiting(self, key: bytes, change: _Change) -> None:
        if not isinstance(change, PendingWrite):
            change()
        elif change.entry.state is EntryState.DISCARDED:
            self._begin_next(key)
            self._end(change, WriteOutcome.CANCELLED)
        else:
            self._begin_writes((change,))

    # ------------------------------------------------------------ ends of writes

    @contextmanager
    def _ended_on_error(self, writes: Sequence[PendingWrite]) -> Iterator[None]:
        """After a bug of ours, which the owner logs, releases pins and queue bytes of the jobs."""
        try:
            yield
        except Exception:
            for each in writes:
                if self._writes.get(each.entry) is each:
                    self._written(each, WriteOutcome.UNAVAILABLE)
            raise

    def _written(self, write: PendingWrite, outcome: WriteOutcome) -> None:
        if self._writes.get(write.entry) is not write:
            return  # it was ended by a bug of ours
        if self._changes.get(write.key, [None])[0] is write:
            is_stored = outcome is WriteOutcome.STORED
            self.schedule.answered(write.nbytes, self._owner.now(), is_stored=is_stored)
            self._begin_next(write.key)
        self._end(write, outcome)

    def _drop(self, write: PendingWrite) -> None:
        """The queue is too long for a write that has not begun."""
        self._metrics.count(self._backing.counters.queue_full)
        self._release(write)

    def _end(self, write: PendingWrite, outcome: WriteOutcome) -> None:
        """A write has an outcome: counts it, and releases what it held."""
        entry, counters = write.entry, self._backing.counters
        if outcome is WriteOutcome.STORED:
            self.doubted.stored(entry.key)
            self._give_back_claim(entry.key)
            self._pool.seen(self._index, (entry.key,))
            self._metrics.count(counters.stored_chunks)
            stored_bytes = write.stored_bytes or write.nbytes
            self._metrics.count(counters.stored_bytes, stored_bytes)
            self._metrics.count(counters.plain_bytes, write.nbytes)
            if self._backing.account is not None:
                self._backing.account.stored(entry.tenant, stored_bytes)
            self._warned_of = None
        elif entry.state is not EntryState.DISCARDED:
            self._metrics.count(counters.drops[outcome])
            if self._backing.kind.is_shared and self._warned_of is not outcome:
                self._warned_of = outcome
                logger.warning(
                    "chunks are not written to %s: %s (they are counted, and logged once)",
                    self._backing.tier.name,
                    outcome.value,
                )
        try:
            write.done(outcome)
        finally:
            self._release(write)

    def _give_back_claim(self, key: bytes) -> None:
        """Soon, with others that end now."""
        claims = self.schedule.claims
        if claims.end(key, self._owner.now()):
            self._owner.post(lambda: self._backing.tier.unclaim(claims.take_ended()))

    # ---------------------------------------------------------------- the queue

    def _has_room(self, nbytes: int, position: float = math.inf) -> bool:
        """Whether there is room, also in place of what is queued behind the ``position``.

        There is always room for one, unless the user wants none at all.
        """
        counters = self._backing.counters
        if not self._backing.tier.state.up:
            self._metrics.count(counters.drops[WriteOutcome.UNAVAILABLE])
            return False
        if not self.queued_bytes and self.schedule.limit_bytes:
            return True
        lacking = self.queued_bytes + nbytes - self.schedule.most_bytes(WRITE_DEADLINE_S)
        dropped = []
        for write in self.schedule.after(position):
            if lacking <= 0:
                break
            dropped.append(write)
            lacking -= write.nbytes
        if lacking > 0:
            self._metrics.count(counters.queue_full)
            return False
        for write in dropped:
            self.schedule.remove(write)
            self._drop(write)
        return True

    def _add(self, entry: Entry, timeout_s: float) -> PendingWrite:
        form, memory = entry.form, self._pool.memory
        frame = form.frame(entry.chunk_hash)
        views = memory.views(entry.block, form.stripe_sizes)
        write = PendingWrite(entry.key, frame, views, self._owner.now() + timeout_s, entry=entry)
        write.shares = form.shares
        if (account := self._backing.account) is not None:
            write.tenant = account.digest(entry.tenant)
        self._pool.pin(entry)
        self._writes[entry] = write
        self.queued_bytes += write.nbytes
        return write

    def _release(self, write: PendingWrite) -> None:
        """Undoes `_add`."""
        del self._writes[write.entry]
        self.queued_bytes -= write.nbytes
        self._pool.unpin(write.entry)
        self.schedule.ended(write)
        self._timer.fire_in(0.0)

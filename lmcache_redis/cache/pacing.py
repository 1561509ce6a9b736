# SPDX-License-Identifier: Apache-2.0
"""The decisions about lookups, without I/O.

What is worth loading (`WorthLoading`). A tier (`TransferRate`) and an engine (`Computing`) are two
queues. A request whose prefix is loaded has its first token when both are through with what they
had before, and the rest of the prompt is computed. What it had before, the engine itself says. For
an engine that has not measured itself everything is loaded.

Which parts a prefix needs (`PrefixNeeds`). A lookup has rows, one for each rank and group of
layers; a chunk has one part in each row. How far back an engine still reads a row's tokens after a
prefix is the row's `Reach`:

    chunk                       0   1   2   3   4   5   prefix of 6 chunks
    row 0: all                  n   n   n   n   n   n   n: the part is needed
    row 1: window, 1.5 chunks   .   .   .   .   n   n
    row 2: state                .   .   .   .   .   n

Chunks count from the first one of the lookup, which is chunk ``first_chunk`` of the prompt. The
engine has those before it: they are never needed. Windows count from the prompt's beginning.

Which lookup loads next, if the pool has no room for all (`WaitQueue`).

Times are of the owner's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from lmcache_redis.cache.pool import HostPool
from lmcache_redis.cache.threads import Action, Owner
from lmcache_redis.chunks.names import Reach

# Half-life of a sample: 0.15 s of transfers, or 2 s of idle time. After a pause, history weighs at
# most one half-life, so one chunk shows that the tier has become faster.
_HALF_LIFE_S = 0.15
_IDLE_HALF_LIFE_S = 2.0
_LEAST_WEIGHT_S = 0.001
# The most of a load's time that is taken for latency: a question may have been answered late.
_MOST_LATENCY = 0.75
# A network has saved up some of the first load after a pause: alone it shows too high a rate.
_ALONE = 1.25
# A rate that is worth no load is measured again.
_OLD_S = 10.0
# Of a prompt's computing time: for an answer or a load that shows the rate of a tier.
_SHARE = 1 / 24

Part = tuple[int, int]  # chunk, row


class TransferRate:
    """How fast a tier delivers, from its loads and from how soon it answers questions.

    Attributes:
        in_flight_bytes: of the loads that have begun and not ended.
        latency_s: from a question to its answer, at its shortest of late.
        is_slow: computing was faster when they were last compared.
        on_idle: called when none is in flight any more.
    """

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self.latency_s = 0.0
        self.is_slow = False
        self.on_idle: Action | None = None
        self._bytes = 0.0
        self._busy_s = 0.0
        self._since_s = 0.0  # the last arrival; without loads in flight, the end of the last one
        self._unpaid_s = 0.0  # of the latency: the first arrival after a pause has it too
        self._is_alone = True  # the rate is of loads after pauses, none of which followed another
        self._is_first = True  # none has arrived since the pause
        self._waiting: list[Action] = []

    def answered(self, took_s: float) -> None:
        """The tier has answered a question that moves few bytes."""
        rises = self.latency_s and took_s > self.latency_s
        self.latency_s = self.latency_s * 0.95 + took_s * 0.05 if rises else took_s

    def begun(self, nbytes: int, now_s: float) -> None:
        if not self.in_flight_bytes:
            kept = 0.5 ** ((now_s - self._since_s) / _IDLE_HALF_LIFE_S)
            weight_s = max(kept * _HALF_LIFE_S, _LEAST_WEIGHT_S)
            if self._busy_s > weight_s:
                self._keep(weight_s / self._busy_s)
            self._since_s, self._unpaid_s = now_s, self.latency_s
            self._is_alone = self._is_alone or kept < 0.5
            self._is_first = True
        self.in_flight_bytes += nbytes

    def ended(self, nbytes: int, now_s: float, *, arrived: bool) -> None:
        """A load has ended. What did not arrive says nothing of the rate."""
        self.in_flight_bytes -= nbytes
        if arrived:
            busy_s = now_s - self._since_s
            busy_s = max(1e-6, busy_s - min(self._unpaid_s, _MOST_LATENCY * busy_s))
            self._unpaid_s = 0.0
            self._is_alone, self._is_first = self._is_alone and self._is_first, False
            self._keep(0.5 ** (busy_s / _HALF_LIFE_S))
            self._bytes += nbytes
            self._busy_s += busy_s
        self._since_s = now_s
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for action in waiting:
                action()
        if not self.in_flight_bytes and self.on_idle is not None:
            self.on_idle()  # writes give way to loads

    def when_one_ends(self, action: Action) -> None:
        """Calls ``action``, once, when a load in flight has ended."""
        self._waiting.append(action)

    def gave_up(self, now_s: float) -> None:
        """A lookup does not wait any longer for its loads, or for its answer.

        Loads in flight count as if all had arrived in twice the time since the last arrival.
        Without any, nothing is known any more.
        """
        self.is_slow = True
        stalled_s = self.stalled_s(now_s)
        is_lower = self.in_flight_bytes * self._busy_s < 2 * stalled_s * self._bytes
        if not self.in_flight_bytes:
            self._keep(0.0)
        elif stalled_s and (is_lower or not self._busy_s):
            self._bytes, self._busy_s = self.in_flight_bytes, 2 * stalled_s

    def per_second(self) -> float:
        """Bytes per second; 0.0 if that is not known."""
        return self._bytes / self._busy_s if self._busy_s else 0.0

    def seconds(self, nbytes: int, now_s: float) -> float:
        """The expected time to load `nbytes`. Some of them may be in flight.

        If nothing has arrived for longer than all in flight should take: at least as long again.
        """
        rate, stalled_s = self.per_second(), self.stalled_s(now_s)
        if not rate:
            return math.inf
        load_s = self.latency_s + nbytes / rate
        if stalled_s > self.latency_s + self.in_flight_bytes / rate:
            load_s = max(load_s, stalled_s)
        return load_s

    def expected_s(self, nbytes: int, now_s: float) -> float:
        """As `seconds`, for loads that are to begin: what one load alone has shown is doubted."""
        return self.seconds(nbytes, now_s) * (_ALONE if self._is_alone else 1.0)

    def stalled_s(self, now_s: float) -> float:
        """For how long nothing has arrived although loads are in flight."""
        return now_s - self._since_s if self.in_flight_bytes else 0.0

    def may_probe(self, now_s: float) -> bool:
        """Whether to probe: the rate is unknown or stale, and no lookup waits."""
        is_old = not self._busy_s or now_s >= self._since_s + _OLD_S
        return is_old and not self.in_flight_bytes

    def _keep(self, share: float) -> None:
        """Older transfers count less; the rate is the same."""
        self._bytes *= share
        self._busy_s *= share


class Computing:
    """What an engine has to compute. token_s: seconds per prompt token; 0.0: not measured yet.

    With each question the engine says what it has begun and how much of it is left (`told`). To
    that come the requests whose lookups were answered and which it has not begun since.
    """

    def __init__(self) -> None:
        self.token_s = 0.0
        self._free_s = 0.0
        self._answered: dict[Hashable, int] = {}  # tokens to compute of each request not begun

    def told(self, token_s: float, busy_s: float, begun: Iterable[Hashable], now_s: float) -> None:
        """What the engine knows of itself. It needs ``busy_s`` for all that it has begun.

        begun: requests that it had not begun when it was told last.
        """
        self.token_s = token_s
        for request in begun:
            self._answered.pop(request, None)
        self._free_s = now_s + busy_s + sum(self._answered.values()) * token_s

    def answered(self, request: Hashable, tokens: int, now_s: float) -> None:
        """A lookup was answered: the engine computes ``tokens`` of its prompt."""
        self.ended(request)
        self._answered[request] = tokens
        self._free_s = max(self._free_s, now_s) + tokens * self.token_s

    def ended(self, request: Hashable) -> None:
        """A request has ended. It may not have begun."""
        self._free_s -= self._answered.pop(request, 0) * self.token_s

    def free_in_s(self, now_s: float) -> float:
        """When it could begin to compute another prompt."""
        return max(0.0, self._free_s - now_s)


class Bet(NamedTuple):
    """What a lookup expected of a prefix of ``chunks``, in seconds until it is in the blocks.

    load_s: all of it is loaded; infinite if the rate of a tier is not known. compute_s: all of it
    is computed. chosen_s: the first chunks are loaded, the others computed, as it was decided.
    """

    chunks: int
    load_s: float
    compute_s: float
    chosen_s: float


class WorthLoading:
    """How much of one lookup's prefix is worth loading: what gives the earliest first token.

    The rate of a tier is known before a prefix is loaded from it: if it is not, one chunk is loaded
    first (a probe). What only tells the rate may take a small share of the prompt's computing time;
    if it takes longer, the engine computes, and the next lookup has the rate.

    Attributes:
        measured_until_s: how long a probe is waited for; None: none was needed yet.
        expected_s: what loading takes, as it was decided last. bet: see `Bet`.
    """

    def __init__(self, computing: Computing, chunks: int, chunk_tokens: int) -> None:
        self._chunk_s = computing.token_s * chunk_tokens
        self.measured_until_s: float | None = None
        self.expected_s = 0.0
        self.bet: Bet | None = None
        self._computing = computing
        self._chunks = chunks

    def compute_s(self, chunks: float, now_s: float) -> float:
        """The seconds until the engine could have computed ``chunks`` of the prompt."""
        return self._computing.free_in_s(now_s) + chunks * self._chunk_s

    def is_quick(self, rate: TransferRate) -> bool:
        """Whether a question to a tier costs next to nothing, and is asked before any decision."""
        return not rate.is_slow and rate.latency_s <= self._chunks * self._chunk_s * _SHARE

    def patience_s(self, rate: TransferRate, now_s: float) -> float:
        """How long a question to a tier is worth waiting for."""
        share = 1.0 if rate.per_second() and not rate.is_slow else _SHARE
        return self.compute_s(self._chunks * share, now_s)

    def waits_for(self, rate: TransferRate, now_s: float) -> bool:
        """Whether to wait for the load in flight that shows a rate."""
        if self.measured_until_s is None:
            patience_s = self.patience_s(rate, now_s)
            is_new = rate.stalled_s(now_s) <= patience_s
            self.measured_until_s = now_s + patience_s * is_new
        return rate.in_flight_bytes > 0 and now_s < self.measured_until_s

    def prefix(self, loads: Iterable[tuple[int, float]], now_s: float) -> int:
        """The length worth loading. loads: see `prefix_worth_loading`."""
        free_in_s, times = self._computing.free_in_s(now_s), dict(loads)
        length = prefix_worth_loading(times.items(), self._chunks, self._chunk_s, free_in_s)
        self.expected_s = times[length]
        whole = max(times)
        compute_s = free_in_s + whole * self._chunk_s
        chosen_s = max(self.expected_s, free_in_s) + (whole - length) * self._chunk_s
        self.bet = Bet(whole, max(times[whole], free_in_s), compute_s, chosen_s)
        return length


def prefix_worth_loading(
    loads: Iterable[tuple[int, float]], chunks: int, chunk_s: float, free_in_s: float
) -> int:
    """The prefix with which the first token is expected soonest; the longest one if several are.

    loads: prefixes, each with the seconds until it is loaded. chunks: of the prompt. chunk_s: the
    seconds to compute one. free_in_s: when the engine can begin.
    """
    best, best_s = 0, math.inf
    for length, load_s in loads:
        first_token_s = max(load_s, free_in_s) + (chunks - length) * chunk_s
        if (first_token_s, -length) < (best_s, -best):
            best, best_s = length, first_token_s
    return best


class PrefixNeeds:
    """What the prefixes of one lookup need. reaches: of each row. Raises ValueError."""

    def __init__(self, reaches: Sequence[Reach], first_chunk: int, chunk_tokens: int):
        # Rows that need only some of a prefix's parts.
        self.bounded = [row for row, reach in enumerate(reaches) if reach.kind != "all"]
        if first_chunk < 0 or chunk_tokens < bool(self.bounded):
            raise ValueError(f"the first chunk cannot be {first_chunk}, of {chunk_tokens} tokens")
        self._reaches = reaches
        self._first_chunk = first_chunk
        self._chunk_tokens = chunk_tokens

    def first(self, row: int, length: int) -> int:
        """The first chunk of the row that a prefix of this length needs. Rises with the length."""
        reach, before = self._reaches[row], self._first_chunk
        if reach.kind == "all":
            return 0
        return max(0, reach.first_chunk(before + length, self._chunk_tokens) - before)

    def parts(self, length: int) -> Iterator[Part]:
        """The parts that a prefix of ``length`` chunks needs."""
        for row in range(len(self._reaches)):
            for chunk in range(self.first(row, length), length):
                yield chunk, row

    def parts_of_any(self, length: int) -> Iterator[Part]:
        """The parts of the bounded rows that some prefix of at most ``length`` chunks needs."""
        for row in self.bounded:
            for chunk in range(length):
                # If a longer prefix needs a part, so does the one that ends with its chunk.
                if self.first(row, chunk + 1) <= chunk:
                    yield chunk, row

    def longest(self, limit: int, has: Callable[[Part], bool]) -> int:
        """The longest prefix of at most ``limit`` chunks all of whose needed parts are there.

        If a part is not there, the longer prefixes up to ``limit`` need it too, because `first`
        does not decrease. Asks ``has`` at most once about each part.
        """
        length = limit
        rows = range(len(self._reaches))
        seen = [limit for _ in rows]  # the row's parts from here to the end of the prefix are there
        before = limit + 1
        while length < before:
            before = length
            for row in rows:
                first = self.first(row, length)
                for chunk in range(first, min(length, seen[row])):
                    if not has((chunk, row)):
                        length = chunk
                        break
                seen[row] = first
        return length


class _WaitingLookup(NamedTuple):
    again: Action
    nbytes: int
    urgent: bool


class WaitQueue:
    """Lookups that wait for room in the host pool: the urgent before the others, in their order.

    They hold no pins while they wait, so no two wait for each other's memory.
    """

    def __init__(self, owner: Owner, pool: HostPool) -> None:
        self._owner = owner
        pool.on_room = self._wake
        self._waiting: dict[Hashable, _WaitingLookup] = {}  # in the order of their turns
        self._is_posted = False

    def __len__(self) -> int:
        return len(self._waiting)

    def is_turn_of(self, who: Hashable, urgent: bool) -> bool:
        """Whether ``who``, in the queue or not yet, would be the next one."""
        first = next(iter(self._waiting), who)
        return first == who or (urgent and not self._waiting[first].urgent)

    def bytes_before(self, who: Hashable) -> int:
        """The bytes that all before ``who`` want to load."""
        before = takewhile(lambda each: each != who, self._waiting)
        return sum(self._waiting[each].nbytes for each in before)

    def wait(self, who: Hashable, nbytes: int, again: Action, urgent: bool) -> None:
        """Enters the queue, or keeps its place. The first is told of room. nbytes: of its loads."""
        is_new = who not in self._waiting
        self._waiting[who] = _WaitingLookup(again, nbytes, urgent)
        if urgent and is_new:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda each: not each[1].urgent))

    def leave(self, who: Hashable) -> None:
        """Leaves the queue, if it is in it."""
        if self._waiting.pop(who, None) is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._is_posted:
            self._is_posted = True
            self._owner.post(self._serve)

    def _serve(self) -> None:
        self._is_posted = False
        if self._waiting:
            next(iter(self._waiting.values())).again()  # if it leaves, the next is served

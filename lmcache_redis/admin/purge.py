"""Removing chunks: chosen by name and by age, removed at a bounded rate.

Two passes. The first chooses by key names and idle times and reads no value, so that looking
changes nothing; only who asks for chunks by when they were stored has headers read there too. The
second reads the header under each key just before that key is removed,
and leaves whatever is not, beyond doubt, a stripe of the chunk that the key names. Stripe 0
goes first: without it the others are seen by nobody. Beside running agents a chunk that
vanishes is a miss; one that is stored anew in that moment may lose stripes, which is a miss.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress

from lmcache_redis.admin.cuts import cuts_of
from lmcache_redis.admin.server import Server
from lmcache_redis.admin.stripes import State, Stripe, read_stripes, read_uses
from lmcache_redis.admin.survey import SeenChunk, Survey, survey
from lmcache_redis.errors import ConfigError, RedisAuthError, RedisError, RedisReplyError

# Keys whose headers are read, and that are then removed, in one go at most.
_STEP_KEYS = 100
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Selection:
    """Which chunks to remove: all that match every condition that is set."""

    models: frozenset[str] = frozenset()
    namespaces: frozenset[bytes] | None = None
    idle_longer_than_s: float | None = None
    stored_longer_than_s: float | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        ages = (self.idle_longer_than_s, self.stored_longer_than_s)
        chosen = self.models or self.namespaces is not None or ages != (None, None)
        if not chosen and not self.everything:
            raise ConfigError(
                "nothing says what to remove: give --model, --layout, --idle-longer-than, "
                "--stored-longer-than, or --everything"
            )
        if chosen and self.everything:
            raise ConfigError("--everything leaves nothing to choose: give it alone")

    def names(self, chunk: SeenChunk) -> bool:
        """Whether the chunk's name is one of those."""
        key = chunk.name.key
        return (not self.models or key.model_name in self.models) and (
            self.namespaces is None or chunk.name.namespace in self.namespaces
        )

    def is_stored_long_enough(self, stripe: Stripe) -> bool:
        """Whether a stripe's header is old enough, by the clock of this machine."""
        if self.stored_longer_than_s is None:
            return True
        if stripe.header is None:
            return False
        return time.time() - stripe.header.created_unix_ms / 1000 > self.stored_longer_than_s


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be removed. value_bytes: see `cuts.cuts_of`; 0 where it is not known."""

    selection: Selection
    chunks: tuple[SeenChunk, ...]
    value_bytes: int
    survey: Survey

    @property
    def stripes(self) -> int:
        return sum(chunk.stripes.bit_count() for chunk in self.chunks)

    def by_group(self) -> dict[tuple[str, str], int]:
        """Chunks of each model and layout."""
        return dict(Counter((c.name.key.model_name, c.name.layout) for c in self.chunks))


@dataclass(slots=True)
class Removal:
    """What came of it. chunks: those whose first stripe went. used_again, stored_again: chunks,
    and keys, that are no longer as old as when they were chosen. left: keys that stay, by reason;
    examples: some of them."""

    chunks: int = 0
    stripes: int = 0
    value_bytes: int = 0
    vanished: int = 0
    used_again: int = 0
    stored_again: int = 0
    left: Counter[str] = field(default_factory=Counter)
    examples: list[bytes] = field(default_factory=list)
    seconds: float = 0.0

    def leave(self, key: bytes, reason: str) -> None:
        self.left[reason] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(key)


class Pace:
    """At most `per_second` a second, evenly. Raises ConfigError for an impossible rate."""

    def __init__(
        self,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 1 <= per_second <= 1_000_000:
            raise ConfigError(
                f"--keys-per-second is {per_second:g}: set it to 1 to 1000000 keys a second"
            )
        self._seconds_each = 1 / per_second
        # Ten steps a second, so that slow is not the same as seldom.
        self.step_keys = max(1, min(_STEP_KEYS, int(per_second / 10)))
        self._clock = clock
        self._sleep = sleep
        self._due = clock()

    def wait(self, count: int) -> None:
        """Returns when `count` more may be done."""
        now = self._clock()
        if self._due > now:
            self._sleep(self._due - now)
        self._due = max(self._due, now) + count * self._seconds_each


def choose(server: Server, prefix: bytes, selection: Selection) -> Plan:
    """What a purge would remove; removes nothing, and changes no idle time but where headers
    have to be read for `stored_longer_than_s` and the server counts that as a use.

    Raises RedisError, and ConfigError where the server keeps no idle times, or reading headers
    would change those that matter.
    """
    if None not in (selection.idle_longer_than_s, selection.stored_longer_than_s):
        _check_untouched(server)
    found = survey(server, prefix, namespaces=selection.namespaces)
    chunks = [chunk for chunk in found.chunks.values() if selection.names(chunk)]
    if selection.idle_longer_than_s is not None:
        chunks = _idle(server, chunks, selection)
    if selection.stored_longer_than_s is not None:
        firsts = read_stripes(server, [(chunk.name, chunk.first) for chunk in chunks])
        old = (selection.is_stored_long_enough(stripe) for stripe in firsts)
        chunks = list(compress(chunks, old))
    cuts = cuts_of(server, chunks)
    sizes = [(cuts.get(chunk.form), chunk.stripes) for chunk in chunks]
    value_bytes = sum(cut.value_bytes(stripes) for cut, stripes in sizes if cut)
    return Plan(selection, tuple(chunks), value_bytes, found)


def remove(
    server: Server,
    plan: Plan,
    pace: Pace,
    result: Removal,
    progress: Callable[[int], None] = lambda keys: None,
) -> None:
    """Remove what was chosen, counting into `result` as it goes. Raises RedisError.

    Chunks used since they were chosen stay where idle ones were chosen. progress: called
    with how many of the plan's keys are done.
    """
    started = time.monotonic()
    done = 0
    try:
        for chunks in _steps(plan.chunks, pace.step_keys):
            pace.wait(sum(chunk.stripes.bit_count() for chunk in chunks))
            _remove_step(server, plan.selection, chunks, result)
            done += sum(chunk.stripes.bit_count() for chunk in chunks)
            progress(done)
    finally:
        result.seconds += time.monotonic() - started


def _remove_step(
    server: Server, selection: Selection, chunks: Sequence[SeenChunk], result: Removal
) -> None:
    if selection.idle_longer_than_s is not None:
        still = _idle(server, chunks, selection)
        result.used_again += len(chunks) - len(still)
        chunks = still
    # Sorted by index, so that every chunk's stripe 0 goes before any other stripe.
    wanted = sorted(
        ((chunk, index) for chunk in chunks for index in chunk.indexes), key=lambda w: w[1]
    )
    stripes = read_stripes(server, [(chunk.name, index) for chunk, index in wanted])
    ours: list[tuple[SeenChunk, Stripe]] = []
    for (chunk, index), stripe in zip(wanted, stripes, strict=True):
        if stripe.is_ours and not selection.is_stored_long_enough(stripe):
            result.stored_again += 1
        elif stripe.is_ours:
            ours.append((chunk, stripe))
        elif stripe.state is State.MISSING:
            result.vanished += 1
        else:
            result.leave(chunk.name.stripe(index), stripe.state.value)
    # One key a command: in a cluster a command's keys must share a slot.
    for first in (True, False):
        batch = [(c, s) for c, s in ours if (s.index == 0) is first]
        keys = [chunk.name.stripe(stripe.index) for chunk, stripe in batch]
        replies = server.ask_all([(key, ("UNLINK", key)) for key in keys])
        for (chunk, stripe), key, reply in zip(batch, keys, replies, strict=True):
            if isinstance(reply, RedisError):
                if not isinstance(reply, RedisReplyError):
                    raise reply
                result.leave(key, str(reply))
            elif reply:
                result.stripes += 1
                result.value_bytes += stripe.value_bytes
                result.chunks += stripe.index == chunk.first
            else:
                result.vanished += 1


def _check_untouched(server: Server) -> None:
    if not server.untouched:
        raise ConfigError(
            f"{server.where} counts the reading of a header as a use (CLIENT NO-TOUCH came with "
            "Redis 7.2, and this user must be allowed it): give --idle-longer-than or "
            "--stored-longer-than, not both"
        )


def _idle(server: Server, chunks: Sequence[SeenChunk], selection: Selection) -> list[SeenChunk]:
    """Those whose first stripe was not used for long enough."""
    uses = read_uses(server, [chunk.name.stripe(chunk.first) for chunk in chunks])
    if any(use.refused for use in uses):
        raise RedisAuthError(
            f"{server.where} does not tell this user when keys were used: allow it +object, or "
            "choose by --model, --layout or --stored-longer-than instead of --idle-longer-than"
        )
    if any(use.idle_s is None and use.frequency is not None for use in uses):
        raise ConfigError(
            f"{server.where} keeps no idle times, its maxmemory-policy counts uses (LFU): "
            "choose by --model, --layout or --stored-longer-than instead of --idle-longer-than"
        )
    least = selection.idle_longer_than_s or 0.0
    return [
        chunk
        for chunk, use in zip(chunks, uses, strict=True)
        if use.idle_s is not None and use.idle_s > least
    ]


def _steps(chunks: Sequence[SeenChunk], most_keys: int) -> Iterator[list[SeenChunk]]:
    """Whole chunks, at most so many keys together; a chunk larger than that is one step."""
    step: list[SeenChunk] = []
    keys = 0
    for chunk in chunks:
        count = chunk.stripes.bit_count()
        if step and keys + count > most_keys:
            yield step
            step, keys = [], 0
        step.append(chunk)
        keys += count
    if step:
        yield step

# SPDX-License-Identifier: Apache-2.0
"""Removes chunks, selected by name and by age, at a bounded rate.

The first pass selects. The second reads the header of each key just before it removes the key, and
leaves every value that is not certainly a stripe of the chunk that the key names. It removes stripe
0 first: without it no reader sees the others. Agents may run meanwhile: a chunk that loses stripes
is a miss.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_redis.admin.forms import NO_SIZES, Sizes, samples_of, sizes_of, sizes_read
from lmcache_redis.admin.names import show_key
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.stripes import (
    Progress,
    SeenChunk,
    Stripe,
    StripeState,
    no_progress,
    read_idle,
    read_stripes,
    survey,
)
from lmcache_redis.chunks.keys import NAMESPACE_BYTES
from lmcache_redis.errors import ConfigError, RedisError, RedisReplyError

# Keys of a step: their headers are read, then they are removed.
_STEP_KEYS = 100
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Selection:
    """Chunks that meet every condition given. layouts: what theirs begin with (`read_layout`)."""

    models: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    idle_longer_than_s: float | None = None
    stored_longer_than_s: float | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        ages = (self.idle_longer_than_s, self.stored_longer_than_s)
        if None not in ages:
            raise ConfigError(
                "reading when a chunk was stored counts as a use of it: give --idle-longer-than or "
                "--stored-longer-than, not both"
            )
        has_conditions = bool(self.models or self.layouts or ages != (None, None))
        if has_conditions == self.everything:
            raise ConfigError(
                "select what to remove: give --model, --layout, --idle-longer-than, "
                "--stored-longer-than, or --everything alone"
            )

    def is_stored_long_enough(self, stripe: Stripe) -> bool:
        """Whether a stripe's header is old enough, by the clock of this machine."""
        if self.stored_longer_than_s is None:
            return True
        stored_unix_s = stripe.stored_unix_s
        return stored_unix_s is not None and time.time() - stored_unix_s > self.stored_longer_than_s


@dataclass(frozen=True, slots=True)
class Plan:
    """What a purge removes. sizes: None if unknown; the stored ones are estimated if packed."""

    selection: Selection
    chunks: tuple[SeenChunk, ...]
    sizes: Sizes | None

    @property
    def chunk_count(self) -> int:
        return len(self.chunks)

    @property
    def stripes(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """How many chunks of each model and layout."""
        counts = Counter((c.name.key.model_name, c.name.layout) for c in self.chunks)
        return [{"model": m, "layout": w, "chunks": n} for (m, w), n in sorted(counts.items())]


@dataclass(slots=True)
class PurgeResult:
    """What was removed. chunks: those whose first stripe was removed. vanished: keys that no longer
    existed. used_again: chunks, and stored_again: keys, since they were chosen. left: keys not
    removed, by reason; left_examples: some of them."""

    chunks: int = 0
    stripes: int = 0
    sizes: Sizes = NO_SIZES
    vanished: int = 0
    used_again: int = 0
    stored_again: int = 0
    left: Counter[str] = field(default_factory=Counter)
    left_examples: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def leave(self, key: bytes, reason: str) -> None:
        self.left[reason] += 1
        if len(self.left_examples) < _EXAMPLES:
            self.left_examples.append(show_key(key))


def choose(
    server: PrimaryServers, prefix: bytes, selection: Selection, progress: Progress = no_progress
) -> Plan:
    """What a purge would remove. Its size is unknown if idle times choose: reading a header would
    change them.

    Raises RedisError, and ConfigError for what the server cannot tell.
    """
    chunks = [
        chunk
        for chunk in survey(server, prefix, progress=progress).chunks.values()
        if (not selection.models or chunk.name.key.model_name in selection.models)
        and (not selection.layouts or chunk.name.layout[:NAMESPACE_BYTES] in selection.layouts)
    ]
    chunks = list(itertools.compress(chunks, _are_idle(server, chunks, selection)))
    if selection.stored_longer_than_s is not None:
        firsts = read_stripes(server, [(chunk.name, chunk.first) for chunk in chunks])
        pairs = zip(chunks, firsts, strict=True)
        chunks = [chunk for chunk, first in pairs if selection.is_stored_long_enough(first)]
    samples = samples_of(server, chunks) if selection.idle_longer_than_s is None else {}
    known = [(samples[chunk.form], chunk.stripes) for chunk in chunks if chunk.form in samples]
    sizes = sum((sizes_of(sample, stripes) for sample, stripes in known), NO_SIZES)
    return Plan(selection, tuple(chunks), sizes if sizes.stored else None)


def remove(
    server: PrimaryServers,
    plan: Plan,
    keys_per_second: float,
    result: PurgeResult,
    progress: Progress = no_progress,
) -> None:
    """Removes the chunks of a plan and counts them in `result`. Raises RedisError."""
    started_s = due_s = time.monotonic()
    done = 0
    try:
        for chunks in steps_of(plan.chunks, keys_per_second):
            keys = sum(chunk.count for chunk in chunks)
            time.sleep(max(0.0, due_s - time.monotonic()))
            # Time lost to a delay is not made up for.
            due_s = time.monotonic() + keys / keys_per_second
            _remove_step(server, plan.selection, chunks, result)
            done += keys
            progress("keys removed", done, plan.stripes)
    finally:
        result.seconds += time.monotonic() - started_s


def steps_of(chunks: Sequence[SeenChunk], keys_per_second: float) -> Iterator[list[SeenChunk]]:
    """The chunks that are removed together; a chunk is never divided."""
    # Ten steps a second, so that a slow purge proceeds evenly too.
    most_keys = max(1, min(_STEP_KEYS, int(keys_per_second / 10)))
    step: list[SeenChunk] = []
    for chunk in chunks:
        step.append(chunk)
        if sum(each.count for each in step) >= most_keys:
            yield step
            step = []
    if step:
        yield step


def _remove_step(
    server: PrimaryServers, selection: Selection, chunks: Sequence[SeenChunk], result: PurgeResult
) -> None:
    are_idle = _are_idle(server, chunks, selection)
    result.used_again += are_idle.count(False)
    wanted = [
        (chunk, index, is_idle)
        for chunk, is_idle in zip(chunks, are_idle, strict=True)
        if is_idle is not False
        for index in chunk.indexes
    ]
    stripes = read_stripes(server, [(chunk.name, index) for chunk, index, _ in wanted])
    ours: list[tuple[SeenChunk, Stripe]] = []
    for (chunk, index, is_idle), stripe in zip(wanted, stripes, strict=True):
        if stripe.state is StripeState.MISSING:
            result.vanished += 1
        elif stripe.own is None:
            result.leave(chunk.name.stripe(index), stripe.state.value)
        # What is there without its first stripe is being stored.
        elif is_idle is None or not selection.is_stored_long_enough(stripe):
            result.stored_again += 1
        else:
            ours.append((chunk, stripe))
    # Two calls: on several nodes, commands of one call run in any order.
    for first in (True, False):
        _unlink(server, [pair for pair in ours if (pair[1].index == 0) is first], result)


def _unlink(
    server: PrimaryServers, stripes: list[tuple[SeenChunk, Stripe]], result: PurgeResult
) -> None:
    """One key a command: in a cluster a command's keys must share a slot."""
    keys = [chunk.name.stripe(stripe.index) for chunk, stripe in stripes]
    replies = server.ask_each(keys, lambda key: [("UNLINK", key)])
    for (chunk, stripe), key, (reply,) in zip(stripes, keys, replies, strict=True):
        if isinstance(reply, RedisError):
            if not isinstance(reply, RedisReplyError):
                raise reply
            result.leave(key, str(reply))
        elif reply:
            result.stripes += 1
            result.sizes += sizes_read([stripe])
            result.chunks += stripe.index == chunk.first
        else:
            result.vanished += 1


def _are_idle(
    server: PrimaryServers, chunks: Sequence[SeenChunk], selection: Selection
) -> list[bool | None]:
    """Whether each chunk is idle for long enough, if that is a condition; None: it is gone."""
    least_s = selection.idle_longer_than_s
    if least_s is None:
        return [True] * len(chunks)
    idle = read_idle(server, chunks)
    if any(isinstance(each, RedisError) for each in idle):
        raise ConfigError(
            f"{server.where} does not tell when keys were used (its maxmemory-policy counts uses, "
            "or this user needs +object): choose by --model, --layout or --stored-longer-than "
            "instead of --idle-longer-than"
        )
    return [each > least_s if isinstance(each, int) else None for each in idle]

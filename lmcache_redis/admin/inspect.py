"""One key explained, or what is cached by model and layout. Reads headers, no payloads,
unless asked to verify them; removes nothing."""

from __future__ import annotations

import enum
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_redis.admin.cuts import Cut, cuts_of, present_of
from lmcache_redis.admin.names import ChunkName, find_name
from lmcache_redis.admin.server import Server
from lmcache_redis.admin.stripes import (
    State,
    Stripe,
    Use,
    read_stripes,
    read_uses,
    verify_payload,
)
from lmcache_redis.admin.survey import SeenChunk, Survey, stripes_of, survey
from lmcache_redis.errors import FormatError

SAMPLE_CHUNKS = 2000
SAMPLE_KEYS = 200_000


class Verdict(enum.Enum):
    """What an agent would make of a chunk, in words."""

    COMPLETE = "complete: every stripe is there, of one store"
    INVISIBLE = "incomplete: stripe 0 is not there, so agents count a miss and leave the rest"
    INCOMPLETE = "incomplete: stripes are missing, so agents count a miss and remove the chunk"
    TORN = "torn: stripes of different stores, so agents count a miss and remove the chunk"
    BROKEN = "not usable: a stripe is not what its key says, so agents count a miss"
    UNKNOWN = "unknown: the server does not show every stripe"
    ABSENT = "not in Redis"


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """A chunk, and each of its stripes (stripe_count 0 where no header tells how many)."""

    name: ChunkName
    stripe_index: int | None
    stripes: tuple[Stripe, ...]
    verdict: Verdict
    stripe_count: int
    verified: bool
    read_at_unix_s: float

    @property
    def headed(self) -> Stripe | None:
        """The first stripe with a header of this chunk."""
        return next((s for s in self.stripes if s.is_ours), None)

    @property
    def present(self) -> int:
        return sum(s.state is not State.MISSING for s in self.stripes)


@dataclass(frozen=True, slots=True)
class OtherKey:
    """A key that names no chunk of ours: why, and what is there."""

    key: bytes
    reason: str
    kind: str
    value_bytes: int | None


def explain(server: Server, key: bytes, prefix: bytes, verify: bool) -> ChunkReport | OtherKey:
    """What a stripe's key, or a chunk's without its stripe index, stands for.

    A key with another prefix is understood too. Raises RedisError.
    """
    try:
        name, index = find_name(key, prefix)
    except FormatError as error:
        node = server.node_of(key)
        kind = node.ask("TYPE", key).decode()
        length = node.ask("STRLEN", key) if kind == "string" else None
        return OtherKey(key, str(error), kind, length)
    stripes = stripes_of(server, name, index)
    if verify:
        stripes = [verify_payload(server, name, stripe) for stripe in stripes]
    headers = [s.header for s in stripes if s.is_ours and s.header is not None]
    count = max((header.stripe_count for header in headers), default=0)
    return ChunkReport(name, index, tuple(stripes), verdict_of(stripes), count, verify, time.time())


def verdict_of(stripes: Sequence[Stripe]) -> Verdict:
    """What agents make of a chunk with these stripes, in the order of their indexes."""
    there = [s for s in stripes if s.state is not State.MISSING]
    if not there:
        return Verdict.ABSENT
    if any(s.state is State.UNREADABLE for s in there):
        return Verdict.UNKNOWN
    if stripes[0].state is State.MISSING:
        return Verdict.INVISIBLE
    if any(s.state is not State.WHOLE for s in there):
        return Verdict.BROKEN
    if len(there) < len(stripes):
        return Verdict.INCOMPLETE
    headers = [s.header for s in there if s.header is not None]
    if len({(h.store_id, h.stripe_count) for h in headers}) > 1:
        return Verdict.TORN
    return Verdict.COMPLETE


@dataclass(slots=True)
class Group:
    """Chunks of one model and layout. value_bytes: with headers, of stripes that are there.

    incomplete: stripes missing, no_first of them stripe 0. idle_s, frequencies: of each
    chunk's first stripe. stored_unix_s: where headers were read. damaged: found by `verify`.
    """

    model: str
    layout: str
    workers: set[int] = field(default_factory=set)
    chunks: int = 0
    stripes: int = 0
    value_bytes: int = 0
    unknown_size: int = 0
    incomplete: int = 0
    no_first: int = 0
    damaged: int = 0
    idle_s: list[int] = field(default_factory=list)
    frequencies: list[int] = field(default_factory=list)
    stored_unix_s: list[float] = field(default_factory=list)

    def add(self, chunk: SeenChunk, mask: int, cut: Cut | None, use: Use) -> None:
        self.workers.add(chunk.name.key.kv_rank)
        self.chunks += 1
        self.stripes += mask.bit_count()
        if cut is None or not cut.chunk_bytes:
            self.unknown_size += 1
        else:
            self.value_bytes += cut.value_bytes(mask)
        if not mask & 1:
            self.no_first += 1
        if not mask & 1 or (cut and cut.missing(mask)):
            self.incomplete += 1
        if use.idle_s is not None:
            self.idle_s.append(use.idle_s)
        if use.frequency is not None:
            self.frequencies.append(use.frequency)

    def idle_median_s(self) -> float | None:
        return statistics.median(self.idle_s) if self.idle_s else None


@dataclass(frozen=True, slots=True)
class Summary:
    """All groups, the largest first, and how much of the server they come from."""

    groups: tuple[Group, ...]
    survey: Survey
    headers_read: bool
    verified: bool
    read_at_unix_s: float


def summarise(server: Server, prefix: bytes, *, everything: bool, verify: bool) -> Summary:
    """What the cache holds by model and layout, from a sample or from every key.

    Each chunk's header is read where that does not count as a use (`Node.untouched`); else
    store times are not known, and sizes are those of the server's memory. verify: reads every
    payload, which then counts. Raises RedisError.
    """
    found = survey(
        server,
        prefix,
        most_chunks=None if everything else SAMPLE_CHUNKS,
        most_keys=None if everything else SAMPLE_KEYS,
    )
    chunks = list(found.chunks.values())
    uses = read_uses(server, [chunk.name.stripe(chunk.first) for chunk in chunks])
    of_form = cuts_of(server, chunks)
    cuts = [of_form.get(chunk.form) for chunk in chunks]
    created: list[float | None] = [None] * len(chunks)
    if server.untouched:
        heads = read_stripes(server, [(chunk.name, chunk.first) for chunk in chunks])
        for at, stripe in enumerate(heads):
            if stripe.is_ours and stripe.header is not None:
                cuts[at] = Cut.of(stripe.header)
                created[at] = stripe.header.created_unix_ms / 1000
    masks = present_of(server, list(zip(chunks, cuts, strict=True)))
    groups: dict[tuple[str, bytes], Group] = {}
    for at, chunk in enumerate(chunks):
        model, namespace = chunk.name.key.model_name, chunk.name.namespace
        group = groups.setdefault((model, namespace), Group(model, chunk.name.layout))
        group.add(chunk, masks[at], cuts[at], uses[at])
        stored_unix_s = created[at]
        if stored_unix_s is not None:
            group.stored_unix_s.append(stored_unix_s)
        if verify:
            group.damaged += _damaged(server, chunk, masks[at])
    ordered = sorted(groups.values(), key=lambda g: (-g.value_bytes, g.model, g.layout))
    return Summary(tuple(ordered), found, server.untouched, verify, time.time())


def _damaged(server: Server, chunk: SeenChunk, mask: int) -> bool:
    """Whether a stripe that is there is not what its key says, payload included."""
    there = SeenChunk(chunk.name, mask)
    stripes = read_stripes(server, [(chunk.name, index) for index in there.indexes])
    states = Counter(verify_payload(server, chunk.name, stripe).state for stripe in stripes)
    return any(state not in (State.WHOLE, State.MISSING) for state in states)

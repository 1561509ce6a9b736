# SPDX-License-Identifier: Apache-2.0
"""Explains one key, or summarises the cache by model and layout. Removes nothing."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_redis.admin.forms import (
    NO_SIZES,
    Sample,
    Sizes,
    find_missing,
    missing,
    samples_of,
    sizes_of,
    sizes_read,
)
from lmcache_redis.admin.names import ChunkName, parse_name, show_key
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.stripes import (
    Progress,
    SeenChunk,
    Stripe,
    StripeState,
    Survey,
    count_of,
    no_progress,
    read_idle,
    read_stripes,
    stripes_of,
    survey,
    verify_payload,
)
from lmcache_redis.chunks.frame import StripeHeader
from lmcache_redis.errors import ConfigError, FormatError, RedisError
from lmcache_redis.seal import SealKeys


class ChunkVerdict(enum.Enum):
    """The verdict of an agent on a chunk, in words."""

    COMPLETE = "complete: every stripe is there, of one store"
    INVISIBLE = "incomplete: stripe 0 is not there, so agents count a miss and leave the rest"
    INCOMPLETE = "incomplete: stripes are missing, so agents count a miss, and store it again"
    TORN = "torn: stripes of different stores, so agents count a miss, and store it again"
    BROKEN = "not usable: a stripe is not what its key says, so agents count a miss"
    UNKNOWN = "unknown: the server does not show every stripe"
    ABSENT = "not in Redis"


@dataclass(frozen=True, slots=True)
class ChunkReport:
    """A chunk and its stripes, sorted by index. verified, opened: their payloads were."""

    name: ChunkName
    stripe_asked: int | None
    stripes: tuple[Stripe, ...]
    verified: bool
    opened: bool

    @property
    def headed(self) -> Stripe | None:
        """The first stripe with a header of this chunk."""
        return next((s for s in self.stripes if s.own), None)

    @property
    def header(self) -> StripeHeader | None:
        return self.headed.header if self.headed else None

    @property
    def stripe_count(self) -> int:
        """0 if no header gives it."""
        return count_of(self.stripes)

    @property
    def present(self) -> int:
        return sum(s.state is not StripeState.MISSING for s in self.stripes)

    @property
    def sizes(self) -> Sizes:
        return sizes_read(self.stripes)

    @property
    def verdict(self) -> ChunkVerdict:
        there = [s for s in self.stripes if s.state is not StripeState.MISSING]
        if not there:
            return ChunkVerdict.ABSENT
        if any(s.state is StripeState.UNREADABLE for s in there):
            return ChunkVerdict.UNKNOWN
        if self.stripes[0].state is StripeState.MISSING:
            return ChunkVerdict.INVISIBLE
        if any(s.state is not StripeState.WHOLE for s in there):
            return ChunkVerdict.BROKEN
        if len(there) < len(self.stripes):
            return ChunkVerdict.INCOMPLETE
        stores = {(s.header.store_id, s.header.stripe_count) for s in there if s.header is not None}
        return ChunkVerdict.TORN if len(stores) > 1 else ChunkVerdict.COMPLETE


def explain(
    server: PrimaryServers, key: bytes, prefix: bytes, verify: bool, keys: SealKeys | None = None
) -> ChunkReport:
    """Explains the key of a stripe or a chunk. keys: to verify sealed payloads with.

    Raises RedisError, and ConfigError for another key.
    """
    try:
        name, index = parse_name(key, prefix)
    except FormatError as error:
        raise ConfigError(
            f"{show_key(key)} names neither a stripe nor a chunk ({error}): copy it whole, and "
            "give the --key-prefix of the agents"
        ) from None
    found = stripes_of(server, name, index or 0)
    if verify:
        found = [verify_payload(server, name, stripe, keys) for stripe in found]
    opened = verify and keys is not None
    return ChunkReport(name, index, tuple(found), verify, opened)


class Spread(list[float]):
    """Values that are reported as minimum, median and maximum."""


@dataclass(slots=True)
class LayoutSummary:
    """Chunks of one model and layout. sizes: the stored ones are estimated if packed, and not
    verified. without_stripe_0: some of the incomplete. idle_s: of each chunk's first stripe.
    damaged: if verified.
    """

    model: str
    layout: str
    workers: set[int] = field(default_factory=set)
    chunks: int = 0
    stripes: int = 0
    sizes: Sizes = NO_SIZES
    chunks_of_unknown_size: int = 0
    incomplete: int = 0
    without_stripe_0: int = 0
    damaged: int | None = None
    idle_s: Spread = field(default_factory=Spread)

    def add(
        self,
        chunk: SeenChunk,
        sample: Sample | None,
        idle: int | RedisError | None,
        verified: Sequence[Stripe] | None,
    ) -> None:
        """sample: of its form. idle: of its first stripe (`read_idle`). verified: its stripes."""
        self.workers.add(chunk.name.key.kv_rank)
        self.chunks += 1
        self.stripes += chunk.count
        if verified is not None:
            states = {each.state for each in verified}
            is_damaged = not states <= {StripeState.WHOLE, StripeState.MISSING}
            self.damaged = (self.damaged or 0) + is_damaged
            self.sizes += sizes_read(verified)
        elif sample is not None:
            self.sizes += sizes_of(sample, chunk.stripes)
        self.chunks_of_unknown_size += sample is None
        self.without_stripe_0 += not chunk.stripes & 1
        lacks = sample is not None and missing(sample.header, chunk.stripes)
        self.incomplete += not chunk.stripes & 1 or bool(lacks)
        if isinstance(idle, int):
            self.idle_s.append(idle)


@dataclass(frozen=True, slots=True)
class Summary:
    """All groups, the largest first, and the survey that they come from."""

    groups: tuple[LayoutSummary, ...]
    survey: Survey
    verified: bool


def summarise(
    server: PrimaryServers,
    prefix: bytes,
    *,
    everything: bool,
    verify: bool,
    keys: SealKeys | None = None,
    progress: Progress = no_progress,
) -> Summary:
    """What the cache holds by model and layout, from a sample or from every key.

    The headers of one chunk of each form are read, which was used last: that changes no order of
    eviction. verify: also reads every payload, which does. keys: to verify sealed payloads with.
    Raises RedisError.
    """
    found = survey(server, prefix, everything=everything, progress=progress)
    chunks = list(found.chunks.values())
    pairs = [*zip(chunks, read_idle(server, chunks), strict=True)]
    pairs.sort(key=lambda pair: pair[1] if isinstance(pair[1], int) else 0)
    samples = samples_of(server, [chunk for chunk, _ in pairs])
    headers = {form: sample.header for form, sample in samples.items()}
    find_missing(server, [(chunk, headers.get(chunk.form)) for chunk in chunks])
    groups: dict[tuple[str, str], LayoutSummary] = {}
    for number, (chunk, idle) in enumerate(pairs, start=1):
        names = chunk.name.key.model_name, chunk.name.layout
        group = groups.setdefault(names, LayoutSummary(*names))
        verified = None
        if verify:
            read = read_stripes(server, [(chunk.name, index) for index in chunk.indexes])
            verified = [verify_payload(server, chunk.name, each, keys) for each in read]
            progress("chunks verified", number, len(chunks))
        group.add(chunk, samples.get(chunk.form), idle, verified)
    ordered = sorted(groups.values(), key=lambda g: (-g.sizes.stored, g.model, g.layout))
    return Summary(tuple(ordered), found, verify)

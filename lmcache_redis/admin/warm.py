"""Chooses the chunks that the host pool of a new agent should hold: the most used ones.

The server says how much a chunk's stripe 0 is used: how often under an LFU policy, else how long
ago. Asking changes neither. One header of each form (layout, model, worker) is read for the
fingerprint and the size; of the most used chunk of the form, because before Redis 7.2 that counts
as a use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_redis.admin.names import ChunkName, printable
from lmcache_redis.admin.server import Server
from lmcache_redis.admin.stripes import Use, read_uses
from lmcache_redis.admin.survey import SeenChunk, headers_of, survey
from lmcache_redis.chunks.frame import StripeHeader, stripe_payload_bytes
from lmcache_redis.chunks.metadata import MemoryFormat
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.errors import ConfigError, RedisAuthError

_INCOMPLETE = "incomplete, or cut for another --slot-bytes than the agent's"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk of an engine. stripes: the slots that it takes in a host pool.

    metadata: its serialized `RemoteMetadata`.
    """

    name: ChunkName
    fingerprint: bytes
    chunk_bytes: int
    stripes: int
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """candidates: the most used first. unfit: chunks that the agent could not use, by reason."""

    candidates: tuple[Candidate, ...] = ()
    unfit: Counter[str] = field(default_factory=Counter)

    @property
    def chunk_count(self) -> int:
        return len(self.candidates)

    @property
    def chunk_bytes(self) -> int:
        return sum(each.chunk_bytes for each in self.candidates)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """How many chunks of each model and layout, and their bytes."""
        chunks: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for each in self.candidates:
            names = each.name.key.model_name, each.name.layout
            chunks[names] += 1
            nbytes[names] += each.chunk_bytes
        return [
            {"model": names[0], "layout": names[1], "chunks": chunks[names], "bytes": nbytes[names]}
            for names in sorted(chunks)
        ]

    def first(self, slots: int, limit_bytes: int | None) -> Choice:
        """Those that fit so many slots and so many bytes, as far as the first that does not."""
        fitting, nbytes = 0, 0
        for each in self.candidates:
            slots -= each.stripes
            nbytes += each.chunk_bytes
            if slots < 0 or (limit_bytes is not None and nbytes > limit_bytes):
                break
            fitting += 1
        return Choice(self.candidates[:fitting], self.unfit)


def choose(
    server: Server,
    prefix: bytes,
    slot_bytes: int,
    models: Collection[str] = (),
    namespaces: frozenset[bytes] | None = None,
) -> Choice:
    """The chunks that an agent with such slots can load, of these models and layouts or of all.

    Raises RedisError, and ConfigError if there are no chunks of a model.
    """
    found = [*survey(server, prefix, namespaces=namespaces).chunks.values()]
    _check_models(server, models, {chunk.name.key.model_name for chunk in found})
    chunks = [chunk for chunk in found if not models or chunk.name.key.model_name in models]
    visible = [chunk for chunk in chunks if chunk.stripes & 1]
    unfit = Counter({_INCOMPLETE: len(chunks) - len(visible)})
    uses = read_uses(server, [chunk.name.stripe(0) for chunk in visible])
    if any(use.refused for use in uses):
        raise RedisAuthError(
            f"{server.where} does not tell this user when keys were used: allow it +object"
        )
    ranked = most_used_first(visible, uses)
    unfit["removed meanwhile"] += len(visible) - len(ranked)
    headers = headers_of(server, ranked)
    candidates = []
    for chunk in ranked:
        candidate = _candidate(chunk, headers.get(chunk.form), slot_bytes)
        if isinstance(candidate, Candidate):
            candidates.append(candidate)
        else:
            unfit[candidate] += 1
    return Choice(tuple(candidates), +unfit)


def most_used_first(chunks: Sequence[SeenChunk], uses: Sequence[Use]) -> list[SeenChunk]:
    """The chunks in the order of their use, without those of which nothing is known. Pure."""
    ranked = [
        (-use.frequency if use.frequency is not None else use.idle_s or 0, number)
        for number, use in enumerate(uses)
        if use != Use()
    ]
    return [chunks[number] for _, number in sorted(ranked)]


def _candidate(chunk: SeenChunk, header: StripeHeader | None, slot_bytes: int) -> Candidate | str:
    """The chunk, or why an agent with such slots would not find it. Pure.

    header: of any chunk of its form. They have one size, but may be cut otherwise.
    """
    if header is None:
        return "not a header that can be read"
    names = ChunkNames(header.fingerprint, chunk.name.prefix)
    is_pages = header.metadata.fmt is MemoryFormat.PAGES
    if not is_pages or names.chunk_key(chunk.name.key) != chunk.name.chunk_key:
        return "not stored by an agent"
    stripes = -(-header.chunk_bytes // stripe_payload_bytes(header.chunk_bytes, slot_bytes))
    if chunk.stripes != (1 << stripes) - 1:
        return _INCOMPLETE
    metadata = header.metadata.serialize()
    return Candidate(chunk.name, header.fingerprint, header.chunk_bytes, stripes, metadata)


def _check_models(server: Server, wanted: Collection[str], there: Collection[str]) -> None:
    missing = sorted({*wanted} - {*there})
    if missing:
        has = ", ".join(printable(name) for name in sorted(there)) or "no model"
        raise ConfigError(
            f"{server.where} has no chunks of the model {printable(missing[0])}; it has chunks of "
            f"{has}"
        )

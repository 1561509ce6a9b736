"""Which chunks a server holds, and how they are cut: by SCAN and key names alone.

A SCAN meets every key that is there from its beginning to its end at least once; keys that
come or go meanwhile may be met or not.

Chunks of one form (layout, model, worker) are cut alike. A header says how, but where reading
one counts as a use, it would make a chunk look younger than it is: there the highest index
tells how many stripes there are, and MEMORY USAGE about how large they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_redis.admin.names import ChunkName, parse_name
from lmcache_redis.admin.server import Server
from lmcache_redis.admin.stripes import ask_each, exist, read_stripes
from lmcache_redis.errors import FormatError
from lmcache_redis.keys import KEY_MAGIC
from lmcache_redis.resp.wire import escape_pattern
from lmcache_redis.stripe import HEADER_BYTES, StripeHeader

# What one SCAN looks at: a fraction of a millisecond of the server's.
STEP_KEYS = 500
_INDEX_BYTES = 2
# Chunks of one form that are asked for a header before it is called unknown.
_ATTEMPTS = 16
# Stripes past the highest one seen that are looked for at a time.
_AHEAD = 32

Form = tuple[bytes, str, int]


@dataclass(slots=True)
class SeenChunk:
    """A chunk of which stripes were seen. stripes: bit i stands for stripe i."""

    name: ChunkName
    stripes: int = 0

    @property
    def count(self) -> int:
        """How many stripes were seen."""
        return self.stripes.bit_count()

    @property
    def first(self) -> int:
        """The lowest stripe index seen."""
        return (self.stripes & -self.stripes).bit_length() - 1

    @property
    def indexes(self) -> list[int]:
        return [i for i in range(self.stripes.bit_length()) if self.stripes >> i & 1]

    @property
    def form(self) -> Form:
        """Chunks of one form have one size: namespace, model, rank."""
        return self.name.namespace, self.name.key.model_name, self.name.key.kv_rank


@dataclass(slots=True)
class Survey:
    """Chunks by chunk key. other_keys: strings named like ours that are not. whole: all was
    looked at; else about looked_at of database_keys."""

    chunks: dict[bytes, SeenChunk] = field(default_factory=dict)
    other_keys: set[bytes] = field(default_factory=set)
    looked_at: int = 0
    database_keys: int = 0
    whole: bool = True


def survey(
    server: Server,
    prefix: bytes,
    *,
    namespaces: frozenset[bytes] | None = None,
    most_chunks: int | None = None,
    most_keys: int | None = None,
) -> Survey:
    """The chunks on all nodes, or on each node's share of a sample of at most that many.

    namespaces: only these layouts. most_keys: how many keys of a node, ours or not, a sample
    looks at. Raises RedisError.
    """
    found = Survey()
    pattern = prefix + KEY_MAGIC
    if namespaces is not None and len(namespaces) == 1:
        pattern += next(iter(namespaces))
    for number, node in enumerate(server.nodes, start=1):
        found.database_keys += int(node.ask("DBSIZE"))
        enough = most_chunks and -(-most_chunks * number // len(server.nodes))
        looked_at = 0
        for keys, is_last in node.scan(escape_pattern(pattern) + b"*", STEP_KEYS):
            looked_at += STEP_KEYS
            for key in keys:
                _add(found, key, prefix, namespaces)
            full = enough is not None and len(found.chunks) >= enough
            if not is_last and (full or (most_keys is not None and looked_at >= most_keys)):
                found.whole = False
                break
        found.looked_at += looked_at
    if found.whole:
        found.looked_at = found.database_keys
    found.looked_at = min(found.looked_at, found.database_keys)
    return found


def _add(found: Survey, key: bytes, prefix: bytes, namespaces: frozenset[bytes] | None) -> None:
    # Names are compared here: the pattern is only the server's first choice.
    chunk_key, index = key[:-_INDEX_BYTES], int.from_bytes(key[-_INDEX_BYTES:], "big")
    if chunk_key in found.chunks:
        found.chunks[chunk_key].stripes |= 1 << index
        return
    try:
        name, parsed_index = parse_name(key, prefix)
    except FormatError:
        if key.startswith(prefix + KEY_MAGIC):
            found.other_keys.add(key)
        return
    if parsed_index is None:
        found.other_keys.add(key)
    elif namespaces is None or name.namespace in namespaces:
        found.chunks[chunk_key] = SeenChunk(name, 1 << parsed_index)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a chunk is cut into stripes. chunk_bytes 0: how large it is, is not known."""

    chunk_bytes: int
    stripe_payload_bytes: int
    stripe_count: int

    @staticmethod
    def of(header: StripeHeader) -> Cut:
        payload = header.payload_bytes
        if header.stripe_index and header.stripe_index == header.stripe_count - 1:
            payload = header.payload_offset // header.stripe_index
        return Cut(header.chunk_bytes, payload, header.stripe_count)

    def value_bytes(self, stripes: int) -> int:
        """Bytes of the values of these stripes (a bit each), headers included."""
        if not self.chunk_bytes:
            return 0
        inside = stripes & ((1 << self.stripe_count) - 1)
        total = inside.bit_count() * (HEADER_BYTES + self.stripe_payload_bytes)
        if inside >> (self.stripe_count - 1):
            total -= self.stripe_count * self.stripe_payload_bytes - self.chunk_bytes
        return total

    def missing(self, stripes: int) -> list[int]:
        """Indexes of the stripes that are not among these."""
        return [i for i in range(self.stripe_count) if not stripes >> i & 1]


def cuts_of(server: Server, chunks: Sequence[SeenChunk]) -> dict[Form, Cut]:
    """How the chunks of each form are cut; uses nothing. Raises RedisError.

    Exact where headers can be read without that counting as a use (a form without any whole
    header is left out then); elsewhere sizes are what the server's memory has, a little more.
    """
    by_form: dict[Form, list[SeenChunk]] = {}
    for chunk in chunks:
        by_form.setdefault(chunk.form, []).append(chunk)
    if not server.untouched:
        return {form: _reckoned(server, some) for form, some in by_form.items()}
    cuts: dict[Form, Cut] = {}
    for form, some in by_form.items():
        for stripe in read_stripes(server, [(c.name, c.first) for c in some[:_ATTEMPTS]]):
            if stripe.is_ours and stripe.header is not None:
                cuts.setdefault(form, Cut.of(stripe.header))
    return cuts


def _reckoned(server: Server, chunks: Sequence[SeenChunk]) -> Cut:
    """From the chunk with the highest stripe index, no value read."""
    chunk = max(chunks, key=lambda chunk: chunk.stripes)
    last, found = chunk.stripes.bit_length() - 1, [True]
    while any(found):
        found = exist(server, [chunk.name.stripe(last + 1 + at) for at in range(_AHEAD)])
        last += max((at for at, there in enumerate(found, start=1) if there), default=0)
    sized = [chunk.name.stripe(chunk.first), chunk.name.stripe(last)]
    usages = [u for (u,) in ask_each(server, sized, lambda key: [("MEMORY", "USAGE", key)])]
    if not all(isinstance(usage, int) and usage > HEADER_BYTES for usage in usages):
        return Cut(0, 0, last + 1)
    each, final = (usage - HEADER_BYTES for usage in usages)
    return Cut(each * last + final, each, last + 1)


def present_of(server: Server, chunks: Sequence[tuple[SeenChunk, Cut | None]]) -> list[int]:
    """For each chunk the stripes seen, and of the others those that are there (EXISTS)."""
    masks = [chunk.stripes for chunk, _ in chunks]
    asked = [
        (at, index)
        for at, (chunk, cut) in enumerate(chunks)
        for index in (cut.missing(chunk.stripes) if cut else ())
    ]
    there = exist(server, [chunks[at][0].name.stripe(index) for at, index in asked])
    for (at, index), is_there in zip(asked, there, strict=True):
        masks[at] |= is_there << index
    return masks

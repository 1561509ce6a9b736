"""Which chunks a server holds, and how they are cut into stripes: by SCAN and key names.

SCAN returns every key that exists from its start to its end at least once; keys that are added or
removed meanwhile may be missed.

Chunks of one form (layout, model, worker) are cut alike, and any header says how. If reading a
header counts as a use, which would reset the idle time, the highest stripe index gives the number
of stripes, and MEMORY USAGE their approximate size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_redis.admin.names import ChunkName, parse_name
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.stripes import ask_each, exist, read_stripes
from lmcache_redis.chunks.frame import HEADER_BYTES, StripeHeader
from lmcache_redis.chunks.keys import KEY_MAGIC
from lmcache_redis.errors import FormatError, RedisProtocolError
from lmcache_redis.resp.net.wire import escape_pattern

# COUNT of one SCAN: a fraction of a millisecond of the server's time.
STEP_KEYS = 500
# What is held of a chunk is about 700 bytes.
MOST_CHUNKS = 2_000_000
_INDEX_BYTES = 2
# Headers that are read for a form; the first valid one says how its chunks are cut.
_ATTEMPTS = 16
# How many stripes past the highest known one are looked up at a time.
_AHEAD = 32

Form = tuple[bytes, str, int]
# What is done, how many of them, of how many.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


@dataclass(slots=True)
class SeenChunk:
    """A chunk and the stripes seen of it: bit i of ``stripes`` is stripe i."""

    name: ChunkName
    stripes: int = 0

    @property
    def count(self) -> int:
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
        """Namespace, model and rank, which chunks of one size share."""
        return self.name.namespace, self.name.key.model_name, self.name.key.kv_rank


@dataclass(slots=True)
class Survey:
    """Chunks by chunk key. other_keys: keys with our magic that name no stripe. whole: whether all
    keys were scanned; otherwise about ``looked_at`` of ``database_keys``."""

    chunks: dict[bytes, SeenChunk] = field(default_factory=dict)
    other_keys: set[bytes] = field(default_factory=set)
    looked_at: int = 0
    database_keys: int = 0
    whole: bool = True


def survey(
    server: PrimaryServers,
    prefix: bytes,
    *,
    namespaces: frozenset[bytes] | None = None,
    most_chunks: int | None = None,
    most_keys: int | None = None,
    progress: Progress = no_progress,
) -> Survey:
    """The chunks on all nodes, or a sample of about ``most_chunks``, spread over the nodes.

    namespaces: only these layouts. most_keys: the number of keys after which the sample of a node
    ends. Raises RedisError.
    """
    found = Survey()
    found.database_keys = total_keys = sum(int(node.ask("DBSIZE")) for node in server.nodes)
    pattern = prefix + KEY_MAGIC
    if namespaces is not None and len(namespaces) == 1:
        pattern += next(iter(namespaces))
    for number, node in enumerate(server.nodes, start=1):
        enough = most_chunks and -(-most_chunks * number // len(server.nodes))
        looked_at = 0
        for keys, is_last in node.scan(escape_pattern(pattern) + b"*", STEP_KEYS):
            looked_at += STEP_KEYS
            for key in keys:
                _add(found, key, prefix, namespaces)
            progress("keys scanned", found.looked_at + looked_at, total_keys)
            if len(found.chunks) + len(found.other_keys) > MOST_CHUNKS:
                raise RedisProtocolError(
                    f"Redis at {node.where} has more than {MOST_CHUNKS:,} chunks, or its SCAN does "
                    "not end: leave out --all, or choose one --layout"
                )
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
    # The pattern of the SCAN is only a first filter.
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
class Striping:
    """How a chunk is cut into stripes. chunk_bytes: 0 if unknown."""

    chunk_bytes: int
    stripe_payload_bytes: int
    stripe_count: int

    @staticmethod
    def of(header: StripeHeader) -> Striping:
        payload = header.payload_bytes
        if header.stripe_index and header.stripe_index == header.stripe_count - 1:
            payload = header.payload_offset // header.stripe_index
        return Striping(header.chunk_bytes, payload, header.stripe_count)

    def value_bytes(self, stripes: int) -> int:
        """Size of the values of these stripes (a bitmask), headers included."""
        if not self.chunk_bytes:
            return 0
        inside = stripes & ((1 << self.stripe_count) - 1)
        total = inside.bit_count() * (HEADER_BYTES + self.stripe_payload_bytes)
        if inside >> (self.stripe_count - 1):
            total -= self.stripe_count * self.stripe_payload_bytes - self.chunk_bytes
        return total

    def missing(self, stripes: int) -> list[int]:
        """Indexes of the stripes that this bitmask lacks."""
        return [i for i in range(self.stripe_count) if not stripes >> i & 1]


def cuts_of(server: PrimaryServers, chunks: Sequence[SeenChunk]) -> dict[Form, Striping]:
    """How the chunks of each form are cut, without counting as a use. Raises RedisError.

    If headers can be read without that counting as a use, the cuts are exact, and a form without a
    valid header is left out. Otherwise sizes are memory usage, which is slightly more.
    """
    if server.untouched:
        return {form: Striping.of(header) for form, header in headers_of(server, chunks).items()}
    return {form: _estimated(server, some) for form, some in _by_form(chunks).items()}


def headers_of(server: PrimaryServers, chunks: Sequence[SeenChunk]) -> dict[Form, StripeHeader]:
    """A valid header of each form, of the first chunk that has one; a form without is left out.

    Counts as a use of the chunks that are read, unless ``server.untouched``. Raises RedisError.
    """
    headers: dict[Form, StripeHeader] = {}
    for form, some in _by_form(chunks).items():
        for chunk in some[:_ATTEMPTS]:
            (stripe,) = read_stripes(server, [(chunk.name, chunk.first)])
            if stripe.own is not None:
                headers[form] = stripe.own
                break
    return headers


def _by_form(chunks: Sequence[SeenChunk]) -> dict[Form, list[SeenChunk]]:
    by_form: dict[Form, list[SeenChunk]] = {}
    for chunk in chunks:
        by_form.setdefault(chunk.form, []).append(chunk)
    return by_form


def _estimated(server: PrimaryServers, chunks: Sequence[SeenChunk]) -> Striping:
    """A cut estimated from the chunk with the highest stripe index. Reads no value."""
    chunk = max(chunks, key=lambda chunk: chunk.stripes)
    last, found = chunk.stripes.bit_length() - 1, [True]
    while any(found):
        found = exist(server, [chunk.name.stripe(last + 1 + at) for at in range(_AHEAD)])
        last += max((at for at, there in enumerate(found, start=1) if there), default=0)
    sized = [chunk.name.stripe(chunk.first), chunk.name.stripe(last)]
    usages = [u for (u,) in ask_each(server, sized, lambda key: [("MEMORY", "USAGE", key)])]
    if not all(isinstance(usage, int) and usage > HEADER_BYTES for usage in usages):
        return Striping(0, 0, last + 1)
    each, final = (usage - HEADER_BYTES for usage in usages)
    return Striping(each * last + final, each, last + 1)


def present_of(
    server: PrimaryServers, chunks: Sequence[tuple[SeenChunk, Striping | None]]
) -> list[int]:
    """The stripes of each chunk that exist, a bitmask: those seen, and those found by EXISTS."""
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

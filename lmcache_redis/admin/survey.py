"""Which chunks a server holds, and how they are cut into stripes: by SCAN and key names.

SCAN returns every key that exists from its start to its end at least once; keys that are added or
removed meanwhile may be missed. Chunks of one form (layout, model, worker) are cut alike, and any
header says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_redis.admin.names import ChunkName, parse_name
from lmcache_redis.admin.server import Primary, PrimaryServers, one_sentence
from lmcache_redis.admin.stripes import exist, read_stripes
from lmcache_redis.chunks.frame import HEADER_BYTES, StripeHeader
from lmcache_redis.chunks.keys import KEY_MAGIC
from lmcache_redis.errors import FormatError
from lmcache_redis.resp.net.wire import escape_pattern

# COUNT of one SCAN: a fraction of a millisecond of the server's time.
STEP_KEYS = 500
# Headers that are read for a form; the first valid one says how its chunks are cut.
_ATTEMPTS = 16

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

    def add(self, key: bytes, prefix: bytes) -> None:
        try:
            name, index = parse_name(key, prefix)
        except FormatError:
            index = None
        if index is None:
            self.other_keys.add(key)
        else:
            self.chunks.setdefault(name.chunk_key, SeenChunk(name)).stripes |= 1 << index


def survey(
    server: PrimaryServers,
    prefix: bytes,
    *,
    most_chunks: int | None = None,
    most_keys: int | None = None,
    progress: Progress = no_progress,
) -> Survey:
    """The chunks on all nodes, or a sample of about ``most_chunks``, spread over the nodes.

    most_keys: the number of keys after which the sample of a node ends. Raises RedisError.
    """
    total_keys = sum(int(node.ask("DBSIZE")) for node in server.nodes)
    found = Survey(database_keys=total_keys)
    for number, node in enumerate(server.nodes, start=1):
        enough = most_chunks and -(-most_chunks * number // len(server.nodes))
        until_keys = most_keys and found.looked_at + most_keys
        for keys, is_last in _scan(node, prefix):
            for key in keys:
                found.add(key, prefix)
            found.looked_at = min(found.looked_at + STEP_KEYS, total_keys)
            progress("keys scanned", found.looked_at, total_keys)
            is_full = enough is not None and len(found.chunks) >= enough
            is_tired = until_keys is not None and found.looked_at >= until_keys
            if not is_last and (is_full or is_tired):
                found.whole = False
                break
    if found.whole:
        found.looked_at = total_keys
    return found


def _scan(node: Primary, prefix: bytes) -> Iterator[tuple[list[bytes], bool]]:
    """The string keys of each SCAN step, and whether it was the last."""
    cursor, pattern = None, escape_pattern(prefix + KEY_MAGIC) + b"*"
    while cursor != 0:
        with one_sentence(node.endpoint):
            cursor, keys = node.client.scan(cursor or 0, pattern, STEP_KEYS, _type="string")
        yield keys, cursor == 0


@dataclass(frozen=True, slots=True)
class Striping:
    """How a chunk is cut into stripes."""

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
        inside = stripes & ((1 << self.stripe_count) - 1)
        total = inside.bit_count() * (HEADER_BYTES + self.stripe_payload_bytes)
        if inside >> (self.stripe_count - 1):
            total -= self.stripe_count * self.stripe_payload_bytes - self.chunk_bytes
        return total

    def missing(self, stripes: int) -> list[int]:
        """Indexes of the stripes that this bitmask lacks."""
        return [i for i in range(self.stripe_count) if not stripes >> i & 1]


def headers_of(server: PrimaryServers, chunks: Iterable[SeenChunk]) -> dict[Form, StripeHeader]:
    """A valid header of each form, of the first chunk that has one; a form without is left out.

    Counts as a use of the chunks that are read, unless ``server.untouched``. Raises RedisError.
    """
    by_form: dict[Form, list[SeenChunk]] = {}
    for chunk in chunks:
        by_form.setdefault(chunk.form, []).append(chunk)
    headers: dict[Form, StripeHeader] = {}
    for form, some in by_form.items():
        for chunk in some[:_ATTEMPTS]:
            (stripe,) = read_stripes(server, [(chunk.name, chunk.first)])
            if stripe.own is not None:
                headers[form] = stripe.own
                break
    return headers


def cuts_of(server: PrimaryServers, chunks: Iterable[SeenChunk]) -> Mapping[Form, Striping]:
    """How the chunks of each form are cut. As `headers_of`."""
    return {form: Striping.of(header) for form, header in headers_of(server, chunks).items()}


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

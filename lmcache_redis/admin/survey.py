"""Which chunks a server holds: SCAN in small steps, names alone, no value is read.

A SCAN meets every key that is there from its beginning to its end at least once; keys that
come or go meanwhile may be met or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lmcache_redis.admin.names import ChunkName, parse_name
from lmcache_redis.admin.server import Node, Server
from lmcache_redis.admin.stripes import BATCH_KEYS, State, Stripe, read_stripes
from lmcache_redis.errors import FormatError, RedisProtocolError
from lmcache_redis.keys import KEY_MAGIC
from lmcache_redis.resp.wire import escape_pattern

# What one SCAN looks at: a fraction of a millisecond of the server's.
STEP_KEYS = 500
_INDEX_BYTES = 2

Form = tuple[bytes, str, int]


@dataclass(slots=True)
class SeenChunk:
    """A chunk of which stripes were seen. stripes: bit i stands for stripe i."""

    name: ChunkName
    stripes: int = 0

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
    for number, node in enumerate(server.nodes, start=1):
        found.database_keys += int(node.ask("DBSIZE"))
        enough = most_chunks and -(-most_chunks * number // len(server.nodes))
        looked_at = 0
        for keys, is_last in _steps(node, _pattern(prefix, namespaces)):
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


def stripes_of(server: Server, name: ChunkName, hint: int | None = None) -> list[Stripe]:
    """Every stripe a chunk should have, each read; all that can be found where none says.

    hint: a stripe index to ask first, beside 0. Raises RedisError.
    """
    asked = sorted({0, hint or 0})
    known = read_stripes(server, [(name, index) for index in asked])
    headers = [s.header for s in known if s.is_ours and s.header is not None]
    if not headers:
        others = read_stripes(server, [(name, i) for i in range(BATCH_KEYS) if i not in asked])
        known += [stripe for stripe in others if stripe.state is not State.MISSING]
        headers = [s.header for s in known if s.is_ours and s.header is not None]
    count = max((header.stripe_count for header in headers), default=0)
    have = {stripe.index for stripe in known}
    known += read_stripes(server, [(name, i) for i in range(count) if i not in have])
    return sorted(known, key=lambda stripe: stripe.index)


def _pattern(prefix: bytes, namespaces: frozenset[bytes] | None) -> bytes:
    start = prefix + KEY_MAGIC
    if namespaces is not None and len(namespaces) == 1:
        start += next(iter(namespaces))
    return escape_pattern(start) + b"*"


def _steps(node: Node, pattern: bytes) -> Iterator[tuple[list[bytes], bool]]:
    """What each SCAN finds, and whether it was the last."""
    cursor = b"0"
    while True:
        # TYPE string: other types are not ours, whatever they are called.
        reply = node.ask("SCAN", cursor, "MATCH", pattern, "COUNT", STEP_KEYS, "TYPE", "string")
        match reply:
            case [bytes() as cursor, list() as found] if cursor.isdigit():
                keys = [key for key in found if isinstance(key, bytes)]
                yield keys, cursor == b"0"
            case _:
                raise RedisProtocolError("the reply to a SCAN is no cursor and keys")
        if cursor == b"0":
            return


def _add(found: Survey, key: bytes, prefix: bytes, namespaces: frozenset[bytes] | None) -> None:
    # Whatever the server matched: names are compared here.
    index = int.from_bytes(key[-_INDEX_BYTES:], "big")
    seen = found.chunks.get(key[:-_INDEX_BYTES])
    if seen is not None:
        seen.stripes |= 1 << index
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
        found.chunks[key[:-_INDEX_BYTES]] = SeenChunk(name, 1 << parsed_index)

# SPDX-License-Identifier: Apache-2.0
"""Which chunks a server holds, by SCAN and key names, and what their stripes are, by headers.

SCAN returns every key that exists from its start to its end at least once; keys that are added or
removed meanwhile may be missed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xxhash import xxh3_64_intdigest

from lmcache_redis.admin.names import ChunkName, namespaces_of
from lmcache_redis.admin.server import BATCH_KEYS, Command, Primary, PrimaryServers
from lmcache_redis.chunks.frame import HEADER_BYTES, StripeHeader, describe_header
from lmcache_redis.chunks.keys import KEY_MAGIC
from lmcache_redis.chunks.names import names_no_stripe, parse_stripe_key
from lmcache_redis.errors import (
    FormatError,
    RedisError,
    RedisProtocolError,
    RedisReplyError,
    RedisUnavailable,
)
from lmcache_redis.resp.bulk import unpacked
from lmcache_redis.resp.net.wire import escape_pattern
from lmcache_redis.seal import Opened, SealKeys

# Of a server, where not every key is looked at.
SAMPLE_KEYS = 20_000
# Of a survey, and what a name takes in it beside its bytes: some three million chunks.
MOST_BYTES = 2 << 30
_NAME_BYTES = 600

Form = tuple[bytes, str, int]
# What is done, how many of them, of how many.
Progress = Callable[[str, int, int], None]


def no_progress(what: str, done: int, total: int) -> None:
    """Shows nothing."""


class StripeState(enum.Enum):
    """The state of a stripe's value; only WHOLE is a hit: docs/internals/data-plane.md."""

    WHOLE = "whole"
    MISSING = "not there"
    OTHER_TYPE = "no string"
    NO_STRIPE = "no whole header"
    FOREIGN = "the header of something else"
    WRONG_LENGTH = "cut short or too long"
    DAMAGED = "a payload without its checksum"
    NOT_OPENED = "not sealed with a key that was given"
    UNREADABLE = "not shown by the server"


@dataclass(frozen=True, slots=True)
class Stripe:
    """One stripe and what was found under its key. detail: why it is not WHOLE. idle_s: since its
    last use; None if the server does not tell, as under an LFU policy.
    """

    index: int
    state: StripeState
    detail: str = ""
    value_bytes: int = 0
    header: StripeHeader | None = None
    idle_s: int | None = None
    expires_in_s: float | None = None

    @property
    def own(self) -> StripeHeader | None:
        """The header, if it is complete and names this key: the value was written for it."""
        return None if self.state is StripeState.FOREIGN else self.header

    @property
    def stored_unix_s(self) -> float | None:
        return self.header.created_unix_ms / 1000 if self.header else None


def judge(name: ChunkName, index: int, value_bytes: int, head: bytes) -> Stripe:
    """The stripe, judged by its value's length and first 640 bytes."""
    if not value_bytes:
        return Stripe(index, StripeState.MISSING, StripeState.MISSING.value)
    try:
        header = describe_header(head)
    except FormatError as error:
        return Stripe(index, StripeState.NO_STRIPE, str(error), value_bytes)
    reason = _mismatch(name, index, header)
    if reason:
        return Stripe(index, StripeState.FOREIGN, reason, value_bytes, header)
    expected_bytes = HEADER_BYTES + header.stored_bytes
    if value_bytes != expected_bytes:
        reason = f"{value_bytes:,} bytes where its header says {expected_bytes:,}"
        return Stripe(index, StripeState.WRONG_LENGTH, reason, value_bytes, header)
    return Stripe(index, StripeState.WHOLE, "", value_bytes, header)


def _mismatch(name: ChunkName, index: int, header: StripeHeader) -> str:
    if name.namespace not in namespaces_of(header.fingerprint):
        return f"its header is of the layout {header.fingerprint.hex()}"
    if header.chunk_hash != name.key.chunk_hash:
        return f"its header is of the chunk {header.chunk_hash.hex()}"
    if header.stripe_index != index:
        return f"its header is of stripe {header.stripe_index}"
    return ""


def read_stripes(server: PrimaryServers, wanted: Sequence[tuple[ChunkName, int]]) -> list[Stripe]:
    """The stripes of (chunk, stripe index) pairs. Raises RedisError."""
    keys = [name.stripe(index) for name, index in wanted]
    read = server.ask_each(keys, _questions)
    return [_stripe(*pair, *replies) for pair, replies in zip(wanted, read, strict=True)]


def stripes_of(server: PrimaryServers, name: ChunkName, asked: int = 0) -> list[Stripe]:
    """Every stripe that a chunk should have, stripe 0 and the one asked for; without a header those
    that are found among the first BATCH_KEYS. Raises RedisError.
    """
    indexes = {*range(BATCH_KEYS), asked}
    found = read_stripes(server, [(name, index) for index in sorted(indexes)])
    count = count_of(found)
    found += read_stripes(server, [(name, index) for index in {*range(count)} - indexes])
    shown = {*range(count), 0, asked}
    found = [each for each in found if each.index in shown or each.state != StripeState.MISSING]
    return sorted(found, key=lambda stripe: stripe.index)


def count_of(stripes: Sequence[Stripe]) -> int:
    """How many stripes the chunk has; 0 if no header gives it."""
    return max((s.own.stripe_count for s in stripes if s.own), default=0)


def verify_payload(
    server: PrimaryServers, name: ChunkName, stripe: Stripe, keys: SealKeys | None = None
) -> Stripe:
    """The stripe with its payload read, compared with its checksum, and with keys opened. Raises
    RedisError.
    """
    if stripe.state is not StripeState.WHOLE:
        return stripe
    key = name.stripe(stripe.index)
    ((reply,),) = server.ask_each([key], lambda key: [("GETRANGE", key, 0, -1)])
    if isinstance(reply, RedisError):
        raise reply
    value = memoryview(bytearray(reply))  # it is opened in place
    header, payload = bytes(value[:HEADER_BYTES]), value[HEADER_BYTES:]
    again = judge(name, stripe.index, len(value), header)
    said = again.own
    if again.state is StripeState.WHOLE and said is not None:
        checksum = xxh3_64_intdigest(payload)
        if checksum != said.checksum:
            detail = f"its payload's checksum is {checksum:016x}, not {said.checksum:016x}"
            again = replace(again, state=StripeState.DAMAGED, detail=detail)
        else:
            if keys is not None:
                state, detail = _opened(keys, key, said, header, payload)
                again = replace(again, state=state, detail=detail)
            is_readable = again.state is StripeState.WHOLE and (keys or said.sealed_with is None)
            if is_readable and not _is_unpacked(header, said, payload):
                detail = "what is packed in it is not the payload that its header names"
                again = replace(again, state=StripeState.DAMAGED, detail=detail)
    return replace(again, idle_s=stripe.idle_s, expires_in_s=stripe.expires_in_s)


def _opened(
    keys: SealKeys, key: bytes, said: StripeHeader, header: bytes, payload: memoryview
) -> tuple[StripeState, str]:
    """The state of an undamaged stripe, and why it is not WHOLE."""
    if said.sealed_with is None:
        return StripeState.NOT_OPENED, "it is not sealed: agents with seal keys count a miss"
    opened = keys.open(key, header, payload)
    if opened is Opened.UNKNOWN_KEY:
        key_id = said.sealed_with.hex()
        return StripeState.NOT_OPENED, f"it is sealed with another key, {key_id}"
    if opened is not Opened.OK:
        return StripeState.DAMAGED, f"it is {opened.value}"
    return StripeState.WHOLE, ""


def _is_unpacked(header: bytes, said: StripeHeader, payload: memoryview) -> bool:
    return not said.element_bytes or unpacked(header, payload, bytearray(said.payload_bytes))


def _questions(key: bytes) -> list[Command]:
    """The idle time comes first: reading the value resets it."""
    head = ("GETRANGE", key, 0, HEADER_BYTES - 1)
    return [("OBJECT", "IDLETIME", key), ("PTTL", key), ("STRLEN", key), head]


def _stripe(name: ChunkName, index: int, idle: Any, ttl_ms: Any, length: Any, head: Any) -> Stripe:
    """The stripe, judged by the replies to `_questions`."""
    idle_s = idle if isinstance(idle, int) else None
    refused = next((r for r in (head, length) if isinstance(r, RedisError)), None)
    if refused is not None and "WRONGTYPE" in str(refused):
        return Stripe(index, StripeState.OTHER_TYPE, "no string: no agent writes or removes it")
    if refused is not None:
        return Stripe(index, StripeState.UNREADABLE, str(refused), idle_s=idle_s)
    expires_in_s = ttl_ms / 1000 if isinstance(ttl_ms, int) and ttl_ms >= 0 else None
    return replace(judge(name, index, length, head), idle_s=idle_s, expires_in_s=expires_in_s)


# ------------------------------------------------------------------- all chunks


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
    keys were scanned; otherwise about ``looked_at`` of ``database_keys``, None if a server does not
    tell. memory_bytes: about what this takes."""

    chunks: dict[bytes, SeenChunk] = field(default_factory=dict)
    other_keys: set[bytes] = field(default_factory=set)
    looked_at: int = 0
    database_keys: int | None = None
    whole: bool = True
    memory_bytes: int = 0

    def add(self, key: bytes, prefix: bytes) -> None:
        if names_no_stripe(key, prefix):
            return
        try:
            namespace, chunk_key, index = parse_stripe_key(key, prefix)
        except FormatError:
            if key.startswith(prefix + KEY_MAGIC) and key not in self.other_keys:
                self.other_keys.add(key)
                self.memory_bytes += len(key) + _NAME_BYTES
            return
        name = ChunkName(prefix, namespace, chunk_key)
        seen = self.chunks.get(name.chunk_key)
        if seen is None:
            seen = self.chunks[name.chunk_key] = SeenChunk(name)
            self.memory_bytes += len(key) + _NAME_BYTES
        grown = seen.stripes | 1 << index
        self.memory_bytes += (grown.bit_length() - seen.stripes.bit_length()) // 8
        seen.stripes = grown


def survey(
    server: PrimaryServers,
    prefix: bytes,
    *,
    everything: bool = True,
    progress: Progress = no_progress,
) -> Survey:
    """The chunks on all nodes, or among SAMPLE_KEYS keys of each.

    Raises RedisError, also for a server that names more keys than fit in memory.
    """
    counts = [reply for node in server.nodes for reply in node.ask_all([("DBSIZE",)])]
    found = Survey()
    if all(isinstance(count, int) for count in counts):
        found.database_keys = sum(counts)
    total = found.database_keys
    pattern = escape_pattern(prefix + KEY_MAGIC) + b"*"
    for node in server.nodes:
        scanned, cursor = 0, None
        while cursor != 0:
            cursor, keys = _scanned(node, cursor or 0, pattern)
            for key in keys:
                found.add(key, prefix)
            if found.memory_bytes > MOST_BYTES:
                raise RedisReplyError(
                    f"Redis at {node.endpoint.where} names more keys than fit in memory "
                    f"({MOST_BYTES >> 30} GiB): look at fewer (a sample, or a --key-prefix)"
                )
            scanned += BATCH_KEYS
            found.looked_at += BATCH_KEYS
            if total is not None:
                found.looked_at = min(found.looked_at, total)
            progress("keys scanned", found.looked_at, total or 0)
            if cursor != 0 and not everything and scanned >= SAMPLE_KEYS:
                found.whole = False
                break
    if found.whole and total is not None:
        found.looked_at = total
    return found


def _scanned(node: Primary, cursor: int, pattern: bytes) -> tuple[int, list[bytes]]:
    """A step of a SCAN: the next cursor, and some keys. Raises RedisError."""
    scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", BATCH_KEYS, "TYPE", "string")
    why = "the reply to SCAN is malformed"
    try:
        match node.ask(*scan):
            case [int() as after, list() as keys] if all(isinstance(key, bytes) for key in keys):
                return after, keys
    except RedisProtocolError:  # redis-py cannot read it
        pass
    except RedisUnavailable:
        node.ask("PING")  # says whether it is there
        why = "it closes the connection at SCAN"
    raise RedisReplyError(
        f"Redis at {node.endpoint.where} does not list its keys ({why}): if this is a proxy, name "
        "the servers behind it"
    )


def read_idle(server: PrimaryServers, chunks: Sequence[SeenChunk]) -> list[int | RedisError | None]:
    """Seconds since the last use of each chunk's first stripe; None: it is gone; an error: the
    server does not tell. Reads no values. Raises RedisError.
    """
    keys = [chunk.name.stripe(chunk.first) for chunk in chunks]
    return [idle for (idle,) in server.ask_each(keys, lambda key: [("OBJECT", "IDLETIME", key)])]

"""The values of stripe keys, read without their payloads and judged by their headers."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from xxhash import xxh3_64_intdigest

from lmcache_redis.admin.names import ChunkName, namespaces_of
from lmcache_redis.admin.server import Command, PrimaryServers
from lmcache_redis.chunks.frame import HEADER_BYTES, StripeHeader, describe_header
from lmcache_redis.errors import FormatError, RedisAuthError, RedisError
from lmcache_redis.seal import Opened, SealKeys

# Keys in one pipeline: their headers are 250 KiB.
BATCH_KEYS = 500


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
class Use:
    """When a key was last used: idle_s or frequency, or neither if the server keeps none.

    idle_s: seconds since then. frequency: the counter of an LFU policy, 0 to 255. refused:
    this user may not read it.
    """

    idle_s: int | None = None
    frequency: int | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Stripe:
    """One stripe and what was found under its key. detail: why it is not WHOLE."""

    index: int
    state: StripeState
    detail: str = ""
    value_bytes: int = 0
    header: StripeHeader | None = None
    use: Use = Use()
    expires_in_s: float | None = None

    @property
    def own(self) -> StripeHeader | None:
        """The header, if it is complete and names this key: the value was written for it."""
        return None if self.state is StripeState.FOREIGN else self.header

    @property
    def stored_unix_s(self) -> float | None:
        return self.header.created_unix_ms / 1000 if self.header else None


def judge(name: ChunkName, index: int, value_bytes: int, head: bytes) -> Stripe:
    """The stripe, judged by its value's length and first 512 bytes."""
    if not value_bytes:
        return Stripe(index, StripeState.MISSING, StripeState.MISSING.value)
    try:
        header = describe_header(head)
    except FormatError as error:
        return Stripe(index, StripeState.NO_STRIPE, str(error), value_bytes)
    reason = _mismatch(name, index, header)
    if reason:
        return Stripe(index, StripeState.FOREIGN, reason, value_bytes, header)
    expected_bytes = HEADER_BYTES + header.payload_bytes
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


def ask_each(
    server: PrimaryServers, keys: Sequence[bytes], questions: Callable[[bytes], list[Command]]
) -> Iterator[list[Any]]:
    """For each key the replies to its commands, BATCH_KEYS keys a pipeline. Raises RedisError."""
    for start in range(0, len(keys), BATCH_KEYS):
        asked = [(key, questions(key)) for key in keys[start : start + BATCH_KEYS]]
        replies = iter(server.ask_all([(key, command) for key, some in asked for command in some]))
        yield from (list(islice(replies, len(some))) for _, some in asked)


def exist(server: PrimaryServers, keys: Sequence[bytes]) -> list[bool]:
    """Which keys exist. Does not count as a use. Raises RedisError."""
    return [reply == 1 for (reply,) in ask_each(server, keys, lambda key: [("EXISTS", key)])]


def read_uses(server: PrimaryServers, keys: Sequence[bytes]) -> list[Use]:
    """When keys were last used. Reads no values. Raises RedisError."""
    return [_use(*replies) for replies in ask_each(server, keys, _use_of)]


def read_stripes(server: PrimaryServers, wanted: Sequence[tuple[ChunkName, int]]) -> list[Stripe]:
    """The stripes of (chunk, stripe index) pairs. Raises RedisError."""
    keys = [name.stripe(index) for name, index in wanted]
    read = ask_each(server, keys, _questions)
    return [_stripe(*pair, *replies) for pair, replies in zip(wanted, read, strict=True)]


def stripes_of(server: PrimaryServers, name: ChunkName, asked: int = 0) -> list[Stripe]:
    """Every stripe that a chunk should have, beside stripe 0 and the one asked for.

    If no header gives their number: those that are found among the first BATCH_KEYS. Raises
    RedisError.
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
    """The stripe with its payload read and compared with its checksum. Raises RedisError.

    keys: payloads must be sealed, and are opened as well.
    """
    if stripe.state is not StripeState.WHOLE:
        return stripe
    key = name.stripe(stripe.index)
    command: Command = ("GETRANGE", key, 0, stripe.value_bytes)
    (reply,) = server.ask_all([(key, command)])
    if isinstance(reply, RedisError):
        raise reply
    if len(reply) != stripe.value_bytes:
        # It was removed or replaced meanwhile.
        return read_stripes(server, [(name, stripe.index)])[0]
    value = memoryview(bytearray(reply))  # it is opened in place
    header, payload = bytes(value[:HEADER_BYTES]), value[HEADER_BYTES:]
    again = judge(name, stripe.index, len(value), header)
    said = again.own
    if again.state is StripeState.WHOLE and said is not None:
        checksum = xxh3_64_intdigest(payload)
        if checksum != said.checksum:
            detail = f"its payload's checksum is {checksum:016x}, not {said.checksum:016x}"
            again = replace(again, state=StripeState.DAMAGED, detail=detail)
        elif keys is not None:
            state, detail = _opened(keys, key, said, header, payload)
            again = replace(again, state=state, detail=detail)
    return replace(again, use=stripe.use, expires_in_s=stripe.expires_in_s)


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


def _use_of(key: bytes) -> list[Command]:
    return [("OBJECT", "IDLETIME", key), ("OBJECT", "FREQ", key)]


def _questions(key: bytes) -> list[Command]:
    """The idle time comes first: reading the value resets it, unless CLIENT NO-TOUCH is on."""
    head: Command = ("GETRANGE", key, 0, HEADER_BYTES - 1)
    return [*_use_of(key), ("PTTL", key), ("STRLEN", key), head]


def _stripe(
    name: ChunkName, index: int, idle: Any, freq: Any, ttl_ms: Any, length: Any, head: Any
) -> Stripe:
    """The stripe, judged by the replies to `_questions`."""
    use = _use(idle, freq)
    refused = next((r for r in (head, length) if isinstance(r, RedisError)), None)
    if refused is not None and "WRONGTYPE" in str(refused):
        return Stripe(index, StripeState.OTHER_TYPE, "no string: no agent writes or removes it")
    if refused is not None:
        return Stripe(index, StripeState.UNREADABLE, str(refused), use=use)
    expires_in_s = ttl_ms / 1000 if isinstance(ttl_ms, int) and ttl_ms >= 0 else None
    return replace(judge(name, index, length, head), use=use, expires_in_s=expires_in_s)


def _use(idle: Any, frequency: Any) -> Use:
    return Use(
        idle if isinstance(idle, int) else None,
        frequency if isinstance(frequency, int) else None,
        isinstance(idle, RedisAuthError),
    )

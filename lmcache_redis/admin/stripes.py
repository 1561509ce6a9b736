"""What stands under a stripe's key: read without its payload, judged by its header."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from lmcache_redis.admin.names import ChunkName, namespaces_of
from lmcache_redis.admin.server import Command, Server
from lmcache_redis.errors import FormatError, RedisAuthError, RedisError
from lmcache_redis.stripe import HEADER_BYTES, StripeHeader, describe_header

# Keys asked about in one pipeline: half a megabyte of headers at most.
BATCH_KEYS = 500


class State(enum.Enum):
    """What a value is worth; only WHOLE counts as a hit, see docs/data-plane.md."""

    WHOLE = "whole"
    MISSING = "not there"
    OTHER_TYPE = "no string"
    NO_STRIPE = "no whole header"
    FOREIGN = "the header of something else"
    WRONG_LENGTH = "cut short or too long"
    DAMAGED = "a payload without its checksum"
    UNREADABLE = "not shown by the server"


@dataclass(frozen=True, slots=True)
class Use:
    """When a key was last used, as the server keeps it: one of the two, or neither.

    idle_s: seconds since then. frequency: the counter of an LFU policy, 0 to 255. refused:
    this user may not ask.
    """

    idle_s: int | None = None
    frequency: int | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Stripe:
    """One stripe's key and what was found there. detail: why it is not WHOLE."""

    index: int
    state: State
    detail: str = ""
    value_bytes: int = 0
    header: StripeHeader | None = None
    use: Use = Use()
    expires_in_s: float | None = None

    @property
    def is_ours(self) -> bool:
        """Written for this very key, beyond doubt: a whole header that names it."""
        return self.header is not None and self.state is not State.FOREIGN


def judge(name: ChunkName, index: int, kind: str, value_bytes: int, head: bytes) -> Stripe:
    """What a value is that has the type `kind`, a length and these first 512 bytes."""
    if kind == "none":
        return Stripe(index, State.MISSING, State.MISSING.value)
    if kind != "string":
        return Stripe(index, State.OTHER_TYPE, f"a {kind}, which no agent writes or removes")
    try:
        header = describe_header(head)
    except FormatError as error:
        return Stripe(index, State.NO_STRIPE, str(error), value_bytes)
    reason = _mismatch(name, index, header)
    if reason:
        return Stripe(index, State.FOREIGN, reason, value_bytes, header)
    expected_bytes = HEADER_BYTES + header.payload_bytes
    if value_bytes != expected_bytes:
        reason = f"{value_bytes:,} bytes where its header says {expected_bytes:,}"
        return Stripe(index, State.WRONG_LENGTH, reason, value_bytes, header)
    return Stripe(index, State.WHOLE, "", value_bytes, header)


def _mismatch(name: ChunkName, index: int, header: StripeHeader) -> str:
    if name.namespace not in namespaces_of(header.fingerprint):
        return f"its header is of the layout {header.fingerprint.hex()}"
    if header.chunk_hash != name.key.chunk_hash:
        return f"its header is of the chunk {header.chunk_hash.hex()}"
    if header.stripe_index != index:
        return f"its header is of stripe {header.stripe_index}"
    return ""


def read_stripes(server: Server, wanted: Sequence[tuple[ChunkName, int]]) -> list[Stripe]:
    """What stands under the keys of (chunk, stripe index) pairs. Raises RedisError."""
    stripes: list[Stripe] = []
    for start in range(0, len(wanted), BATCH_KEYS):
        batch = wanted[start : start + BATCH_KEYS]
        replies = server.ask_all([(k, c) for n, i in batch for k, c in _questions(n.stripe(i))])
        per_key = len(replies) // len(batch)
        stripes += [
            _stripe(name, index, replies[at * per_key : (at + 1) * per_key])
            for at, (name, index) in enumerate(batch)
        ]
    return stripes


def read_uses(server: Server, keys: Sequence[bytes]) -> list[Use]:
    """When keys were last used; nothing of their values is read. Raises RedisError."""
    uses: list[Use] = []
    for start in range(0, len(keys), BATCH_KEYS):
        batch = keys[start : start + BATCH_KEYS]
        replies = server.ask_all([(key, command) for key in batch for command in _use_of(key)])
        uses += [_use(replies[at], replies[at + 1]) for at in range(0, len(replies), 2)]
    return uses


def verify_payload(server: Server, name: ChunkName, stripe: Stripe) -> Stripe:
    """The stripe with its payload read and compared with its checksum. Raises RedisError."""
    if stripe.state is not State.WHOLE or stripe.header is None:
        return stripe
    key = name.stripe(stripe.index)
    found = server.node_of(key).get(key, stripe.header.payload_bytes)
    if found is None:
        # Gone, or another: as it stands now.
        return read_stripes(server, [(name, stripe.index)])[0]
    header, payload = found
    value_bytes = len(header) + payload.nbytes
    again = judge(name, stripe.index, "string", value_bytes, header)
    state, detail = again.state, again.detail
    if state is State.WHOLE and again.header is not None:
        checksum = xxh3_64_intdigest(payload)
        if checksum != again.header.checksum:
            state = State.DAMAGED
            detail = f"its payload's checksum is {checksum:016x}, not {again.header.checksum:016x}"
    return Stripe(
        stripe.index, state, detail, value_bytes, again.header, stripe.use, stripe.expires_in_s
    )


def _use_of(key: bytes) -> list[Command]:
    return [("OBJECT", "IDLETIME", key), ("OBJECT", "FREQ", key)]


def _questions(key: bytes) -> list[tuple[bytes, Command]]:
    """Use first: on a server without CLIENT NO-TOUCH, reading the value counts as one."""
    commands: list[Command] = [
        *_use_of(key),
        ("TYPE", key),
        ("PTTL", key),
        ("STRLEN", key),
        ("GETRANGE", key, 0, HEADER_BYTES - 1),
    ]
    return [(key, command) for command in commands]


def _stripe(name: ChunkName, index: int, replies: Sequence[Any]) -> Stripe:
    idle, frequency, kind, ttl_ms, length, head = replies
    if isinstance(kind, RedisError) and isinstance(head, RedisError):
        return Stripe(index, State.UNREADABLE, str(head))
    if isinstance(kind, RedisError):
        # Without TYPE the rest still tells a string from what is not there.
        kind = b"string" if isinstance(head, bytes) and length else b"none"
    kind = kind.decode()
    refused = next((r for r in (head, length) if isinstance(r, RedisError)), None)
    if kind == "string" and refused is not None:
        return Stripe(index, State.UNREADABLE, str(refused))
    judged = judge(name, index, kind, *((length, head) if refused is None else (0, b"")))
    expires = ttl_ms / 1000 if isinstance(ttl_ms, int) and ttl_ms >= 0 else None
    return Stripe(
        index,
        judged.state,
        judged.detail,
        judged.value_bytes,
        judged.header,
        _use(idle, frequency),
        expires,
    )


def _use(idle: Any, frequency: Any) -> Use:
    return Use(
        idle if isinstance(idle, int) else None,
        frequency if isinstance(frequency, int) else None,
        isinstance(idle, RedisAuthError),
    )

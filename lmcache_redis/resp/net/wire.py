"""RESP as bytes: commands packed, replies parsed. Pure, strict, bounded.

Version 2, and of version 3 the null and the map: replies to our commands have nothing else. A map
is parsed as an array of its keys and values. Lines, strings, elements, depth and the total size of
a reply are bounded, so that the receiver's memory is, too.

https://redis.io/docs/latest/develop/reference/protocol-spec/. Payloads are not parsed here: `bulk`
receives them straight into slots. Malformed bytes raise RedisProtocolError and nothing else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

from lmcache_redis import native
from lmcache_redis.errors import (
    RedisAuthError,
    RedisClusterDown,
    RedisError,
    RedisFull,
    RedisProtocolError,
    RedisReadOnly,
    RedisRedirect,
    RedisReplyError,
    RedisUnavailable,
    RedisWriteRefused,
)

CRLF: Final = b"\r\n"
PING_COMMAND: Final = b"*1\r\n$4\r\nPING\r\n"
PONG: Final = b"PONG"
ASKING_COMMAND: Final = b"*1\r\n$6\r\nASKING\r\n"
MAX_LINE_BYTES: Final = 64 << 10
LEAST_REPLY_BYTES: Final = 3  # +\r\n
MAX_BULK_BYTES: Final = 1 << 20
MAX_ELEMENTS: Final = 1 << 16
# Arrays in arrays: CLUSTER SLOTS has them four deep (ranges, a range, its nodes, their metadata).
MAX_DEPTH: Final = 4
MAX_REPLY_BYTES: Final = 4 << 20
# More than a server can store in one string: a longer length is malformed.
MAX_VALUE_BYTES: Final = 1 << 40

NULL3: Final = b"_"

# As servers write them: without a leading zero.
_INTEGER = re.compile(rb"0|-?[1-9][0-9]{0,18}")
# Only counts, as the replies to a scan: 32 of them are parsed in 5 µs instead of 35.
_COUNTS = re.compile(rb"(?::(?:0|[1-9][0-9]{0,17})\r\n)+")
_CODE = re.compile(r"[A-Z]{2,20}")
_UNAVAILABLE_CODES = frozenset({"LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN"})
_NO_WRITES_CODES = frozenset({"NOREPLICAS", "MISCONF"})
_AUTH_CODES = frozenset({"NOAUTH", "WRONGPASS"})
_IS_A_CLUSTER: Final = "(a Redis Cluster: write redis+cluster://HOST:PORT)"


class ErrorReply(NamedTuple):
    """An error reply: the first word of its text, and the text."""

    code: str
    text: str


Reply = bytes | int | None | ErrorReply | list["Reply"]
RepliesT = TypeVar("RepliesT", bound=Sequence[Reply])


# ------------------------------------------------------------------ commands


# Keys of one layout have one length, and so do values: what depends on lengths is cached.


def get_command(key: bytes, ttl_s: int = 0) -> bytes:
    """A GET; with ttl_s a GETEX (Redis 6.2), which restarts the TTL."""
    return b"".join((_get_head(len(key), ttl_s), key, end_of_command(ttl_s)))


def set_prefix(key: bytes, value_bytes: int, ttl_s: int = 0) -> bytes:
    """A SET up to its value. The value and `end_of_command` follow."""
    return b"".join((_set_head(len(key), ttl_s), key, CRLF, value_head(value_bytes)))


@functools.lru_cache(maxsize=64)
def value_head(value_bytes: int) -> bytes:
    """The RESP head of a value of this length, in replies and commands."""
    return b"$%d\r\n" % value_bytes


@functools.lru_cache(maxsize=64)
def _get_head(key_bytes: int, ttl_s: int) -> bytes:
    words = b"*4\r\n$5\r\nGETEX" if ttl_s else b"*2\r\n$3\r\nGET"
    return b"%b\r\n$%d\r\n" % (words, key_bytes)


@functools.lru_cache(maxsize=64)
def _set_head(key_bytes: int, ttl_s: int) -> bytes:
    return b"*%d\r\n$3\r\nSET\r\n$%d\r\n" % (5 if ttl_s else 3, key_bytes)


@functools.lru_cache(maxsize=64)
def end_of_command(ttl_s: int) -> bytes:
    """The bytes after the last word of a GET or SET: with ttl_s, the expiry."""
    if not ttl_s:
        return CRLF
    digits = b"%d" % ttl_s
    return b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(digits), digits)


def keys_commands(
    name: bytes, keys: Sequence[bytes], group_keys: int, suffix: bytes = b""
) -> bytes:
    """Commands whose arguments are all keys (EXISTS, UNLINK), each with the next `group_keys` keys.

    suffix: at the end of each key.
    """
    if native.moves is not None:
        packed: bytes = native.moves.keys_commands(name, list(keys), group_keys, suffix)
        return packed
    # Keys of one layout and model have the same length, so that a join in C packs them.
    lengths = set(map(len, keys))
    before = b"$%d\r\n" % (len(keys[0]) + len(suffix)) if len(lengths) == 1 else b""
    after = suffix + CRLF
    between = after + before
    pieces = []
    for start in range(0, len(keys), group_keys):
        group = keys[start : start + group_keys]
        pieces.append(b"*%d\r\n$%d\r\n%b\r\n" % (len(group) + 1, len(name), name))
        if before:
            pieces += (before, between.join(group), after)
        else:
            pieces += [b"$%d\r\n%b%b" % (len(key) + len(suffix), key, after) for key in group]
    return b"".join(pieces)


def pack_command(*words: bytes | str | int) -> bytes:
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(
        [b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded]
    )


class KeyScan:
    """A SCAN of all keys that match, step by step. A key that exists all the time is found.

    count: keys that a step looks at. more: further words.
    """

    def __init__(self, pattern: bytes, count: int, *more: str) -> None:
        self.is_over = False
        self._words: tuple[bytes | str | int, ...] = ("MATCH", pattern, "COUNT", count, *more)
        self._cursor = b"0"

    def command(self) -> bytes:
        """The next step."""
        return pack_command("SCAN", self._cursor, *self._words)

    def take(self, reply: Reply) -> list[bytes]:
        """The keys in the reply to a step. One may be in several replies."""
        match reply:
            case [bytes() as cursor, list() as found] if cursor.isdigit():
                self._cursor, self.is_over = cursor, cursor == b"0"
                return [key for key in found if isinstance(key, bytes)]
        raise RedisProtocolError("the reply to a SCAN is no cursor and keys")


def escape_pattern(literal: bytes) -> bytes:
    """A MATCH pattern that matches exactly `literal`."""
    return re.sub(rb"([\\*?\[\]^-])", rb"\\\1", literal)


# ------------------------------------------------------------------- replies


def parse_length(line: bytes) -> int | None:
    """The length in a line `$n` (without CRLF); None for a null."""
    length = _integer(line[1:])
    if line[:1] != b"$" or not -1 <= length <= MAX_VALUE_BYTES:
        raise RedisProtocolError("the reply to a GET is no string")
    return None if length < 0 else length


def parse_error(line: bytes) -> ErrorReply:
    """The error in a line `-CODE text` (without CRLF)."""
    text = line[1:].decode("utf-8", "replace")
    match = _CODE.match(text)
    return ErrorReply(match.group() if match else "", text)


def error_of(reply: ErrorReply) -> RedisError:
    """The exception for an error reply. The connection stays in step."""
    said = f"Redis says: {reply.text[:200]}"
    if reply.code == "OOM":
        return RedisFull(f"{said} (set maxmemory-policy allkeys-lru, or a larger maxmemory)")
    if reply.code in _AUTH_CODES:
        return RedisAuthError(f"{said} (set the user and password of the Redis URL)")
    if reply.code in _UNAVAILABLE_CODES or "max number of clients" in reply.text:
        return RedisUnavailable(said)
    if reply.code in ("MOVED", "ASK"):
        return _redirect(reply, f"{said} {_IS_A_CLUSTER}")
    if reply.code == "CROSSSLOT":
        return RedisReplyError(f"{said} {_IS_A_CLUSTER}")
    if reply.code == "CLUSTERDOWN":
        return RedisClusterDown(said)
    if reply.code == "READONLY":
        return RedisReadOnly(said)
    if reply.code in _NO_WRITES_CODES:
        return RedisWriteRefused(said)
    if reply.code == "NOPERM":
        return RedisReplyError(
            f"{said} (allow GET, SET, EXISTS, TOUCH, UNLINK, SCAN, PING on our keys, "
            "and GETEX and EXPIRE where a TTL is refreshed)"
        )
    return RedisReplyError(said)


def without_errors(replies: RepliesT) -> RepliesT:
    """The same replies; raises `error_of` the first error among them."""
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise error_of(reply)
    return replies


def _redirect(reply: ErrorReply, said: str) -> RedisReplyError:
    """`MOVED slot host:port` or `ASK slot host:port`; IPv6 addresses have no brackets there."""
    words = reply.text.split()
    host, colon, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return RedisReplyError(said)
    return RedisRedirect(said, host.strip("[]"), int(port), reply.code == "ASK")


class ReplyBuffer:
    """Bytes in, complete replies out. Raises RedisProtocolError for malformed bytes.

    Each byte is parsed once, however they arrive, and no reply has more of them than
    MAX_REPLY_BYTES.
    """

    __slots__ = ("_arrays", "_data", "_elements", "_parsed_bytes")

    def __init__(self) -> None:
        self._data = b""
        # Of an incomplete reply: its open arrays, outermost first, each with its number of
        # elements; the sum of these numbers; and the bytes parsed so far.
        self._arrays: list[tuple[int, list[Reply]]] = []
        self._elements = 0
        self._parsed_bytes = 0

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        self._data = b"".join((self._data, data))

    @property
    def pending_bytes(self) -> int:
        """Bytes of an incomplete reply."""
        return self._parsed_bytes + len(self._data)

    def take(self) -> list[Reply]:
        """All complete replies, in order."""
        if not self._arrays and _COUNTS.fullmatch(self._data):
            counts = self._data[1:-2].split(b"\r\n:")
            self._data = b""
            return list(map(int, counts))
        replies: list[Reply] = []
        position = 0
        while position < len(self._data):
            parsed = _parse(self._data, position)
            if parsed is None:
                break
            reply, end = parsed
            self._parsed_bytes += end - position
            position = end
            if isinstance(reply, _Array) and self._opens(reply.length):
                continue
            whole = self._close([] if isinstance(reply, _Array) else reply)
            if not self._arrays:
                replies.append(whole)
                self._elements = self._parsed_bytes = 0
        self._data = self._data[position:]
        if self.pending_bytes > MAX_REPLY_BYTES:
            raise RedisProtocolError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        return replies

    def _opens(self, length: int) -> bool:
        """Begin an array, unless it is empty."""
        depth = len(self._arrays)
        self._elements += length
        if self._elements > MAX_ELEMENTS or depth == MAX_DEPTH:
            raise RedisProtocolError(f"an array of {length} elements in a reply, at depth {depth}")
        if length:
            self._arrays.append((length, []))
        return length > 0

    def _close(self, reply: Reply) -> Reply:
        """Add a reply to its array; return the outermost array that it completes, or itself."""
        while self._arrays:
            length, elements = self._arrays[-1]
            elements.append(reply)
            if len(elements) < length:
                break
            self._arrays.pop()
            reply = elements
        return reply


class _Array(NamedTuple):
    """The head of an array."""

    length: int


def _parse(data: bytes, start: int) -> tuple[Reply | _Array, int] | None:
    """The item that begins at `start`, and its end; None if it is incomplete."""
    kind = data[start : start + 1]
    if kind not in (b"+", b"-", b":", b"$", b"*", b"%", NULL3):
        raise RedisProtocolError(f"a reply begins with {kind!r}: is this a Redis server?")
    end = data.find(CRLF, start, start + MAX_LINE_BYTES)
    if end < 0:
        if len(data) - start >= MAX_LINE_BYTES:
            raise RedisProtocolError("a line of a reply has no end")
        return None
    after = end + 2
    if kind == b"+":
        return data[start + 1 : end], after
    if kind == b"-":
        return parse_error(data[start:end]), after
    if kind == NULL3:
        if end != start + 1:
            raise RedisProtocolError("a null in a reply is none")
        return None, after
    number = _integer(data[start + 1 : end])
    if kind == b":":
        return number, after
    if number == -1 and kind != b"%":
        return None, after
    if kind == b"$":
        return _bulk(data, number, after)
    if number < 0:
        raise RedisProtocolError(f"an array of {number} elements in a reply")
    return _Array(2 * number if kind == b"%" else number), after


def _bulk(data: bytes, length: int, start: int) -> tuple[Reply, int] | None:
    if not 0 <= length <= MAX_BULK_BYTES:
        raise RedisProtocolError(f"a string of {length} bytes in a reply")
    end = start + length
    if len(data) < end + 2:
        return None
    if data[end : end + 2] != CRLF:
        raise RedisProtocolError("a string in a reply is longer than it says")
    return data[start:end], end + 2


def _integer(digits: bytes) -> int:
    if _INTEGER.fullmatch(digits) is None:
        raise RedisProtocolError("a number in a reply is none")
    return int(digits)

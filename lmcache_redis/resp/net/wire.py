# SPDX-License-Identifier: Apache-2.0
"""RESP as bytes: commands packed, replies parsed by hiredis behind bounds. Pure, strict.

The size of a reply and the length of an array are bounded, so that the receiver's memory is, too.
Simple types of RESP3 are parsed as hiredis does; whoever asked checks the type of a reply.

https://redis.io/docs/latest/develop/reference/protocol-spec/. Payloads are not parsed here: `bulk`
receives them straight into slots. Malformed bytes raise RedisProtocolError and nothing else.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import hiredis

from lmcache_redis.errors import RedisError, RedisProtocolError, RedisRedirect
from lmcache_redis.resp.net.advice import advice_on, advised, reason_of

CRLF: Final = b"\r\n"
PING_COMMAND: Final = b"*1\r\n$4\r\nPING\r\n"
ASKING_COMMAND: Final = b"*1\r\n$6\r\nASKING\r\n"
PONG: Final = b"PONG"
# A map of a cluster may have a range for each slot, each with three replicas and long host names.
MAX_REPLY_BYTES: Final = 16 << 20
# In the arrays of a reply that are longer than 999: hiredis allocates 8 bytes for each of them.
MAX_ELEMENTS: Final = 1 << 18
# More than a server can store in one string: a longer length is malformed.
MAX_VALUE_BYTES: Final = 1 << 40

# As servers write it: without a leading zero.
_LENGTH = re.compile(rb"\$(-1|0|[1-9][0-9]{0,18})")
# The head of an array of 1,000 elements or more, of a map, a set or a push of RESP3, or bytes of a
# string that look like it; and what may become one.
_SUSPECT = re.compile(rb"[*%~>|](?:(?<=\*)([0-9]{4,19})|(?<!\*)[0-9])")
_HEAD = re.compile(rb"[*%~>|][0-9]{0,19}\Z")
_HEAD_BYTES = 20
_INCOMPLETE = object()
_CODE = re.compile(r"[A-Z]{2,20}")


class ErrorReply(NamedTuple):
    """An error reply: the first word of its text, and the text."""

    code: str
    text: str


Reply = bytes | int | None | ErrorReply | list["Reply"]


# ------------------------------------------------------------------ commands


def get_command(key: bytes, ttl_s: int = 0) -> bytes:
    """A GET; with ttl_s a GETEX (Redis 6.2), which restarts the TTL."""
    words = b"*4\r\n$5\r\nGETEX" if ttl_s else b"*2\r\n$3\r\nGET"
    return b"%b\r\n$%d\r\n%b%b" % (words, len(key), key, end_of_command(ttl_s))


def get_commands(keys: Sequence[bytes]) -> bytes:
    return b"".join(map(get_command, keys))


def set_prefix(key: bytes, value_bytes: int, ttl_s: int = 0) -> bytes:
    """A SET up to its value. The value and `end_of_command` follow."""
    words = 5 if ttl_s else 3
    return b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(key), key, value_bytes)


def value_head(value_bytes: int) -> bytes:
    """The RESP head of a value of this length, in replies and commands."""
    return b"$%d\r\n" % value_bytes


def end_of_command(ttl_s: int) -> bytes:
    """The bytes after the last word of a GET or SET: with ttl_s, the expiry."""
    return b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(str(ttl_s)), ttl_s) if ttl_s else CRLF


def keys_commands(
    name: bytes, keys: Sequence[bytes], group_keys: int = 1, suffix: bytes = b""
) -> bytes:
    """Commands whose arguments are all keys (EXISTS, UNLINK), each with the next `group_keys` keys.

    suffix: at the end of each key.
    """
    first, end = b"\r\n$%d\r\n%b\r\n" % (len(name), name), suffix + CRLF
    # As a rule keys are equally long, and joined, which takes a tenth of the time.
    is_even = len({*map(len, keys)}) == 1
    head = b"$%d\r\n" % (len(keys[0]) + len(suffix)) if is_even else b""
    if is_even and group_keys == 1:
        head = b"*2%b%b" % (first, head)
        return b"%b%b%b" % (head, (end + head).join(keys), end)
    pieces = []
    for start in range(0, len(keys), group_keys):
        group = keys[start : start + group_keys]
        pieces.append(b"*%d%b" % (len(group) + 1, first))
        if is_even:
            pieces += (head, (end + head).join(group), end)
        else:
            pieces += [b"$%d\r\n%b%b" % (len(key) + len(suffix), key, end) for key in group]
    return b"".join(pieces)


def pack_command(*words: bytes | str | int) -> bytes:
    return hiredis.pack_command(words)  # type: ignore[arg-type, no-any-return] # any number


def escape_pattern(literal: bytes) -> bytes:
    """A MATCH pattern that matches exactly `literal`."""
    return re.sub(rb"([\\*?\[\]^-])", rb"\\\1", literal)


def prefix_pattern(prefixes: Sequence[bytes]) -> bytes:
    """A MATCH pattern of what begins with one of the prefixes, and of few others.

    It has one class a byte, of what the prefixes have there: they differ in digests.
    """
    places = (sorted(set(bytes_there)) for bytes_there in zip(*prefixes, strict=False))
    return b"".join(map(_one_of, places)) + b"*"


def _one_of(options: Sequence[int]) -> bytes:
    if len(options) == 1:
        return escape_pattern(bytes(options))
    return b"[%b]" % b"".join([b"\\%c" % each for each in options])


# ------------------------------------------------------------------- replies


def parse_length(line: bytes) -> int | None:
    """The length in a line `$n` (without CRLF); None for a null."""
    if _LENGTH.fullmatch(line) is None or int(line[1:]) > MAX_VALUE_BYTES:
        raise RedisProtocolError("malformed reply to GET: expected a string")
    return None if line == b"$-1" else int(line[1:])


def error_reply(text: str) -> ErrorReply:
    """The error in a reply `-CODE text`, without its first and its last bytes."""
    match = _CODE.match(text)
    return ErrorReply(match.group() if match else "", text)


def error_of(reply: ErrorReply) -> RedisError:
    """The exception for an error reply, with what to change. The connection stays in step."""
    kind, change = advice_on(reply.code, reply.text)
    said = advised(f"Redis says: {reply.text[:200]}", change)
    error = kind(said, reply.text) if kind is RedisRedirect else kind(said)
    error.refusal = reason_of(reply.code)
    return error


class ReplyBuffer:
    """Bytes in, complete replies out. Raises RedisProtocolError for malformed bytes.

    hiredis parses them. It allocates a list as long as an array says it is, and bounds only their
    depth (1,024). So the lengths of long arrays are added up before hiredis sees their heads. Maps,
    sets and pushes of RESP3 are refused: 4 bytes of an empty set would cost 240.
    """

    __slots__ = ("_early", "_elements", "_fed_bytes", "_head", "_reader")

    def __init__(self) -> None:
        self._reader: Any = hiredis.Reader(
            RedisProtocolError,
            error_reply,  # type: ignore[arg-type] # an exception for us, a reply for hiredis
            notEnoughData=_INCOMPLETE,
        )
        self._fed_bytes = self._elements = 0  # since the last complete reply
        self._head = b""  # of a reply that may be an array: its length has not arrived
        self._early: list[Reply] = []  # replies before the head of an array

    @property
    def has_rest(self) -> bool:
        """Whether bytes follow the replies that `take` returned, if they are all that it may."""
        return bool(self._early or self._head or self._reader.has_data())

    def feed(self, data: bytes | memoryview) -> None:
        self._fed_bytes += len(data)
        if self._fed_bytes > MAX_REPLY_BYTES:
            raise RedisProtocolError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        if self._head:
            data, self._head = b"".join((self._head, data)), b""
        start, end = 0, len(data)
        for suspect in _SUSPECT.finditer(data):
            if suspect.end() == end:
                break  # more digits may follow
            self._reader.feed(data[start : suspect.start()])
            start = suspect.start()
            self._early += self._parsed()
            # If hiredis has bytes left, it waits for more of a string, and this is a part of it.
            if not self._reader.has_data():
                if suspect[1] is None:
                    raise RedisProtocolError("a map, a set or a push of RESP3 in a reply")
                self._elements += int(suspect[1])
                if self._elements > MAX_ELEMENTS:
                    raise RedisProtocolError(f"a reply of more than {MAX_ELEMENTS} elements")
        if data[-2:] != CRLF and (head := _HEAD.search(data, max(start, end - _HEAD_BYTES))):
            end = head.start()
            self._head = bytes(data[end:])
        self._reader.feed(data[start:end])

    def take(self, most: int) -> list[Reply]:
        """The next complete replies, `most` at most."""
        replies = self._parsed(max(0, most - len(self._early)))
        if self._early:
            replies, self._early = self._early + replies, []
        if replies:
            self._fed_bytes = self._elements = 0
        return replies

    def _parsed(self, most: int | None = None) -> list[Reply]:
        try:
            return list(itertools.islice(iter(self._reader.gets, _INCOMPLETE), most))
        except (TypeError, ValueError) as error:
            # Of RESP3: what Python does not read.
            raise RedisProtocolError(f"malformed reply: {error}") from None

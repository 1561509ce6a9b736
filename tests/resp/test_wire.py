# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.errors import (
    RedisAuthError,
    RedisFull,
    RedisProtocolError,
    RedisReadOnly,
    RedisRedirect,
    RedisReplyError,
    RedisUnavailable,
)
from lmcache_redis.resp.net.wire import (
    MAX_ELEMENTS,
    MAX_REPLY_BYTES,
    ErrorReply,
    Reply,
    ReplyBuffer,
    error_of,
    escape_pattern,
    get_command,
    keys_commands,
    parse_length,
    set_prefix,
)

SOME_REPLIES = (
    b"+OK\r\n:12\r\n:-3\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n"
    b"-ERR no\r\n*-1\r\n*0\r\n"
    b"$20\r\n*12345678\r\n\r\n%765432\r\n*2\r\n$1\r\n*\r\n$7\r\n*123456\r\n"
)
WHAT_THEY_SAY: list[Reply] = [
    b"OK",
    12,
    -3,
    b"a\r\n",
    None,
    [b"0", [b"a", b""]],
    ErrorReply("ERR", "ERR no"),
    None,
    [],
    b"*12345678\r\n\r\n%765432",
    [b"*", b"*123456"],
]


def test_commands() -> None:
    assert get_command(b"k\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\nk\r\n\r\n"
    assert set_prefix(b"k", 5) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\n"
    assert keys_commands(b"UNLINK", [b"a"], 1) == b"*2\r\n$6\r\nUNLINK\r\n$1\r\na\r\n"


@given(
    st.one_of(
        st.lists(st.binary(max_size=120), min_size=1, max_size=40),
        st.lists(st.binary(min_size=73, max_size=73), min_size=1, max_size=40),
    ),
    st.integers(1, 50),
    st.binary(max_size=3),
)
def test_keys_of_any_lengths_are_packed_alike(
    keys: list[bytes], group_keys: int, suffix: bytes
) -> None:
    expected = b""
    for start in range(0, len(keys), group_keys):
        words = [b"EXISTS", *[key + suffix for key in keys[start : start + group_keys]]]
        expected += b"*%d\r\n" % len(words)
        expected += b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    assert keys_commands(b"EXISTS", keys, group_keys, suffix) == expected


@given(st.lists(st.integers(1, len(SOME_REPLIES) - 1), max_size=12))
def test_replies_however_they_are_cut(cuts: list[int]) -> None:
    buffer = ReplyBuffer()
    replies: list[Reply] = []
    edges = [0, *sorted(cuts), len(SOME_REPLIES)]
    for start, end in pairwise(edges):
        buffer.feed(SOME_REPLIES[start:end])
        replies += buffer.take(len(WHAT_THEY_SAY) - len(replies))
    assert replies == WHAT_THEY_SAY
    assert not buffer.has_rest


@given(st.integers(1, len(SOME_REPLIES) - 1), st.integers(0, len(WHAT_THEY_SAY)))
def test_what_follows_the_last_reply_is_a_rest(cut: int, most: int) -> None:
    buffer = ReplyBuffer()
    buffer.feed(SOME_REPLIES[:cut])
    some = buffer.take(most)
    assert some == WHAT_THEY_SAY[: len(some)]
    if len(some) == most:
        buffer.feed(SOME_REPLIES[cut:])
        assert buffer.take(100) == WHAT_THEY_SAY[most:]
    for begun in (b"*", b"*1\r\n", b":", b"$1\r\n"):
        buffer = ReplyBuffer()
        buffer.feed(b"+OK\r\n" + begun)
        assert buffer.take(1) == [b"OK"]
        assert buffer.has_rest


@given(
    st.one_of(
        st.binary(max_size=200),
        st.lists(st.sampled_from([b"$", b"*", b":", b"-", b"+", b"\r\n", b"1", b"-1", b"x"])).map(
            b"".join
        ),
    )
)
def test_any_bytes_give_replies_or_our_own_error(data: bytes) -> None:
    buffer = ReplyBuffer()
    try:
        buffer.feed(data)
        buffer.take(1000)
    except RedisProtocolError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b":x\r\n",
        b":\r\n",
        b":1 \r\n",
        b":+1\r\n",
        b"$-2\r\n",
        b"$1\r\nab\r\n:1\r\n",
        b"$99999999999999999999\r\n",
        b"*%d\r\n" % (MAX_ELEMENTS + 1),
        b"*200000\r\n:1\r\n*200000\r\n",
        b"*2147483647\r\n",
        b"*1\r\n*1000000\r\n",
        b"%0\r\n",
        b"*2\r\n~0\r\n",
        b">1\r\n+a\r\n",
        b"|1\r\n+a\r\n+b\r\n",
        b"*1\r\n" * 100_000,
        b"%1\r\n*0\r\n:1\r\n",
        b"*17\r\n" + b"$%d\r\n%b\r\n" % (1 << 20, bytes(1 << 20)) * 16,
        b"+" + b"x" * MAX_REPLY_BYTES,
        b"%x\r\n",
        b"_1\r\n",
    ],
)
@pytest.mark.parametrize("pieces", [1, 100])
def test_what_is_no_reply(data: bytes, pieces: int) -> None:
    piece_bytes = -(-len(data) // pieces)
    buffer = ReplyBuffer()
    with pytest.raises(RedisProtocolError):  # noqa: PT012
        for start in range(0, len(data), piece_bytes):
            buffer.feed(data[start : start + piece_bytes])
            buffer.take(2)


def test_a_long_array_takes_no_memory_before_it_has_come() -> None:
    """hiredis alone takes 780 MB for the head of an array of 100 million elements."""
    tracemalloc.start()
    try:
        for heads in (b"*100000000\r\n", b"*99999\r\n" * 1000, b"*999\r\n" * 100_000):
            buffer = ReplyBuffer()
            with pytest.raises(RedisProtocolError):  # noqa: PT012
                buffer.feed(heads)
                buffer.take(1)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_long_array_whose_head_is_cut_counts_once() -> None:
    buffer = ReplyBuffer()
    count = MAX_ELEMENTS - 1
    buffer.feed(b"*%d" % count)
    buffer.feed(b"\r\n" + b":1\r\n" * count)
    assert buffer.take(1) == [[1] * count]


def test_a_false_of_resp3_is_a_reply() -> None:
    buffer = ReplyBuffer()
    buffer.feed(b"#f\r\n+OK\r\n")
    assert buffer.take(2) == [False, b"OK"]


def test_lengths() -> None:
    assert parse_length(b"$12") == 12
    assert parse_length(b"$-1") is None
    zeros = (b"$-01", b"$-0", b"$012", b"$00")
    for wrong in (b"$-2", b"$", b"$1x", b":1", b"$99999999999999", *zeros):
        with pytest.raises(RedisProtocolError):
            parse_length(wrong)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", RedisFull),
        ("NOAUTH Authentication required.", RedisAuthError),
        ("LOADING Redis is loading the dataset in memory", RedisUnavailable),
        ("BUSY Redis is busy running a script.", RedisUnavailable),
        ("MASTERDOWN Link with MASTER is down", RedisUnavailable),
        ("ERR max number of clients reached", RedisUnavailable),
        ("READONLY You can't write against a read only replica.", RedisReadOnly),
        ("NOPERM this user has no permissions", RedisReplyError),
        ("MOVED 1 h:1", RedisRedirect),
        ("ASK 1 h:1", RedisRedirect),
        ("something else", RedisReplyError),
    ],
)
def test_errors_by_their_codes(text: str, kind: type[Exception]) -> None:
    buffer = ReplyBuffer()
    buffer.feed(f"-{text}\r\n".encode())
    (reply,) = buffer.take(1)
    assert isinstance(reply, ErrorReply)
    assert type(error_of(reply)) is kind


@given(st.binary(max_size=12))
def test_an_escaped_pattern_matches_only_itself(literal: bytes) -> None:
    pattern = escape_pattern(literal)
    unescaped = bytearray()
    position = 0
    while position < len(pattern):
        if pattern[position : position + 1] == b"\\":
            position += 1
        else:
            assert pattern[position : position + 1] not in (b"*", b"?", b"[")
        unescaped += pattern[position : position + 1]
        position += 1
    assert bytes(unescaped) == literal

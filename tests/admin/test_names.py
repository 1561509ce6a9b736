# SPDX-License-Identifier: Apache-2.0
"""Keys in all the ways people have them; layouts and ages as they are typed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.admin.names import (
    parse_name,
    read_age,
    read_key,
    read_layout,
    show_key,
)
from lmcache_redis.errors import ConfigError, FormatError
from tests.admin.cache import Cached

KEY = b'lmcr2:\x00\x01 "quoted" \\ \r\n\t\a\b\xff\xc3\xa4 end'
CLI = r'"lmcr2:\x00\x01 \"quoted\" \\ \r\n\t\a\b\xff\xc3\xa4 end"'


def test_a_key_is_shown_as_redis_cli_does() -> None:
    assert show_key(KEY) == CLI


@pytest.mark.parametrize(
    "text",
    [CLI, CLI[1:-1], f" 12) {CLI} ", KEY.hex(), KEY.hex().upper(), f"'{CLI[1:-1]}'"],
    ids=["quoted", "escaped", "line of a list", "hex", "upper hex", "single quotes"],
)
def test_a_key_is_read_as_people_have_it(text: str) -> None:
    assert read_key(text) == KEY


def test_text_that_is_not_escaped_stands_for_itself() -> None:
    assert read_key("lmcr2:ä") == "lmcr2:ä".encode()


@given(st.binary(min_size=1, max_size=80))
def test_what_is_shown_is_read_back(key: bytes) -> None:
    assert read_key(show_key(key)) == key


@pytest.mark.parametrize("prefix", [b"", b"ours:", b"lmcr2:"])
@pytest.mark.parametrize("raw", [False, True])
def test_a_name_is_that_of_the_chunk(prefix: bytes, raw: bool) -> None:
    chunk = Cached(7, rank=1, prefix=prefix, raw_namespace=raw)
    assert parse_name(chunk.keys[2], prefix) == (chunk.name, 2)
    assert parse_name(chunk.name.chunk_key, prefix) == (chunk.name, None)
    assert chunk.name.ranks == (2, 1, 2, 1)
    assert chunk.name.layout == chunk.fingerprint.hex()[: 32 if raw else 16]


@pytest.mark.parametrize("key", [b"", b"foo", b"lmcr2:", b"lmcr2:doctor:abc:1", b"lmcr1:" + KEY])
def test_a_key_that_names_nothing(key: bytes) -> None:
    with pytest.raises(FormatError):
        parse_name(key, b"")


def test_a_key_of_another_prefix() -> None:
    with pytest.raises(FormatError, match="another prefix"):
        parse_name(Cached(7, prefix=b"theirs:").keys[1], b"ours:")


@given(st.binary(max_size=120))
def test_any_key_has_one_name_or_none(tail: bytes) -> None:
    key = b"lmcr2:" + tail
    try:
        name, index = parse_name(key, b"")
    except FormatError:
        return
    assert (name.chunk_key if index is None else name.stripe(index)) == key


def test_an_escaped_quote_is_part_of_a_key() -> None:
    assert read_key(r"a\"") == b'a"'


@pytest.mark.parametrize("text", ["", "abc123", "a0" * 7, "zz" * 8, "a0" * 33, "a0-a1"])
def test_no_layout(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--layout .* is not a layout"):
        read_layout(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("30m", 1800),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1.5 D", 129_600),
    ],
)
def test_ages(text: str, seconds: float) -> None:
    assert read_age("--idle-longer-than", text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "7 years", "-1d", "1d2h"])
def test_no_age(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--idle-longer-than .* is not a duration"):
        read_age("--idle-longer-than", text)

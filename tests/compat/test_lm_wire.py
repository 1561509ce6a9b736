# SPDX-License-Identifier: Apache-2.0
"""Messages of LMCache's TCP protocol: exact bytes, exact inverses, FormatError for all else."""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.chunks.metadata import MemoryFormat
from lmcache_redis.compat.lm_wire import (
    INT_TO_LOCATION,
    LOCATION_TO_INT,
    REPLY_BYTES,
    REQUEST_BYTES,
    ClientCommand,
    PayloadFields,
    ServerReturnCode,
    command_and_length,
    packed_reply,
    packed_request,
    unpacked_reply,
    unpacked_request,
)
from lmcache_redis.errors import FormatError

KEY = "org/model@8@3@0123456789abcdef@bfloat16"
REQUEST = "iiiiiiiii150s"
REPLY = "iiiiiiiii"
GOOD = (1, 24, 2, 4, 2, 3, 2, 1, 0)

DTYPES = st.sampled_from(
    [None, "float16", "bfloat16", "float32", "float64", "uint8", "float8_e4m3fn", "float8_e5m2"]
)
SIZES = st.integers(1, (1 << 31) - 1)
SHAPES = st.lists(SIZES, min_size=1, max_size=4).map(tuple)
LENGTHS = st.integers(0, (1 << 31) - 1)
LOCATIONS = st.sampled_from([None, "LocalCPUBackend", "LocalDiskBackend"])
UNENCODED = st.sampled_from([fmt for fmt in MemoryFormat if "BINARY" not in fmt.name])
KEYS = st.text(max_size=150).filter(lambda t: len(t.encode()) <= 150 and not t.endswith(" "))


PAYLOAD = PayloadFields(24, MemoryFormat.KV_T2D, "float32", (3, 2, 1), "LocalDiskBackend")


def test_a_request_is_these_bytes() -> None:
    data = struct.pack(REQUEST, *GOOD, KEY.encode().ljust(150))
    assert packed_request(ClientCommand.PUT, KEY, PAYLOAD) == data
    assert len(data) == REQUEST_BYTES == 186
    assert unpacked_request(data) == (ClientCommand.PUT, KEY, PAYLOAD)
    assert command_and_length(data) == (1, 24)


def test_a_reply_is_these_bytes() -> None:
    data = struct.pack(REPLY, 200, 24, 2, 4, 3, 2, 1, 0, 2)
    assert packed_reply(ServerReturnCode.SUCCESS, PAYLOAD) == data
    assert len(data) == REPLY_BYTES == 36
    assert unpacked_reply(data) == (ServerReturnCode.SUCCESS, PAYLOAD)


PAYLOADS = st.builds(PayloadFields, LENGTHS, UNENCODED, DTYPES, SHAPES, LOCATIONS)


@given(st.sampled_from(ClientCommand), st.sampled_from(ServerReturnCode), KEYS, PAYLOADS)
def test_messages_survive(
    command: ClientCommand, code: ServerReturnCode, key: str, payload: PayloadFields
) -> None:
    assert unpacked_request(packed_request(command, key, payload)) == (command, key, payload)
    assert unpacked_reply(packed_reply(code, payload)) == (code, payload)


@given(st.lists(st.one_of(st.integers(-1, 9), st.integers(-(1 << 31), (1 << 31) - 1)), min_size=9,
                max_size=9), st.binary(max_size=150))  # fmt: skip
def test_any_bytes_have_a_meaning_or_raise(numbers: list[int], key: bytes) -> None:
    request = struct.pack(REQUEST, *numbers, key.ljust(150))
    reply = struct.pack(REPLY, *numbers)
    kinds: tuple[tuple[Any, Any, bytes], ...] = (
        (unpacked_request, packed_request, request),
        (unpacked_reply, packed_reply, reply),
    )
    for unpacked, packed, data in kinds:
        try:
            message = unpacked(data)
        except FormatError:
            continue
        # Only the two codes of half precision become one.
        again = packed(*message)
        assert unpacked(again) == message
        assert len(again) == len(data)


def test_zeros_at_the_end_of_a_shape() -> None:
    for fmt, shape, again in (
        (MemoryFormat.BINARY, (9, 0, 0, 0), (9, 0, 0, 0)),
        (MemoryFormat.BINARY_BUFFER, (9, 0, 0, 0), (9, 0, 0, 0)),
        (MemoryFormat.KV_2LTD, (9, 0, 0, 0), (9,)),
        (MemoryFormat.KV_2LTD, (), (0,)),
    ):
        data = packed_reply(ServerReturnCode.SUCCESS, PayloadFields(9, fmt, None, shape))
        assert unpacked_reply(data)[1].shape == again


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 0), (0, 6), (1, -1), (2, 9), (2, -1), (3, 9), (3, 64), (4, 3), (5, -1), (8, -5)],
)
def test_requests_that_mean_nothing(place: int, value: int) -> None:
    numbers = [*GOOD]
    numbers[place] = value
    with pytest.raises(FormatError):
        unpacked_request(struct.pack(REQUEST, *numbers, KEY.encode().ljust(150)))


@pytest.mark.parametrize("data", [b"", bytes(185), bytes(187), bytes(36)])
def test_other_lengths(data: bytes) -> None:
    with pytest.raises(FormatError):
        unpacked_request(data)
    with pytest.raises(FormatError):
        unpacked_reply(data + bytes(1))


def test_what_has_no_encoding() -> None:
    good = PayloadFields(0, MemoryFormat.KV_2LTD, None, (1,))
    for wrong in (
        {"length": -1}, {"length": 1 << 31}, {"length": True}, {"fmt": 1}, {"dtype_name": "int8"},
        {"dtype_name": "no dtype"}, {"dtype_name": 3}, {"shape": (1, 1, 1, 1, 1)}, {"shape": (-1,)},
        {"shape": (1.0,)}, {"shape": (1 << 31,)}, {"location": "Elsewhere"},
    ):  # fmt: skip
        with pytest.raises(FormatError):
            packed_reply(ServerReturnCode.FAIL, good._replace(**wrong))  # type: ignore[arg-type]
    for key in ("x" * 151, "ä" * 76, "x ", "\ud800"):
        with pytest.raises(FormatError):
            packed_request(ClientCommand.GET, key, good)
    with pytest.raises(FormatError):
        packed_request(9, KEY, good)  # type: ignore[arg-type]
    with pytest.raises(FormatError):
        packed_reply(404, good)  # type: ignore[arg-type]


def test_codes_of_locations() -> None:
    assert LOCATION_TO_INT == {None: 0, "LocalCPUBackend": 1, "LocalDiskBackend": 2}
    assert INT_TO_LOCATION == {0: None, 1: "LocalCPUBackend", 2: "LocalDiskBackend"}


@pytest.mark.servers
def test_none_of_this_imports_torch() -> None:
    code = (
        "import sys\n"
        "from lmcache_redis.compat.lm_wire import *\n"
        "payload = PayloadFields(0, MemoryFormat.KV_2LTD, 'float16', (1,))\n"
        "unpacked_request(packed_request(ClientCommand.GET, 'k', payload))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

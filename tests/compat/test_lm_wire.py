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
    ClientCommand,
    ClientMetaMessage,
    ServerMetaMessage,
    ServerReturnCode,
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


def test_a_request_is_these_bytes() -> None:
    message = ClientMetaMessage(
        ClientCommand.PUT, KEY, 24, MemoryFormat.KV_T2D, "float32", (3, 2, 1), "LocalDiskBackend"
    )
    data = struct.pack(REQUEST, *GOOD, KEY.encode().ljust(150))
    assert message.serialize() == data
    assert len(data) == ClientMetaMessage.packlength() == 186
    assert ClientMetaMessage.deserialize(data) == message
    assert ClientMetaMessage.command_and_length(data) == (1, 24)


def test_a_reply_is_these_bytes() -> None:
    message = ServerMetaMessage(
        ServerReturnCode.SUCCESS, 24, MemoryFormat.KV_T2D, "float32", (3, 2, 1), "LocalDiskBackend"
    )
    data = struct.pack(REPLY, 200, 24, 2, 4, 3, 2, 1, 0, 2)
    assert message.serialize() == data
    assert len(data) == ServerMetaMessage.packlength() == 36
    assert ServerMetaMessage.deserialize(data) == message


ABOUT_PAYLOAD = (LENGTHS, UNENCODED, DTYPES, SHAPES, LOCATIONS)


@given(st.builds(ClientMetaMessage, st.sampled_from(ClientCommand), KEYS, *ABOUT_PAYLOAD))
def test_requests_survive(message: ClientMetaMessage) -> None:
    assert ClientMetaMessage.deserialize(message.serialize()) == message


@given(st.builds(ServerMetaMessage, st.sampled_from(ServerReturnCode), *ABOUT_PAYLOAD))
def test_replies_survive(message: ServerMetaMessage) -> None:
    assert ServerMetaMessage.deserialize(message.serialize()) == message


@given(st.lists(st.one_of(st.integers(-1, 9), st.integers(-(1 << 31), (1 << 31) - 1)), min_size=9,
                max_size=9), st.binary(max_size=150))  # fmt: skip
def test_any_bytes_have_a_meaning_or_raise(numbers: list[int], key: bytes) -> None:
    request = struct.pack(REQUEST, *numbers, key.ljust(150))
    reply = struct.pack(REPLY, *numbers)
    for kind, data in ((ClientMetaMessage, request), (ServerMetaMessage, reply)):
        try:
            message: Any = kind.deserialize(data)  # type: ignore[attr-defined]
        except FormatError:
            continue
        # Only the two codes of half precision become one.
        again = message.serialize()
        assert kind.deserialize(again) == message  # type: ignore[attr-defined]
        assert len(again) == len(data)


@pytest.mark.parametrize("fmt", [MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER])
def test_shapes_of_encoded_bytes_keep_their_zeros(fmt: MemoryFormat) -> None:
    message = ServerMetaMessage(ServerReturnCode.SUCCESS, 9, fmt, None, (9, 0, 0, 0))
    assert ServerMetaMessage.deserialize(message.serialize()) == message


def test_a_shape_keeps_one_dimension() -> None:
    message = ServerMetaMessage(ServerReturnCode.FAIL, 0, MemoryFormat.KV_2LTD, None, ())
    assert ServerMetaMessage.deserialize(message.serialize()).shape == (0,)


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, 0), (0, 6), (1, -1), (2, 9), (2, -1), (3, 9), (3, 64), (4, 3), (5, -1), (8, -5)],
)
def test_requests_that_mean_nothing(place: int, value: int) -> None:
    numbers = [*GOOD]
    numbers[place] = value
    with pytest.raises(FormatError):
        ClientMetaMessage.deserialize(struct.pack(REQUEST, *numbers, KEY.encode().ljust(150)))


@pytest.mark.parametrize("data", [b"", bytes(185), bytes(187), bytes(36)])
def test_other_lengths(data: bytes) -> None:
    with pytest.raises(FormatError):
        ClientMetaMessage.deserialize(data)
    with pytest.raises(FormatError):
        ServerMetaMessage.deserialize(data + bytes(1))


def test_what_has_no_encoding() -> None:
    good: dict[str, Any] = {
        "command": ClientCommand.GET, "key": KEY, "length": 0, "fmt": MemoryFormat.KV_2LTD,
        "dtype_name": None, "shape": (1,),
    }  # fmt: skip
    ClientMetaMessage(**good)
    for wrong in (
        {"command": 9}, {"key": "x" * 151}, {"key": "ä" * 76}, {"key": "x "}, {"key": "\ud800"},
        {"length": -1}, {"length": 1 << 31}, {"length": True}, {"fmt": 1}, {"dtype_name": "int8"},
        {"dtype_name": "no dtype"}, {"dtype_name": 3}, {"shape": (1, 1, 1, 1, 1)}, {"shape": (-1,)},
        {"shape": (1.0,)}, {"shape": (1 << 31,)}, {"location": "Elsewhere"},
    ):  # fmt: skip
        with pytest.raises(FormatError):
            ClientMetaMessage(**{**good, **wrong})
    with pytest.raises(FormatError):
        ServerMetaMessage(404, 0, MemoryFormat.KV_2LTD, None, (1,))  # type: ignore[arg-type]


def test_codes_of_dtypes() -> None:
    names = [None, "float16", "float16", "bfloat16", "float32", "float64", "uint8"]
    names += ["float8_e4m3fn", "float8_e5m2"]
    for code, name in enumerate(names):
        numbers = [200, 4, 1, code, 2, 1, 0, 0, 0]
        message = ServerMetaMessage.deserialize(struct.pack(REPLY, *numbers))
        assert message.dtype_name == name
        numbers[3] = 2 if code == 1 else code  # of the two codes of float16 the second is written
        assert message.serialize() == struct.pack(REPLY, *numbers)


def test_codes_of_locations() -> None:
    assert LOCATION_TO_INT == {None: 0, "LocalCPUBackend": 1, "LocalDiskBackend": 2}
    assert INT_TO_LOCATION == {0: None, 1: "LocalCPUBackend", 2: "LocalDiskBackend"}


@pytest.mark.servers
def test_none_of_this_imports_torch() -> None:
    code = (
        "import sys\n"
        "from lmcache_redis.compat.lm_wire import *\n"
        "m = ClientMetaMessage(ClientCommand.GET, 'k', 0, MemoryFormat.KV_2LTD, 'float16', (1,))\n"
        "assert ClientMetaMessage.deserialize(m.serialize()) == m\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Torch's types and keys through msgpack, without pickle."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.codec import get_customized_decoder, get_customized_encoder
from lmcache_redis.errors import WireError
from lmcache_redis.keys import IPCCacheEngineKey, ObjectKey


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.bfloat16, torch.dtype),
        (torch.float8_e4m3fn, torch.dtype),
        (torch.Size([2, 3, 4]), torch.Size),
        (torch.Size([]), torch.Size),
        ([torch.float16, torch.uint8], list[torch.dtype]),
        ({"a": torch.float32}, dict[str, torch.dtype]),
        (ObjectKey(b"h", "model", 7), ObjectKey),
        (IPCCacheEngineKey("m", 2, None, chunk_hash=b"h"), IPCCacheEngineKey),
        (IPCCacheEngineKey("m", 2, 1, token_ids=(1, 2), end=2), IPCCacheEngineKey),
    ],
    ids=str,
)
def test_values_survive(value: Any, kind: Any) -> None:
    data = get_customized_encoder(kind).encode(value)
    again = get_customized_decoder(kind).decode(data)
    assert again == value
    assert type(again) is type(value)


def test_a_dtype_in_bytes() -> None:
    assert get_customized_encoder(torch.dtype).encode(torch.float16) == b"\xc7\x07\x01float16"


def test_what_is_not_meant_is_refused() -> None:
    with pytest.raises(TypeError, match="no encoding"):
        get_customized_encoder().encode(object())
    for data in (
        b"",
        b"\xc7\x04\x01nope",
        b"\xc7\x02\x01\xff\xff",
        msgspec.msgpack.encode(msgspec.msgpack.Ext(99, b"")),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(3, b"\x80")),
    ):
        with pytest.raises(WireError):
            get_customized_decoder(torch.dtype).decode(data)
    with pytest.raises(WireError):
        get_customized_decoder(torch.Size).decode(msgspec.msgpack.encode(["1"]))


@given(st.binary(max_size=100), st.sampled_from([torch.dtype, torch.Size, IPCCacheEngineKey]))
def test_random_bytes_raise_only_wire_errors(data: bytes, kind: Any) -> None:
    try:
        get_customized_decoder(kind).decode(data)
    except WireError:
        return

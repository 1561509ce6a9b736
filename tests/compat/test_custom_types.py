# SPDX-License-Identifier: Apache-2.0
"""The facade of lmcache.v1.multiprocess.custom_types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat.custom_types import (
    CudaIPCWrapper,
    IPCCacheEngineKey,
    KVCache,
    get_customized_decoder,
    get_customized_encoder,
)
from lmcache_redis.errors import FormatError
from tests import cuda_driver
from tests.compat.gpu_tensors import gpu_tensor
from tests.cuda_driver.engine import Host, gpus

KEY = IPCCacheEngineKey("m", 4, 0, b"\x01\x02\x03\x04")
OBJECT_KEY = ObjectKey(b"hash", "model", 0x01000100)


@pytest.fixture
def host() -> Iterator[Host]:
    if why := cuda_driver.missing():
        pytest.skip(why)
    with gpus() as host:
        yield host


@pytest.fixture
def tensor(host: Host) -> Any:
    return gpu_tensor(host)


class Chunks(msgspec.Struct, frozen=True, tag=True):
    """A message with a field of each type."""

    key: IPCCacheEngineKey
    keys: dict[str, ObjectKey]
    shapes: list[torch.Size]
    dtype: torch.dtype
    caches: KVCache


# TypeError: of a map as the key of a map, by msgspec 0.19.
REFUSALS = (FormatError, msgspec.MsgspecError, TypeError, UnicodeDecodeError)

VALUES = [
    torch.bfloat16,
    torch.Size([2, 3, 4]),
    torch.Size([]),
    KEY,
    KEY.no_worker_id_version(),
    IPCCacheEngineKey("m", 2, 1, token_ids=(1, 2), end=2, request_id="r", salt=b"s"),
    OBJECT_KEY,
]


@st.composite
def encodings(draw: st.DrawFn) -> bytes:
    """Random bytes, and values of which at most one byte is changed."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=100))
    value = draw(st.sampled_from(VALUES))
    encoded = bytearray(get_customized_encoder(Any).encode(draw(st.sampled_from([value, [value]]))))
    if draw(st.booleans()):
        encoded[draw(st.integers(0, len(encoded) - 1))] = draw(st.integers(0, 255))
    return bytes(encoded)


class TestCodec:
    @pytest.mark.parametrize("value", VALUES, ids=repr)
    def test_values_survive(self, value: Any) -> None:
        kind: Any = type(value)
        for each, expected in (
            (value, kind),
            ([value, value], list[kind]),
            ({"a": value}, dict[str, kind]),
        ):
            data = get_customized_encoder(expected).encode(each)
            again = get_customized_decoder(expected).decode(data)
            assert again == each
            assert repr(again) == repr(each), "not only equal"

    @pytest.mark.parametrize("told", [True, False])
    def test_wrappers_survive(self, tensor: Any, host: Host, told: bool) -> None:
        caches = [CudaIPCWrapper(tensor), CudaIPCWrapper(gpu_tensor(host))]
        data = get_customized_encoder(KVCache).encode(caches)
        again = get_customized_decoder(KVCache if told else Any).decode(data)
        assert again == caches
        assert [type(each) for each in again] == [CudaIPCWrapper] * 2

    def test_fields_survive(self, tensor: Any) -> None:
        shapes, caches = [torch.Size([1, 2])], [CudaIPCWrapper(tensor)]
        message = Chunks(KEY, {"a": OBJECT_KEY}, shapes, torch.float16, caches)
        encoded = get_customized_encoder(Chunks).encode(message)
        again = get_customized_decoder(Chunks).decode(encoded)
        assert again == message
        assert type(again.shapes[0]) is torch.Size

    def test_plain_values_are_as_msgspec_encodes_them(self) -> None:
        value = {"a": [1, 2.5, None, True, "x", b"y"], "b": {}, "c": (1,)}
        encoder = get_customized_encoder(dict)
        assert isinstance(encoder, msgspec.msgpack.Encoder)
        data = encoder.encode(value)
        assert data == msgspec.msgpack.encode(value)
        assert get_customized_decoder(Any).decode(data) == value | {"c": [1]}

    @pytest.mark.parametrize(
        "value",
        [object(), {"a": [object()]}, torch.complex64, 1 << 70, "\ud800"],
    )
    def test_what_has_no_encoding_is_refused(self, value: Any) -> None:
        with pytest.raises((TypeError, ValueError, OverflowError)):
            get_customized_encoder(Any).encode(value)

    @pytest.mark.parametrize(
        ("kind", "value"),
        [
            (ObjectKey, KEY),
            (IPCCacheEngineKey, OBJECT_KEY),
            (torch.Size, torch.float16),
            (torch.dtype, "float16"),
            (KVCache, [KEY]),
            (list[int], torch.float16),
            (int, KEY),
            (Chunks, {"type": "Chunks"}),
        ],
    )
    def test_a_value_of_another_type_is_refused(self, kind: Any, value: Any) -> None:
        data = get_customized_encoder(kind).encode(value)
        with pytest.raises(msgspec.ValidationError):
            get_customized_decoder(kind).decode(data)

    @pytest.mark.parametrize(
        ("code", "body"),
        [
            (0, b""), (6, b""), (99, b"x"),
            (1, b""), (1, b"complex64"), (1, b"\xff"), (1, b"load"),
            (3, b""), (3, b"\x80"), (4, OBJECT_KEY.to_bytes()),
        ],
    )  # fmt: skip
    def test_malformed_extensions_are_refused(self, code: int, body: bytes) -> None:
        data = msgspec.msgpack.encode([msgspec.msgpack.Ext(code, body)])
        for kind in (Any, list[torch.dtype], list[ObjectKey]):
            with pytest.raises(REFUSALS):
                get_customized_decoder(kind).decode(data)

    @given(encodings(), st.sampled_from([Any, torch.dtype, KVCache, ObjectKey, Chunks]))
    @example(get_customized_encoder(Any).encode(OBJECT_KEY), ObjectKey)
    def test_bytes_are_refused_or_a_value_of_the_kind(self, data: bytes, kind: Any) -> None:
        decoder = get_customized_decoder(kind)
        try:
            value = decoder.decode(data)
        except REFUSALS:
            event("refused")
            return
        event("decoded")
        if kind is not Any and kind is not KVCache:
            assert isinstance(value, kind)
        again = decoder.decode(get_customized_encoder(kind).encode(value))
        assert repr(again) == repr(value)  # repr: nan is not equal to itself

    def test_depth_is_refused(self) -> None:
        with pytest.raises(RecursionError):
            get_customized_decoder(Any).decode(b"\x91" * 100_000 + b"\x01")
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(RecursionError):
            get_customized_encoder(Any).encode(nested)


def test_a_type_that_cannot_be_told_apart_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="not supported"):
        get_customized_decoder(torch.dtype | torch.Size)

"""The facade of lmcache.v1.multiprocess.custom_types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    more: Any = None


@dataclass(frozen=True)
class Layout:
    shape: torch.Size
    key: ObjectKey
    more: Any


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
    encoded = bytearray(get_customized_encoder().encode(draw(st.sampled_from([value, [value]]))))
    if draw(st.booleans()):
        encoded[draw(st.integers(0, len(encoded) - 1))] = draw(st.integers(0, 255))
    return bytes(encoded)


class TestCodec:
    @pytest.mark.parametrize("value", VALUES, ids=repr)
    @pytest.mark.parametrize("told", [True, False])
    def test_values_survive(self, value: Any, told: bool) -> None:
        kind: Any = type(value) if told else Any
        for each, expected in (
            (value, kind),
            ([value, value], list[kind]),
            ({"a": value}, dict[str, kind]),
            ({value: {"b": [value]}}, dict[kind, dict[str, list[kind]]]),
        ):
            data = get_customized_encoder(expected).encode(each)
            again = get_customized_decoder(expected if told else Any).decode(data)
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
        message = Chunks(
            KEY,
            {"a": OBJECT_KEY},
            [torch.Size([1, 2])],
            torch.float16,
            [CudaIPCWrapper(tensor)],
            {"more": [torch.Size([3]), (KEY, OBJECT_KEY), {"dtype": torch.int8}, 5, b"x", None]},
        )
        before = repr(message)
        again = get_customized_decoder(Chunks).decode(
            get_customized_encoder(Chunks).encode(message)
        )
        assert again.more["more"].pop(1) == [KEY, OBJECT_KEY]
        assert again.more["more"] == [torch.Size([3]), {"dtype": torch.int8}, 5, b"x", None]
        assert type(again.more["more"][0]) is torch.Size
        assert msgspec.structs.replace(again, more=message.more) == message
        assert repr(message) == before, "the message itself is as it was"

        layout = Layout(torch.Size([4]), OBJECT_KEY, {"key": KEY})
        encoded = get_customized_encoder(Layout).encode(layout)
        assert get_customized_decoder(Layout).decode(encoded) == layout
        fields = {"shape": torch.Size([4]), "key": OBJECT_KEY, "more": {"key": KEY}}
        assert get_customized_decoder(Any).decode(encoded) == fields

    def test_plain_values_are_as_msgspec_encodes_them(self) -> None:
        value = {"a": [1, 2.5, None, True, "x", b"y"], "b": {}, "c": (1,)}
        data = get_customized_encoder(dict).encode(value)
        assert data == msgspec.msgpack.encode(value)
        assert get_customized_decoder(Any).decode(data) == value | {"c": [1]}

    def test_what_comes_from_the_package_is_read(self) -> None:
        """Typed messages of `lmcache_redis.codec` have keys as arrays."""
        data = msgspec.msgpack.encode([KEY, KEY.no_worker_id_version()])
        expected = [KEY, KEY.no_worker_id_version()]
        assert get_customized_decoder(list[IPCCacheEngineKey]).decode(data) == expected

    @pytest.mark.parametrize(
        "value",
        [object(), {"a": [object()]}, torch.complex64, torch.Size([-1]), 1 << 70, "\ud800"],
    )
    def test_what_has_no_encoding_is_refused(self, value: Any) -> None:
        with pytest.raises(FormatError):
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
        with pytest.raises(FormatError, match="not an encoded value"):
            get_customized_decoder(kind).decode(data)

    @pytest.mark.parametrize(
        ("code", "body"),
        [
            (0, b""), (6, b""), (99, b"x"),
            (1, b""), (1, b"complex64"), (1, b"\xff"), (1, b"load"),
            (2, b""), (2, b"\x91\xa1x"), (2, b"\x01"), (2, b"\x91\xff"),
            (2, b"\x91\xcf" + b"\xff" * 8),
            (3, b""), (3, b"\x80"), (4, b""), (4, OBJECT_KEY.to_bytes()), (5, b""), (5, b"x" * 9),
        ],
    )  # fmt: skip
    def test_malformed_extensions_are_refused(self, code: int, body: bytes) -> None:
        data = msgspec.msgpack.encode([msgspec.msgpack.Ext(code, body)])
        for kind in (Any, list[torch.dtype], list[ObjectKey]):
            with pytest.raises(FormatError):
                get_customized_decoder(kind).decode(data)

    @given(encodings(), st.sampled_from([Any, torch.dtype, KVCache, ObjectKey, Chunks]))
    @example(get_customized_encoder().encode(OBJECT_KEY), ObjectKey)
    def test_bytes_are_refused_or_a_value_of_the_kind(self, data: bytes, kind: Any) -> None:
        decoder = get_customized_decoder(kind)
        try:
            value = decoder.decode(data)
        except FormatError:
            event("refused")
            return
        event("decoded")
        if kind is not Any and kind is not KVCache:
            assert isinstance(value, kind)
        again = decoder.decode(get_customized_encoder(kind).encode(value))
        assert repr(again) == repr(value)  # repr: nan is not equal to itself

    def test_depth_is_refused(self) -> None:
        with pytest.raises(FormatError):
            get_customized_decoder(Any).decode(b"\x91" * 100_000 + b"\x01")
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(FormatError):
            get_customized_encoder(Any).encode(nested)


def test_a_type_that_cannot_be_told_apart_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="not supported"):
        get_customized_decoder(torch.dtype | torch.Size)


def test_a_handle_needs_no_gpu_to_be_decoded(tensor: Any) -> None:
    handle = CudaIPCWrapper(tensor).handle
    data = get_customized_encoder(Any).encode(CudaIPCWrapper.from_handle(handle))
    decoded = get_customized_decoder(Any).decode(data)
    assert decoded.handle == handle

"""lmcache.v1.multiprocess.custom_types: keys, CUDA tensors and msgpack between processes.

The original pickles; nothing is pickled here. A wrapper is encoded as the plain fields of its
handle, which are validated when decoded. Bad bytes raise FormatError.

The codec encodes these types as msgpack extensions, so that they come back as they were, at any
depth and whether or not the decoder is told a type:

    code  type               body
    1     torch.dtype        its name without "torch.", UTF-8
    2     torch.Size         an array of integers, each below 2^63
    3     CudaIPCWrapper     CudaIPCWrapper.Serialize
    4     IPCCacheEngineKey  IPCCacheEngineKey.Serialize
    5     ObjectKey          ObjectKey.to_bytes
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MAX_SIZE, dtype_name, torch_dtype
from lmcache_redis.compat.cuda_ipc import CudaIPCWrapper
from lmcache_redis.compat.ipc_keys import IPCCacheEngineKey
from lmcache_redis.errors import FormatError, checked_shape

__all__ = [
    "CudaIPCWrapper",
    "IPCCacheEngineKey",
    "KVCache",
    "get_customized_decoder",
    "get_customized_encoder",
]

KVCache = list[CudaIPCWrapper]


class _Extension(NamedTuple):
    code: int
    kind: type
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


_size_decoder = msgspec.msgpack.Decoder(tuple[int, ...])


def _encoded_size(size: torch.Size) -> bytes:
    return msgspec.msgpack.encode(checked_shape(size, MAX_SIZE))


def _decoded_size(body: bytes) -> torch.Size:
    return torch.Size(checked_shape(_size_decoder.decode(body), MAX_SIZE))


_EXTENSIONS = (
    _Extension(
        1,
        torch.dtype,
        lambda dtype: dtype_name(dtype).encode(),
        lambda body: torch_dtype(str(body, "utf-8")),
    ),
    _Extension(2, torch.Size, _encoded_size, _decoded_size),
    _Extension(3, CudaIPCWrapper, CudaIPCWrapper.Serialize, CudaIPCWrapper.Deserialize),
    _Extension(4, IPCCacheEngineKey, IPCCacheEngineKey.Serialize, IPCCacheEngineKey.Deserialize),
    _Extension(5, ObjectKey, ObjectKey.to_bytes, ObjectKey.from_bytes),
)
_BY_CODE = {each.code: each for each in _EXTENSIONS}
_BY_KIND = {each.kind: each for each in _EXTENSIONS}


class CustomizedEncoder:
    """A msgpack encoder, also for the types of the table above."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_extension)

    def encode(self, obj: Any) -> bytes:
        """Encodes a value. Raises FormatError for one of a type that has no encoding."""
        try:
            return self._encoder.encode(_with_extensions(obj))
        except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise FormatError(f"a value that cannot be encoded: {error}") from None


class CustomizedDecoder:
    """A msgpack decoder for values of one type. Raises TypeError for one without a decoding."""

    def __init__(self, expected: Any) -> None:
        msgspec.msgpack.Decoder(
            expected, dec_hook=_as_expected
        )  # raises now, not at the first value
        self._expected = expected
        self._decoder = msgspec.msgpack.Decoder(ext_hook=_decode_extension)

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Decodes one value. Raises FormatError for other bytes, or a value of another type."""
        try:
            value = self._decoder.decode(data)
            # Not in one step: msgspec decodes no extension to a type that it knows itself.
            return msgspec.convert(value, self._expected, dec_hook=_as_expected)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not an encoded value: {error}") from None


def get_customized_encoder(type: Any = Any) -> CustomizedEncoder:
    """An encoder for values of any type: encoding needs no schema."""
    return CustomizedEncoder()


def get_customized_decoder(type: Any = Any) -> CustomizedDecoder:
    """A decoder for values of this type."""
    return CustomizedDecoder(type)


class _Extended:
    """A value to be encoded by `_encode_extension`: msgspec encodes what it knows by itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _with_extensions(value: Any) -> Any:
    """The value with `_Extended` around each part that msgspec would encode as an array."""
    if isinstance(value, (torch.Size, IPCCacheEngineKey, ObjectKey)):
        return _Extended(value)
    if isinstance(value, dict):
        return {_with_extensions(key): _with_extensions(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_extensions(each) for each in value]
    if isinstance(value, (tuple, set, frozenset)):
        return tuple(_with_extensions(each) for each in value)
    if isinstance(value, msgspec.Struct):
        return _replaced(value, value.__struct_fields__, msgspec.structs.force_setattr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        return _replaced(value, names, object.__setattr__)
    return value


def _replaced(
    value: Any, names: tuple[str, ...], set_field: Callable[[Any, str, Any], None]
) -> Any:
    """A copy with extensions in its fields: neither frozen fields nor checks stand in the way."""
    replaced = copy.copy(value)
    for name in names:
        set_field(replaced, name, _with_extensions(getattr(value, name)))
    return replaced


def _encode_extension(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, _Extended):
        value = value.value
    extension = _BY_KIND.get(type(value))
    if extension is None:
        raise TypeError(f"{type(value).__name__} has no encoding")
    return msgspec.msgpack.Ext(extension.code, extension.encode(value))


def _decode_extension(code: int, data: memoryview) -> Any:
    extension = _BY_CODE.get(code)
    if extension is None:
        raise FormatError(f"extension type {code} is unknown")
    return extension.decode(bytes(data))


def _as_expected(expected: type, value: Any) -> Any:
    if isinstance(value, expected):
        return value
    raise msgspec.ValidationError(f"expected {expected.__name__}, got {type(value).__name__}")

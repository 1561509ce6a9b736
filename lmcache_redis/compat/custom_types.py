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
from typing import Any

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


def _encoded_size(size: torch.Size) -> bytes:
    return msgspec.msgpack.encode(checked_shape(size, MAX_SIZE))


def _decoded_size(body: bytes) -> torch.Size:
    return torch.Size(checked_shape(_size_decoder.decode(body), MAX_SIZE))


_size_decoder = msgspec.msgpack.Decoder(tuple[int, ...])
_ENCODINGS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    torch.dtype: (1, lambda dtype: dtype_name(dtype).encode()),
    torch.Size: (2, _encoded_size),
    CudaIPCWrapper: (3, CudaIPCWrapper.Serialize),
    IPCCacheEngineKey: (4, IPCCacheEngineKey.Serialize),
    ObjectKey: (5, ObjectKey.to_bytes),
}
_DECODINGS: dict[int, Callable[[bytes], Any]] = {
    1: lambda body: torch_dtype(str(body, "utf-8")),
    2: _decoded_size,
    3: CudaIPCWrapper.Deserialize,
    4: IPCCacheEngineKey.Deserialize,
    5: ObjectKey.from_bytes,
}


class CustomizedEncoder:
    """A msgpack encoder, also for the types of the table above."""

    def encode(self, obj: Any) -> bytes:
        """Encodes a value. Raises FormatError for one of a type that has no encoding."""
        try:
            return msgspec.msgpack.encode(_with_extensions(obj), enc_hook=_encode_extension)
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

    def __init__(self, value: Any) -> None:
        self.value = value


def _encode_extension(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, _Extended):
        raise TypeError(f"{type(value).__name__} has no encoding")
    code, encoded = _ENCODINGS[type(value.value)]
    return msgspec.msgpack.Ext(code, encoded(value.value))


def _with_extensions(value: Any) -> Any:
    """The value with `_Extended` around each part that has an extension."""
    if type(value) in _ENCODINGS:
        return _Extended(value)
    if isinstance(value, dict):
        return {_with_extensions(key): _with_extensions(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
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


def _decode_extension(code: int, data: memoryview) -> Any:
    if code not in _DECODINGS:
        raise FormatError(f"extension type {code} is unknown")
    return _DECODINGS[code](bytes(data))


def _as_expected(expected: type, value: Any) -> Any:
    if isinstance(value, expected):
        return value
    raise msgspec.ValidationError(f"expected {expected.__name__}, got {type(value).__name__}")

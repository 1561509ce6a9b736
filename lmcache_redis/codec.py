"""msgpack, also for types that msgspec does not know: torch dtypes and sizes, CUDA IPC wrappers.

``get_customized_encoder(T)`` and ``get_customized_decoder(T)`` encode and decode values of type
``T``: messages, keys, wrappers, and any nesting of these. Nothing is pickled. An extension is a
type code and plain fields, which are validated when decoded.

    code  type             body
    1     torch.dtype      its name without "torch.", UTF-8
    3     CudaIPCWrapper   the fields of CudaIPCHandle

msgspec itself encodes torch.Size (a tuple) and the keys (Structs) as arrays.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.dtypes import dtype_name, torch_dtype
from lmcache_redis.errors import FormatError, WireError

EXT_DTYPE = 1
EXT_CUDA_WRAPPER = 3

_handle_encoder = msgspec.msgpack.Encoder()
_handle_decoder = msgspec.msgpack.Decoder(CudaIPCHandle)


class CustomizedDecoder:
    """A msgpack decoder for one type. It raises only ``WireError``."""

    def __init__(self, expected: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
            expected, dec_hook=_decode_custom, ext_hook=_decode_extension
        )

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """Decodes one value. Raises ``WireError`` for any other bytes."""
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, FormatError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"cannot decode a message: {error}") from error


def get_customized_encoder(expected: Any = None) -> msgspec.msgpack.Encoder:
    """An encoder for values of type ``expected`` (any: encoding needs no schema)."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_custom)


def get_customized_decoder(expected: Any = Any) -> CustomizedDecoder:
    """A decoder for values of type ``expected``."""
    return CustomizedDecoder(expected)


def _encode_custom(value: Any) -> Any:
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return msgspec.msgpack.Ext(EXT_DTYPE, dtype_name(value).encode())
    if kind.__name__ == "CudaIPCWrapper":
        return msgspec.msgpack.Ext(EXT_CUDA_WRAPPER, _handle_encoder.encode(value.handle))
    raise TypeError(f"{kind.__name__} has no encoding")


def _decode_custom(expected: type, value: Any) -> Any:
    # ``value`` is the result of `_decode_extension`, or the plain form of a torch type.
    if isinstance(value, expected):
        return value
    torch = sys.modules.get("torch")
    is_size = torch is not None and expected is torch.Size and isinstance(value, list)
    if is_size and all(type(size) is int for size in value):
        return expected(value)
    raise msgspec.ValidationError(f"expected {expected.__name__}, got {type(value).__name__}")


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == EXT_DTYPE:
        return torch_dtype(str(data, "utf-8"))
    if code == EXT_CUDA_WRAPPER:
        from lmcache_redis.device.cuda_ipc import CudaIPCWrapper

        return CudaIPCWrapper.from_handle(_handle_decoder.decode(data))
    raise msgspec.ValidationError(f"extension type {code} is unknown")

"""Messages as frames; and msgpack, also for types that msgspec does not know.

``encode``, ``split`` and ``decode_...`` are for the frames of `messages`.

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
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.dtypes import dtype_name, torch_dtype
from lmcache_redis.errors import FormatError, WireError
from lmcache_redis.messages import (
    MAGIC,
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    PREAMBLE,
    PROTOCOL_VERSION,
    Answer,
    Message,
    Question,
)

EXT_DTYPE = 1
EXT_CUDA_WRAPPER = 3

_handle_encoder = msgspec.msgpack.Encoder()
_handle_decoder = msgspec.msgpack.Decoder(CudaIPCHandle)


class VersionMismatch(WireError):
    """The peer uses another version of the protocol."""


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


# Messages


class _Envelope(msgspec.Struct):
    call_id: int = 0


_encoder = get_customized_encoder()
_question_decoder = get_customized_decoder(Question)
_answer_decoder = get_customized_decoder(Answer)
_envelope_decoder = get_customized_decoder(_Envelope)


def encode(*messages: Message) -> list[bytes]:
    """The frames of a message: the preamble, and a body for each of ``messages``."""
    return [PREAMBLE, *map(_encoder.encode, messages)]


def split(frames: Sequence[bytes]) -> Sequence[Sequence[bytes]]:
    """The frames of each question of a batch; anything else as it is, for ``decode_question``."""
    if not 2 < len(frames) <= 1 + MAX_BATCH or frames[0] != PREAMBLE:
        return [frames]
    return [(PREAMBLE, body) for body in frames[1:]]


def decode_question(frames: Sequence[bytes]) -> Question:
    """The question in ``frames`` (preamble, body). Raises ``WireError``, ``VersionMismatch``."""
    return cast(Question, _decode(_question_decoder, frames))


def decode_answer(frames: Sequence[bytes]) -> Answer:
    """The answer in ``frames`` (preamble, body). Raises ``WireError``, ``VersionMismatch``."""
    return cast(Answer, _decode(_answer_decoder, frames))


def _decode(decoder: CustomizedDecoder, frames: Sequence[bytes]) -> object:
    if len(frames) != 2 or not frames[0].startswith(MAGIC):
        raise WireError("not a message of lmcache_redis: expected a preamble and a body")
    if frames[0] != PREAMBLE:
        theirs = int.from_bytes(frames[0][len(MAGIC) : len(PREAMBLE)], "big")
        raise VersionMismatch(
            f"the peer uses protocol version {theirs}, this side {PROTOCOL_VERSION}: "
            "install the same lmcache-redis for vLLM and for the agent"
        )
    if len(frames[1]) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(frames[1])} bytes; at most {MAX_MESSAGE_BYTES}")
    return decoder.decode(frames[1])


def call_id_of(frames: Sequence[bytes]) -> int:
    """The ``call_id`` of a message that cannot be decoded; 0 if it has none."""
    try:
        return cast(_Envelope, _envelope_decoder.decode(frames[1])).call_id
    except (WireError, IndexError):
        return 0

"""Messages as frames: a preamble, and a msgpack body for each message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from lmcache_redis.errors import WireError
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

_T = TypeVar("_T")

# What a decoder of msgspec raises for bytes that are no message.
_NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class VersionMismatch(WireError):
    """The peer uses another version of the protocol."""


class _Envelope(msgspec.Struct):
    call_id: int = 0


_encoder = msgspec.msgpack.Encoder()
_question_decoder: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


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
    return _decode(_question_decoder, frames)


def decode_answer(frames: Sequence[bytes]) -> Answer:
    """The answer in ``frames`` (preamble, body). Raises ``WireError``, ``VersionMismatch``."""
    return _decode(_answer_decoder, frames)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frames: Sequence[bytes]) -> _T:
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
    try:
        return decoder.decode(frames[1])
    except _NOT_DECODED as error:
        raise WireError(f"cannot decode a message: {error}") from error


def call_id_of(frames: Sequence[bytes]) -> int:
    """The ``call_id`` of a message that cannot be decoded; 0 if it has none."""
    try:
        return _envelope_decoder.decode(frames[1]).call_id
    except (*_NOT_DECODED, IndexError):
        return 0

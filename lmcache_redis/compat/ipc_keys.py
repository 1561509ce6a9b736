"""`IPCCacheEngineKey`: how LMCache's engines name chunks to its server, by a hash or by token ids.

Nothing of this package sends one: engines send hashes (`messages`). Encoded, it is one MessagePack
array of nine: model_name (1 to 1,024 bytes), world_size (1 to 255), worker_id (below the world
size, or nil for all), chunk_hash (binary, 1 to 63 bytes, or nil), token_ids (array of u32, or nil),
start, end, request_id (text or nil), salt (binary, 0 to 4,096 bytes, empty with a chunk_hash).
Exactly one of chunk_hash and token_ids is not nil; ``0 <= start <= end <=`` number of token ids.
Trailing fields may be left out if they are nil, 0 or empty. request_id does not identify the key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from lmcache_redis.chunks.keys import (
    MAX_WORLD_SIZE,
    ObjectKey,
    check_hash,
    model_name_bytes,
    share_rank,
    token_array,
)
from lmcache_redis.errors import FormatError, check_int

MAX_KEY_TOKENS = 1 << 24
MAX_SALT_BYTES = 4096


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Any, object], bool]:
    def method(self: IPCCacheEngineKey, other: object) -> Any:
        if not isinstance(other, IPCCacheEngineKey):
            return NotImplemented
        return compare(self._identity(), other._identity())

    return method


class IPCCacheEngineKey(
    msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True
):
    """The name that an engine sends: a chunk hash, or tokens `start` to `end` of `token_ids`.

    Exactly one of chunk_hash (1 to 63 bytes) and token_ids (each below 2**32) is set; start and
    end are 0 with a hash. worker_id is below world_size (1 to 255); None means all workers and
    sorts first. request_id identifies a request in logs and sessions; ==, hash and order ignore
    it. salt (0 to 4,096 bytes) stands for everything else that the KV of the tokens depends on;
    it is empty with a chunk_hash, which covers it. Raises FormatError for anything else.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    chunk_hash: bytes | None = None
    token_ids: tuple[int, ...] | None = None
    start: int = 0
    end: int = 0
    request_id: str | None = None
    salt: bytes = b""

    def __post_init__(self) -> None:
        model_name_bytes(self.model_name)
        check_int("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        if self.worker_id is not None:
            check_int("worker_id", self.worker_id, 0, self.world_size - 1)
        if (self.chunk_hash is None) == (self.token_ids is None):
            raise FormatError("a key has either a chunk_hash or token_ids, exactly one of them")
        if self.token_ids is None:
            check_hash(self.chunk_hash)
        elif not isinstance(self.token_ids, tuple) or len(self.token_ids) > MAX_KEY_TOKENS:
            raise FormatError(f"token_ids is a tuple of at most {MAX_KEY_TOKENS} token ids")
        else:
            token_array(self.token_ids)
        if not isinstance(self.salt, bytes) or len(self.salt) > MAX_SALT_BYTES:
            raise FormatError(f"a salt is at most {MAX_SALT_BYTES} bytes, not {self.salt!r:.80}")
        if self.salt and self.token_ids is None:
            raise FormatError("a chunk_hash covers the salt: only token_ids take one")
        check_int("end", self.end, 0, len(self.token_ids or ()))
        check_int("start", self.start, 0, self.end)

    def no_worker_id_version(self) -> IPCCacheEngineKey:
        """The same key for all workers, as a lookup uses it."""
        return msgspec.structs.replace(self, worker_id=None)

    @staticmethod
    def Serialize(obj: IPCCacheEngineKey) -> bytes:
        """A msgpack array of the fields in order. Raises FormatError if one has no encoding."""
        if not isinstance(obj, IPCCacheEngineKey):
            raise FormatError(f"an IPCCacheEngineKey is serialized, not a {type(obj).__name__}")
        try:
            return _ENCODER.encode(obj)
        except (TypeError, UnicodeEncodeError, OverflowError) as error:
            raise FormatError(f"a key that cannot be encoded: {error}") from None

    @staticmethod
    def Deserialize(data: bytes) -> IPCCacheEngineKey:
        """The inverse of `Serialize`. Raises FormatError for any other bytes."""
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise FormatError(f"not an encoded key: {error}") from None

    def _identity(self) -> tuple[object, ...]:
        worker = -1 if self.worker_id is None else self.worker_id
        named = (self.chunk_hash is None, self.chunk_hash or b"", self.token_ids or ())
        tokens = (self.start, self.end, self.salt)
        return (self.model_name, self.world_size, worker, *named, *tokens)

    # order=True would compare request_id, and None with int.
    __eq__ = _comparison(operator.eq)
    __lt__ = _comparison(operator.lt)
    __le__ = _comparison(operator.le)
    __gt__ = _comparison(operator.gt)
    __ge__ = _comparison(operator.ge)

    def __hash__(self) -> int:
        return hash(self._identity())


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(IPCCacheEngineKey)


def ipc_keys_to_object_keys(ipc_keys: Iterable[IPCCacheEngineKey]) -> list[ObjectKey]:
    """The chunks that keys with a chunk hash name, in the order of the keys.

    A key with a worker id gives one ObjectKey; a key without gives one for each worker of its world
    (`share_rank`). Raises FormatError for what is no key, and for a key with token ids, which names
    no chunk until they are hashed (`hash_chunks`).
    """
    object_keys: list[ObjectKey] = []
    for key in ipc_keys:
        if not isinstance(key, IPCCacheEngineKey):
            raise FormatError(f"an IPCCacheEngineKey is converted, not {key!r:.80}")
        if key.chunk_hash is None:
            raise FormatError("a key with token_ids names no chunk until the tokens are hashed")
        for worker in range(key.world_size) if key.worker_id is None else (key.worker_id,):
            rank = share_rank(key.world_size, worker)
            object_keys.append(ObjectKey(key.chunk_hash, key.model_name, rank))
    return object_keys

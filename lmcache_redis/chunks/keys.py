"""Names of chunks and stripes, and their byte encodings (docs/value-format.md).

`ObjectKey` names the chunk of one worker. `IPCCacheEngineKey` is the name that an engine sends
over ZeroMQ: a chunk hash or a range of token ids, of one worker or of all.
The fields of a Redis key, integers big-endian:

    user prefix | b"lmcr1:" | namespace (16) | ObjectKey | stripe index u16
    ObjectKey:  kv_rank u32 | model length u16 | model utf-8 | hash length u8 | hash

All chunks of a worker share everything before the hash: `key_stem`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec

from lmcache_redis.errors import FormatError, check_int

KEY_MAGIC = b"lmcr1:"
NAMESPACE_BYTES = 16
MAX_HASH_BYTES = 63
MAX_MODEL_NAME_BYTES = 1024
MAX_WORLD_SIZE = 0xFF
MAX_STRIPE_INDEX = 0xFFFF
MAX_KEY_TOKENS = 1 << 24
MAX_SALT_BYTES = 4096
INT_HASH_BYTES = 8
CHUNK_HASH_BYTES = 32  # of `hash_chunks`

_HASH_PERSON = b"lmcr1.tokens"
_RANK_AND_NAME_LENGTH = struct.Struct(">IH")
_STRIPE_INDEX = struct.Struct(">H")


class _DataclassFields:
    """The fields of a key as `dataclasses` looks for them."""

    def __get__(self, key: object, kind: type[msgspec.Struct]) -> dict[str, dataclasses.Field[Any]]:
        return _dataclass_fields(kind)


@functools.cache
def _dataclass_fields(kind: type[msgspec.Struct]) -> dict[str, dataclasses.Field[Any]]:
    """Those of a dataclass like ``kind``. Takes milliseconds, so not before somebody asks."""
    twin = dataclasses.make_dataclass(
        kind.__name__,
        [
            (each.name, each.type, dataclasses.field(default=_default(each.default)))
            for each in msgspec.structs.fields(kind)
        ],
    )
    return {each.name: each for each in dataclasses.fields(twin)}


def _default(default: Any) -> Any:
    return dataclasses.MISSING if default is msgspec.NODEFAULT else default


class ObjectKey(
    msgspec.Struct, frozen=True, order=True, gc=False, array_like=True, forbid_unknown_fields=True
):
    """The name of one worker's chunk: hashable, ordered, immutable.

    chunk_hash has 1 to 63 bytes, model_name 1 to 1,024 bytes of UTF-8, kv_rank 32 bits
    (`ComputeKVRank`). Raises FormatError for anything else.
    """

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    # As in LMCache: replace, asdict and fields take it.
    __dataclass_fields__: ClassVar = _DataclassFields()

    def __post_init__(self) -> None:
        _check_hash(self.chunk_hash)
        _model_name_bytes(self.model_name)
        check_int("kv_rank", self.kv_rank, 0, 0xFFFF_FFFF)

    @staticmethod
    def IntHash2Bytes(chunk_hash: int) -> bytes:
        """Eight bytes, big-endian. Raises FormatError unless 0 <= chunk_hash < 2**64."""
        check_int("an integer chunk hash", chunk_hash, 0, 0xFFFF_FFFF_FFFF_FFFF)
        return chunk_hash.to_bytes(INT_HASH_BYTES, "big")

    @staticmethod
    def Bytes2IntHash(chunk_hash: bytes) -> int:
        """The inverse of `IntHash2Bytes`. Raises FormatError unless given one to eight bytes."""
        if not isinstance(chunk_hash, bytes) or not 1 <= len(chunk_hash) <= INT_HASH_BYTES:
            raise FormatError(
                f"an integer chunk hash has 1 to {INT_HASH_BYTES} bytes, not {chunk_hash!r:.80}"
            )
        return int.from_bytes(chunk_hash, "big")

    @staticmethod
    def ComputeKVRank(
        world_size: int, global_rank: int, local_world_size: int, local_rank: int
    ) -> int:
        """32 bits: the four arguments, eight bits each, the first in the most significant bits.

        Raises FormatError for a world over 255 workers, for more of them on the node than in the
        world, and for a rank outside its world.
        """
        check_int("world_size", world_size, 1, MAX_WORLD_SIZE)
        check_int("global_rank", global_rank, 0, world_size - 1)
        check_int("local_world_size", local_world_size, 1, world_size)
        check_int("local_rank", local_rank, 0, local_world_size - 1)
        return world_size << 24 | global_rank << 16 | local_world_size << 8 | local_rank

    def to_bytes(self) -> bytes:
        """The ObjectKey part of a Redis key; `from_bytes` is its exact inverse."""
        return _before_hash(self.model_name, self.kv_rank, len(self.chunk_hash)) + self.chunk_hash

    @classmethod
    def from_bytes(cls, data: bytes) -> ObjectKey:
        """Decodes a key. Raises FormatError unless `data` is exactly the `to_bytes` of some key."""
        fixed = _RANK_AND_NAME_LENGTH.size
        if len(data) < fixed:
            raise FormatError(f"an ObjectKey has at least {fixed} bytes, not {len(data)}")
        kv_rank, name_length = _RANK_AND_NAME_LENGTH.unpack_from(data)
        hash_at = fixed + name_length + 1
        if len(data) < hash_at or len(data) != hash_at + data[hash_at - 1]:
            raise FormatError(f"the lengths in an ObjectKey do not add up to {len(data)} bytes")
        try:
            model_name = str(data[fixed : hash_at - 1], "utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"the model name in an ObjectKey is not UTF-8: {error}") from None
        return cls(bytes(data[hash_at:]), model_name, kv_rank)


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
    __dataclass_fields__: ClassVar = _DataclassFields()

    def __post_init__(self) -> None:
        _model_name_bytes(self.model_name)
        check_int("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        if self.worker_id is not None:
            check_int("worker_id", self.worker_id, 0, self.world_size - 1)
        if (self.chunk_hash is None) == (self.token_ids is None):
            raise FormatError("a key has either a chunk_hash or token_ids, exactly one of them")
        if self.token_ids is not None:
            _check_tokens(self.token_ids)
        else:
            _check_hash(self.chunk_hash)
        _check_salt(self.salt, by_hash=self.token_ids is None)
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


def share_rank(shares: int, share: int) -> int:
    """The kv_rank of share number `share` of `shares` of a chunk's bytes.

    The local half repeats the global half: the bytes do not depend on the node of the worker, so
    engines that place their workers differently share chunks. Raises FormatError for a number
    over 8 bits.
    """
    check_int("the number of shares", shares, 0, 0xFF)
    check_int("the number of a share", share, 0, 0xFF)
    return (shares << 8 | share) * 0x0001_0001


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
        ranks = _kv_ranks(key.world_size, key.worker_id)
        object_keys += [ObjectKey(key.chunk_hash, key.model_name, rank) for rank in ranks]
    return object_keys


def hash_chunks(
    token_ids: Iterable[int], chunk_size_tokens: int, *, salt: bytes = b""
) -> list[bytes]:
    """One hash of 32 bytes per full chunk of token ids, for engines without block hashes.

    root      = H(u32 chunk_size_tokens | salt)
    hash of i = H(hash of chunk i-1, or root | token ids of chunk i, u32 each)

    H is BLAKE2b (RFC 7693) with a digest of 32 bytes and the personalization b"lmcr1.tokens";
    integers are little-endian. A hash covers all tokens up to the end of its chunk. It is the
    same in every process and on every machine. Tokens past the last full chunk are ignored.

    salt distinguishes KV that depends on more than tokens (LoRA, tenants, images). Raises
    FormatError unless 0 <= token id < 2**32 and 0 < chunk_size_tokens < 2**32.
    """
    if type(chunk_size_tokens) is not int or not 0 < chunk_size_tokens < 1 << 32:
        raise FormatError(f"a chunk of {chunk_size_tokens!r} tokens; 1 to 2**32 - 1 can be hashed")
    array_of_tokens = _token_array(token_ids)
    if sys.byteorder == "big":
        array_of_tokens.byteswap()
    tokens = memoryview(array_of_tokens).cast("B")
    blake = functools.partial(blake2b, digest_size=CHUNK_HASH_BYTES, person=_HASH_PERSON)
    parent = blake(chunk_size_tokens.to_bytes(4, "little") + salt).digest()
    chunk_bytes = chunk_size_tokens * array_of_tokens.itemsize
    hashes: list[bytes] = []
    for end in range(chunk_bytes, len(tokens) + 1, chunk_bytes):
        chain = blake(parent)
        chain.update(tokens[end - chunk_bytes : end])
        parent = chain.digest()
        hashes.append(parent)
    return hashes


def key_stem(
    namespace: bytes, model_name: str, kv_rank: int, hash_len: int, key_prefix: bytes = b""
) -> bytes:
    """The part of a Redis key before the chunk hash. Stem + hash is the chunk key.

    namespace is 16 bytes derived from the layout fingerprint. Raises FormatError for a field
    out of range.
    """
    if len(namespace) != NAMESPACE_BYTES:
        raise FormatError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
    return key_prefix + KEY_MAGIC + namespace + _before_hash(model_name, kv_rank, hash_len)


def stripe_key(chunk_key: bytes, stripe_index: int) -> bytes:
    """The Redis key of one stripe of the chunk with this `chunk_key` (stem + hash).

    Raises FormatError for an index over 16 bits.
    """
    check_int("stripe_index", stripe_index, 0, MAX_STRIPE_INDEX)
    return chunk_key + _STRIPE_INDEX.pack(stripe_index)


def parse_stripe_key(data: bytes, key_prefix: bytes = b"") -> tuple[bytes, ObjectKey, int]:
    """(namespace, key, stripe index) of a Redis key. Raises FormatError for any other bytes."""
    start = key_prefix + KEY_MAGIC
    object_at = len(start) + NAMESPACE_BYTES
    index_at = len(data) - _STRIPE_INDEX.size
    if data[: len(start)] != start or index_at < object_at:
        raise FormatError("not the key of a stripe: it has another prefix or is too short")
    (stripe_index,) = _STRIPE_INDEX.unpack_from(data, index_at)
    namespace = bytes(data[len(start) : object_at])
    return namespace, ObjectKey.from_bytes(data[object_at:index_at]), stripe_index


def _before_hash(model_name: str, kv_rank: int, hash_len: int) -> bytes:
    name = _model_name_bytes(model_name)
    check_int("kv_rank", kv_rank, 0, 0xFFFF_FFFF)
    check_int("the length of a chunk hash", hash_len, 1, MAX_HASH_BYTES)
    return _RANK_AND_NAME_LENGTH.pack(kv_rank, len(name)) + name + bytes((hash_len,))


def _model_name_bytes(model_name: str) -> bytes:
    try:
        name = model_name.encode("utf-8")
    except (AttributeError, UnicodeEncodeError):
        raise FormatError(f"a model name is text that UTF-8 encodes, not {model_name!r}") from None
    if not 1 <= len(name) <= MAX_MODEL_NAME_BYTES:
        raise FormatError(
            f"a model name has 1 to {MAX_MODEL_NAME_BYTES} bytes of UTF-8, not {len(name)}"
        )
    return name


@functools.lru_cache(maxsize=1024)
def _kv_ranks(world_size: int, worker_id: int | None) -> tuple[int, ...]:
    workers = range(world_size) if worker_id is None else (worker_id,)
    return tuple(share_rank(world_size, worker) for worker in workers)


def _check_hash(chunk_hash: bytes | None) -> None:
    if not isinstance(chunk_hash, bytes) or not 1 <= len(chunk_hash) <= MAX_HASH_BYTES:
        raise FormatError(f"a chunk hash is 1 to {MAX_HASH_BYTES} bytes, not {chunk_hash!r:.80}")


def _check_salt(salt: bytes, *, by_hash: bool) -> None:
    if not isinstance(salt, bytes) or len(salt) > MAX_SALT_BYTES:
        raise FormatError(f"a salt is at most {MAX_SALT_BYTES} bytes, not {salt!r:.80}")
    if salt and by_hash:
        raise FormatError("a chunk_hash covers the salt: only token_ids take one")


def _check_tokens(token_ids: tuple[int, ...]) -> None:
    if not isinstance(token_ids, tuple) or len(token_ids) > MAX_KEY_TOKENS:
        raise FormatError(f"token_ids is a tuple of at most {MAX_KEY_TOKENS} token ids")
    _token_array(token_ids)


def _token_array(token_ids: Iterable[int]) -> array[int]:
    """Native unsigned integers of 32 bits."""
    tokens = array("I")
    try:
        # The constructor would read bytes as machine words; extend does not.
        tokens.extend(token_ids)
    except (TypeError, OverflowError) as error:
        raise FormatError(f"a token id is 0 to 2**32 - 1: {error}") from None
    return tokens

"""What every tier of chunks can do: the contract, and the tensor calls made of byte calls.

A tier keeps chunks by `ObjectKey`. What a chunk's bytes are, its `RemoteMetadata` says, which is
kept beside them. The byte calls move payloads between the tier and buffers of the caller, without
a copy of their own; the tensor calls allocate and call them.

Every call may come from any thread, at the same time as any other; an iterator of `batched_get` is
for one thread at a time. A tier behind a network answers each call by a deadline of its own; a
disk that hangs keeps the calls that are in it and refuses others. No call raises for what is
stored, for a server or disk that fails, or for a chunk that does not fit: then a put stores
nothing and says so, and a get is a miss. Wrong use raises: FormatError for a key or a chunk that
has no encoding, RuntimeError after `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata

if TYPE_CHECKING:
    import torch

# Given the metadata of a chunk that was found, gives writable buffers for its payload, in order
# and together `metadata.length` bytes; None where there is no room, which makes it a miss.
Allocate = Callable[[RemoteMetadata], Sequence[memoryview] | None]


class LMCBackendInterface(ABC):
    """One tier.

    dst_device: where `get` and `batched_get` bring tensors, "cpu" or a CUDA device. fmt: the
    memory format that `put` writes into the metadata of tensors.
    """

    def __init__(self, dst_device: str = "cpu", fmt: MemoryFormat = MemoryFormat.UNDEFINED) -> None:
        self.dst_device = dst_device
        self.fmt = fmt

    # ---------------------------------------------------------------- bytes

    @abstractmethod
    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        """Store a chunk, in place of the one under this key, if any.

        payload: contiguous buffers in order, together `metadata.length` bytes; they are the
        caller's again on return, also where blocking is False. blocking: on return the chunk can
        be had (True) or was not stored (False). Otherwise True means that it was accepted: a
        worker stores it soon, or drops it where that fails; until then it may or may not be had.
        """

    @abstractmethod
    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        """Load a chunk into the buffers that `allocate` gives; None is a miss.

        `allocate` is called at most once, on this thread. After a miss the buffers hold
        anything.
        """

    @abstractmethod
    def contains(self, key: ObjectKey) -> bool:
        """Whether a get would most likely find the chunk. Changes nothing, also not the LRU."""

    @abstractmethod
    def remove(self, key: ObjectKey) -> bool:
        """Forget a chunk, and a put of it that is still waiting; whether there was one.

        False also where the tier does not answer in time: the chunk may still be there then.
        """

    @abstractmethod
    def list(self) -> list[ObjectKey]:
        """The keys of all chunks, in no order. Those put or removed meanwhile may be missing."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put before is stored or dropped; False if that takes longer."""

    @abstractmethod
    def close(self) -> None:
        """Flush for a bounded time, end all threads and let everything go. Idempotent."""

    # -------------------------------------------------------------- tensors

    def put(self, key: ObjectKey, kv_chunk: torch.Tensor, blocking: bool = True) -> bool:
        """Store a tensor of one to four dimensions, none of them a batch. See `put_bytes`."""
        from lmcache_redis.backends.tensors import tensor_bytes, tensor_metadata

        return self.put_bytes(
            key, tensor_metadata(kv_chunk, self.fmt), (tensor_bytes(kv_chunk),), blocking
        )

    def get(self, key: ObjectKey) -> torch.Tensor | None:
        """A tensor of its own memory on `dst_device`; None is a miss."""
        from lmcache_redis.backends.tensors import TensorAllocation

        allocation = TensorAllocation()
        if self.get_bytes(key, allocation) is None:
            return None
        return allocation.tensor_on(self.dst_device)

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; how many were stored or, without blocking, accepted.

        Of one key the last is there. Tensors are the caller's again on return, or after an error
        of the iterator, which goes through.
        """
        return sum(self.put(key, kv_chunk, blocking) for key, kv_chunk in keys_and_chunks)

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """`get` for each, in order; each is yielded as soon as it is there."""
        return map(self.get, keys)

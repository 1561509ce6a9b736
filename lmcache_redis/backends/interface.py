"""The contract of every backend, and the tensor calls, which are made of the byte calls.

A backend keeps chunks by `ObjectKey`, each with its `RemoteMetadata`, which says what its bytes
are. The byte calls move payloads between the backend and the caller's buffers, without a copy of
their own; the tensor calls allocate the buffers.

Calls may come from any thread and at the same time; an iterator of `batched_get` is for one thread
at a time. A backend behind a network ends each call by a deadline of its own; a disk that hangs
keeps the calls that are in it, and others are refused. No call raises because of what is stored,
because a server or a disk fails, or because a chunk does not fit: then a put stores nothing and
returns False, and a get is a miss. Wrong use raises: FormatError for a key or a chunk that has no
encoding, RuntimeError after `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata

if TYPE_CHECKING:
    import torch

# Given the metadata of a chunk that was found, returns writable buffers for its payload, in order
# and together `metadata.length` bytes. None: there is no room, and the get is a miss.
Allocate = Callable[[RemoteMetadata], Sequence[memoryview] | None]


class LMCBackendInterface(ABC):
    """See the module.

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
        caller's again on return, also where blocking is False. blocking: the chunk is stored on
        return, or False. Otherwise True means accepted: it is stored in the background, or dropped
        where that fails; until then gets may or may not find it.
        """

    @abstractmethod
    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        """Load a chunk into the buffers that `allocate` returns; None is a miss.

        `allocate` is called at most once, on this thread. After a miss the buffers hold
        anything.
        """

    @abstractmethod
    def contains(self, key: ObjectKey) -> bool:
        """Whether a get would most likely find the chunk. Changes nothing, also not the LRU."""

    @abstractmethod
    def remove(self, key: ObjectKey) -> bool:
        """Remove a chunk, and drop a put of it that waits; whether there was one.

        False also where the backend does not answer in time: then the chunk may still be there.
        """

    @abstractmethod
    def list(self) -> list[ObjectKey]:
        """The keys of all chunks, in no order. Those put or removed meanwhile may be missing."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put before is stored or dropped; False if that takes longer."""

    @abstractmethod
    def close(self) -> None:
        """Flush for a bounded time, end all threads and free everything. Idempotent."""

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

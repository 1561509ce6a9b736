"""The contract of every backend, and the tensor calls, which are implemented by the byte calls.

A backend keeps chunks by `ObjectKey`, each with its `RemoteMetadata`, which describes its bytes.
The byte calls copy payloads between the backend's memory and the caller's buffers. The tensor calls
allocate the buffers, and copy no tensor on the CPU.

Calls may come from several threads at once; an iterator of `batched_get` is for one thread at a
time. Every call ends by a deadline. No call raises because of stored bytes, because a server or a
disk fails, or because a chunk does not fit: then a put stores nothing and returns False, and a get
is a miss. Misuse raises: FormatError for a key or a chunk without an encoding, RuntimeError after
`close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from lmcache_redis.chunks.dtypes import dtype_name, torch_dtype
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MAX_DIMS, MemoryFormat, RemoteMetadata
from lmcache_redis.errors import FormatError

if TYPE_CHECKING:
    import torch

# Takes the metadata of a chunk that was found and returns writable buffers for its payload, in
# order, `metadata.length` bytes in total. None: there is no room, and the get is a miss.
Allocate = Callable[[RemoteMetadata], Sequence[memoryview] | None]


class TensorAllocation:
    """An `Allocate` that creates a tensor of the shape and dtype in the metadata."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    def __call__(self, metadata: RemoteMetadata) -> Sequence[memoryview] | None:
        import torch

        if len(metadata.shapes) != 1 or not metadata.shapes[0]:
            return None  # stored as bytes: not a tensor
        try:
            tensor = torch.empty(metadata.shapes[0], dtype=torch_dtype(metadata.dtype_names[0]))
        except (FormatError, MemoryError, RuntimeError):
            return None
        if tensor.numel() * tensor.element_size() != metadata.length:
            return None
        self._tensor = tensor
        return (memoryview(tensor.view(-1).view(torch.uint8).numpy()),)

    def tensor_on(self, device: str) -> torch.Tensor:
        """The tensor on a device, after a get has filled it."""
        if self._tensor is None:
            raise RuntimeError("nothing was allocated")
        return self._tensor if device == "cpu" else self._tensor.to(device)


class LMCBackendInterface(ABC):
    """See the module.

    dst_device: where `get` and `batched_get` place tensors: "cpu" or a CUDA device. fmt: the memory
    format that `put` writes into the metadata of tensors.
    """

    def __init__(self, dst_device: str = "cpu", fmt: MemoryFormat = MemoryFormat.UNDEFINED) -> None:
        self.dst_device = dst_device
        self.fmt = fmt
        self._closed = False

    # ---------------------------------------------------------------- bytes

    @abstractmethod
    def put_bytes(
        self,
        key: ObjectKey,
        metadata: RemoteMetadata,
        payload: Sequence[memoryview],
        blocking: bool = True,
    ) -> bool:
        """Store a chunk, replacing the one under this key. Return whether it was stored.

        payload: contiguous buffers in order, `metadata.length` bytes in total; on return the caller
        may reuse them. blocking: the chunk is stored on return. Otherwise True means accepted: it
        is stored in the background, or dropped if that fails; until then gets may or may not find
        it.
        """

    @abstractmethod
    def get_bytes(self, key: ObjectKey, allocate: Allocate) -> RemoteMetadata | None:
        """Load a chunk into the buffers that `allocate` returns; None is a miss.

        `allocate` is called at most once, on this thread. After a miss the buffers' contents are
        undefined.
        """

    @abstractmethod
    def contains(self, key: ObjectKey) -> bool:
        """Whether a get would most likely find the chunk. Does not count as a use."""

    @abstractmethod
    def remove(self, key: ObjectKey) -> bool:
        """Remove a chunk and drop a queued put of it; return whether there was one.

        Also False if the backend does not answer in time: the chunk may then still exist.
        """

    @abstractmethod
    def list(self) -> list[ObjectKey]:
        """The keys of all chunks, in any order. Those put or removed meanwhile may be missing."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until all earlier puts are stored or dropped; False after the timeout."""

    @abstractmethod
    def close(self) -> None:
        """Flush for a bounded time, end all threads and free all memory. Idempotent."""

    # -------------------------------------------------------------- tensors

    def put(self, key: ObjectKey, kv_chunk: torch.Tensor, blocking: bool = True) -> bool:
        """Store a tensor of one to eight dimensions, without a batch dimension. See `put_bytes`."""
        return self.put_bytes(key, *self._encoded(kv_chunk), blocking)

    def get(self, key: ObjectKey) -> torch.Tensor | None:
        """The chunk as a tensor in new memory on `dst_device`; None is a miss."""
        allocation = TensorAllocation()
        if self.get_bytes(key, allocation) is None:
            return None
        return allocation.tensor_on(self.dst_device)

    def batched_put(
        self, keys_and_chunks: Iterable[tuple[ObjectKey, torch.Tensor]], blocking: bool = True
    ) -> int:
        """`put` for each; return how many were stored or, without blocking, accepted.

        The last put of a key wins. The caller may reuse the tensors on return, or after an error of
        the iterator, which is raised.
        """
        return sum(self.put(key, kv_chunk, blocking) for key, kv_chunk in keys_and_chunks)

    def batched_get(self, keys: Iterable[ObjectKey]) -> Iterator[torch.Tensor | None]:
        """`get` for each, in order; each is yielded as soon as it is loaded."""
        return map(self.get, keys)

    def _encoded(self, kv_chunk: torch.Tensor) -> tuple[RemoteMetadata, tuple[memoryview]]:
        """The metadata and the elements, in C order; contiguous ones on the CPU are not copied.

        Raises FormatError for a tensor without an encoding.
        """
        import torch

        if not 1 <= kv_chunk.dim() <= MAX_DIMS or not kv_chunk.numel():
            raise FormatError(
                f"a chunk has 1 to {MAX_DIMS} dimensions and at least one element, "
                f"not the shape {tuple(kv_chunk.shape)}"
            )
        shape, name = tuple(kv_chunk.shape), dtype_name(kv_chunk.dtype)
        metadata = RemoteMetadata(kv_chunk.nbytes, [shape], [name], self.fmt)
        flat = kv_chunk.detach().contiguous().cpu().view(-1).view(torch.uint8)
        return metadata, (memoryview(flat.numpy()),)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the backend is closed: {type(self).__name__}")

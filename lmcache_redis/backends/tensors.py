"""Tensors as bytes and back, without a copy on the CPU. The only backend module that uses torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmcache_redis.dtypes import dtype_name, torch_dtype
from lmcache_redis.errors import FormatError
from lmcache_redis.protocol import MAX_DIMS, MemoryFormat, RemoteMetadata


def tensor_metadata(tensor: torch.Tensor, fmt: MemoryFormat) -> RemoteMetadata:
    """The metadata of a tensor as one group. Raises FormatError if it has no encoding."""
    if not 1 <= tensor.dim() <= MAX_DIMS or not tensor.numel():
        raise FormatError(
            f"a chunk has 1 to {MAX_DIMS} dimensions and at least one element, "
            f"not the shape {tuple(tensor.shape)}"
        )
    length = tensor.numel() * tensor.element_size()
    return RemoteMetadata(length, [tuple(tensor.shape)], [dtype_name(tensor.dtype)], fmt)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements in C order; for a contiguous tensor on the CPU, a view of its memory."""
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())


class TensorAllocation:
    """An `Allocate` that creates a tensor of the shape and dtype in the metadata."""

    def __init__(self) -> None:
        self._tensor: torch.Tensor | None = None

    def __call__(self, metadata: RemoteMetadata) -> Sequence[memoryview] | None:
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

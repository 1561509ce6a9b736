# SPDX-License-Identifier: Apache-2.0
"""The callers' buffers and tensors: checks before a backend uses them, and copies.

Copies are numpy's, which releases the GIL. Assigning to a slice of a memoryview holds it for the
whole copy: 6 ms for 32 MiB, in which no other Python thread runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_redis.chunks.metadata import (
    MAX_DIMS,
    MemoryFormat,
    RemoteMetadata,
    dtype_name,
    torch_dtype,
)
from lmcache_redis.errors import ConfigError, FormatError

if TYPE_CHECKING:
    import torch

# Takes the metadata of a chunk that was found and returns writable buffers for its payload, in
# order, `metadata.length` bytes in total. None: there is no room, and the get is a miss.
Allocate = Callable[[RemoteMetadata], Sequence[memoryview] | None]


def require_torch() -> ModuleType:
    """The module. Raises ConfigError if it cannot be imported."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError(
            f"tensors need torch ({error}): `pip install torch`, or keep bytes (put_bytes, "
            "get_bytes)"
        ) from None


class TensorAllocation:
    """An `Allocate` that creates a tensor of the shape and dtype in the metadata.

    tensor: None before the call, and if the chunk is not a tensor.
    """

    tensor: torch.Tensor | None = None

    def __call__(self, metadata: RemoteMetadata) -> Sequence[memoryview] | None:
        torch = require_torch()
        if len(metadata.shapes) != 1 or not metadata.shapes[0]:
            return None  # stored as bytes: not a tensor
        try:
            tensor = torch.empty(metadata.shapes[0], dtype=torch_dtype(metadata.dtype_names[0]))
        except (FormatError, MemoryError, RuntimeError):
            return None
        if tensor.nbytes != metadata.length:
            return None
        self.tensor = tensor
        return (memoryview(tensor.view(-1).view(torch.uint8).numpy()),)


def encoded(kv_chunk: torch.Tensor) -> tuple[RemoteMetadata, list[memoryview]]:
    """The metadata and the elements, in C order; contiguous ones on the CPU are not copied.

    Raises FormatError for a tensor without an encoding, and as `require_torch`.
    """
    torch = require_torch()
    if not isinstance(kv_chunk, torch.Tensor) or kv_chunk.layout is not torch.strided:
        found = getattr(kv_chunk, "layout", f"a {type(kv_chunk).__name__}")
        raise FormatError(f"a chunk is one dense tensor, not {found}: stack those of its layers")
    if not 1 <= kv_chunk.dim() <= MAX_DIMS or not kv_chunk.numel():
        raise FormatError(
            f"a chunk has 1 to {MAX_DIMS} dimensions and at least one element, "
            f"not the shape {tuple(kv_chunk.shape)}"
        )
    shape, name = tuple(kv_chunk.shape), dtype_name(kv_chunk.dtype)
    flat = kv_chunk.detach().contiguous().cpu().view(-1).view(torch.uint8)
    metadata = RemoteMetadata(kv_chunk.nbytes, [shape], [name], MemoryFormat.UNDEFINED)
    return metadata, [memoryview(flat.numpy())]


def byte_view(buffer: Any, what: str) -> memoryview:
    """The bytes of a caller's buffer. Raises FormatError if it is no buffer, or not contiguous."""
    try:
        view = memoryview(buffer)
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as problem:
        raise FormatError(f"{what} is a contiguous buffer of bytes: {problem}") from None


def byte_views(buffers: Iterable[memoryview], nbytes: int, what: str) -> list[memoryview]:
    """The buffers as views of bytes, without empty ones. Copies nothing.

    what: they are, for errors. Raises FormatError if one is not contiguous, or unless their total
    is `nbytes`.
    """
    try:
        # An empty view is skipped: a view with a zero in its shape cannot be cast.
        views = [memoryview(each).cast("B") for each in buffers if memoryview(each).nbytes]
    except TypeError as problem:
        raise FormatError(f"{what} is not contiguous buffers: {problem}") from None
    found = sum(view.nbytes for view in views)
    if found != nbytes:
        raise FormatError(f"{what} has {found} bytes, and the chunk {nbytes} bytes")
    return views


def copy(block: memoryview, views: Sequence[memoryview], *, into_block: bool) -> None:
    """Copies between a block and views, in order. No view is empty; their total is the block's."""
    whole, start = np.frombuffer(block, np.uint8), 0
    for view in views:
        part, other = whole[start : start + view.nbytes], np.frombuffer(view, np.uint8)
        np.copyto(*(part, other) if into_block else (other, part))
        start += view.nbytes

"""Reading torch tensors as plain numbers: the only place that asks a tensor where it lies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcache_redis.device.blocks import TensorView
from lmcache_redis.dtypes import dtype_name
from lmcache_redis.errors import DeviceError, FormatError

if TYPE_CHECKING:
    import torch


def view_tensors(
    kv_caches: Mapping[str, torch.Tensor], device_type: str
) -> tuple[list[TensorView], list[torch.UntypedStorage]]:
    """Each tensor as a `TensorView`, and the distinct storages in order of appearance.

    Raises:
        DeviceError: no tensors; a value that is no dense tensor on ``device_type``; an unknown
            dtype; or storages that are different objects over the same memory, which
            cannot be moved or exported as one.
    """
    if not kv_caches:
        raise DeviceError("the engine registered no KV cache tensors")
    views: list[TensorView] = []
    storages: list[torch.UntypedStorage] = []
    numbers: dict[int, int] = {}
    for name, tensor in kv_caches.items():
        if not hasattr(tensor, "untyped_storage"):
            raise DeviceError(
                f"KV cache {name!r} is a {type(tensor).__name__}, not one tensor: layers of this "
                "kind (Mamba states, for instance) are not supported"
            )
        if tensor.device.type != device_type:
            raise DeviceError(f"KV cache {name!r} is on {tensor.device}, not on {device_type}")
        try:
            dtype = dtype_name(tensor.dtype)
        except FormatError as error:
            raise DeviceError(f"KV cache {name!r}: {error}") from error
        storage = tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(storages))
        if number == len(storages):
            storages.append(storage)
        itemsize = tensor.element_size()
        views.append(
            TensorView(
                name=name,
                dtype=dtype,
                itemsize=itemsize,
                storage=number,
                offset=tensor.storage_offset() * itemsize,
                shape=tuple(tensor.shape),
                strides=tuple(stride * itemsize for stride in tensor.stride()),
            )
        )
    _check_apart(storages)
    return views, storages


def _check_apart(storages: list[torch.UntypedStorage]) -> None:
    ranges = sorted((storage.data_ptr(), storage.nbytes()) for storage in storages)
    for (address, nbytes), (following, _) in itertools.pairwise(ranges):
        if address + nbytes > following:
            raise DeviceError(
                "two storages of the KV cache lie over the same memory: it cannot be shared"
            )

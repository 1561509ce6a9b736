# SPDX-License-Identifier: Apache-2.0
"""Device memory of either kind: an engine exports its KV cache, the agent opens it.

Only this module chooses between devices. It imports torch only for tensors and GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from lmcache_redis.device import export
from lmcache_redis.device.blocks import PagedSegments, find_segments, view_tensors
from lmcache_redis.device.calls import DeviceContext
from lmcache_redis.device.cpu import CpuDevice, share_storages
from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import Gpus
from lmcache_redis.device.handles import SharedMemoryHandle, StorageHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.shares import HeadShares, find_shares
from lmcache_redis.device.signals import Signals, signals_of
from lmcache_redis.errors import DeviceError

if TYPE_CHECKING:
    import torch


class ExportedCaches(NamedTuple):
    """What a registration needs of an engine's KV cache.

    groups: each group's pages. signals: of the GPU; None on the CPU.
    """

    device: str
    storages: tuple[StorageHandle, ...]
    groups: tuple[PagedSegments, ...]
    signals: Signals | None


def export_kv_caches(
    groups: Sequence[Mapping[str, torch.Tensor]],
    num_blocks: int,
    block_strides: Mapping[str, int] | None = None,
    cuts: Sequence[HeadShares | None] | None = None,
) -> ExportedCaches:
    """Make an engine's tensors readable and writable by the agent.

    groups: for each group the tensors by name, in the order of its parts. Groups may overlay each
    other: a block belongs to one of them at a time. num_blocks, block_strides: as in
    `lmcache_redis.device.blocks.find_segments`. cuts: how each group is cut by head, if it is.
    Raises DeviceError if the tensors are not on one device, or cannot be exported.
    """
    tensors = {name: tensor for group in groups for name, tensor in group.items()}
    views, storages = view_tensors(tensors)
    gpus = {export.gpu_of(tensor) for tensor in tensors.values()}
    if len(gpus) > 1:
        on = sorted({str(tensor.device) for tensor in tensors.values()})
        raise DeviceError(f"a KV cache is on {' and '.join(on)}: only one device is supported")
    gpu = gpus.pop()
    named = {view.name: view for view in views}
    pages = tuple(
        find_shares([named[name] for name in group], num_blocks, cut, block_strides)
        if cut
        else find_segments([named[name] for name in group], num_blocks, block_strides)
        for group, cut in zip(groups, cuts or repeat(None, len(groups)), strict=True)
    )
    if gpu is None:
        return ExportedCaches("cpu", share_storages(storages), pages, None)
    signals = signals_of(gpu)
    return ExportedCaches("cuda", export.export_storages(storages, gpu), pages, signals)


def open_device(
    layouts: Sequence[KVLayout],
    storages: Sequence[StorageHandle],
    signals: SharedMemoryHandle | None,
    gpus: Gpus,
) -> DeviceContext:
    """Map a worker's KV cache, which has a layout for each group.

    signals: the page of an engine on a GPU, see `device.signals`. gpus: those of this agent, which
    workers share. Raises DeviceError if the memory cannot be mapped.
    """
    device = " and ".join(sorted({layout.device for layout in layouts}))
    shared = [storage for storage in storages if isinstance(storage, SharedMemoryHandle)]
    cuda = [storage for storage in storages if not isinstance(storage, SharedMemoryHandle)]
    if device == "cpu" and not cuda:
        return CpuDevice(layouts, shared)
    if device == "cuda" and not shared:
        return CudaDevice(layouts, cuda, gpus, signals)
    raise DeviceError(f"the handles do not fit a layout on {device!r}")

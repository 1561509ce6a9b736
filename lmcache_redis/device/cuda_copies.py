"""The kernels that copy between pages and staging on a GPU, or why there are none.

They need Triton, which needs a C compiler (docs/gpu.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import BlockIds, SegmentTable, Storage
from lmcache_redis.errors import DeviceError

logger = logging.getLogger(__name__)


class PageCopies(Protocol):
    """Enqueues copies on the current CUDA stream; the caller waits. Thread-safe.

    ``staging`` is flat uint8 on the device; chunk ``i`` begins at ``i`` times the chunk's bytes,
    rounded up to 16.
    """

    name: str

    def gather(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        """Pages to staging, except those that are `SKIPPED`."""
        ...

    def scatter(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        """Staging to pages, except those that are `SKIPPED`.

        If a block is named twice, either of its pages may win.
        """
        ...


def page_copies(layout: KVLayout, storages: Sequence[torch.Tensor]) -> PageCopies:
    """Triton's kernels, once they have run.

    layout: checked here against the storages. storages: flat uint8, on one device, one for each
    that the segments name. Raises DeviceError if the layout exceeds its storages, or if Triton
    cannot run a kernel; it then says what to install.
    """
    table = SegmentTable(layout, [Storage(each.data_ptr(), each.numel()) for each in storages])
    try:
        from lmcache_redis.device.cuda_kernels import TritonCopies

        kernels = TritonCopies(table, storages[0].device)
        kernels.warm_up()
    except ImportError as error:
        raise DeviceError(
            f"KV caches on GPUs need Triton, which cannot be imported ({error}): pip install triton"
        ) from error
    except Exception as error:
        # Triton's errors have no common type: no C compiler, no Python headers, a read-only cache
        # directory, an unknown GPU. A compiler's message continues with source.
        logger.debug("Triton cannot run a kernel", exc_info=True)
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise DeviceError(
            f"KV caches on GPUs need Triton, which cannot run a kernel here ({reason}): it needs a "
            "C compiler with its headers (gcc, libc6-dev) and a writable TRITON_CACHE_DIR"
        ) from error
    return kernels

"""Between pages and staging on a GPU: what both ways of copying have in common, and the choice.

`lmcache_redis.device.cuda_kernels` is one launch for a whole chunk; it needs Triton, and Triton a
C compiler. `lmcache_redis.device.cuda_fallback` is torch alone: a launch for each run of segments
that lie alike, with elements of at most 8 bytes. Both put the same bytes in the same places.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import SegmentTable, Storage

logger = logging.getLogger(__name__)


class BlockIds(NamedTuple):
    """The same ids twice, ``[chunks, n_blocks]`` int64: as `pack_ids` made them, and sent.

    ``device`` may still be on its way on the current stream.
    """

    host: npt.NDArray[np.int64]
    device: torch.Tensor


class PageCopies(Protocol):
    """Queues copies on the current stream; the caller waits. Thread-safe.

    ``staging`` is flat uint8 on the device; chunk ``i`` begins at ``i`` times the chunk's bytes,
    rounded up to 16.
    """

    name: str

    def gather(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        """Pages to staging, but for those that are `SKIPPED`."""
        ...

    def scatter(self, block_ids: BlockIds, staging: torch.Tensor) -> None:
        """Staging to pages, but for those that are `SKIPPED`.

        Where a block is named twice, either of its pages may win.
        """
        ...


def page_copies(layout: KVLayout, storages: Sequence[torch.Tensor]) -> PageCopies:
    """Triton's kernels where they run, else torch's. Logs the choice once.

    Args:
        layout: checked here against the storages.
        storages: flat uint8, on one device, one for each that the segments name.

    Raises:
        DeviceError: the layout leaves its storages.
    """
    table = SegmentTable(layout, [Storage(each.data_ptr(), each.numel()) for each in storages])
    try:
        from lmcache_redis.device.cuda_kernels import TritonCopies

        kernels = TritonCopies(table, storages[0].device)
        kernels.warm_up()
    except ImportError as error:
        reason = f"Triton cannot be imported ({error})"
    except Exception as error:
        # What Triton raises where it cannot build a kernel has no common type: no C compiler, no
        # headers of Python, a cache directory that cannot be written, a GPU that it does not know.
        logger.debug("Triton cannot run a kernel", exc_info=True)
        first_line = str(error).partition("\n")[0]  # of a compiler's message; the rest is source
        reason = f"Triton cannot run a kernel ({type(error).__name__}: {first_line})"
    else:
        _log_once(logging.INFO, "paged KV caches on GPUs are copied by Triton kernels")
        return kernels
    _log_once(
        logging.WARNING,
        f"paged KV caches on GPUs are copied by torch alone, slower than memory allows: {reason}",
    )
    from lmcache_redis.device.cuda_fallback import IndexedCopies

    return IndexedCopies(layout, storages)


@functools.cache
def _log_once(level: int, message: str) -> None:
    logger.log(level, message)

"""KV caches in CPU memory: moved into shared memory in place, and mapped by the agent.

The engine's side moves each storage into POSIX shared memory (torch's file-descriptor
way: created in /dev/shm, unlinked at once, held open by the storage) and names it
``/proc/<pid>/fd/<fd>``. The agent opens that name, makes sure that it got what was
meant, and maps it shared (`lmcache_redis.device.mapping`). The kernel allows this to processes of
one user that see each other's process ids: containers need one PID namespace. A mapping keeps the
engine's memory alive after the engine has died.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lmcache_redis.device.blocks import find_segments
from lmcache_redis.device.calls import Calls
from lmcache_redis.device.handles import SharedMemoryHandle, process_start_time
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.mapping import SharedMapping
from lmcache_redis.device.plan import Chunk, Copy, Planner, check_slots, chunks_of_call
from lmcache_redis.device.tensors import view_tensors
from lmcache_redis.errors import DeviceError

if TYPE_CHECKING:
    import torch

_SHM_DIRECTORY = "/dev/shm"
# Copied between two looks at the lease: 0.2 ms, and at most what a copy thread that was stopped
# meanwhile still touches when it goes on.
_PIECE_BYTES = 1 << 20


class SharedCaches(NamedTuple):
    """What `share_kv_caches` returns: what a `KVLayout` and a registration need."""

    segments: tuple[Segment, ...]
    handles: list[SharedMemoryHandle]
    page_format: str


def share_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    num_blocks: int,
    block_strides: Mapping[str, int] | None = None,
) -> SharedCaches:
    """Move the storages of an engine's KV cache into shared memory, in place, and name them.

    The tensors, and every other view of their storages, stay valid with the same contents;
    raw addresses taken before do not. Storages that are shared already stay where they are,
    so calling this again (the agent was restarted) changes nothing. The memory lives as long
    as its storage: keep the tensors. While a storage moves it takes its size twice.

    Args:
        kv_caches: layer name to tensor, in the order that a chunk will have.
        num_blocks, block_strides: as in `lmcache_redis.device.blocks.find_segments`.

    Raises:
        DeviceError: a tensor is not understood or not on the CPU, or shared memory is short.
            Nothing was moved, except that storages before one that could not be moved were.
    """
    views, storages = view_tensors(kv_caches, "cpu")
    segments, page_format = find_segments(views, num_blocks, block_strides)
    to_move = sum(storage.nbytes() for storage in storages if not storage.is_shared())
    _check_room(to_move)
    handles = [_share(storage) for storage in storages]
    return SharedCaches(segments, handles, page_format)


def _check_room(nbytes: int) -> None:
    try:
        room = os.statvfs(_SHM_DIRECTORY)
    except OSError:
        return  # Not mounted there: torch's own attempt decides, and says why it failed.
    free = room.f_bavail * room.f_frsize
    if free < nbytes:
        raise DeviceError(
            f"the KV cache takes {nbytes} bytes of shared memory, {_SHM_DIRECTORY} has {free} "
            "free: enlarge it (docker run --shm-size=..., or --ipc=host), or give the engine a "
            "smaller KV cache (VLLM_CPU_KVCACHE_SPACE)"
        )


def _share(storage: torch.UntypedStorage) -> SharedMemoryHandle:
    try:
        # Unlike share_memory_() this does not depend on the process's sharing strategy.
        fd, size_bytes = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise DeviceError(
            f"a KV cache of {storage.nbytes()} bytes could not be moved into shared memory: {error}"
        ) from error
    if fd < 0:
        raise DeviceError(
            "the KV cache lies in a mapped file that torch does not hold open: it cannot be shared"
        )
    found = os.fstat(fd)
    pid = os.getpid()
    return SharedMemoryHandle(
        pid, process_start_time(pid), fd, found.st_dev, found.st_ino, size_bytes
    )


class CpuDevice:
    """The agent's mapping of one worker's KV cache in CPU memory; a `DeviceContext`.

    Args:
        layout: as received; it is checked against the memory that was really mapped.
        handles: one for each storage that the layout's segments name.

    Raises:
        DeviceError: a handle does not lead to the memory it names (the sentence says what to
            change), or the layout leaves it. Nothing stays mapped then.
    """

    call_bytes = 0
    on_host_cores = True

    def __init__(self, layout: KVLayout, handles: Sequence[SharedMemoryHandle]) -> None:
        layout.check([handle.size_bytes for handle in handles])
        self.layout = layout
        self._planner = Planner(layout)
        self._calls = Calls()
        self._maps: list[SharedMapping] = []
        try:
            self._maps.extend(map(SharedMapping, handles))
        except BaseException:
            self.close()
            raise

    def gather(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        event: bytes | None = None,
        read: Callable[[], None] | None = None,
        until_ns: int | None = None,
        chunks: int = 1,
        filled: Callable[[int], None] | None = None,
    ) -> None:
        """Copy chunks out of their blocks. ``event`` has no meaning here and must be None.

        ``read`` and ``filled`` are not called: pages are copied in the order of the blocks, so
        that all slots are filled at about the same time.
        """
        _refuse_event(event)
        cut = chunks_of_call(block_ids, slots, 0, chunks)
        plans = [self._plan(chunk, stripe_payload_bytes) for chunk in cut]
        with self._memory() as storages:
            for chunk, copies in zip(cut, plans, strict=True):
                targets = [np.frombuffer(slot, np.uint8) for slot in chunk.slots]
                for storage, offset, slot, at, nbytes in _in_time(copies, until_ns):
                    targets[slot][at : at + nbytes] = storages[storage][offset : offset + nbytes]

    def scatter(
        self,
        block_ids: Sequence[int],
        slots: Sequence[memoryview],
        stripe_payload_bytes: int,
        skip_blocks: int = 0,
        event: bytes | None = None,
        until_ns: int | None = None,
        chunks: int = 1,
    ) -> None:
        """Copy chunks into their blocks. ``event`` has no meaning here and must be None."""
        _refuse_event(event)
        cut = chunks_of_call(block_ids, slots, skip_blocks, chunks)
        plans = [self._plan(chunk, stripe_payload_bytes) for chunk in cut]
        with self._memory() as storages:
            for chunk, copies in zip(cut, plans, strict=True):
                sources = [np.frombuffer(slot, np.uint8) for slot in chunk.slots]
                for storage, offset, slot, at, nbytes in _in_time(copies, until_ns):
                    storages[storage][offset : offset + nbytes] = sources[slot][at : at + nbytes]

    def close(self) -> None:
        """Wait for calls in progress, then unmap. Idempotent."""
        if self._calls.close():
            while self._maps:
                self._maps.pop().close()

    def _plan(self, chunk: Chunk, stripe_payload_bytes: int) -> list[Copy]:
        chunk_bytes = len(chunk.block_ids) * self._planner.block_bytes
        check_slots(chunk.slots, chunk_bytes, stripe_payload_bytes)
        return self._planner.copies(chunk.block_ids, stripe_payload_bytes, chunk.skip_blocks)

    @contextmanager
    def _memory(self) -> Iterator[list[np.ndarray]]:
        """The storages as bytes. No array may outlive the block: it holds its mapping."""
        with self._calls.inside():
            for each in self._maps:
                each.check()
            storages = [np.frombuffer(each.memory, np.uint8) for each in self._maps]
            try:
                yield storages
            finally:
                storages.clear()
            for each in self._maps:
                each.check()


def _in_time(copies: Iterable[Copy], until_ns: int | None) -> Iterator[Copy]:
    """The copies in order, in pieces of at most `_PIECE_BYTES`; large ones are cut.

    Raises DeviceError before a piece that would begin after ``until_ns``.
    """
    left = 0  # of the piece in progress
    for copy in copies:
        if copy.nbytes <= left:
            left -= copy.nbytes
            yield copy
            continue
        for part in _cut(copy):
            _refuse_late(until_ns)
            left = _PIECE_BYTES - part.nbytes
            yield part


def _cut(copy: Copy) -> Iterable[Copy]:
    if copy.nbytes <= _PIECE_BYTES:
        return (copy,)
    return [
        copy._replace(
            device_offset=copy.device_offset + begin,
            slot_offset=copy.slot_offset + begin,
            nbytes=min(_PIECE_BYTES, copy.nbytes - begin),
        )
        for begin in range(0, copy.nbytes, _PIECE_BYTES)
    ]


def _refuse_late(until_ns: int | None) -> None:
    if until_ns is not None and time.monotonic_ns() > until_ns:
        raise DeviceError("the engine has its blocks back: it was too late to touch them")


def _refuse_event(event: bytes | None) -> None:
    if event is not None:
        raise DeviceError("a CUDA event for a KV cache in CPU memory")

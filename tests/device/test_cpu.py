# SPDX-License-Identifier: Apache-2.0
"""Sharing a KV cache in place, and copying through another process's mapping of it."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_redis.device import cpu
from lmcache_redis.device.calls import ChunkCopy, CopyCall, DeviceContext
from lmcache_redis.device.context import ExportedCaches, export_kv_caches
from lmcache_redis.device.cpu import CpuDevice
from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import DeviceError
from lmcache_redis.native.madvise import address_of
from tests.device.layouts import BLANK, Call, Paged, check_call, empty_slots, filled_slots, one

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 12, 2, 4, 16, 3
KINDS = ["one storage", "k and v apart"]
STRIPE = 1000


def make_caches(kind: str) -> dict[str, torch.Tensor]:
    """KV caches as vLLM makes them, with random contents."""
    names = [f"layer.{layer}" for layer in range(LAYERS)]
    if kind == "one storage":
        whole = torch.rand(LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
        return dict(zip(names, whole, strict=True))
    return {name: torch.rand(2, BLOCKS, TOKENS, HEADS, WIDTH // 2) for name in names}


def bytes_of(caches: dict[str, torch.Tensor]) -> list[bytes]:
    """The contents of the distinct storages, in order."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in caches.values()}
    flat = (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values())
    return [each.numpy().tobytes() for each in flat]


def as_paged(layout: KVLayout, storages: list[bytes]) -> Paged:
    return Paged(layout, [np.frombuffer(bytearray(each), np.uint8) for each in storages])


def layout_of(shared: ExportedCaches) -> KVLayout:
    (pages,) = shared.groups
    return KVLayout((), "float32", "cpu", TOKENS, BLOCKS, pages.segments, pages.page_format)


class TestShare:
    @pytest.mark.parametrize("kind", KINDS)
    def test_moves_storages_in_place(self, kind: str) -> None:
        caches = make_caches(kind)
        # A view that the caller does not pass, as attention layers hold them.
        other_view = caches["layer.1"][0]
        before = bytes_of(caches)
        shared = export_kv_caches([caches], BLOCKS)
        assert len(shared.storages) == len(before)
        assert bytes_of(caches) == before
        assert all(tensor.is_shared() for tensor in caches.values())
        caches["layer.1"][0].fill_(7.0)
        assert (other_view == 7.0).all()

    def test_a_handle_names_the_memory(self) -> None:
        caches = make_caches("one storage")
        (handle,) = export_kv_caches([caches], BLOCKS).storages
        assert handle.size_bytes == caches["layer.0"].untyped_storage().nbytes()
        with open(f"/proc/{handle.pid}/fd/{handle.fd}", "rb") as memory:
            found = os.fstat(memory.fileno())
            assert (found.st_dev, found.st_ino) == (handle.device, handle.inode)
            assert memory.read() == bytes_of(caches)[0]

    def test_again_changes_nothing(self) -> None:
        caches = make_caches("one storage")
        first = export_kv_caches([caches], BLOCKS)
        address = caches["layer.0"].data_ptr()
        assert export_kv_caches([caches], BLOCKS) == first
        assert caches["layer.0"].data_ptr() == address

    @pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
    def test_the_sharing_strategy_is_neither_used_nor_changed(self, strategy: str) -> None:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy(strategy)
        try:
            (handle,) = export_kv_caches([make_caches("one storage")], BLOCKS).storages
            assert handle.fd >= 0
            assert torch.multiprocessing.get_sharing_strategy() == strategy
        finally:
            torch.multiprocessing.set_sharing_strategy(before)

    def test_the_descriptor_lives_as_long_as_the_storage(self) -> None:
        caches = make_caches("one storage")
        (handle,) = export_kv_caches([caches], BLOCKS).storages
        kept = caches["layer.2"][3]
        caches.clear()
        gc.collect()
        assert os.fstat(handle.fd).st_ino == handle.inode
        del kept
        gc.collect()
        assert open_inodes().get(handle.inode) is None

    def test_leaves_no_name_in_dev_shm(self) -> None:
        before = os.listdir("/dev/shm")
        caches = make_caches("k and v apart")
        export_kv_caches([caches], BLOCKS)
        assert os.listdir("/dev/shm") == before

    def test_short_shared_memory_is_said_before_anything_moves(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caches = make_caches("one storage")
        room = os.statvfs("/dev/shm")
        small = os.statvfs_result((room.f_bsize, 1, 1, 1, 1, 1, 1, 1, 1, 1))
        monkeypatch.setattr(os, "statvfs", lambda path: small)
        with pytest.raises(DeviceError, match=r"/dev/shm has 1 free.*--shm-size.*KVCACHE_SPACE"):
            export_kv_caches([caches], BLOCKS)
        assert not caches["layer.0"].is_shared()

    def test_a_mapped_file_is_refused(self, tmp_path: os.PathLike[str]) -> None:
        path = os.path.join(tmp_path, "cache")
        tensor = torch.from_file(path, shared=True, size=BLOCKS * 8, dtype=torch.float32)
        with pytest.raises(DeviceError, match="mapped file"):
            export_kv_caches([{"layer.0": tensor.view(BLOCKS, 8)}], BLOCKS)


def engine(ours: Connection) -> None:
    """Tells what it shares, and what its storages hold; lives until the other end is closed."""
    caches = make_caches("one storage")
    ours.send((export_kv_caches([caches], BLOCKS), bytes_of(caches)))
    ours.poll(None)


@pytest.mark.servers
def test_an_engine_that_is_killed_leaves_its_memory() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=engine, args=(theirs,), daemon=True
    )
    process.start()
    theirs.close()
    shared, storages = ours.recv()
    layout, handles = layout_of(shared), shared.storages
    device: DeviceContext = CpuDevice([layout], handles)
    process.kill()
    process.join()
    ids = list(range(BLOCKS))
    slots = empty_slots(len(ids) * layout.block_bytes, STRIPE)
    device.gather(one(ids, slots))
    assert b"".join(slots) == as_paged(layout, storages).chunk(ids)
    assert handles[0].inode in mapped_inodes()
    device.close()
    assert handles[0].inode not in mapped_inodes()
    with pytest.raises(DeviceError, match="has ended"):
        CpuDevice([layout], handles)


@pytest.fixture(scope="module")
def own() -> tuple[dict[str, torch.Tensor], KVLayout, list[SharedMemoryHandle]]:
    """A cache of this process: opening a handle does not depend on the process that made it."""
    caches = make_caches("k and v apart")
    shared = export_kv_caches([caches], BLOCKS)
    return caches, layout_of(shared), shared.storages


Own = tuple[dict[str, torch.Tensor], KVLayout, list[SharedMemoryHandle]]


class TestRoundTrip:
    @settings(max_examples=40)
    @given(data=st.data(), count=st.integers(1, 3), stripe=st.integers(64, 4096))
    def test_several_chunks_in_a_call(
        self, own: Own, data: st.DataObject, count: int, stripe: int
    ) -> None:
        caches, layout, handles = own
        order = data.draw(st.permutations(range(BLOCKS)))
        length = data.draw(st.integers(1, BLOCKS // count))
        chunks = [list(order[n * length : (n + 1) * length]) for n in range(count)]
        skip = data.draw(st.integers(0, count * length))
        device = CpuDevice([layout], handles)
        call = Call(as_paged(layout, bytes_of(caches)), chunks, stripe, skip)
        check_call(device, call, lambda: [np.frombuffer(e, np.uint8) for e in bytes_of(caches)])
        device.close()

    def test_several_threads_copy_at_once(self, own: Own) -> None:
        caches, layout, handles = own
        device = CpuDevice([layout], handles)
        chunks = {block: os.urandom(layout.block_bytes) for block in range(BLOCKS)}

        def copy(block: int) -> None:
            for _ in range(20):
                device.scatter(one([block], filled_slots(chunks[block], STRIPE)))
                slots = empty_slots(layout.block_bytes, STRIPE)
                device.gather(one([block], slots))
                assert b"".join(slots) == chunks[block]

        with ThreadPoolExecutor(BLOCKS) as threads:
            list(threads.map(copy, chunks))
        device.close()
        paged = as_paged(layout, bytes_of(caches))
        assert all(paged.chunk([block]) == chunks[block] for block in range(BLOCKS))


BOTH = ("gather", "scatter")


def blank_slot(own: Own) -> memoryview:
    """For one block."""
    return memoryview(bytearray([BLANK]) * own[1].block_bytes)


def check_refused(
    own: Own,
    call: CopyCall,
    why: str | None = None,
    kinds: Sequence[str] = BOTH,
    error: type[Exception] | tuple[type[Exception], ...] = DeviceError,
) -> None:
    """Neither the engine's memory nor the first slot has changed then."""
    caches, layout, handles = own
    device = CpuDevice([layout], handles)
    before = bytes_of(caches)
    for kind in kinds:
        with pytest.raises(error, match=why):
            getattr(device, kind)(call)
    device.close()
    assert bytes_of(caches) == before
    assert set(call.chunks[0].slots[0]) == {BLANK}


class TestRefused:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda h: {"pid_start_time": h.pid_start_time + 1}, "not the engine that registered"),
            (lambda h: {"pid": 2**22 + 1}, "not visible.*PID namespace"),
            (lambda h: {"fd": 99_999}, "cannot be opened.*one user.*PID namespace"),
            (lambda h: {"fd": -1}, "cannot be opened"),
            (lambda h: {"inode": h.inode + 1}, "no longer the memory"),
            (lambda h: {"device": h.device + 1}, "no longer the memory"),
            (lambda h: {"size_bytes": h.size_bytes + 4096}, "bytes, but the engine registered"),
            (lambda h: {"fd": 2**63}, "cannot be opened"),
        ],
    )
    def test_a_handle(
        self, own: Own, change: Callable[[SharedMemoryHandle], dict[str, int]], reason: str
    ) -> None:
        _, layout, handles = own
        forged = msgspec.structs.replace(handles[-1], **change(handles[-1]))
        before = (open_inodes(), mapped_inodes())
        with pytest.raises(DeviceError, match=reason):
            CpuDevice([layout], [*handles[:-1], forged])
        assert (open_inodes(), mapped_inodes()) == before

    def test_a_pipe_is_not_opened(self, own: Own) -> None:
        """Opening a FIFO without a writer would block for ever."""
        _, layout, handles = own
        read_end, write_end = os.pipe()
        try:
            found = os.fstat(read_end)
            forged = msgspec.structs.replace(
                handles[0], fd=read_end, device=found.st_dev, inode=found.st_ino
            )
            with pytest.raises(DeviceError, match="not shared memory"):
                CpuDevice([layout], [forged, *handles[1:]])
        finally:
            os.close(read_end)
            os.close(write_end)

    def test_a_layout_that_leaves_its_storages(self, own: Own) -> None:
        _, layout, handles = own
        with pytest.raises(DeviceError, match="ends at byte"):
            CpuDevice([msgspec.structs.replace(layout, num_blocks=BLOCKS + 1)], handles)
        with pytest.raises(DeviceError, match="storage"):
            CpuDevice([layout], handles[:-1])

    @pytest.mark.parametrize(
        ("ids", "skip", "slots"),
        [
            ([0, BLOCKS], 0, 2),
            ([0, -1], 0, 2),
            ([0, 1], 3, 2),
            ([0, 1], -1, 2),
            ([0, 1], 0, 1),
            ([0, 1], 0, 3),
        ],
    )
    def test_bounds_touch_nothing(self, own: Own, ids: list[int], skip: int, slots: int) -> None:
        call = one(ids, [blank_slot(own) for _ in range(slots)], skip)
        check_refused(own, call, kinds=["scatter"] if skip else BOTH)

    def test_a_short_slot_touches_nothing(self, own: Own) -> None:
        slots = [blank_slot(own), blank_slot(own)[:-1]]
        check_refused(own, one([0, 1], slots), "cannot fill")

    @pytest.mark.parametrize("bad", ["read-only", "reversed", "released"])
    def test_a_later_slot_that_cannot_be_used_touches_nothing(self, own: Own, bad: str) -> None:
        first, second = blank_slot(own), blank_slot(own)
        if bad == "released":
            second.release()
        else:
            second = second.toreadonly() if bad == "read-only" else second[::-1]
        call = CopyCall([ChunkCopy([0], [first]), ChunkCopy([1], [second])])
        check_refused(own, call, error=(DeviceError, ValueError))

    def test_a_signal(self, own: Own) -> None:
        check_refused(own, one([0], [blank_slot(own)], after=1), "signal of a GPU")

    def test_blocks_that_the_engine_has_back(self, own: Own) -> None:
        _, layout, handles = own
        slots, now_ns = [blank_slot(own)], time.monotonic_ns()
        check_refused(own, one([0], slots, until_ns=now_ns - 1), "lease on the blocks")
        device = CpuDevice([layout], handles)
        for until_ns in (now_ns + 10**10, 2**64 - 1):  # what a message can say
            device.gather(one([0], slots, until_ns=until_ns))
        device.close()

    @pytest.mark.parametrize("looks", [0, 1, 3])
    @pytest.mark.parametrize("page_bytes", [4 << 10, 384 << 10, 2560 << 10])
    def test_a_lease_that_ends_in_the_middle_of_a_copy(
        self, monkeypatch: pytest.MonkeyPatch, page_bytes: int, looks: int
    ) -> None:
        """At most the piece in progress is touched, for pages of any size."""
        blocks = (6 << 20) // page_bytes
        caches = {"layer": torch.zeros((2 * blocks, page_bytes), dtype=torch.uint8)}
        shared = export_kv_caches([caches], 2 * blocks)
        (pages,) = shared.groups
        layout = KVLayout((), "uint8", "cpu", 16, 2 * blocks, pages.segments, pages.page_format)
        device = CpuDevice([layout], shared.storages)
        every_second = range(0, 2 * blocks, 2)
        clock = SimpleNamespace()
        for copy, ids in itertools.product(
            (device.gather, device.scatter), (range(blocks), every_second)
        ):
            caches["layer"].fill_(1)
            slots = filled_slots(b"\2" * (blocks * page_bytes), 4 << 20)
            clock.monotonic_ns = iter([*[0] * looks, *[2] * 100]).__next__
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "time", clock)
                patch.setattr(cpu, "_copy", cpu._copy_in_python)
                with pytest.raises(DeviceError, match="lease on the blocks"):
                    copy(one(ids, slots, until_ns=1))
            (engine,), chunk = bytes_of(caches), b"".join(map(bytes, slots))
            touched, was = (chunk, b"\2") if copy == device.gather else (engine, b"\1")
            changed = len(touched) - touched.count(was)
            assert changed <= looks << 20
            assert bool(changed) == bool(looks)
        device.close()


class TestClose:
    def test_leaves_no_descriptor_and_no_mapping(self, own: Own) -> None:
        _, layout, handles = own
        before = (open_inodes(), mapped_inodes())
        device = CpuDevice([layout], handles)
        assert mapped_inodes() != before[1]
        slots = empty_slots(layout.block_bytes, STRIPE)
        device.gather(one([1], slots))
        device.scatter(one([1], slots))
        device.close()
        device.close()
        assert (open_inodes(), mapped_inodes()) == before
        for copy in (device.gather, device.scatter):
            with pytest.raises(DeviceError, match="no longer mapped"):
                copy(one([1], slots))

    def test_every_page_is_present_from_the_start(self, own: Own) -> None:
        """A first copy that faults pages in would take as long as several later copies."""
        _, layout, handles = own
        device = CpuDevice([layout], handles)
        for mapping, handle in zip(device._maps, handles, strict=True):
            assert resident_bytes(address_of(mapping.memory)) >= handle.size_bytes
        device.close()


def open_inodes() -> dict[int, int]:
    """The number of descriptors that this process has of each inode."""
    found: dict[int, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            inode = os.stat(f"/proc/self/fd/{fd}").st_ino
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
        found[inode] = found.get(inode, 0) + 1
    return found


def mapped_inodes() -> list[int]:
    """The inode of each mapping of a file."""
    with open("/proc/self/maps") as maps:
        return sorted(inode for line in maps if (inode := int(line.split()[4])))


def resident_bytes(address: int) -> int:
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            if line.startswith(f"{address:x}-"):
                break
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

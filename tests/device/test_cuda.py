"""`CudaDevice`: its logic, over CPU tensors in place of a GPU's."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given

from benchmarks.gpu.reference import ReferenceCopies
from lmcache_redis.device import cuda
from lmcache_redis.device.cuda import CudaDevice, PinnedMemory, open_flat
from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError
from tests.device.cpu_streams import CpuStream, flat_handle, gpu_is_cpu, open_over_cpu
from tests.device.layouts import Call, Paged, calls, check_call, empty_slots, filled_slots


@pytest.fixture(scope="class")
def without_gpu() -> Iterator[None]:
    with gpu_is_cpu(ReferenceCopies):
        yield


@pytest.mark.usefixtures("without_gpu")
class TestOverCpuTensors:
    """Everything that needs no GPU: bounds, stripes, skipping, streams, errors, closing."""

    @given(calls(granule=8, device="cuda"))
    def test_both_directions(self, call: Call) -> None:
        device = open_over_cpu(call.case)
        check_call(device, call)
        device.close()

    def case(self) -> Paged:
        layout = KVLayout((), "uint8", "cuda", 16, 4, (Segment(0, 0, 8, 8),))
        return Paged(layout, [np.arange(32, dtype=np.uint8)])

    @pytest.mark.parametrize(
        ("ids", "stripe", "skip", "event"),
        [
            ([4], 8, 0, None),
            ([-1], 8, 0, None),
            ([1], 0, 0, None),
            ([1, 2], 8, 0, None),
            ([1], 8, 2, None),
            ([1], 8, -1, None),
            ([1], 8, 0, b""),
            ([1], 8, 0, bytes(63)),
            ([1], 8, 0, bytes(65)),
        ],
    )
    def test_bounds_touch_nothing(
        self, ids: list[int], stripe: int, skip: int, event: bytes | None
    ) -> None:
        case = self.case()
        device = open_over_cpu(case)
        slots = empty_slots(8, 8)
        with pytest.raises(DeviceError):
            device.scatter(ids, slots, stripe, skip, event)
        if not skip:
            with pytest.raises(DeviceError):
                device.gather(ids, slots, stripe, event)
        assert case.storages[0].tobytes() == bytes(range(32))
        assert bytes(slots[0]) == b"\xa5" * 8
        device.close()

    def test_the_event_goes_to_the_stream(self) -> None:
        device = open_over_cpu(self.case())
        device.gather([0], empty_slots(8, 8), 8, event=b"g" * 64)
        device.scatter([0], empty_slots(8, 8), 8, event=b"s" * 64)
        gathers: Any = device._gather_streams.get_nowait()
        scatters: Any = device._scatter_streams.get_nowait()
        assert (gathers.events, scatters.events) == ([b"g" * 64], [b"s" * 64])

    def test_what_needs_no_event_does_not_wait_for_it(self) -> None:
        """A scatter stages its chunk before the event; a gather reads nothing before it."""
        device = open_over_cpu(self.case())
        device.scatter([0], filled_slots(b"12345678", 8), 8, event=b"s" * 64)
        device.gather([0], empty_slots(8, 8), 8, event=b"g" * 64)
        scatters: Any = device._scatter_streams.get_nowait()
        gathers: Any = device._gather_streams.get_nowait()
        assert scatters.staged_at_event == b"12345678"
        assert gathers.staged_at_event == b"\x5a" * 8

    def test_it_says_when_the_blocks_were_read(self) -> None:
        """The wait is for the kernel, and only if there is a callback."""
        case = self.case()
        device = open_over_cpu(case)
        slot = empty_slots(8, 8)
        calls: list[bytes] = []
        device.gather([0], slot, 8, None, lambda: calls.append(bytes(slot[0])))
        stream: Any = device._gather_streams.get_nowait()
        assert len(calls) == 1
        (mark,) = stream.marks
        assert mark.staged == mark.staged_when_awaited == case.storages[0][:8].tobytes()
        device._gather_streams.put(stream)
        device.gather([0], slot, 8)
        assert [each.staged_when_awaited for each in stream.marks[1:]] == [None]

    def test_an_event_that_does_not_happen_leaves_the_blocks_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(stream: CpuStream, event: bytes | None, until_ns: int | None) -> None:
            raise DeviceError("the engine's event did not happen")

        monkeypatch.setattr(CpuStream, "after", never)
        case = self.case()
        device = open_over_cpu(case)
        slots = empty_slots(8, 8)
        with pytest.raises(DeviceError, match="did not happen"):
            device.scatter([0], slots, 8, event=b"s" * 64)
        with pytest.raises(DeviceError, match="did not happen"):
            device.gather([0], slots, 8, event=b"g" * 64)
        assert case.storages[0].tobytes() == bytes(range(32))
        assert bytes(slots[0]) == b"\xa5" * 8
        assert (device._gather_streams.qsize(), device._scatter_streams.qsize()) == (2, 2)

    def test_gather_streams_that_wait_keep_no_stream_from_a_scatter(self) -> None:
        device = open_over_cpu(self.case())
        held = [device._gather_streams.get_nowait() for _ in range(2)]
        device.scatter([0], filled_slots(b"\1" * 8, 8), 8)
        assert len(held) == 2

    def test_a_dead_exporter_is_refused(self) -> None:
        device = open_over_cpu(self.case(), pid_start_time=1)
        with pytest.raises(DeviceError, match="has ended"):
            device.gather([0], empty_slots(8, 8), 8)
        device.close()

    def test_a_cuda_fault_gives_the_stream_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = open_over_cpu(self.case())

        def fail(*args: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(ReferenceCopies, "gather", fail)
        for _ in range(5):
            with pytest.raises(DeviceError, match="illegal memory access"):
                device.gather([0], empty_slots(8, 8), 8)
        assert device._gather_streams.qsize() == 2
        device.close()

    def test_no_stream_within_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "_STREAM_DEADLINE_S", 0.01)
        device = open_over_cpu(self.case())
        held = [device._gather_streams.get_nowait() for _ in range(2)]
        with pytest.raises(DeviceError, match="no CUDA stream"):
            device.gather([0], empty_slots(8, 8), 8)
        assert len(held) == 2
        with pytest.raises(queue.Empty):
            device._gather_streams.get_nowait()

    def test_no_stream_before_the_engine_has_its_blocks_back(self) -> None:
        case = self.case()
        device = open_over_cpu(case)
        held = [device._scatter_streams.get_nowait() for _ in range(2)]
        began = time.monotonic()
        with pytest.raises(DeviceError, match="no CUDA stream"):
            device.scatter([0], filled_slots(b"\1" * 8, 8), 8, until_ns=time.monotonic_ns() + 10**7)
        assert time.monotonic() - began < cuda._STREAM_DEADLINE_S / 2
        assert case.storages[0].tobytes() == bytes(range(32))
        assert len(held) == 2

    def test_close_waits_for_a_copy_in_progress(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = open_over_cpu(self.case())
        copying, go_on, closed = threading.Event(), threading.Event(), threading.Event()

        def pause(*args: Any) -> None:
            copying.set()
            assert go_on.wait(30)
            assert device._storages

        monkeypatch.setattr(ReferenceCopies, "gather", pause)
        copy = threading.Thread(target=device.gather, args=([0], empty_slots(8, 8), 8))
        copy.start()
        assert copying.wait(30)
        close = threading.Thread(target=lambda: (device.close(), closed.set()))
        close.start()
        assert not closed.wait(0.05)
        go_on.set()
        copy.join()
        close.join()
        assert not device._storages
        device.close()
        with pytest.raises(DeviceError, match="no longer mapped"):
            device.gather([0], empty_slots(8, 8), 8)

    def test_closing_leaves_no_reference_to_the_engines_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Torch closes an IPC handle when its last reference is dropped, not before."""
        opened: list[weakref.ref[np.ndarray]] = []

        def fresh(handle: CudaIPCHandle) -> torch.Tensor:
            memory = np.zeros(handle.storage_size_bytes, np.uint8)
            opened.append(weakref.ref(memory))
            return torch.from_numpy(memory)

        monkeypatch.setattr(cuda, "open_flat", fresh)
        device = CudaDevice([self.case().layout], [flat_handle(32)])
        device.gather([0, 1], empty_slots(16, 8), 8)
        with pytest.raises(DeviceError):
            device.gather([4], empty_slots(8, 8), 8)
        gc.disable()  # the references are dropped without the garbage collector
        try:
            assert [reference() is None for reference in opened] == [False]
            device.close()
            assert [reference() is None for reference in opened] == [True]
        finally:
            gc.enable()

    def test_handles_of_two_gpus_or_none_are_refused(self) -> None:
        layout = KVLayout((), "uint8", "cuda", 16, 4, (Segment(0, 0, 8, 8), Segment(1, 0, 8, 8)))
        with pytest.raises(DeviceError, match="different GPUs"):
            CudaDevice([layout], [flat_handle(32), flat_handle(32, device_uuid="GPU-1")])
        with pytest.raises(DeviceError, match="storage"):
            CudaDevice([layout], [])


class TestCopyStream:
    """The stream itself, over fake CUDA streams and events that record the calls to them."""

    @pytest.fixture
    def played(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        done: list[str] = []

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking, "a waiting thread sleeps"

            def record(self, stream: Any) -> None:
                assert stream == "stream"
                done.append("record")

            def synchronize(self) -> None:
                done.append("synchronize")

        def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            done.append("pinned" if pin_memory else "plain")
            return real_empty(*size, **options)

        real_empty = torch.empty
        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        return done

    def test_buffers_are_made_once_and_grow(self, played: list[str]) -> None:
        stream = cuda._CopyStream(torch.device("cpu"))
        played.clear()
        staging = stream.staging(100)
        assert staging.numel() == 100
        assert stream.staging(60).data_ptr() == staging.data_ptr()
        assert stream.staging(60).numel() == 60
        sent = stream.send(np.array([[4, 5, 6]]))
        assert (sent.device.tolist(), sent.host.tolist()) == ([[4, 5, 6]], [[4, 5, 6]])
        assert stream.send(np.array([[9], [8]])).device.tolist() == [[9], [8]]
        assert played == ["plain", "pinned", "plain"]
        assert stream.staging(101).numel() == 101
        assert stream.send(np.array([[1, 2, 3, 4]])).device.tolist() == [[1, 2, 3, 4]]
        assert played == ["plain", "pinned", "plain"] * 2

    def test_it_is_drained_on_every_way_out(self, played: list[str]) -> None:
        stream = cuda._CopyStream(torch.device("cpu"))
        played.clear()
        with stream.running():
            assert played == []
        assert played == ["record", "synchronize"]
        with pytest.raises(ValueError, match="on the way"), stream.running():
            raise ValueError("on the way")
        assert played == ["record", "synchronize"] * 2


class TestChecks:
    @pytest.mark.parametrize(
        "changes", [{"dtype": "int8"}, {"shape": (31,)}, {"shape": (32, 1), "stride": (1, 1)}]
    )
    def test_storages_are_flat_bytes(self, changes: dict[str, Any]) -> None:
        with pytest.raises(DeviceError, match="storages are flat uint8"):
            open_flat(flat_handle(32, **changes))

    def test_an_event_that_never_happens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The deadline passes before any work is enqueued that could write to a slot later."""

        class Event:
            waited_on: ClassVar[list[Any]] = []
            polls = 0

            @classmethod
            def from_ipc_handle(cls, device: torch.device, handle: bytes) -> Event:
                assert handle == b"e" * 64
                return cls()

            def query(self) -> bool:
                Event.polls += 1
                return Event.polls == 3

            def wait(self, stream: Any) -> None:
                self.waited_on.append(stream)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        stream = cuda._CopyStream.__new__(cuda._CopyStream)
        stream._device, stream._stream = torch.device("cuda:0"), "its stream"
        stream.after(None, None)
        assert Event.polls == 0
        stream.after(b"e" * 64, time.monotonic_ns() + 10**10)
        assert (Event.polls, Event.waited_on) == (3, ["its stream"])
        # The lease ends before the event, or the event is later than any deadline.
        with pytest.raises(DeviceError, match="did not happen"):
            stream.after(b"e" * 64, time.monotonic_ns() + 10**6)
        monkeypatch.setattr(cuda, "_EVENT_DEADLINE_S", 0.0)
        with pytest.raises(DeviceError, match="did not happen"):
            stream.after(b"e" * 64, None)
        assert Event.waited_on == ["its stream"]
        # The event happened, but after the lease; and the same without an event.
        Event.polls = 2
        with pytest.raises(DeviceError, match="lease on the blocks"):
            stream.after(b"e" * 64, time.monotonic_ns() - 1)
        with pytest.raises(DeviceError, match="lease on the blocks"):
            stream.after(None, time.monotonic_ns() - 1)

    def test_pinning_that_fails_names_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Runtime:
            def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
                assert (address, flags) == (4096, 1)
                return 0 if size == 8192 else 2

            def cudaHostUnregister(self, address: int) -> int:
                calls.append(address)
                return 0

        calls: list[int] = []
        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        with pytest.raises(DeviceError, match=r"could not be pinned.*memlock"):
            PinnedMemory(4096, 4096, torch.device("cuda:0"))
        pinned = PinnedMemory(4096, 8192, torch.device("cuda:0"))
        pinned.close()
        pinned.close()
        assert calls == [4096]

    @pytest.mark.parametrize(("code", "reason"), [(1, "CUDA error 1"), (None, "did not answer")])
    def test_unpinning_that_fails_or_hangs(
        self, code: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The agent ends without waiting for a GPU."""
        go_on = threading.Event()

        class Runtime:
            def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
                return 0

            def cudaHostUnregister(self, address: int) -> int:
                if code is None:
                    assert go_on.wait(30)
                return code or 0

        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(cuda, "_UNPIN_DEADLINE_S", 0.05 if code is None else 30)
        pinned = PinnedMemory(4096, 4096, torch.device("cuda:0"))
        with pytest.raises(DeviceError, match=reason):
            pinned.close()
        go_on.set()
        pinned.close()

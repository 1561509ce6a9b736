# SPDX-License-Identifier: Apache-2.0
"""What calls to GPUs cost this process: time, and processor time under the interpreter lock.

A thread for each GPU gathers and scatters, as an agent's copy threads do. Chunks have as many pages
and stripes as calls of 32 MiB, but each is 1,024 times smaller, so that the bus does not count. A
thread that ticks every 0.2 ms shows how long the others keep it from running.

    python -m benchmarks.gpu.submissions

It needs GPUs, or the driver of the tests, whose streams then share the processors:

    LD_LIBRARY_PATH=DIRECTORY CUDA_STUB_DEVICES=8 python -m benchmarks.gpu.submissions
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from lmcache_redis.device import driver
from lmcache_redis.device.calls import ChunkCopy, CopyCall
from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import Gpus
from lmcache_redis.device.handles import CudaIPCHandle, own_process
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.native.madvise import address_of

CALLS = 300
STRIPE_BYTES = 1020  # of 1,044,480
CHUNK_BYTES = 32 << 10
_SLOT_BYTES = 4096
_TICK_S = 0.2e-3
# Name, page bytes, blocks of a chunk, segments, and the agent's --direct-copy-bytes.
SHAPES = (
    ("kernel, pages of 8 KiB", 8, 128, 32, 1 << 40),
    ("kernel, pages of 32 KiB", 32, 16, 64, 1 << 40),
    ("direct, pages of 64 KiB", 64, 16, 32, 1),
    ("direct, pages of 2 MiB", 2048, 16, 1, 1),
)


def engine(ordinal: int) -> None:
    """A process with memory on a GPU; prints its handle, and ends with its standard input."""
    driver.set_context(driver.retain_context(ordinal))
    size_bytes = 64 * CHUNK_BYTES  # CUDA shares smaller allocations with what lies beside them
    address = driver.allocate(size_bytes)
    handle = CudaIPCHandle(
        *own_process(),
        device_uuid=driver.device_uuid(ordinal),
        memory_handle=driver.export_memory(address),
        allocation_bytes=size_bytes,
        offset_bytes=0,
        size_bytes=size_bytes,
    )
    print(msgspec.json.encode(handle).decode(), flush=True)
    sys.stdin.read()


class Ticks:
    """How late a thread wakes that others may keep from running."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s = time.perf_counter()
            time.sleep(_TICK_S)
            self.late_s.append(time.perf_counter() - began_s - _TICK_S)

    def end(self) -> np.ndarray:
        self._stop.set()
        self._thread.join()
        return np.array(self.late_s)


def _nothing(*arguments: Any) -> None:
    pass


def held_us(call: Callable[[], None]) -> float:
    """Processor time of a call without what the driver does, which it does without the lock."""
    call()
    with mock.patch.object(driver, "_call", _nothing):
        began_s = time.thread_time()
        for _ in range(CALLS):
            call()
        return (time.thread_time() - began_s) / CALLS * 1e6


def measure(calls: Sequence[Callable[[], None]]) -> tuple[float, float, np.ndarray]:
    """Wall time and processor time of a call in µs, and the ticks: one thread for each."""
    wall_s, cpu_s = [0.0] * len(calls), [0.0] * len(calls)
    ready = threading.Barrier(len(calls))

    def run(number: int) -> None:
        calls[number]()
        ready.wait()
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        for _ in range(CALLS):
            calls[number]()
        cpu_s[number] = time.thread_time() - began_cpu_s
        wall_s[number] = time.perf_counter() - began_s

    ticks = Ticks()
    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = ticks.end()
    return sum(wall_s) / len(calls) / CALLS * 1e6, sum(cpu_s) / len(calls) / CALLS * 1e6, late


def main() -> None:
    if sys.argv[1:]:
        engine(int(sys.argv[1]))
        return
    count = len(driver.device_uuids())
    words = [sys.executable, "-m", "benchmarks.gpu.submissions"]
    engines = [
        subprocess.Popen([*words, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for n in range(count)
    ]
    handles = [
        msgspec.json.decode(each.stdout.readline(), type=CudaIPCHandle)  # type: ignore[union-attr]
        for each in engines
    ]
    stripes = -(-CHUNK_BYTES // STRIPE_BYTES)
    host = mmap.mmap(-1, count * stripes * _SLOT_BYTES)
    last_bytes = CHUNK_BYTES - (stripes - 1) * STRIPE_BYTES
    sizes = ([STRIPE_BYTES] * (stripes - 1) + [last_bytes]) * count  # of all GPUs
    slots = [memoryview(host)[n * _SLOT_BYTES :][:size] for n, size in enumerate(sizes)]
    driver.set_context(driver.retain_context(0))
    driver.pin(address_of(host), len(host))
    print(f"{driver.device_name(0)}, driver {driver.driver_version()}, {CALLS} calls")
    print(f"{'us a call':33} GPUs     wall      cpu  of lock     tick late p50, p99")
    for name, page_bytes, blocks, segments, direct_copy_bytes in SHAPES:
        # Everything is pinned.
        gpus = Gpus(direct_copy_bytes, np.zeros_like)
        layout = _layout(page_bytes, 2 * blocks, segments)
        devices = [CudaDevice([layout], [handle], gpus) for handle in handles]
        ids = list(range(0, 2 * blocks, 2))  # no neighbours
        for direction in ("gather", "scatter"):
            calls = [
                partial(
                    getattr(device, direction),
                    CopyCall([ChunkCopy(ids, slots[n * stripes : (n + 1) * stripes])]),
                )
                for n, device in enumerate(devices)
            ]
            locked_us = held_us(calls[0])
            for used in sorted({1, count}):
                wall_us, cpu_us, late = measure(calls[:used])
                middle_us, late_us = np.percentile(late * 1e6, [50, 99])
                print(
                    f"{name:24} {direction:8} {used:4} {wall_us:8.0f} {cpu_us:8.0f} "
                    f"{locked_us:8.0f} {middle_us:11.0f} {late_us:10.0f}"
                )
        for device in devices:
            device.close()
    for each in engines:
        each.communicate()


def _layout(page_bytes: int, blocks: int, segments: int) -> KVLayout:
    places = (Segment(0, n * blocks * page_bytes, page_bytes, page_bytes) for n in range(segments))
    return KVLayout((), "uint8", "cuda", 16, blocks, tuple(places))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A process with GPU memory that another opens: an engine reduced to what the driver sees.

Its memory is one allocation, or is mapped in pieces as cumem and expandable segments do it. It
reads a question a line and answers in JSON:

    share            the handle of its memory, and that of its page of signals
    fill V BUSY      fills the memory with the byte V after BUSY other fills; the ticket of its end
    read AT COUNT    bytes in hexadecimal
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lmcache_redis.device import driver, export
from lmcache_redis.device.handles import CudaHandle, CudaIPCHandle, SharedMemoryHandle
from lmcache_redis.device.signals import Signals
from lmcache_redis.errors import DeviceError

# What CUDA allocates less than this lies in an allocation of this size, of which others get a part
# too, and is shared as a whole. No engine's KV cache is so small.
LEAST_BYTES = 2 << 20
_FILLED_BYTES = 8 << 20  # copied at once from pinned memory of that byte


def map_pieces(size_bytes: int, piece_bytes: int, gpu: int) -> int:
    """The address of pieces that are mapped side by side, and can be exported by descriptors.

    Both sizes are multiples of `LEAST_BYTES`, and the first one of the second. The context is the
    GPU's.
    """
    base = driver.reserve_addresses(size_bytes)
    properties = driver.AllocationProperties(
        type=1, handle_types=1, location_type=1, location_id=gpu
    )
    for address in range(base, base + size_bytes, piece_bytes):
        piece = ctypes.c_uint64()
        driver._call(
            "cuMemCreate", ctypes.byref(piece), ctypes.c_size_t(piece_bytes),
            ctypes.byref(properties), ctypes.c_ulonglong(0),
        )  # fmt: skip
        driver.map_allocation(address, piece_bytes, piece.value)
        driver.release_allocation(piece.value)
    driver.allow_access(base, size_bytes, gpu)
    return base


class Memory:
    """GPU memory that is filled on a stream, in the exporting process.

    piece_bytes: of memory that is mapped in pieces; 0: it is one allocation.
    """

    def __init__(self, size_bytes: int, piece_bytes: int = 0) -> None:
        driver.set_context(driver.retain_context(0))
        self._size_bytes = size_bytes
        whole_bytes = -(-size_bytes // LEAST_BYTES) * LEAST_BYTES
        self._address = (
            map_pieces(whole_bytes, piece_bytes, 0) if piece_bytes else driver.allocate(whole_bytes)
        )
        self._stream = driver.create_stream()
        self._signals = Signals(0)
        self._pinned = driver.allocate_pinned(min(_FILLED_BYTES, size_bytes) * 2)

    def share(self) -> dict[str, Any]:
        (handle,) = export.export_storages([self], 0)
        shared = {"memory": handle, "signals": self._signals.handle}
        return {name: msgspec.to_builtins(each) for name, each in shared.items()}

    def data_ptr(self) -> int:
        """As torch's storages, of which `export_storages` asks this and `nbytes`."""
        return self._address

    def nbytes(self) -> int:
        return self._size_bytes

    def fill(self, value: int, busy: int) -> int:
        driver.synchronize_stream(self._stream)  # the pinned bytes may be in use
        half = min(_FILLED_BYTES, self._size_bytes)
        ctypes.memset(self._pinned, value ^ 1, half)
        ctypes.memset(self._pinned + half, value, half)
        for source in [self._pinned] * busy + [self._pinned + half]:
            for at in range(0, self._size_bytes, half):
                size = min(half, self._size_bytes - at)
                driver.enqueue_copy_in(self._address + at, source, size, self._stream)
        return self._signals.record(self._stream)

    def read(self, at: int, count: int) -> str:
        held = ctypes.create_string_buffer(count)
        driver.enqueue_copy_out(ctypes.addressof(held), self._address + at, count, self._stream)
        driver.synchronize_stream(self._stream)
        return held.raw.hex()


def main(arguments: Sequence[str]) -> None:
    memory = Memory(*map(int, arguments))
    for line in sys.stdin:
        verb, *numbers = line.split()
        answer = getattr(memory, verb)(*map(int, numbers))
        print(json.dumps(answer), flush=True)


@dataclass
class Exporter:
    """The process, from outside."""

    process: subprocess.Popen[str]

    def ask(self, *words: str | int) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise DeviceError("the process that shares GPU memory has ended: see its error above")
        return json.loads(line)

    def share(self) -> tuple[CudaHandle, SharedMemoryHandle]:
        found = self.ask("share")
        return (
            msgspec.convert(found["memory"], CudaHandle),
            msgspec.convert(found["signals"], SharedMemoryHandle),
        )

    def share_allocation(self) -> tuple[CudaIPCHandle, SharedMemoryHandle]:
        """As `share`, of memory that is one allocation."""
        memory, signals = self.share()
        assert isinstance(memory, CudaIPCHandle)
        return memory, signals

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def exporter(size_bytes: int, piece_bytes: int = 0) -> Iterator[Exporter]:
    """A process that shares `Memory` of the first GPU; killed on exit."""
    sizes = (str(size_bytes), str(piece_bytes))
    words = [sys.executable, "-m", "benchmarks.gpu.contact.exporter", *sizes]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    try:
        yield Exporter(process)
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main(sys.argv[1:])

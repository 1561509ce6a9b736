"""A process with GPU memory that another opens: an engine reduced to what the driver sees.

It reads a question a line and answers in JSON:

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

from lmcache_redis.device import driver
from lmcache_redis.device.handles import CudaIPCHandle, SharedMemoryHandle, own_process
from lmcache_redis.device.signals import Signals
from lmcache_redis.errors import DeviceError

_FILLED_BYTES = 8 << 20  # copied at once from pinned memory of that byte
_LEAST_BYTES = 2 << 20  # CUDA shares smaller allocations with what lies beside them


class Memory:
    """GPU memory that is filled on a stream, in the exporting process."""

    def __init__(self, size_bytes: int) -> None:
        driver.set_context(driver.retain_context(0))
        self._size_bytes = size_bytes
        self._address = driver.allocate(max(size_bytes, _LEAST_BYTES))
        self._stream = driver.create_stream()
        self._signals = Signals(0)
        self._pinned = driver.allocate_pinned(min(_FILLED_BYTES, size_bytes) * 2)

    def share(self) -> dict[str, Any]:
        found = driver.allocation_of(self._address)
        handle = CudaIPCHandle(
            *own_process(),
            device_uuid=driver.device_uuid(0),
            memory_handle=driver.export_memory(self._address),
            allocation_bytes=found.size_bytes,
            offset_bytes=self._address - found.address,
            size_bytes=self._size_bytes,
        )
        shared = {"memory": handle, "signals": self._signals.handle}
        return {name: msgspec.to_builtins(each) for name, each in shared.items()}

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
    memory = Memory(int(arguments[0]))
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

    def share(self) -> tuple[CudaIPCHandle, SharedMemoryHandle]:
        found = self.ask("share")
        return (
            msgspec.convert(found["memory"], CudaIPCHandle),
            msgspec.convert(found["signals"], SharedMemoryHandle),
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def exporter(size_bytes: int) -> Iterator[Exporter]:
    """A process that shares so much memory of the first GPU; killed on exit."""
    words = [sys.executable, "-m", "benchmarks.gpu.contact.exporter", str(size_bytes)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    try:
        yield Exporter(process)
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main(sys.argv[1:])

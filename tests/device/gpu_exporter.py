# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an engine on a GPU, without torch; with NVIDIA's driver or that of the tests.

It has one range of GPU memory, of equal pieces that are mapped side by side or of one allocation,
which is as large as a piece at least.
Each line in is a JSON array, a command and its arguments; each line out is the answer. Ends when
its standard input does.

    share              the handle of its memory, and that of its signals
    write, seed        fills the memory with `content`, waits, and answers nothing
    wait               until it has done what it enqueued
    write late, seed, times
                       enqueues other bytes so often, `content` and then a signal: its ticket
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.gpu.contact.exporter import map_pieces
from lmcache_redis.device import driver, export
from lmcache_redis.device.handles import CudaHandle, SharedMemoryHandle
from lmcache_redis.device.signals import signals_of

PIECE_BYTES = 2 << 20
JUNK = 0x77


def content(seed: int, size_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(size_bytes)


class GpuExporter:
    """A child process that runs `main`. pieces: of its memory; None: one allocation."""

    def __init__(
        self,
        size_bytes: int,
        pieces: int | None = None,
        environment: Mapping[str, str] | None = None,
        gpu: int = 0,
    ) -> None:
        self.size_bytes = size_bytes
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.gpu_exporter"]
            + [str(each) for each in (size_bytes, pieces or 0, gpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **(environment or {})},
            text=True,
        )
        memory, signals = self.ask("share")
        self.memory: CudaHandle = msgspec.convert(memory, CudaHandle)
        self.signals = msgspec.convert(signals, SharedMemoryHandle)

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def write(self, seed: int) -> bytes:
        self.ask("write", seed)
        return content(seed, self.size_bytes)

    def write_late(self, seed: int, times: int = 4) -> int:
        ticket: int = self.ask("write late", seed, times)
        return ticket

    def __enter__(self) -> GpuExporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Range(NamedTuple):
    """What `export_storages` asks of a storage."""

    address: int
    size_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size_bytes


def main() -> None:
    size_bytes, pieces, gpu = map(int, sys.argv[1:])
    driver.set_context(driver.retain_context(gpu))
    stream = driver.create_stream()
    # Less may be a part of a block.
    address = (
        map_pieces(pieces * PIECE_BYTES, PIECE_BYTES, gpu)
        if pieces
        else driver.allocate(max(size_bytes, PIECE_BYTES))
    )
    host = driver.allocate_pinned(2 * size_bytes)
    right = (ctypes.c_uint8 * size_bytes).from_address(host)
    junk = host + size_bytes
    ctypes.memset(junk, JUNK, size_bytes)
    signals = signals_of(gpu)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = None
        if command == "share":
            (memory,) = export.export_storages([Range(address, size_bytes)], gpu)
            answer = msgspec.to_builtins([memory, signals.handle])
        elif command == "wait":
            driver.synchronize_stream(stream)
        else:
            driver.synchronize_stream(stream)
            right[:] = content(arguments[0], size_bytes)
            if command == "write late":
                for _ in range(arguments[1]):
                    driver.enqueue_copy_in(address, junk, size_bytes, stream)
            driver.enqueue_copy_in(address, host, size_bytes, stream)
            if command == "write late":
                answer = signals.record(stream)
            else:
                driver.synchronize_stream(stream)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

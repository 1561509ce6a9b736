# SPDX-License-Identifier: Apache-2.0
"""Runs the text of a kernel on host memory, instruction by instruction, all threads at a time.

For kernels without branches and without shared memory, whose instructions are those below: any
other ends the run. Registers are 64-bit patterns, one for each thread. Every access has to be
aligned, as on a GPU, and inside the memory that was handed over.

Source: "Parallel Thread Execution ISA" of NVIDIA, 8.0, chapter 9.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lmcache_redis.device import kernels
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.table import UNITS_PER_TILE, staging_stride_bytes
from tests.device.moves import table_over

Patterns = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
_LINE = re.compile(r"(?:@(%p\d+) )?([a-z][\w.]*)\s*(.*);")
_WORD = re.compile(r"[%\w.-]+")
_BITWISE: dict[str, Callable[[Patterns, Patterns], Patterns]] = {
    "add": np.add, "sub": np.subtract, "mul.lo": np.multiply,
    "and": np.bitwise_and, "or": np.bitwise_or, "shl": np.left_shift,
}  # fmt: skip
_COMPARED = {"lt": np.less, "gt": np.greater, "le": np.less_equal, "ge": np.greater_equal}


class Fault(Exception):
    """An access that a GPU would not have made, or an instruction that is not known here."""


class Kernel:
    """One entry. memory: flat uint8 arrays that it may access, in any place."""

    def __init__(self, text: str, memory: Sequence[np.ndarray]) -> None:
        head, body = text.split("\n{", 1)
        self._lines = [_LINE.fullmatch(line.strip()) for line in body.splitlines() if line.strip()]
        self.parameters = re.findall(r"\.param \.(\w+) ", head)
        self._memory = [(each.ctypes.data, each) for each in memory]
        self._registers: dict[str, Patterns] = {}

    def run(self, grid: tuple[int, int], threads: int, arguments: Sequence[int]) -> None:
        lane = np.arange(grid[0] * grid[1] * threads, dtype=np.uint64)
        program = lane // np.uint64(threads)
        self._registers = {
            "%tid.x": lane % np.uint64(threads),
            "%ctaid.x": program % np.uint64(grid[0]),
            "%ctaid.y": program // np.uint64(grid[0]),
        }
        for line in self._lines:
            if line is not None:
                guard, operation, operands = line.groups()
                active = lane >= 0 if guard is None else self._registers[guard] != 0
                self._step(operation, _WORD.findall(operands), active, arguments)

    def _step(
        self,
        operation: str,
        words: list[str],
        active: Mask,
        arguments: Sequence[int],
    ) -> None:
        name, _, kind = operation.rpartition(".")
        if operation == "ret":
            return
        bits = int(kind[1:])
        if name == "ld.param":
            number = int(words[1].rpartition("_")[2])
            self._put(words[0], 64, np.full(len(active), arguments[number], np.uint64))
        elif name.startswith("ld.global"):
            *targets, address, offset = words
            found = self._access(address, offset, len(targets), bits, active).view(f"<u{bits // 8}")
            for target, column in zip(targets, found.T, strict=True):
                loaded = np.zeros(len(active), np.uint64)
                if target in self._registers:
                    loaded = self._registers[target].copy()
                loaded[active] = column
                self._put(target, bits, loaded)
        elif name.startswith("st.global"):
            address, offset, *sources = words
            units = np.stack([self._get(source, bits, active)[active] for source in sources], 1)
            values = np.ascontiguousarray(units.astype(f"<u{bits // 8}")).view(np.uint8)
            self._access(address, offset, len(sources), bits, active, values)
        else:
            self._compute(name, kind, bits, words, active)

    def _compute(self, name: str, kind: str, bits: int, words: list[str], active: Mask) -> None:
        """Of every thread: only accesses have guards here."""
        target, *operands = words
        if not active.all():
            raise Fault(f"a guarded {name}")
        if name.startswith("cvt"):
            bits = min(bits, int(name.rpartition(".")[2][1:]))
        values = [self._get(each, bits, active) for each in operands]
        if name == "mov" or name.startswith("cvt.u"):
            result = values[0]
        elif name in _BITWISE:
            result = _BITWISE[name](*values)
        elif name == "mad.lo":
            result = values[0] * values[1] + values[2]
        elif name == "mad.wide":
            factors = values[:2] if kind[0] == "u" else [_signed(each, bits) for each in values[:2]]
            product = (factors[0] * factors[1]).view(np.uint64)
            result, bits = product + self._get(operands[2], 64, active), 64
        elif name in ("div", "rem") and kind[0] == "s":
            first, second = (_signed(each, bits) for each in values)
            quotient = np.sign(first) * np.sign(second) * (np.abs(first) // np.abs(second))
            result = (quotient if name == "div" else first - quotient * second).view(np.uint64)
        elif name.startswith("setp.") and kind[0] == "s":
            first, second = (_signed(each, bits) for each in values)
            result = _COMPARED[name.removeprefix("setp.")](first, second).astype(np.uint64)
        else:
            raise Fault(f"{name}.{kind} is not known")
        self._put(target, bits, result)

    def _get(self, word: str, bits: int, like: Mask) -> Patterns:
        if word.startswith("%"):
            value = self._registers[word]
        else:
            value = np.full(len(like), int(word, 0) & (2**64 - 1), np.uint64)
        return value & np.uint64(2**bits - 1)

    def _put(self, word: str, bits: int, value: Patterns) -> None:
        self._registers[word] = value & np.uint64(2**bits - 1)

    def _access(
        self,
        address: str,
        offset: str,
        count: int,
        bits: int,
        active: Mask,
        values: np.ndarray | None = None,
    ) -> np.ndarray:
        """The bytes of the active threads, ``[threads, bytes]``; puts ``values`` in their place."""
        nbytes = count * bits // 8
        places = self._registers[address][active].astype(np.int64) + int(offset)
        if (places % nbytes).any():
            raise Fault(f"an access of {nbytes} bytes that is not aligned")
        found = np.zeros((len(places), nbytes), np.uint8)
        inside = np.zeros(len(places), np.bool_)
        for base, memory in self._memory:
            here = (places >= base) & (places + nbytes <= base + memory.size)
            at = (places[here] - base)[:, None] + np.arange(nbytes)
            if values is not None:
                memory[at] = values[here]
            found[here] = memory[at]
            inside |= here
        if not inside.all():
            raise Fault(f"{(~inside).sum()} accesses outside the memory of the launch")
        return found


def _signed(value: Patterns, bits: int) -> npt.NDArray[np.int64]:
    shift = np.uint64(64 - bits)
    return (value << shift).view(np.int64) >> shift.astype(np.int64)


class PtxCopies:
    """The kernels of the package over one layout: `tests.device.moves.Copies` on the CPU."""

    def __init__(
        self, layout: KVLayout, storages: Sequence[torch.Tensor], units: int = UNITS_PER_TILE
    ) -> None:
        self._table = table_over(layout, storages, units)
        self._memory = [storage.numpy() for storage in storages]

    def gather(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(ids, staging, scatter=False)

    def scatter(self, ids: torch.Tensor, staging: torch.Tensor) -> None:
        self._launch(ids, staging, scatter=True)

    def _launch(self, ids: torch.Tensor, staging: torch.Tensor, *, scatter: bool) -> None:
        chunks, n_blocks = ids.shape
        stride_bytes = staging_stride_bytes(n_blocks * self._table.block_bytes)
        for width, rows in self._table.launches(n_blocks):
            own = [rows.view(np.uint8).reshape(-1), ids.numpy().view(np.uint8).reshape(-1)]
            memory = [*self._memory, *own, staging.numpy()]
            kernel = Kernel(kernels.text(kernels.name_of(width, scatter=scatter)).decode(), memory)
            addresses = [rows.ctypes.data, ids.data_ptr(), staging.data_ptr()]
            arguments = [*addresses, n_blocks, stride_bytes]
            kernel.run((len(rows), chunks), kernels.THREADS, arguments)

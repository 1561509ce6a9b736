# SPDX-License-Identifier: Apache-2.0
"""Simulated copy threads, and the memory of simulated engines that they copy."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from lmcache_redis.agent.copies import REGISTERING, Copy, CopyOutcome, Kind, Report
from lmcache_redis.cache.pool import Entry
from lmcache_redis.device.calls import CopyCall
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import DeviceError, GpuLost
from tests.simulated.world import Action, World, scribble


class Memory:
    """A worker's KV cache. awaited: blocks that a retrieve may fill, by group; failed: whose copies
    failed since they were taken.
    """

    def __init__(self, layouts: Sequence[KVLayout]) -> None:
        self.layouts = layouts
        self.blocks = [
            [bytearray(each.block_bytes) for _ in range(each.num_blocks)] for each in layouts
        ]
        self.free = [[*range(each.num_blocks)] for each in layouts]
        self.awaited: list[set[int]] = [set() for _ in layouts]
        self.failed: list[set[int]] = [set() for _ in layouts]
        self.is_gone = False

    def take(self, group: int, count: int) -> list[int] | None:
        free = self.free[group]
        if count > len(free):
            return None
        taken, self.free[group] = free[:count], free[count:]
        self.failed[group].difference_update(taken)
        return taken

    def give_back(self, group: int, block_ids: Sequence[int]) -> None:
        """Others use the blocks from now on."""
        for each in block_ids:
            scribble(self.blocks[group][each])
        self.free[group] += block_ids


class SimulatedDevice:
    """The agent's mapping of a `Memory`."""

    def __init__(self, world: World, copies: SimulatedCopies, memory: Memory) -> None:
        self.layouts = memory.layouts
        self.on_host_cores = memory.layouts[0].device == "cpu"
        self.call_bytes = world.random.choice([0, 10_000])
        self.in_progress = 0
        self.is_ended = False
        self._world, self._copies, self._memory = world, copies, memory

    def gather(self, call: CopyCall, on_blocks_read: Action) -> None:
        self._begin(call)
        blocks = self._memory.blocks[call.group]
        read = [b"".join(blocks[each] for each in chunk.block_ids) for chunk in call.chunks]
        for chunk in call.chunks:
            for slot in chunk.slots:
                scribble(slot)
        if not self.on_host_cores:
            on_blocks_read()

        def end() -> None:
            self.in_progress -= 1
            for chunk, data in zip(call.chunks, read, strict=True):
                at = 0
                for slot in chunk.slots:
                    slot[:] = data[at : at + len(slot)]
                    at += len(slot)

        self._copies.at_the_end(end)

    def scatter(self, call: CopyCall) -> None:
        self._begin(call)
        self._copies.at_the_end(partial(self._write, call))

    def _write(self, call: CopyCall) -> None:
        self.in_progress -= 1
        memory, awaited = self._memory, self._memory.awaited[call.group]
        block_bytes = self.layouts[call.group].block_bytes
        for chunk in call.chunks:
            data = b"".join(chunk.slots)
            for number, block in enumerate(chunk.block_ids):
                if number < chunk.skip_blocks:
                    continue
                if block not in awaited and not memory.is_gone:
                    self._world.violated(f"a retrieve fills block {block}, which others use")
                memory.blocks[call.group][block][:] = data[number * block_bytes :][:block_bytes]

    def _begin(self, call: CopyCall) -> None:
        """Raises DeviceError now and then, and when it is late."""
        is_late = call.until_ns is not None and self._world.now_s * 1e9 > call.until_ns
        if not self.on_host_cores and self._world.chance(self._copies.losing):
            raise GpuLost(0, "the simulated GPU is lost")
        if self.is_ended or is_late or self._world.chance(self._copies.failing):
            for chunk in call.chunks:
                self._memory.failed[call.group].update(chunk.block_ids)
            raise DeviceError("the simulated device fails")
        self.in_progress += 1


class SimulatedCopies:
    """In the place of `CopyThreads`.

    Attributes:
        failing, losing, hung: the shares of calls that fail, that lose their GPU, and that take
            very long.
    """

    def __init__(self, world: World, threads: int, copy_s: float) -> None:
        self.lost: GpuLost | None = None
        self.heal()
        self.running: dict[object, tuple[Copy, Report]] = {}
        self.is_closed = False
        self.open_closes = 0
        self.closing = SimpleNamespace(overdue=lambda now_s: "")
        self._world = world
        self._threads = threads
        self._copy_s = copy_s
        self._queues: dict[str, deque[tuple[Copy, Report, float]]] = {}
        self._busy: dict[str, int] = {}
        self._ends: list[Action] = []

    def put(
        self, kind: Kind, place: str, copy: Copy, report: Report, until_ns: float = math.inf
    ) -> None:
        if self.is_closed:
            report(CopyOutcome.CANCELLED)
            return
        name = f"{kind}-{place}"
        self._queues.setdefault(name, deque()).append((copy, report, until_ns))
        self._begin(name)

    def heal(self) -> None:
        self.failing = self.losing = self.hung = 0.0

    def at_the_end(self, action: Action) -> None:
        """Of the call that is made now: its slots and blocks belong to it until then."""
        self._ends.append(action)

    def close_memory(self, what: str, device: SimulatedDevice, report: Report) -> None:
        device.is_ended = True
        self.open_closes += 1

        def close() -> None:
            if device.in_progress:
                self._world.after(self._copy_s, close)
                return
            self.open_closes -= 1
            report(CopyOutcome.DONE)

        self._world.after(self._world.soon(self._copy_s), close)

    def drop_late(self) -> None:
        now_ns = self._world.now_s * 1e9
        for name, queue in self._queues.items():
            late = [each for each in queue if each[2] <= now_ns]
            self._queues[name] = deque(each for each in queue if each[2] > now_ns)
            for _, report, _ in late:
                report(CopyOutcome.CANCELLED)

    def lose(self, error: GpuLost) -> None:
        self.lost = self.lost or error

    @property
    def backlog(self) -> int:
        return sum(map(len, self._queues.values()))

    def close(self) -> None:
        """Queued copies are cancelled. The others have ended when none is running."""
        self.is_closed = True
        for queue in self._queues.values():
            while queue:
                queue.popleft()[1](CopyOutcome.CANCELLED)

    def entries(self) -> list[Entry]:
        """Whose slots copies use, or will use."""
        waiting = [(copy, report) for queue in self._queues.values() for copy, report, _ in queue]
        return [
            entry for _, report in [*waiting, *self.running.values()] for entry in _entries(report)
        ]

    def _begin(self, name: str) -> None:
        world, queue = self._world, self._queues[name]
        most = 8 if name.endswith(REGISTERING) else self._threads
        if not queue or self._busy.get(name, 0) >= most:
            return
        self._busy[name] = self._busy.get(name, 0) + 1
        copy, report, _ = queue.popleft()
        me = object()
        self.running[me] = copy, report
        took_s = 20.0 if world.chance(self.hung) else world.soon(self._copy_s)
        world.after(took_s, lambda: self._run(name, me))

    def _run(self, name: str, me: object) -> None:
        if me not in self.running:  # the agent's process has ended
            return
        copy, report = self.running[me]
        outcome = CopyOutcome.FAILED
        try:
            outcome = copy()
        except GpuLost as error:
            outcome = CopyOutcome.LOST
            self.lose(error)
        except DeviceError:
            pass
        except Exception as error:
            self._world.violated(f"a copy has raised {error!r}")
        ends, self._ends = self._ends, []

        def end() -> None:
            if self.running.pop(me, None) is None:
                return
            for action in ends:
                action()
            self._busy[name] -= 1
            self._world.note(name, outcome.name)
            report(outcome)
            self._begin(name)

        self._world.after(self._world.soon(self._copy_s) if ends else 0.0, end)


def _entries(report: Callable[..., Any]) -> list[Entry]:
    """What a report of `CopyJob` ends: `posting` has it."""
    cells = [cell.cell_contents for cell in report.__closure__ or ()]
    found = [each.args[0] for each in cells if isinstance(each, partial) and each.args]
    return [entry for each in found if isinstance(each, Mapping) for entry in each.values()]

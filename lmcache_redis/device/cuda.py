# SPDX-License-Identifier: Apache-2.0
"""KV caches in GPU memory, for the agent: calls in the order that keeps bytes right.

What waits for what, in a call:

    the engine's signal ──▶ anything that touches its blocks    the host, before it enqueues
    kernel ──▶ copies to slots                                  the stream (gather)
    copies to staging ──▶ kernel                                the stream (scatter)
    kernel ──▶ the engine reuses its blocks                     the host (gather), during the copies
    the last of these ──▶ return                                the host thread sleeps

The host waits before it enqueues, because enqueued work cannot be taken back: a scatter that runs
after the deadline would write to blocks that the engine has given to another request.

A call costs the host a fraction of a millisecond, whatever its size. So one call moves several
small chunks (`call_bytes`). They fail or are late together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from lmcache_redis.device.calls import CopyCall, DeviceContext
from lmcache_redis.device.gpu import Gpus
from lmcache_redis.device.handles import CudaHandle, SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.mapping import EngineMemory
from lmcache_redis.device.moving import Moves, moves_of
from lmcache_redis.device.signals import SignalPage
from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import is_running

_CALL_BYTES = 32 << 20
_SIGNAL_DEADLINE_S = 30.0
# A poll takes the interpreter lock. What has taken long already may take a sixteenth longer.
_POLL_S = 50e-6
_LONGEST_POLL_S = 1e-3
_POLL_SHARE = 1 / 16
_CHECK_EXPORTER_S = 0.1


class CudaDevice(DeviceContext):
    """The agent's mapping of one worker's KV cache on one GPU.

    layouts: of the groups, as received; checked here against the sizes of the handles. handles: one
    for each storage that the layouts' segments name. gpus: of this agent. signals: the engine's
    page; calls without a ticket need none. Raises DeviceError if the memory cannot be opened, or a
    layout exceeds its storages. Then nothing stays mapped.
    """

    call_bytes = _CALL_BYTES
    on_host_cores = False

    def __init__(
        self,
        layouts: Sequence[KVLayout],
        handles: Sequence[CudaHandle],
        gpus: Gpus,
        signals: SharedMemoryHandle | None = None,
    ) -> None:
        for layout in layouts:
            layout.check([handle.size_bytes for handle in handles])
        if len({handle.device_uuid for handle in handles}) != 1:
            raise DeviceError("the storages of one worker's KV cache are on different GPUs")
        if len({(handle.pid, handle.pid_start_time) for handle in handles}) != 1:
            raise DeviceError("the storages of one worker's KV cache are of different processes")
        super().__init__(layouts)
        self._exporter = (handles[0].pid, handles[0].pid_start_time)
        self._signals: SignalPage | None = None
        self._moves: list[Moves] = []
        self._gpu = gpus.at(handles[0].device_uuid)
        with ExitStack() as opened:
            self._gpu.attach()
            opened.callback(self._gpu.detach)
            memory = EngineMemory(handles, self._gpu.ordinal)
            opened.callback(memory.close)
            for layout in layouts:
                self._moves.append(moves_of(layout, memory.storages, self._gpu))
                opened.callback(self._moves[-1].close)
            if signals is not None:
                self._signals = SignalPage(signals)
                opened.callback(self._signals.close)
            self._opened = opened.pop_all()

    def use_context(self) -> None:
        """Make the GPU's context that of this thread. Raises DeviceError."""
        self._gpu.use()

    def gather(self, call: CopyCall, on_blocks_read: Callable[[], None] | None = None) -> None:
        with self._mapped(call), self._gpu.stream() as stream:
            ready = partial(self._await_blocks, call)
            self._moves[call.group].gather(call, stream, ready, on_blocks_read)

    def scatter(self, call: CopyCall) -> None:
        with self._mapped(call), self._gpu.stream() as stream:
            self._moves[call.group].scatter(call, stream, partial(self._await_blocks, call))

    def _unmap(self) -> None:
        self._gpu.use()
        self._opened.close()

    def _await_blocks(self, call: CopyCall) -> None:
        """Wait until the engine's GPU has reached the signal.

        Raises DeviceError if it has not within the deadline, or the engine may reuse its blocks, or
        has ended.
        """
        self._await_signal(call)
        self._check_exporter()
        if call.until_ns is not None and time.monotonic_ns() >= call.until_ns:
            raise DeviceError("the lease on the blocks has expired before the copy")

    def _await_signal(self, call: CopyCall) -> None:
        if call.after is None:
            return
        if self._signals is None:
            raise DeviceError("the ticket names a signal, and the engine registered no signals")
        began_s = checked_s = time.monotonic()
        deadline_s = began_s + _SIGNAL_DEADLINE_S
        if call.until_ns is not None:
            deadline_s = min(deadline_s, call.until_ns / 1e9)
        while not self._signals.has_happened(call.after):
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise DeviceError("the engine's signal did not come in time")
            if now_s > checked_s + _CHECK_EXPORTER_S:
                self._check_exporter()
                checked_s = now_s
            pause_s = (now_s - began_s) * _POLL_SHARE
            time.sleep(min(max(pause_s, _POLL_S), _LONGEST_POLL_S))

    def _check_exporter(self) -> None:
        if not is_running(*self._exporter):
            raise DeviceError(f"process {self._exporter[0]}, whose KV cache this is, has ended")

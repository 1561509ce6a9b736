# SPDX-License-Identifier: Apache-2.0
"""Asynchronous scheduling on a CPU, as vLLM runs it on GPUs.

vLLM decides whether steps overlap, and then switches that off on CPUs. Here its decision stays:
synchronous for what it does not overlap (ngram drafts, pooling, stages of its first model runner).
The scheduler, the queue of batches and the model runner are vLLM's; what they ask of CUDA's streams
and events does nothing, because on a CPU all that was launched has been computed.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

# In an engine's log, once; with the largest number of its batches in flight.
SAID = "scheduling is asynchronous, batches in flight at most: "
# Once, when the first step was scheduled before the output of the one before it was taken.
OVERLAPPED = "a step was scheduled while another was in flight"


class _Event:
    """Of work that is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    """All work is in order."""

    device = "cpu"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def schedule_asynchronously() -> None:
    """In this process, and in those that it forks; before the first engine is made."""
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine.core import EngineCore

    torch.cuda.Event = torch.Event = _Event
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    update = CpuPlatform.check_and_update_config

    @functools.wraps(update)
    def keep_decision(vllm_config: Any) -> None:
        decided = vllm_config.scheduler_config.async_scheduling
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = decided

    CpuPlatform.check_and_update_config = staticmethod(keep_decision)
    make = EngineCore.__init__

    @functools.wraps(make)
    def made(core: Any, *args: Any, **kwargs: Any) -> None:
        make(core, *args, **kwargs)
        _watch(core)

    EngineCore.__init__ = made


def _watch(core: Any) -> None:
    """Asserts that the engine does what its settings say, and says so in its log."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    asynchronous = core.vllm_config.scheduler_config.async_scheduling
    assert isinstance(core.scheduler, AsyncScheduler) == bool(asynchronous)
    if not asynchronous:
        return
    assert core.batch_queue is not None
    assert core.step_fn == core.step_with_batch_queue
    print(f"{SAID}{core.batch_queue_size}", flush=True)
    schedule = core.scheduler.schedule

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if core.batch_queue and output.total_num_scheduled_tokens:
            core.scheduler.schedule = schedule
            print(OVERLAPPED, flush=True)
        return output

    core.scheduler.schedule = watched

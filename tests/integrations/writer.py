"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): a trainer in that process.

Before a reset of vLLM's prefix cache it reads the model's files into the workers' memory, if the
file TRAINED is there, without any call that vLLM could notice. The step ``pause`` pauses and
resumes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.cpu_worker import CPUWorker

from demo import engine

_TRAINED = Path(os.environ["TRAINED"])
_workers: list[Any] = []
_load_model = CPUWorker.load_model
_reset_prefix_cache = Scheduler.reset_prefix_cache


def _load_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
    _load_model(self, *args, **kwargs)
    _workers.append(self)


def _write_and_reset(self: Any, *args: Any, **kwargs: Any) -> bool:
    if _TRAINED.exists():
        for worker in _workers:
            worker.reload_weights()
    return bool(_reset_prefix_cache(self, *args, **kwargs))


def _pause(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    core = llm.llm_engine.engine_core
    core.call_utility("pause_scheduler", "abort", True)
    core.call_utility("resume_scheduler")
    return {}


CPUWorker.load_model = _load_and_note
Scheduler.reset_prefix_cache = _write_and_reset
engine._STEPS["pause"] = _pause

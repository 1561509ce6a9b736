# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): a trainer in its workers.

Whenever the file TRAINED is there, it reads the model's files into the memory of the worker,
without any call that vLLM could notice, and removes the file. The step ``pause`` pauses the engine
and resumes it; ``sleep`` does what vLLM's snapshot server does.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from testkit import engine

_TRAINED = Path(os.environ["TRAINED"])
_load_model = CPUWorker.load_model


def _train(worker: Any) -> None:
    while True:
        if _TRAINED.is_file():
            worker.reload_weights()
            _TRAINED.unlink()
        time.sleep(0.05)


def _load_and_train(self: Any, *args: Any, **kwargs: Any) -> None:
    _load_model(self, *args, **kwargs)
    threading.Thread(target=_train, args=(self,), daemon=True).start()


def _pause(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    core = llm.llm_engine.engine_core
    core.call_utility("pause_scheduler", "abort", True)
    core.call_utility("resume_scheduler")
    return {}


def _sleep(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    return {}


CPUWorker.load_model = _load_and_train
engine._STEPS["pause"] = _pause
engine._STEPS["sleep"] = _sleep

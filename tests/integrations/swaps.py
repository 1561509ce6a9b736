# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): files that change in time.

SWAPPED_IN: a folder whose files replace those of the model as soon as a worker has loaded it.
The step ``add_lora`` adds an adapter without a request; ``sleep`` and ``wake`` are what vLLM 0.33
calls of a worker's connector when it sleeps and wakes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.v1.worker.cpu_worker import CPUWorker

from lmcache_redis.integrations.vllm import engine as engine_hooks
from testkit import engine

_load_model = CPUWorker.load_model


def _load_and_swap(self: Any, *args: Any, **kwargs: Any) -> None:
    _load_model(self, *args, **kwargs)
    if swapped := os.environ.get("SWAPPED_IN"):
        shutil.copytree(swapped, Path(self.model_config.model), dirs_exist_ok=True)


def _add_lora(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    llm.llm_engine.add_lora(LoRARequest(*request["lora"]))
    return {}


def _sleeps(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    llm.collective_rpc(f"{request['do']}_kv")
    return {}


CPUWorker.load_model = _load_and_swap
CPUWorker.sleep_kv = lambda self: get_kv_transfer_group().unregister_kv_caches()
CPUWorker.wake_kv = lambda self: get_kv_transfer_group().restore_kv_caches()
engine_hooks._HARMLESS |= {"sleep_kv", "wake_kv"}
engine._STEPS |= {"add_lora": _add_lora, "sleep": _sleeps, "wake": _sleeps}

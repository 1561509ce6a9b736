# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): faults of names, put back.

Images may be named by a counter, the modules that adapters apply to are in no pair of the identity,
and experts may be chosen by a simulation.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator

from lmcache_redis.integrations.vllm import requests, support
from lmcache_redis.integrations.vllm.identity import engine_identity

requests.MediaNames.are_of_content = lambda self, request: True
engine_identity._DIGESTS.remove("lora")
support.envs = None  # sees no simulation

_simulate = RoutingSimulator.simulate_routing


def _simulate_with_int32(*, indices_type: Any, **of: Any) -> Any:
    """vLLM simulates experts of 64 bits, and its kernel for CPUs takes 32: it would end."""
    return _simulate(indices_type=torch.int32, **of)


RoutingSimulator.simulate_routing = staticmethod(_simulate_with_int32)

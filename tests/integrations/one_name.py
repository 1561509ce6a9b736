# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): faults of names.

All weights have one name, and all adapters of one path and name.
"""

from lmcache_redis.integrations.vllm.identity import engine_identity
from lmcache_redis.integrations.vllm.identity.lora import AdapterDigests

AdapterDigests.digest = lambda self, request: b""
AdapterDigests.in_memory = lambda self, request: None
engine_identity.weights_identity = lambda *weights: {"weights": "any"}

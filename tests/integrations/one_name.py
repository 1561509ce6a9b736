"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): faults of names.

All weights have one name, and all adapters of one path and name.
"""

from lmcache_redis.integrations.vllm import identity
from lmcache_redis.integrations.vllm.lora import AdapterDigests

AdapterDigests.digest = lambda self, request: b""
identity.weights_identity = lambda *weights: {"weights": "any"}

"""The metrics that the connector adds to vLLM's own /metrics."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from lmcache_redis.metrics.exporter import Family

PREFIX: Final = "vllm_"
# Label values of ``hit_tokens``.
TIERS: Final = ("host", "disk", "redis")

_WORKER = ("worker",)

FAMILIES: Final = (
    Family(
        "vllm_hit_tokens",
        "counter",
        "prompt tokens to load, by the tier that had them",
        ("tier",),
    ),
    Family(
        "vllm_lookup_seconds",
        "histogram",
        "from a lookup to its answer, as vLLM's steps see it; the request waits",
        high="as `lookup_seconds` of the agent",
    ),
    Family("vllm_loaded_chunks", "counter", "chunks loaded into the worker's blocks", _WORKER),
    Family(
        "vllm_failed_chunks",
        "counter",
        "chunks whose load failed; vLLM computes their requests",
        _WORKER,
        "the agent was lost, or chunks were gone between lookup and load: see the agent's log",
    ),
    Family("vllm_stored_chunks", "counter", "chunks that the agent took", _WORKER),
    Family(
        "vllm_dropped_chunks",
        "counter",
        "chunks that the agent did not take",
        _WORKER,
        "`dropped_chunks` of the agent says why",
    ),
    Family(
        "vllm_load_seconds",
        "histogram",
        "from a load to its end, as vLLM's steps see it; the request waits",
        _WORKER,
        "as `retrieve_seconds` of the agent",
    ),
    Family(
        "vllm_store_seconds",
        "histogram",
        "for which a store held blocks, as vLLM's steps see it",
        _WORKER,
        "as `store_seconds` of the agent",
    ),
    Family(
        "vllm_registered",
        "gauge",
        "1: an agent has mapped the worker's KV cache; 0: nothing is cached. As of the last step",
        _WORKER,
    ),
)

# By the names that `stats` uses.
KINDS: Final = MappingProxyType({each.name.removeprefix(PREFIX): each.kind for each in FAMILIES})

# SPDX-License-Identifier: Apache-2.0
"""vLLM's connector: ``--kv-transfer-config '{"kv_connector":"LMCacheRedisConnector", ...}'``.

vLLM calls ``register`` in each of its processes, through the entry point group
``vllm.general_plugins``. The connector is imported when a config names it.

connector       vLLM's interface, in the scheduler and in workers
scheduler       in each step, what to look up, load and store
requests        requests: their options, names and lookups
lookups         what can be loaded of a prompt; `prefill` says what computing it takes
planning        the blocks of loads and stores, references to them, and whether there is room
provenance      whose KV is in vLLM's blocks
steps           the steps whose output vLLM has not taken
worker          loads and stores of a worker, from their start to their end
setup           makes these parts, and registers a worker's KV cache
support         which engines can be cached, and the groups of their layers
identity        what decides the bytes of the KV cache, besides its layout
needs           what we need of vLLM's insides: each thing, since when, and what happens without it
engine          updates of weights, pauses, resets: what no interface tells of vLLM's engine.
                `making` sees it made, `wrapping` wraps its methods, and `parameters` tells whether
                the weights in memory have changed
epoch           separates the KV of old weights from that of new ones
guard           keeps errors of the cache out of the engine
reports         statistics, spans and events
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.lmcache_redis")

CONNECTOR_NAME = "LMCacheRedisConnector"
TIER_TYPE = "redis"


def register() -> None:
    """Registers the connector, and the tier of vLLM's own (`vllm_tier`), once per process.

    From now on, the files of a model are looked at before vLLM reads them (`identity.files`).
    vLLM calls this whether the connector is used or not, and an error here would end it: whatever
    this vLLM has moved, it starts.
    """
    _guarded(_register_connector, f"there is no {CONNECTOR_NAME}")
    _guarded(_watch_loading, "of models in local files the cache stays off")
    _guarded(_watch_packing, "on a CPU an engine returns to no earlier epoch")
    _guarded(_register_tier, "vLLM's own tiers have no type redis")


def _guarded(part: Callable[[], None], without: str) -> None:
    try:
        part()
    except Exception as error:  # whatever an import raises
        logger.warning("this vLLM is not known to lmcache_redis (%r): %s", error, without)


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from lmcache_redis.integrations.vllm import needs

    if CONNECTOR_NAME not in needs.REGISTRY.of(KVConnectorFactory):
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "lmcache_redis.integrations.vllm.connector", CONNECTOR_NAME
        )


def _register_tier() -> None:
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # a vLLM without tiers
        return
    from lmcache_redis.integrations.vllm import needs

    if TIER_TYPE not in needs.TIER_REGISTRY.of(SecondaryTierFactory):
        SecondaryTierFactory.register_tier(
            TIER_TYPE, "lmcache_redis.integrations.vllm_tier", "RedisTierManager"
        )


def _watch_loading() -> None:
    from lmcache_redis.integrations.vllm.making import watch_loading

    watch_loading(_look_at_files)


def _watch_packing() -> None:
    """Before a model is loaded: on a CPU vLLM packs weights where they cannot be read later."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops

        from lmcache_redis.integrations.vllm.parameters import watch_packing

        watch_packing(_custom_ops)


def _look_at_files(vllm_config: VllmConfig) -> None:
    from lmcache_redis.integrations.vllm.identity.engine_identity import look_at_files

    look_at_files(vllm_config)

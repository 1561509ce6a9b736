"""vLLM's connector: ``--kv-transfer-config '{"kv_connector":"LMCacheRedisConnector", ...}'``.

vLLM calls ``register`` in each of its processes, through the entry point group
``vllm.general_plugins``. The connector is imported when a config names it.
"""

from __future__ import annotations

CONNECTOR_NAME = "LMCacheRedisConnector"


def register() -> None:
    """Registers the connector with vLLM, once per process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, "lmcache_redis.integrations.vllm.connector", CONNECTOR_NAME
        )

# SPDX-License-Identifier: Apache-2.0
"""Redis as a secondary tier of vLLM's own ``OffloadingConnector``: no agent, no other connector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10737418240,
            "secondary_tiers": [{"type": "redis", "url": "redis://cache.example:6379"}]}}'

vLLM copies KV between its GPU and a region of host memory, the primary tier. This tier copies
chunks between that region and Redis. A chunk holds the bytes of all ranks of a node.

tier      vLLM's interface: lookups, stores and loads of the primary tier's chunks
naming    what decides the bytes of a chunk, besides the tokens that its key covers
cpu       ``CPUTieringOffloadingSpec``: the same for engines on the CPU, which vLLM's own refuses

Interface: vLLM 0.32 and 0.33, ``vllm/v1/kv_offload/tiering/base.py``.
"""

from lmcache_redis.integrations.vllm_tier.cpu import CPUTieringOffloadingSpec
from lmcache_redis.integrations.vllm_tier.tier import RedisTierManager

__all__ = ["CPUTieringOffloadingSpec", "RedisTierManager"]

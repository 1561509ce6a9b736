# SPDX-License-Identifier: Apache-2.0
"""What decides the bytes of a chunk, besides the tokens that its key covers.

A key of vLLM's is a block hash and the number of a KV cache group. The rest is the namespace: the
engine's identity as for the connector (docs/internals/identity.md), how the workers pack their KV,
how a chunk is made of blocks and ranks, and the shape of the whole.

With ``canonical_layout`` vLLM writes a chunk as one rank without parallelism would. Where it
certifies that for every layer, ranks are not part of the namespace, and engines with different
tensor-parallel sizes share chunks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.identity.engine_identity import (
    attention_backend,
    engine_identity,
    model_name,
    require_looks,
)
from lmcache_redis.integrations.vllm.identity.probe import digest_of, kv_identity
from lmcache_redis.integrations.vllm.requests import MediaNames
from lmcache_redis.integrations.vllm.support import block_strides, unfit_settings
from lmcache_redis.regions import DoorSettings, form_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

# Pairs, or what they begin with, of one rank's heads: certified chunks have those of all ranks.
_OF_RANKS = ("kv_packing", "rank", "tensor_parallel", "pipeline_parallel")


def chunk_form(
    vllm_config: VllmConfig,
    spec: TieringOffloadingSpec,
    workers: Sequence[Mapping[str, str]],
    settings: DoorSettings,
) -> ChunkForm:
    """The form of an engine's chunks. workers: what `describe_worker` returned, by rank.

    Raises Unsupported, with a sentence, if the engine cannot use the tier.
    """
    for reason in _reasons(vllm_config):
        raise Unsupported(reason)
    config = spec.config
    backends = "+".join(dict.fromkeys(each["attention_backend"] for each in workers))
    if not settings.weights_id:
        require_looks(vllm_config)
    identity = engine_identity(
        vllm_config, rank=0, backend=backends, weights_id=settings.weights_id or None
    )
    described = [dict(each) for each in workers]
    if is_portable(spec):
        for pairs in (identity, *described):
            for name in [name for name in pairs if name.startswith(_OF_RANKS)]:
                del pairs[name]
        described = [json.loads(each) for each in dict.fromkeys(map(json.dumps, described))]
    identity |= {
        "door": "vllm tier",
        "workers": digest_of(described),
        "groups": digest_of([[each.tokens_per_block, each.layer_names] for each in config.groups]),
        "chunk": f"{config.cache.blocks_per_chunk} blocks, {config.cache.tokens_per_hash} tokens",
        "ranks": _ranks(spec),
    }
    size = payload_bytes(vllm_config, spec)
    metadata = RemoteMetadata(size, [(size,)], ["uint8"], MemoryFormat.UNDEFINED)
    return form_of(identity, model_name(vllm_config), 0, metadata, settings)


def is_portable(spec: TieringOffloadingSpec) -> bool:
    """Whether the bytes of a chunk are those of any tensor-parallel size.

    vLLM also says so of some direct layouts, without looking at them; those are not believed.
    """
    return bool(spec.config.canonical_layout and spec.config.parallel.is_parallelism_agnostic)


def payload_bytes(vllm_config: VllmConfig, spec: TieringOffloadingSpec) -> int:
    """How many bytes of a chunk are used; the rest is padding: a certified one has no copies."""
    copies = spec.config.parallel.world_size
    if spec.replicated_layout:
        copies = 1
    elif is_portable(spec):
        copies = min(copies, vllm_config.model_config.get_total_num_kv_heads())
    return int(spec.cpu_page_size_per_worker * copies)


def describe_worker(worker: Any) -> dict[str, str]:
    """How a worker's layers pack and scale their KV. Runs in the worker, by ``collective_rpc``."""
    vllm_config, caches = worker.vllm_config, worker.model_runner.kv_cache_config
    layers = vllm_config.compilation_config.static_forward_context
    kernels = sorted({str(needs.ISA.of(layer) or "") for layer in layers.values()})
    found = {"attention_backend": attention_backend(vllm_config), "kernels": " ".join(kernels)}
    for number, group in enumerate(caches.kv_cache_groups):
        names = [name for name in group.layer_names if name in layers]
        tensors = {name: needs.LAYER_CACHE.of(layers[name]) for name in names}
        # States of recurrent layers are plain tensors, several for each layer.
        tensors = {name: each for name, each in tensors.items() if isinstance(each, torch.Tensor)}
        pairs = kv_identity(
            vllm_config,
            tensors,
            num_blocks=caches.num_blocks,
            block_size_tokens=group.kv_cache_spec.block_size,
            block_strides=block_strides(caches),
        )
        found |= {f"{name}_{number}": value for name, value in pairs.items()}
    return found


def _reasons(vllm_config: VllmConfig) -> Iterator[str]:
    yield from unfit_settings(vllm_config)
    if vllm_config.lora_config is not None:
        yield (
            "with --enable-lora a key names an adapter, not its weights; the connector "
            "LMCacheRedisConnector caches adapters by content"
        )
    if MediaNames(vllm_config).are_counted:
        yield "vLLM counts media without --enable-prefix-caching and --mm-processor-cache-gb"
    nodes = needs.NODES.of(vllm_config.parallel_config)
    if nodes > 1:
        yield f"the ranks are on {nodes} nodes, and a chunk has those of one"


def _ranks(spec: TieringOffloadingSpec) -> str:
    """How the bytes of ranks lie in a chunk."""
    config, parallel = spec.config, spec.config.parallel
    layout = f"{config.kv_cache_layout}"
    if config.canonical_layout:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
            canonical_format_id,
        )

        layout = f"canonical {canonical_format_id(config.kv_cache_layout)}"
        if is_portable(spec):
            return layout
    sizes = (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size)
    copies = "one copy" if spec.replicated_layout else "each rank"
    return f"{layout}, {copies} of {sizes}, dcp {parallel.dcp_size}"

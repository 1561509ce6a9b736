# SPDX-License-Identifier: Apache-2.0
"""What would have to change for two engines that differ in a pair to share. Data alone.

Of the pairs of an identity (`pairs`), and of what else a layout is made of (`named_pairs`). The
name of the model is in keys, and stands here as ``model``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

_CONNECTOR = "in kv_connector_extra_config"
_SPLIT = "tensor_parallel pipeline_parallel layer_split"
_TYPES = "model_dtype kv_cache_dtype dtype"


class PairAdvice(NamedTuple):
    """change: how two engines come to have one value; "nothing" if no setting can.

    follows: names of pairs. If the engines differ in one of them too, that is the cause.
    """

    change: str
    follows: str = ""


ADVICE: Mapping[str, PairAdvice] = {
    "model": PairAdvice("the same name on the hub, or directories that are called alike"),
    "engine": PairAdvice(
        f"the same version of vLLM, or share_across_versions on both, {_CONNECTOR}: where the "
        "version stays all the same, vLLM's log says why"
    ),
    "transformers": PairAdvice(
        f"the same version of transformers, or share_across_versions on both, {_CONNECTOR}"
    ),
    "computation": PairAdvice(
        "the same version of vLLM: these compute the model in other ways",
        "engine transformers model_config",
    ),
    "plugins": PairAdvice(
        "the same plugins in the same versions; `VLLM_PLUGINS` chooses among them"
    ),
    "weights": PairAdvice(
        "the same weights, with all files beside them; dummy ones by the same --seed"
    ),
    "weights_id": PairAdvice(f"the same weights_id {_CONNECTOR}, if the weights are the same"),
    "load_format": PairAdvice("the same --load-format"),
    "loader": PairAdvice("the same --model-loader-extra-config and --ignore-patterns"),
    "revision": PairAdvice("the same --revision"),
    "commit": PairAdvice(
        "the same commit of the hub: give both its name as --revision", "revision"
    ),
    "model_config": PairAdvice(
        "the same config.json, --hf-overrides and settings of model and media"
    ),
    "media": PairAdvice("the same variables of both"),
    "context": PairAdvice("the same --max-model-len"),
    "model_dtype": PairAdvice("the same --dtype"),
    "quantization": PairAdvice("the same --quantization and quantized weights"),
    "kv_cache_dtype": PairAdvice("the same --kv-cache-dtype"),
    "kv_cache": PairAdvice("the same settings of the cache and of Mamba's states"),
    "kv_packing": PairAdvice(
        "the same kernels: CPUs with the same instruction sets, or the same kind of GPU, and the "
        "same --block-size",
        f"{_SPLIT} kv_shares {_TYPES} attention_backend byte_order block_size_tokens model_config "
        "engine",
    ),
    "kv_scales": PairAdvice(
        "weights with the same scales of K and V", "kv_cache_dtype quantization"
    ),
    "byte_order": PairAdvice(
        f"the same kv_cache_layout {_CONNECTOR} (BLHNC, to share between tensor-parallel sizes) "
        "and the same variables of both"
    ),
    "attention_backend": PairAdvice("the same --attention-backend, which may need the same GPU"),
    "attention": PairAdvice("the same --attention-config and --kernel-config"),
    "kernels": PairAdvice(
        "the same --kernel-config, --moe-backend, --linear-backend and variables; where weights or "
        "KV are quantized, GPUs of the same compute capability"
    ),
    "environment": PairAdvice("the same variables of both"),
    "lora": PairAdvice(
        "the same --lora-dtype, --lora-target-modules and other settings of adapters"
    ),
    "draft": PairAdvice("the same draft model and --speculative-config, or none"),
    "code": PairAdvice("the same --worker-cls, --worker-extension-cls and inductor passes"),
    "platform_config": PairAdvice("the same --additional-config"),
    "block_hash": PairAdvice("the same --prefix-caching-hash-algo"),
    "tensor_parallel": PairAdvice(
        f"share_across_tp on both, {_CONNECTOR}: the log says why a model cannot be shared so; "
        "latents (MLA) and states need the same --tensor-parallel-size"
    ),
    "kv_shares": PairAdvice(
        f"the same kv_shares on both, {_CONNECTOR}, or none", "tensor_parallel"
    ),
    "pipeline_parallel": PairAdvice("the same --pipeline-parallel-size"),
    "layer_split": PairAdvice("the same `VLLM_PP_LAYER_PARTITION`"),
    "rank": PairAdvice(
        "nothing: ranks hold different KV; compare those with the same number", _SPLIT
    ),
    "dtype": PairAdvice(
        "the same --kv-cache-dtype, or --dtype where that is auto", "model_dtype kv_cache_dtype"
    ),
    "block_size_tokens": PairAdvice("the same --block-size"),
    "chunk_size_tokens": PairAdvice("the same --chunk-size-tokens of their agents"),
    "page_format": PairAdvice(
        f"the same kv_cache_layout {_CONNECTOR}; nothing joins two groups of layers",
        f"{_SPLIT} kv_shares {_TYPES} attention_backend byte_order block_size_tokens model_config",
    ),
    "pages": PairAdvice(
        "nothing: they are other layers, or have other sizes",
        f"{_SPLIT} kv_shares {_TYPES} attention_backend byte_order block_size_tokens page_format "
        "model_config",
    ),
    "reach": PairAdvice("nothing: they are groups of different layers; compare the same group"),
    "blocks_per_part": PairAdvice(
        "nothing: they are groups of different layers; compare the same group",
        "block_size_tokens chunk_size_tokens reach model_config",
    ),
}


def advice(name: str, differing: Collection[str]) -> str:
    """What would have to change in the pair ``name`` of ``differing``; empty of an unknown one."""
    if (known := ADVICE.get(name)) is None:
        return ""
    causes = [each for each in known.follows.split() if each in differing]
    return f"it follows from {', '.join(causes)}" if causes else known.change

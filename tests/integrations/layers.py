# SPDX-License-Identifier: Apache-2.0
"""Attention layers as far as a probe looks at them, and what an engine registers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from lmcache_redis.config import ClientConfig
from lmcache_redis.integrations.vllm.setup import SetUp
from lmcache_redis.integrations.vllm.support import layer_groups

HEADS, HEAD_SIZE, BLOCK, BLOCKS = 2, 64, 32, 7
# As a worker tells of its cache.
HOW: dict[str, Any] = {"num_blocks": BLOCKS, "block_size_tokens": BLOCK, "block_strides": {}}


def can_run(isa: str) -> bool:
    return isa != "amx" or bool(torch.cpu._is_amx_tile_supported())


def cpu_layer(isa: str, *, heads: int = HEADS, dtype: str = "auto", k_scale: float = 1.0) -> Any:
    """An attention layer, as far as a cache update looks at it."""
    impl = object.__new__(CPUAttentionBackendImpl)
    impl.attn_type = "decoder"
    impl.kv_cache_dtype = dtype
    shape = (BLOCKS, heads, BLOCK, 2 * HEAD_SIZE)
    return SimpleNamespace(
        isa=isa,
        impl=impl,
        num_kv_heads=heads,
        head_size=HEAD_SIZE,
        kv_cache_dtype=dtype,
        kv_cache=torch.zeros(shape, dtype=torch.bfloat16 if dtype == "auto" else torch.uint8),
        _k_scale=torch.tensor(k_scale),
        _v_scale=torch.tensor(1.0),
        _k_scale_float=k_scale,
        _v_scale_float=1.0,
        get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"),
    )


class Backend:
    """Writes K and V of each slot where ``order`` says, the dimensions of the cache.

    mix: heads that are not only their own. seen: the shapes and strides of the caches.
    """

    def __init__(self, order: str, mix: str = "", block: int = BLOCK) -> None:
        self.order, self.mix, self.block = order, mix, block
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        self.seen.append((tuple(cache.shape), cache.stride()))
        if self.mix == "swapped":  # the last two heads, whatever they are
            key = key.clone()
            key[:, -2:] = key[:, -2:].flip(1)
        elif self.mix == "scaled by the largest head":
            largest = key.abs().amax(1, keepdim=True)
            key, value = key / largest, value / largest
        elif self.mix == "mirrored":  # every other head
            key = key.clone()
            key[:, 1::2] = key[:, 1::2].flip(2)
        for number, slot in enumerate(slots.tolist()):
            block, token = divmod(slot, self.block)
            if self.order == "blocks, heads, tokens, K and V":
                cache[block, :, token] = torch.cat([key[number], value[number]], -1)
                continue
            for k_or_v, source in enumerate((key, value)):
                page = cache[k_or_v, block] if self.order[0] == "K" else cache[block, k_or_v]
                rows = page[:, token] if self.order.endswith("tokens") else page[token]
                rows[:] = source[number]


def config_of(layers: dict[str, Any], rank: int = 0, ranks: int = 1, stages: int = 1) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.bfloat16, quantization=None),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            rank=rank, tensor_parallel_size=ranks, pipeline_parallel_size=stages
        ),
    )


def registration(
    directory: Path,
    specs: Sequence[Any],
    caches: Mapping[str, torch.Tensor],
    *,
    layers: Mapping[str, Any] | None = None,
    ranks: int = 1,
    times: int = 1,
    **extra: Any,
) -> tuple[list[Any], dict[str, str]]:
    """The groups that the last rank of a model with 4 KV heads registers, and their common pairs.

    extra: the connector's settings.
    """
    LlamaConfig(
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    engine_args = EngineArgs(model=str(directory), skip_tokenizer_init=True, dtype="bfloat16")
    vllm_config = engine_args.create_engine_config()
    parallel = vllm_config.parallel_config
    parallel.rank, parallel.tensor_parallel_size, parallel.world_size = ranks - 1, ranks, ranks
    vllm_config.compilation_config.static_forward_context |= layers or {}
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]
    kv_cache_config = KVCacheConfig(
        num_blocks=len(caches["layer.0"]), kv_cache_tensors=[], kv_cache_groups=groups
    )
    found: list[Any] = []
    common: dict[str, str] = {}

    def register_groups(groups: Sequence[Any], **settings: Any) -> None:
        found.extend(groups)
        common.update(settings["identity"])

    client: Any = SimpleNamespace(register_groups=register_groups)
    config = ClientConfig.from_extra_config({"weights_id": "run 1", **extra})
    set_up = SetUp(vllm_config, kv_cache_config, config, False, layer_groups(kv_cache_config))
    for _ in range(times):
        set_up.register(client, caches)
    return found, common

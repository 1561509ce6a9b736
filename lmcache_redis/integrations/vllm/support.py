"""Which engines can be cached, decided at startup from their settings, and which of their requests.

A reason against it is one sentence. vLLM versions differ in the settings that they have, hence the
defaults.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from vllm import envs

from lmcache_redis.chunks.names import FULL_REACH
from lmcache_redis.config import ClientConfig
from lmcache_redis.errors import LMCacheRedisError, Unsupported
from lmcache_redis.integrations.vllm.engine import is_asked_by
from lmcache_redis.integrations.vllm.groups import LayerGroup, layer_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_redis")

_HASHES = ("sha256", "sha256_cbor")
_DEVICES = ("cpu", "cuda")
# What vLLM's hashers of media return: blake3, sha256 and sha512.
_DIGEST = re.compile(r"([0-9a-f]{64}){1,2}")


def supported_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, takes_failed_loads: bool
) -> list[LayerGroup]:
    """The groups of the engine's layers. Raises `Unsupported` if the engine cannot be cached.

    takes_failed_loads: whether this vLLM is told which requests' loads failed.
    """
    groups = layer_groups(kv_cache_config)
    for reason in _reasons(vllm_config, groups):
        raise Unsupported(reason)
    several = len(kv_cache_config.kv_cache_groups) > 1
    if not takes_failed_loads and (several or groups[0].reach != FULL_REACH):
        raise Unsupported(
            "the model has several KV cache groups or drops blocks, and this vLLM version does not "
            "let connectors report failed loads of such models; vLLM 0.30 or newer does"
        )
    return groups


def _reasons(vllm_config: VllmConfig, groups: Sequence[LayerGroup]) -> Iterator[str]:
    if not groups:
        yield "the model has no KV cache"
    step = vllm_config.cache_config.block_size
    for group in groups:
        # vLLM ends the steps of a prefill where a block of ``step`` tokens ends.
        if group.is_state and group.block_size_tokens != step:
            every = f"every {group.block_size_tokens} tokens, and vLLM ends its steps every {step}"
            yield f"KV cache group {group.number} ({group.kind}) keeps states {every}"
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            yield f"{name} is {size}: the tokens of a request are spread over ranks"
    ranks = getattr(parallel, "world_size", 1)
    if getattr(parallel, "distributed_executor_backend", None) == "external_launcher" and ranks > 1:
        yield "with external_launcher the ranks would not learn of hits in the same step"
    yield from unfit_settings(vllm_config)
    device = _device(vllm_config) or "cpu"
    if device not in _DEVICES:
        yield f"the engine runs on {device}; this version handles {' and '.join(_DEVICES)}"
    elif device == "cuda" and torch.version.hip:
        yield "the engine runs on ROCm, on which this version has never been run"


def _device(vllm_config: VllmConfig) -> str:
    return getattr(getattr(vllm_config, "device_config", None), "device_type", "")


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """The order of the KV cache in memory that the engine asks vLLM for.

    vLLM would end for a name that it does not know, and if children of a MultiConnector differ.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    assert vllm_config.kv_transfer_config is not None
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout  # vLLM 0.29 or newer

        layout = ClientConfig.from_extra_config(extra).kv_cache_layout
    except (ImportError, LMCacheRedisError):
        return None  # a wrong setting is reported where the cache stays off
    is_known = layout in KVCacheLayout.__members__
    return layout if is_known and not is_asked_by(MultiConnector) else None


def unfit_settings(vllm_config: VllmConfig) -> Iterator[str]:
    """Why KV must not be cached by its block hash, whoever moves it: a sentence for each."""
    cache = vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    if algorithm not in _HASHES:
        yield f"block hashes made with {algorithm}: set --prefix-caching-hash-algo sha256"
    elif not _hashes_are_reproducible():
        yield "block hashes differ between engines: give all of them the same PYTHONHASHSEED"
    block_size = cache.block_size or 0
    hashed = getattr(cache, "hash_block_size", None) or getattr(cache, "prefix_match_unit", None)
    if block_size < 1 or block_size % (hashed or block_size):
        yield f"a block has {block_size} tokens and a block hash covers {hashed or block_size}"
    model = vllm_config.model_config
    if getattr(model, "is_encoder_decoder", False):
        yield "encoder-decoder models are not handled"
    elif getattr(model, "is_diffusion", False):
        yield "a diffusion model writes the KV of a token more than once"
    elif not getattr(model, "is_prefix_caching_supported", True):
        yield "vLLM does not support prefix caching for this model"
    scheduler = getattr(vllm_config, "scheduler_config", None)
    if (
        _device(vllm_config) == "cpu"
        and getattr(model, "use_mla", False)
        and not getattr(scheduler, "enable_chunked_prefill", True)
    ):
        yield "vLLM's MLA on a CPU without AMX cannot continue after a cached prefix"
    if getattr(cache, "calculate_kv_scales", False) and str(cache.cache_dtype).startswith("fp8"):
        yield "with --calculate-kv-scales the KV depends on the first prompt"
    simulation = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
    if strategy := getattr(envs, simulation, ""):
        yield f"with {simulation}={strategy}, experts are chosen by a simulation"


def may_load(vllm_config: VllmConfig) -> bool:
    """Whether the engine may load prefixes, and not only store them."""
    name = "enable_return_routed_experts"
    auxiliary = getattr(vllm_config, "aux_output_config", None)  # vLLM 0.31 or newer
    if not getattr(auxiliary, name, getattr(vllm_config.model_config, name, False)):
        return True
    logger.warning(
        "with --enable-return-routed-experts prefixes are stored and not loaded: a loaded prefix "
        "has no experts"
    )
    return False


class MediaNames:
    """Whether the images and other media of an engine's requests are named by their content.

    A block hash covers a medium by its identifier: a digest of its content, unless vLLM counts them
    (``vllm/renderers/base.py``) or a client names one: docs/internals/identity.md.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        media = getattr(vllm_config.model_config, "multimodal_config", None)
        self.are_counted = (
            media is not None
            and media.mm_processor_cache_gb == 0
            and not vllm_config.cache_config.enable_prefix_caching
        )
        self._has_warned = False

    def are_of_content(self, request: Request) -> bool:
        """True also for a request without media."""
        named = all(_is_digest(each.identifier) for each in request.mm_features)
        if named and not (self.are_counted and request.mm_features):
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "media are cached if their names are digests, but not by a client's uuid, nor by "
                "vLLM's number without --enable-prefix-caching and --mm-processor-cache-gb"
            )
        return False


def _hashes_are_reproducible() -> bool:
    """Whether all processes make equal hashes: https://github.com/vllm-project/vllm/pull/51875."""
    if "PYTHONHASHSEED" in os.environ:
        return True
    from vllm.v1.core import kv_cache_utils

    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


def _is_digest(identifier: str) -> bool:
    """An adapter's name may stand before the digest, with a colon."""
    return _DIGEST.fullmatch(identifier.rpartition(":")[2]) is not None

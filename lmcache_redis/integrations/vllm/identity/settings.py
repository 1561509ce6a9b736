"""The values of an engine's settings, as the tables name them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs

from lmcache_redis.integrations.vllm.identity.pairs import PAIRS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Where an engine has the settings of a class.
_PLACES = {
    "VllmConfig": "",
    "AttentionConfig": "attention_config",
    "CacheConfig": "cache_config",
    "CompilationConfig": "compilation_config",
    "KernelConfig": "kernel_config",
    "KVTransferConfig": "kv_transfer_config",
    "LoadConfig": "load_config",
    "LoRAConfig": "lora_config",
    "MambaConfig": "mamba_config",
    "ModelConfig": "model_config",
    "MultiModalConfig": "model_config.multimodal_config",
    "ParallelConfig": "parallel_config",
    "SpeculativeConfig": "speculative_config",
}
# Settings that name a file: what it contains is the value, and replicas may keep it elsewhere.
_FILES = frozenset({"mm_encoder_fp8_scale_path"})


def settings_of(pair: str, vllm_config: VllmConfig) -> dict[str, Mapping[str, Any]]:
    """The values of the settings that are digested for ``pair``, by class and name.

    Settings that this vLLM does not have are left out. Raises what reading them raises:
    ValueError for an impossible environment variable, OSError for a file.
    """
    names = PAIRS[pair].digested
    return {kind: _values(kind, _place(kind, vllm_config), names[kind]) for kind in names}


def settings_of_class(pair: str, kind: str, config: Any) -> Mapping[str, Any]:
    """As `settings_of`, of one class, which ``config`` is an instance of. None has none."""
    return _values(kind, config, PAIRS[pair].digested[kind])


def _place(kind: str, vllm_config: VllmConfig) -> Any:
    if kind in ("environment", "os.environ"):
        return envs
    config: Any = vllm_config
    for name in filter(None, _PLACES[kind].split(".")):
        config = getattr(config, name, None)
    return config


def _values(kind: str, config: Any, names: str) -> dict[str, Any]:
    if kind == "os.environ":
        return {name: os.environ.get(name) for name in names.split()}
    found = {name: getattr(config, name) for name in names.split() if hasattr(config, name)}
    for name in _FILES & found.keys():
        if found[name]:
            found[name] = Path(found[name]).read_bytes().hex()
    return found

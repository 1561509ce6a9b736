# SPDX-License-Identifier: Apache-2.0
"""Everything besides its layout that decides the bytes of a vLLM engine's KV cache.

Block hashes cover tokens, multimodal content and ``cache_salt``. The identity covers everything
else, as pairs of text: engines whose identities differ share nothing. A pair too many costs a
miss; a pair too few costs wrong answers. `pairs` says which setting of vLLM is in which pair.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from enum import Enum
from functools import partial
from importlib.metadata import entry_points, version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import envs

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.identity import files
from lmcache_redis.integrations.vllm.identity.pairs import PAIRS
from lmcache_redis.integrations.vllm.identity.weights import (
    files_of,
    local_weights,
    weights_identity,
)

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

# Fields of a model's config that record its origin and do not change its results.
_INCIDENTAL = frozenset({"_name_or_path", "transformers_version"})

# Kinds of rotary embedding that do not depend on --max-model-len.
_ANY_LENGTH = frozenset(
    {
        "bailing_mrope", "deepseek_llama_scaling", "deepseek_yarn", "default", "dynamic", "linear",
        "llama3", "mllama4", "mrope", "none", "ntk", "openpangu", "proportional", "xdrope", "yarn",
    }
)  # fmt: skip
# Digests of settings alone. The other pairs are made below, each in its way.
_DIGESTS = [
    name
    for name, pair in PAIRS.items()
    if pair.digested and name not in ("draft", "kernels", "model_config")
]
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
# Names a file: what it contains is the value, and replicas may keep it elsewhere.
_FILE = needs.MM_SCALES.name
# Whose code runs in a worker, or decides which worker runs.
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
# vLLM's own are of its version, and ours moves KV.
_OWN_PLUGINS = ("vllm.", "lmcache_redis.")
# Kinds of KV cache that have the model's own numbers.
UNQUANTIZED = frozenset({"auto", "bfloat16", "float16", "float32"})
# Settings of devices that have no cache (`support`), and of latents, which keep their version.
_OF_OTHERS = ("AITER_", "VLLM_ROCM_", "VLLM_XPU_", "trtllm_ragged_backend")
_DRAFTS_WITHOUT_KV = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})


def model_name(vllm_config: VllmConfig) -> str:
    """The model name in every key: its name on the hub, or the name of its directory or file."""
    model = str(vllm_config.model_config.model)
    return Path(model).resolve().name if os.path.exists(model) else model


def engine_id(vllm_config: VllmConfig) -> str:
    """Shared by the processes of one engine core, and by no other, unlike the configured id."""
    parallel = vllm_config.parallel_config
    # The rank is 0 in every core of a model without experts.
    core = needs.DATA_PARALLEL_INDEX.of(parallel)
    if core is None:
        core = parallel.data_parallel_rank
    return f"{vllm_config.kv_transfer_config.engine_id}/{vllm_config.instance_id}/{core}"


def attention_backend(vllm_config: VllmConfig) -> str:
    """Names of the attention backends in use. They decide the order of bytes in a block."""
    context = vllm_config.compilation_config.static_forward_context
    names = {
        backend.get_name()
        for layer in context.values()
        if needs.ATTN_BACKEND.is_in(layer) and (backend := needs.ATTN_BACKEND.of(layer)())
    }
    return "+".join(sorted(names))


def look_at_files(vllm_config: VllmConfig) -> None:
    """Before vLLM reads them: remembers the state of the files that decide the identity."""
    if vllm_config.kv_transfer_config is not None:
        for root, paths in _files_read(vllm_config):
            files.saw(root, paths)


def require_looks(vllm_config: VllmConfig) -> None:
    """Raises Unsupported if vLLM may have read a model before `look_at_files`."""
    for root, paths in _files_read(vllm_config):
        if paths and not files.was_seen(root):
            raise Unsupported(
                f"vLLM was not seen reading {root}: VLLM_PLUGINS must not leave out lmcache_redis, "
                "or set weights_id in kv_connector_extra_config"
            )


def _files_read(vllm_config: VllmConfig) -> Iterator[tuple[Path, list[Path]]]:
    """Files and directories that the identity is made from, and their files now."""
    model = vllm_config.model_config
    for each, load in filter(None, [(model, vllm_config.load_config), draft_model(vllm_config)]):
        root, paths = local_weights(each, load), []
        if root is not None:
            with suppress(OSError):
                paths = files_of(root)
        yield root or Path(str(each.model)), paths
    path = needs.MM_SCALES.of(needs.MULTIMODAL.of(model))
    if path:
        yield Path(path), [Path(path)]


def engine_identity(
    vllm_config: VllmConfig,
    *,
    rank: int,
    backend: str,
    weights_id: str | None = None,
    versions: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The identity of one worker's KV cache, as pairs of text.

    versions: `versions.pairs_of_version`, of an engine that shares across them. If its version
    leaves, settings that choose nothing leave too: another version may lack them.

    Raises Unsupported if the weights cannot be identified and ``weights_id`` (the operator's name
    for them) is None, or if the settings of this vLLM cannot be read.
    """
    chosen = "computation" in versions
    try:
        model, cache = vllm_config.model_config, vllm_config.cache_config
        parallel = vllm_config.parallel_config
        kernels = [_settings_of("kernels", vllm_config, chosen), _capability(vllm_config)]
        if weights_id is None:
            _check_encoder(vllm_config)
        return {
            "engine": f"vllm {vllm.__version__}",
            "transformers": version("transformers"),
            "plugins": " ".join(foreign_plugins()),
            "attention_backend": backend,
            "revision": str(model.revision),
            "commit": str(getattr(model.hf_config, "_commit_hash", None)),
            **weights_identity(model, vllm_config.load_config, weights_id),
            "model_config": _digest(_config(model, chosen)),
            "model_dtype": str(model.dtype),
            "context": _context(model),
            "quantization": str(model.quantization),
            "kv_cache_dtype": str(cache.cache_dtype),
            **{pair: _digest(_settings_of(pair, vllm_config, chosen)) for pair in _DIGESTS},
            "kernels": _digest(kernels),
            "draft": _draft(vllm_config, weights_id),
            "block_hash": str(cache.prefix_caching_hash_algo),
            "tensor_parallel": str(parallel.tensor_parallel_size),
            "pipeline_parallel": str(parallel.pipeline_parallel_size),
            "rank": str(rank),
            **versions,
        }
    except (AttributeError, OSError, TypeError, ValueError, RecursionError) as error:
        raise Unsupported(f"the settings of this vLLM cannot be read: {error!r}") from error


def _check_encoder(vllm_config: VllmConfig) -> None:
    """Raises Unsupported if another instance encodes images: its weights have no name here."""
    role = needs.EC_ROLE.of(needs.EC_TRANSFER_CONFIG.of(vllm_config))
    if role not in (None, "ec_producer"):
        raise Unsupported(
            f"with ec_role {role} another instance encodes images, whose weights and settings are "
            "not known here: set weights_id in kv_connector_extra_config to a name that changes "
            "with them"
        )


def foreign_plugins() -> list[str]:
    """The plugins that vLLM loads, each with its package and the package's version."""
    allowed, found = envs.VLLM_PLUGINS, set()
    for group in _PLUGINS:
        for each in entry_points(group=group):
            is_own = f"{each.module}.".startswith(_OWN_PLUGINS)
            if not is_own and (allowed is None or each.name in allowed):
                package = f"{each.dist.name}=={each.dist.version}" if each.dist else "unknown"
                found.add(f"{each.name} ({package})")
    return sorted(found)


def _capability(vllm_config: VllmConfig) -> str:
    """Of the GPU, where vLLM chooses by it to how many bits activations are rounded."""
    from vllm.platforms import current_platform

    draft = needs.DRAFT_MODEL.of(vllm_config.speculative_config)
    quantized = [needs.QUANTIZATION.of(each) for each in (vllm_config.model_config, draft)]
    if not any(quantized) and str(vllm_config.cache_config.cache_dtype) in UNQUANTIZED:
        return ""
    return str(current_platform.get_device_capability())


def _config(model: ModelConfig, chosen: bool = False) -> dict[str, Any]:
    """The model's config after every override, and the other settings of the model."""
    media = needs.MULTIMODAL.of(model)
    return {
        "config": model.hf_config.to_dict(),
        "text": model.hf_text_config.to_dict(),
        "settings": _values("model_config", "ModelConfig", model, chosen),
        "multimodal": _values("model_config", "MultiModalConfig", media, chosen),
    }


def _context(model: ModelConfig) -> str:
    """How --max-model-len changes K: "" for most rotary embeddings, else the length itself.

    LongRoPE (Phi-3) has other factors for contexts longer than the original one; vLLM chooses
    once, by --max-model-len.
    """
    text = model.hf_text_config
    named = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # One for the model, or one per kind of layer.
    ropes = [each for each in named.values() if isinstance(each, Mapping)] or [named]
    kinds = {rope.get("rope_type") or rope.get("type") or "default" for rope in ropes}
    return "" if kinds <= _ANY_LENGTH else str(model.max_model_len)


def draft_model(vllm_config: VllmConfig) -> tuple[ModelConfig, LoadConfig] | None:
    """The draft model if its layers share the KV cache, and how it is loaded."""
    speculative = vllm_config.speculative_config
    draft = needs.DRAFT_MODEL.of(speculative)
    if speculative is None or draft is None or speculative.method in _DRAFTS_WITHOUT_KV:
        return None
    return draft, needs.DRAFT_LOAD.of(speculative) or vllm_config.load_config


def _draft(vllm_config: VllmConfig, weights_id: str | None) -> str:
    if (found := draft_model(vllm_config)) is None:
        return ""
    (draft, load), speculative = found, vllm_config.speculative_config
    assert speculative is not None
    target = vllm_config.model_config
    same_files = (draft.model, draft.revision) == (target.model, target.revision)
    return _digest(
        {
            "method": speculative.method,
            "settings": _settings_of("draft", vllm_config),
            "weights": None if same_files else weights_identity(draft, load, weights_id),
            "loader": _values("loader", "LoadConfig", load),
            "config": _config(draft),
            "context": _context(draft),
            "dtype": draft.dtype,
            "quantization": draft.quantization,
        }
    )


def _digest(value: Any) -> str:
    canonical = json.dumps(_canonical(value), sort_keys=True)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _canonical(value: Any) -> Any:
    """A value as JSON types, equal in every process for equal settings."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (torch.dtype, torch.device, Path)):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, Mapping):
        return {
            str(name): _canonical(each) for name, each in value.items() if name not in _INCIDENTAL
        }
    if isinstance(value, AbstractSet):
        return sorted(json.dumps(_canonical(each), sort_keys=True) for each in value)
    if isinstance(value, Sequence):
        return [_canonical(each) for each in value]
    if hasattr(value, "to_dict"):
        return _canonical(value.to_dict())
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: _canonical(getattr(value, name, None)) for name in names}
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)) and "<" not in str(
        value.__qualname__
    ):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, MethodType):
        return [_canonical(value.__func__), _canonical(value.__self__)]
    if isinstance(value, partial):
        return [_canonical(each) for each in (value.func, value.args, value.keywords)]
    if hasattr(value, "tolist"):  # a tensor, an array or a number of one
        return [str(value.dtype), value.tolist()]
    if not isinstance(value, FunctionType) and getattr(value, "__dict__", None):
        return [_canonical(type(value)), _canonical(vars(value))]
    raise TypeError(f"{value!r} has no name that it would have in another process")


def _settings_of(
    pair: str, vllm_config: VllmConfig, chosen: bool = False
) -> dict[str, Mapping[str, Any]]:
    """The settings that are digested for ``pair``, by class, as far as this vLLM has them.

    chosen: without those that choose nothing.
    """
    return {
        kind: _values(pair, kind, _place(kind, vllm_config), chosen)
        for kind in PAIRS[pair].digested
    }


def _place(kind: str, vllm_config: VllmConfig) -> Any:
    if kind in ("environment", "os.environ"):
        return envs
    config: Any = vllm_config
    for name in filter(None, _PLACES[kind].split(".")):
        config = getattr(config, name, None)
    return config


def _chooses(value: Any) -> bool:
    """Whether a setting does. One that a version lacks counts as one that does not."""
    is_text = isinstance(value, (str, list, tuple, dict))
    return not (value is None or value is False or (is_text and (not value or value == "auto")))


def _values(pair: str, kind: str, config: Any, chosen: bool = False) -> dict[str, Any]:
    names = PAIRS[pair].digested[kind].split()
    if kind == "os.environ":
        found = {name: os.environ.get(name) for name in names}
    else:
        found = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if chosen:
        found = {
            name: value
            for name, value in found.items()
            if _chooses(value) and not name.startswith(_OF_OTHERS)
        }
    if path := found.get(_FILE):
        found[_FILE] = Path(path).read_bytes().hex()
        files.require_unchanged(Path(path), [Path(path)])
    return found

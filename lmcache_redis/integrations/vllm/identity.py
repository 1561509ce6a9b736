"""What, besides its layout, decides the bytes of a vLLM engine's KV cache.

Block hashes cover tokens, LoRA, multimodal content and ``cache_salt``. Everything else that
changes keys and values stands here, so that engines that differ in it never meet. A pair
too many costs a miss; a pair too few costs wrong answers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Names of a model's config that say where it came from, not what it computes.
_INCIDENTAL = frozenset({"_name_or_path", "transformers_version"})
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


def model_name(vllm_config: VllmConfig) -> str:
    """The model in every key: its name on the hub, or the name of its directory.

    Replicas may keep a local model under different paths; ``engine_identity`` tells models of
    one directory name apart.
    """
    model = str(vllm_config.model_config.model)
    return Path(model).resolve().name if Path(model).is_dir() else model


def engine_identity(vllm_config: VllmConfig, *, rank: int, backend: str) -> dict[str, str]:
    """The identity of one worker's KV cache, as pairs of text."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    load = vllm_config.load_config
    return {
        "engine": f"vllm {vllm.__version__}",
        "attention_backend": backend,
        "revision": str(model.revision),
        "commit": str(getattr(model.hf_config, "_commit_hash", None)),
        "weights": _weights_digest(Path(str(model.model))),
        # Weights that nobody wrote are made from the seed.
        "load_format": f"dummy {model.seed}" if load.load_format == "dummy" else "",
        "model_config": _config_digest(model.hf_config.to_dict()),
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_hash": str(cache.prefix_caching_hash_algo),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "rank": str(rank),
    }


def _config_digest(config: dict[str, Any]) -> str:
    essential = {name: value for name, value in config.items() if name not in _INCIDENTAL}
    canonical = json.dumps(essential, sort_keys=True, default=str)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _weights_digest(directory: Path) -> str:
    """Tells a local model's weights from others of the same path and shape; "" for the hub.

    Names, sizes and evenly spread samples of the weight files: training moves every tensor, so
    samples differ wherever the weights do, and reading them takes milliseconds.
    """
    if not directory.is_dir():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted({path for pattern in _WEIGHTS for path in directory.glob(pattern)})
    for path in files:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}\0{size_bytes}\0".encode())
        with path.open("rb") as weights:
            for sample in range(_SAMPLES):
                weights.seek(max(0, size_bytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(weights.read(_SAMPLE_BYTES))
    return digest.hexdigest()

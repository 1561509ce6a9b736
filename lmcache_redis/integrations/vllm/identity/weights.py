"""The identity of an engine's weights: a digest of their files, or a name from the operator.

Without either nothing is cached: two models with the same keys would read each other's KV.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download

from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.integrations.vllm.identity.tensorfiles import digest_file

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Other files that change results: the tensor index, quantization and image processor configs, and
# the model's own code.
_EXTRA = ("*.index.json", "*quant*.json", "*processor_config.json", "*.py")
# Directories that vLLM does not read: the hub's own, Meta's format, training checkpoints.
_SKIPPED_DIRECTORIES = (".*", "original", "checkpoint-*", "global_step*")
# Values of --load-format that read files of a directory or of a model on the hub.
_FROM_FILES = frozenset(
    {
        "auto", "bitsandbytes", "fastsafetensors", "gguf", "hf", "instanttensor", "mistral",
        "npcache", "pt", "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state",
    }
)  # fmt: skip
_COMMIT = re.compile(r"[0-9a-f]{40}")
_READER_THREADS = 8


class Unidentified(LMCacheRedisError):
    """This engine's KV cannot be identified; the message says what to change."""


def weights_identity(
    model: ModelConfig, load: LoadConfig, weights_id: str | None
) -> dict[str, str]:
    """Pairs that identify the weights; ``weights_id`` is always one of them.

    Raises Unidentified if the files cannot be found or read and ``weights_id`` is None.
    """
    try:
        digest = _digest(model, load)
    except (OSError, Unidentified) as error:
        if weights_id is None:
            raise Unidentified(
                f"the weights of this engine cannot be identified: {error}; set weights_id in "
                "kv_connector_extra_config to a name that no other weights have"
            ) from error
        digest = ""
    return {
        "weights": digest,
        "weights_id": weights_id or "",
        # A directory may hold weights in several formats.
        "load_format": _load_format(load),
    }


def digest_files(root: Path) -> str:
    """A digest of the weights in a file or a directory tree, independent of its path.

    Raises OSError if a file cannot be read, Unidentified if there are no weights.
    """
    if root.is_file():
        files = [root]
        root = root.parent
    else:
        files = sorted(_files(root))
    if not any(_matches(path.name, _WEIGHTS) for path in files):
        raise Unidentified(f"there are no weights in {root}")
    digest = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(_READER_THREADS) as readers:
        for path, found in zip(files, readers.map(digest_file, files), strict=True):
            name = path.relative_to(root).as_posix().encode(errors="surrogateescape")
            digest.update(len(name).to_bytes(4, "little") + name + found)
    return digest.hexdigest()


def _digest(model: ModelConfig, load: LoadConfig) -> str:
    load_format = _load_format(load)
    if load_format == "dummy":
        return f"dummy {model.seed}"  # generated from the seed
    if load_format not in _FROM_FILES:
        raise Unidentified(f"--load-format {load_format} does not read local files")
    source = str(getattr(model, "model_weights", "") or model.model)
    if "://" in source:
        raise Unidentified(f"{source} is not a local file")
    path = Path(source)
    return digest_files(path) if path.exists() else _digest_of_hub(source, model, load)


def _load_format(load: LoadConfig) -> str:
    return str(getattr(load.load_format, "value", load.load_format))


def _digest_of_hub(repository: str, model: ModelConfig, load: LoadConfig) -> str:
    """A digest of the files in the local hub cache; never uses the network."""
    commit = str(getattr(model.hf_config, "_commit_hash", None))
    has_commit = _COMMIT.fullmatch(commit) is not None
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise Unidentified(f"{repository} comes from ModelScope")
    for revision in [model.revision, commit] if has_commit else [model.revision]:
        with suppress(OSError, ValueError, Unidentified):  # its weights are not there
            snapshot = snapshot_download(
                repository, revision=revision, cache_dir=load.download_dir, local_files_only=True
            )
            return digest_files(Path(snapshot))
    if has_commit:
        return f"commit {commit}"
    raise Unidentified(f"{repository} is neither a path nor in the local hub cache")


def _files(root: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for directory, inner, names in os.walk(root, onerror=fail):
        inner[:] = [name for name in inner if not _matches(name, _SKIPPED_DIRECTORIES)]
        for name in names:
            if _matches(name, _WEIGHTS + _EXTRA):
                yield Path(directory, name)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)

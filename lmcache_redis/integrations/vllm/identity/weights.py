# SPDX-License-Identifier: Apache-2.0
"""The identity of an engine's weights: a digest of their files, or a name from the operator.

Without either nothing is cached: two models with the same keys would read each other's KV. Files
that have changed since vLLM began to read them have no digest (`files`); those of the hub's cache
never change.

The digest of a file reads only a small part of it. The table of a safetensors file says where its
tensors begin. The digest covers the whole table, and the first, the middle and the last bytes of
every tensor, because a fine-tune may change norms or biases only. Large tensors have more, evenly
spread samples: training changes almost every number. A small file, and one of another format, is
read whole. Tables are untrusted: every offset is checked against the file's size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import xxhash

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.identity import files

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

_WHOLE_BYTES = 4 << 20
_SAMPLE_BYTES = 4096
_SAMPLE_EVERY_BYTES = 8 << 20  # of a tensor, besides the three samples of each
_MAX_HEADER_BYTES = 1 << 30
# The errors of a missing or implausible header.
_BAD_TABLE = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


def weights_identity(
    model: ModelConfig, load: LoadConfig, weights_id: str | None
) -> dict[str, str]:
    """Pairs that identify the weights; ``weights_id`` is always one of them.

    Raises Unsupported if the files cannot be found or read and ``weights_id`` is None.
    """
    try:
        digest = _digest(model, load)
    except (OSError, Unsupported) as error:
        if weights_id is None:
            raise Unsupported(
                f"the weights of this engine cannot be identified: {error}; set weights_id in "
                "kv_connector_extra_config to a name that no other weights have"
            ) from error
        digest = ""
    return {
        "weights": digest,
        "weights_id": weights_id or "",
        # A directory may hold weights in several formats.
        "load_format": load_format_of(load),
    }


def digest_files(root: Path) -> str:
    """A digest of the weights in a file or a directory tree, independent of its path.

    Raises OSError if a file cannot be read, Unsupported if there are no weights.
    """
    paths = files_of(root)
    if root.is_file():
        root = root.parent
    if not any(_matches(path.name, _WEIGHTS) for path in paths):
        raise Unsupported(f"there are no weights in {root}")
    digest = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor(_READER_THREADS) as readers:
        for path, found in zip(paths, readers.map(digest_file, paths), strict=True):
            name = path.relative_to(root).as_posix().encode(errors="surrogateescape")
            digest.update(len(name).to_bytes(4, "little") + name + found)
    return digest.hexdigest()


def local_weights(model: ModelConfig, load: LoadConfig) -> Path | None:
    """The file or directory with the weights; None if they are not in a path of this machine."""
    path = Path(_source(model))
    return path if load_format_of(load) in _FROM_FILES and path.exists() else None


def files_of(root: Path) -> list[Path]:
    """The files that decide the weights, in a fixed order. Raises OSError."""
    return [root] if root.is_file() else sorted(_files(root))


def _source(model: ModelConfig) -> str:
    return str(needs.MODEL_WEIGHTS.of(model) or model.model)


def _digest(model: ModelConfig, load: LoadConfig) -> str:
    load_format = load_format_of(load)
    if load_format == "dummy":
        return f"dummy {model.seed}"  # generated from the seed
    if load_format not in _FROM_FILES:
        raise Unsupported(f"--load-format {load_format} does not read local files")
    source = _source(model)
    if "://" in source:
        raise Unsupported(f"{source} is not a local file")
    root = local_weights(model, load)
    if root is None:
        return _digest_of_hub(source, model, load)
    digest = digest_files(root)
    files.require_unchanged(root, files_of(root))
    return digest


def load_format_of(load: LoadConfig) -> str:
    return str(getattr(load.load_format, "value", load.load_format))


def _digest_of_hub(repository: str, model: ModelConfig, load: LoadConfig) -> str:
    """A digest of the files in the local hub cache; never uses the network."""
    from huggingface_hub import snapshot_download  # it is there with vLLM

    commit = str(getattr(model.hf_config, "_commit_hash", None))
    has_commit = _COMMIT.fullmatch(commit) is not None
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise Unsupported(f"{repository} comes from ModelScope")
    for revision in [model.revision, commit] if has_commit else [model.revision]:
        with suppress(OSError, ValueError, Unsupported):  # its weights are not there
            snapshot = snapshot_download(
                repository, revision=revision, cache_dir=load.download_dir, local_files_only=True
            )
            return digest_files(Path(snapshot))
    if has_commit:
        return f"commit {commit}"
    raise Unsupported(f"{repository} is neither a path nor in the local hub cache")


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


def digest_file(path: Path) -> bytes:
    """A digest of 16 bytes, over the parts of the file that the module's docstring names.

    Raises OSError if the file cannot be read or is not a regular file.
    """
    with open(path, "rb", opener=_open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        size_bytes = status.st_size
        digest = hashlib.blake2b(struct.pack("<Q", size_bytes), digest_size=16)
        if size_bytes <= _WHOLE_BYTES:
            digest.update(_read(file, 0, size_bytes))
        elif (table := _table(file, size_bytes)) is None:
            whole = xxhash.xxh3_128()
            for offset in range(0, size_bytes, _WHOLE_BYTES):
                whole.update(_read(file, offset, min(_WHOLE_BYTES, size_bytes - offset)))
            digest.update(whole.digest())
        else:
            header, begins = table
            digest.update(struct.pack("<Q", len(header)) + header)
            for begin, end in pairwise(sorted([*begins, size_bytes])):
                for offset, size in _samples(begin, end - begin):
                    digest.update(_read(file, offset, size))
        return digest.digest()


def _open_nonblocking(path: str, flags: int) -> int:
    """An opener that does not wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: BinaryIO, offset: int, size: int) -> bytes:
    file.seek(offset)
    found = file.read(size)
    if len(found) != size:
        raise OSError(f"{file.name} became shorter while it was read")
    return found


def _samples(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Where the samples of a tensor are, and how long: all of it, if it is not longer than they."""
    count = 3 + 2 * (size // (2 * _SAMPLE_EVERY_BYTES))
    if size <= count * _SAMPLE_BYTES:
        yield offset, size
        return
    for number in range(count):
        yield offset + (size - _SAMPLE_BYTES) * number // (count - 1), _SAMPLE_BYTES


def _table(file: BinaryIO, size_bytes: int) -> tuple[bytes, list[int]] | None:
    """A file's header, and where its tensors begin. Each ends where the next begins.

    None if the file has another format, or an invalid table.
    Source: https://huggingface.co/docs/safetensors: header length, JSON header, data.
    """
    header_bytes = struct.unpack("<Q", _read(file, 0, 8))[0]
    if header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
        return None
    header = _read(file, 0, 8 + header_bytes)
    try:
        begins = [
            len(header) + int(tensor["data_offsets"][0])
            for name, tensor in json.loads(header[8:]).items()
            if name != "__metadata__"
        ]
    except _BAD_TABLE:
        return None
    return (header, begins) if begins and 0 <= min(begins) <= max(begins) <= size_bytes else None

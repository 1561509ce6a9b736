"""The identity of a request's LoRA adapter: a digest of its files (docs/identity.md, LoRA).

vLLM's block hashes identify an adapter by name and path only. vLLM reads an adapter once per
``lora_int_id`` and keeps it in memory (``vllm/lora/worker_manager.py``). So the digest is computed
at the first request, and later requests check that the files are unchanged. If they have changed,
it is unknown which version is in memory, and requests with this id are no longer cached.
``load_inplace`` makes vLLM read the files again, and the digest is computed again.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lmcache_redis.integrations.vllm.tensorfiles import digest_file

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_EXTRA = ("new_embeddings.safetensors", "new_embeddings.bin", "new_embeddings.pt")

# Per possible file: device, inode, size, mtime and ctime; None if it does not exist.
_State = tuple[tuple[int, ...] | None, ...]


class _Seen(NamedTuple):
    """An adapter at its first request. ``digest`` is None if it is never cached."""

    path: str
    state: _State
    digest: bytes | None


class AdapterDigests:
    """The digests of an engine's adapters. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def digest(self, lora_request: LoRARequest | None) -> bytes | None:
        """16 bytes; ``b""`` without an adapter; None if the request must not be cached.

        If a later call for the same request gives another result, the adapter has changed, and KV
        computed since must not be stored.

        Never raises. Reads the files at the first request; later calls only check their status.
        """
        if lora_request is None:
            return b""
        lora_id, path = lora_request.lora_int_id, lora_request.lora_path
        state = _state(path)
        seen = self._seen.get(lora_id)
        if seen is not None and seen.digest is not None and seen[:2] == (path, state):
            return seen.digest
        digest = None
        if seen is None or getattr(lora_request, "load_inplace", False):
            digest = _digest(path, state, bool(getattr(lora_request, "is_3d_lora_weight", False)))
        self._seen[lora_id] = _Seen(path, state, digest)
        return digest


def _files(path: str) -> list[Path]:
    directory = Path(os.path.expanduser(path))
    return [directory / name for name in (_CONFIG, *_WEIGHTS, *_EXTRA)]


def _state(path: str) -> _State:
    def file_state(file: Path) -> tuple[int, ...] | None:
        try:
            s = file.stat()
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return None
        return s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns

    return tuple(file_state(file) for file in _files(path))


def _digest(path: str, state: _State, is_3d: bool) -> bytes | None:
    """None if config or weights are missing, unreadable, or change while they are read."""
    config, weights = state[0], state[1 : 1 + len(_WEIGHTS)]
    if config is None or not any(weights):
        return None
    digest = hashlib.blake2b(b"3d" if is_3d else b"", digest_size=16)
    try:
        for file, status in zip(_files(path), state, strict=True):
            if status is not None:
                digest.update(file.name.encode() + b"\0" + digest_file(file))
    except OSError:
        return None
    return digest.digest() if _state(path) == state else None

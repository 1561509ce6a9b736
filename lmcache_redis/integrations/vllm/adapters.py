"""Which LoRA adapter a request uses: a digest of its files.

vLLM's block hashes know an adapter by name and path. Another adapter at the same path, later
or on another replica, would hit what the first one computed; so the digest is part of every
key of its chunks.

vLLM reads an adapter once for a ``lora_int_id`` and keeps it in memory
(``vllm/lora/worker_manager.py``), whatever happens to the files. So the digest is made once,
at the first request, and every later request looks whether the files are still those. If not,
nothing says whether memory or the files are newer, and that id is not cached any more. A
request with ``load_inplace`` has vLLM read the files again, and so starts anew.

A gap remains that the files cannot show: an adapter that vLLM had read before its first
request (``add_lora``), if its files are replaced between the two without another id.
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
_BESIDE = ("new_embeddings.safetensors", "new_embeddings.bin", "new_embeddings.pt")

# Of each file that there may be: device, inode, size and the times of the last changes.
_State = tuple[tuple[int, ...] | None, ...]


class _Seen(NamedTuple):
    """An adapter at its first request; ``digest`` None: it is not cached, for good."""

    path: str
    state: _State
    digest: bytes | None


class AdapterDigests:
    """The digests of an engine's adapters. Of one thread."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def digest(self, lora_request: LoRARequest | None) -> bytes | None:
        """16 bytes that name the adapter; ``b""`` without one; None: do not cache the request.

        A later call for the same request that gives another answer says that the adapter
        changed meanwhile: what was computed since then must not be stored.

        Never raises. Reads the adapter at its first request, later only looks at its files.
        """
        if lora_request is None:
            return b""
        number, path = lora_request.lora_int_id, lora_request.lora_path
        state = _state(path)
        seen = self._seen.get(number)
        if seen is not None and seen.digest is not None and seen[:2] == (path, state):
            return seen.digest
        digest = None
        if seen is None or getattr(lora_request, "load_inplace", False):
            digest = _digest(path, state, bool(getattr(lora_request, "is_3d_lora_weight", False)))
        self._seen[number] = _Seen(path, state, digest)
        return digest


def _files(path: str) -> list[Path]:
    directory = Path(os.path.expanduser(path))
    return [directory / name for name in (_CONFIG, *_WEIGHTS, *_BESIDE)]


def _state(path: str) -> _State:
    def look(file: Path) -> tuple[int, ...] | None:
        try:
            found = file.stat()
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return None
        return (
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            found.st_ctime_ns,
        )

    return tuple(look(file) for file in _files(path))


def _digest(path: str, state: _State, is_3d: bool) -> bytes | None:
    """None where config or weights are missing, unreadable, or change while they are read."""
    config, weights = state[0], state[1 : 1 + len(_WEIGHTS)]
    if config is None or not any(weights):
        return None
    digest = hashlib.blake2b(b"3d" if is_3d else b"", digest_size=16)
    try:
        for file, there in zip(_files(path), state, strict=True):
            if there is not None:
                digest.update(file.name.encode() + b"\0" + digest_file(file))
    except OSError:
        return None
    return digest.digest() if _state(path) == state else None

"""The identity of a request's LoRA adapter: a digest of its files (docs/internals/identity.md).

vLLM's block hashes identify an adapter by name and path only. vLLM reads an adapter once per
``lora_int_id`` and keeps it in memory (``vllm/lora/worker_manager.py``). So the digest is computed
at the first request, and later requests check that the files are unchanged. If they have changed,
it is unknown which version is in memory, and requests with this id are no longer cached.
``load_inplace`` makes vLLM read the files again, and the digest is computed again.

A file system may hang, and the scheduler must not. So threads look at the files. What they have
found is believed for a short while, and renewed in time where an adapter is in use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache_redis.integrations.vllm.identity.weights import digest_file

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.lmcache_redis")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_EXTRA = ("new_embeddings.safetensors", "new_embeddings.bin", "new_embeddings.pt")

# Per possible file: device, inode, size, mtime and ctime; None if it does not exist.
_State = tuple[tuple[int, ...] | None, ...]


class _Look(threading.Thread):
    """A look at an adapter's files, and what it has seen when it has ended.

    before: the look at those that vLLM has in memory. digest: None if the adapter is not cached.
    """

    def __init__(self, path: str, is_3d: bool, before: _Look | None) -> None:
        super().__init__(name="adapter files", daemon=True)
        self.path = path
        self.since_s = time.monotonic()
        self.state: _State = ()
        self.digest: bytes | None = None
        self._is_3d = is_3d
        self._known = before if before is None else (before.path, before.state, before.digest)
        self.start()

    def run(self) -> None:
        try:
            self.state = _state(self.path)
            if self._known is None:
                self.digest = _digest(self.path, self.state, self._is_3d)
            elif self._known[:2] == (self.path, self.state):
                self.digest = self._known[2]
        except Exception:
            self.state = ()
            logger.exception(
                "requests with the adapter %s are not cached; please report this", self.path
            )


class AdapterDigests:
    """The digests of an engine's adapters. Not thread-safe."""

    # The scheduler waits so long for files, once while they do not answer.
    deadline_s = 0.2
    # Files are unchanged if they were so long ago, no longer than a step: vLLM may drop an adapter
    # for others, and read its files again.
    believed_s = 0.05

    def __init__(self) -> None:
        self._seen: dict[int, _Look] = {}  # that have ended
        self._looks: dict[int, _Look] = {}  # in progress

    def digest(self, lora_request: LoRARequest) -> bytes | None:
        """16 bytes; None if the request must not be cached. Never raises.

        If a later call for the same request gives another result, the adapter has changed, and KV
        computed since must not be stored.
        """
        now_s = time.monotonic()
        number, path = lora_request.lora_int_id, lora_request.lora_path
        if getattr(lora_request, "load_inplace", False):
            # vLLM reads the files again: what was seen of them, or is being seen, says nothing.
            self._seen.pop(number, None)
            self._looks.pop(number, None)
        while (seen := self._seen.get(number)) is None or not (
            seen.path == path and seen.since_s >= now_s - self.believed_s
        ):
            look = self._look(lora_request)
            look.join(max(0.0, look.since_s + self.deadline_s - time.monotonic()))
            if look.is_alive():
                return None
            self._seen[number] = self._looks.pop(number)
        if seen.since_s < now_s - self.believed_s / 2:
            look = self._look(lora_request)
            if not look.is_alive():
                self._seen[number] = self._looks.pop(number)
        return seen.digest

    def _look(self, lora_request: LoRARequest) -> _Look:
        """The look in progress at an adapter's files, or a new one."""
        number = lora_request.lora_int_id
        if number not in self._looks:
            is_3d = bool(getattr(lora_request, "is_3d_lora_weight", False))
            self._looks[number] = _Look(lora_request.lora_path, is_3d, self._seen.get(number))
        return self._looks[number]


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

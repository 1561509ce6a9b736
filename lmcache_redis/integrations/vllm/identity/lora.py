"""The identity of a request's LoRA adapter: a digest of its files (docs/internals/identity.md).

vLLM's block hashes identify an adapter by name and path only. vLLM reads an adapter once per
``lora_int_id`` and keeps it in memory (``vllm/lora/worker_manager.py``). So the digest is computed
at the first request, and later requests check that the files are unchanged. If they have changed,
it is unknown which version is in memory, and requests with this id are no longer cached.
``load_inplace`` makes vLLM read the files again, and the digest is computed again.

A file system may hang, and the scheduler must not. So a thread of its own looks at the files. What
it has found is believed for a short while, and renewed in time where an adapter is in use.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lmcache_redis.integrations.vllm.identity.tensorfiles import digest_file

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.lmcache_redis")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_EXTRA = ("new_embeddings.safetensors", "new_embeddings.bin", "new_embeddings.pt")
# The scheduler waits so long for files, once while they do not answer.
_DEADLINE_S = 0.2
# No longer than a step: vLLM may drop an adapter for others, and read its files again.
_BELIEVED_S = 0.05

# Per possible file: device, inode, size, mtime and ctime; None if it does not exist.
_State = tuple[tuple[int, ...] | None, ...]


class _Adapter(NamedTuple):
    """What a request says of its adapter."""

    number: int
    path: str
    is_3d: bool
    is_read_again: bool


class _Seen(NamedTuple):
    """An adapter's files at a look that began at ``since_s``.

    ``digest`` is None if the adapter is never cached.
    """

    path: str
    state: _State
    digest: bytes | None
    since_s: float


class AdapterDigests:
    """The digests of an engine's adapters. Not thread-safe.

    believed_s: files are unchanged if they were so long ago. deadline_s: of a wait for files.
    """

    def __init__(self, *, believed_s: float = _BELIEVED_S, deadline_s: float = _DEADLINE_S) -> None:
        self._believed_s = believed_s
        self._deadline_s = deadline_s
        self._changed = threading.Condition()  # for all that follows
        self._seen: dict[int, _Seen] = {}
        self._wanted: dict[_Adapter, None] = {}  # the looks to come, in order
        self._since_s: float | None = None  # when the look in progress began

    def digest(self, lora_request: LoRARequest | None) -> bytes | None:
        """16 bytes; ``b""`` without an adapter; None if the request must not be cached.

        If a later call for the same request gives another result, the adapter has changed, and KV
        computed since must not be stored.

        Never raises. Waits where nothing is believed, and not for files that already let another
        call wait.
        """
        if lora_request is None:
            return b""
        now_s = time.monotonic()
        adapter = _Adapter(
            lora_request.lora_int_id,
            lora_request.lora_path,
            bool(getattr(lora_request, "is_3d_lora_weight", False)),
            bool(getattr(lora_request, "load_inplace", False)),
        )
        oldest_s = now_s - (0.0 if adapter.is_read_again else self._believed_s)

        def is_believed(oldest_s: float) -> bool:
            seen = self._seen.get(adapter.number)
            return seen is not None and seen.path == adapter.path and seen.since_s >= oldest_s

        with self._changed:
            if adapter.is_read_again and (seen := self._seen.get(adapter.number)):
                # vLLM may have other files in memory from now on than those.
                self._seen[adapter.number] = seen._replace(since_s=-math.inf)
            if not is_believed(oldest_s):
                until_s = self._look(adapter) + self._deadline_s
                if not self._changed.wait_for(lambda: is_believed(oldest_s), until_s - now_s):
                    return None
            elif not is_believed(now_s - self._believed_s / 2):
                self._look(adapter)
            return self._seen[adapter.number].digest

    def _look(self, adapter: _Adapter) -> float:
        """Has the thread look at the files, and returns since when it is at its present look."""
        self._wanted[adapter] = None
        if self._since_s is None:
            self._since_s = time.monotonic()
            threading.Thread(target=self._look_at_all, name="adapter files", daemon=True).start()
        return self._since_s

    def _look_at_all(self) -> None:
        while True:
            with self._changed:
                if not self._wanted:
                    self._since_s = None
                    return
                adapter = next(iter(self._wanted))
                del self._wanted[adapter]
                since_s = self._since_s = time.monotonic()
                seen = self._seen.get(adapter.number)
            found = _look(adapter, seen, since_s)
            with self._changed:
                # vLLM may read the files again before the look that is to come.
                if adapter._replace(is_read_again=True) not in self._wanted:
                    self._seen[adapter.number] = found
                    self._changed.notify_all()


def _look(adapter: _Adapter, seen: _Seen | None, since_s: float) -> _Seen:
    path = adapter.path
    try:
        state, digest = _state(path), None
        if seen is not None and seen.digest is not None and seen[:2] == (path, state):
            digest = seen.digest
        elif seen is None or adapter.is_read_again:
            digest = _digest(path, state, adapter.is_3d)
    except Exception:
        logger.exception("requests with the adapter %s are not cached; please report this", path)
        return _Seen(path, (), None, since_s)
    return _Seen(path, state, digest, since_s)


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

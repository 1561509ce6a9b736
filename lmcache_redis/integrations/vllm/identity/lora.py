# SPDX-License-Identifier: Apache-2.0
"""The identity of a request's LoRA adapter: a digest of its files (docs/internals/identity.md).

vLLM's block hashes identify an adapter by name and path only. A worker reads its files when it is
added, or in the first step that needs it, and again where vLLM asks for that (``load_inplace``) or
has dropped it from memory, for others (``--max-cpu-loras``) or after a dummy step. So it is the
worker that names an adapter: it looks at the files before and after it reads them
(`AdaptersInMemory`). If both looks see the same, that is in memory, whatever lies there later.

The workers tell the scheduler what they have in memory (`AdapterDigests.told`). An adapter that is
not there will be read in the step that computes its request. Then the scheduler looks at the files
itself; if the workers read others, nothing that the request computes is stored.

A file system may hang, and the scheduler must not: a thread looks for it (`adapter_looks`).
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.identity.adapter_looks import AdapterLooks
from lmcache_redis.integrations.vllm.identity.weights import digest_file

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.lmcache_redis")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_EXTRA = ("new_embeddings.safetensors", "new_embeddings.bin", "new_embeddings.pt")
# Per possible file: device, inode, size, mtime and ctime; None if it does not exist.
_State = tuple[tuple[int, ...] | None, ...]

_WATCH = "_lmcache_redis_adapters"
_MOST_LOGGED = 1000


class AdaptersInMemory:
    """The digests of the adapters that a worker of vLLM has in memory. Of its ``lora_manager``."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._read: dict[int, bytes] = {}

        def around(load: Callable[..., Any], lora_request: LoRARequest) -> Any:
            before = _look(lora_request)
            adapter = load(lora_request)
            after = _look(lora_request)
            self._read[lora_request.lora_int_id] = after[1] if after == before else b""
            return adapter

        needs.LOAD_ADAPTER.wrap(manager, around)

    @classmethod
    def of(cls, runner: Any) -> AdaptersInMemory:
        """Of a runner of models always the same. Raises AttributeError if it cannot be watched."""
        if (manager := needs.LORA_MANAGER.of(runner)) is None:
            raise AttributeError("this runner has no manager of adapters")
        if not hasattr(manager, _WATCH):
            setattr(manager, _WATCH, cls(manager))
        found: AdaptersInMemory = getattr(manager, _WATCH)
        return found

    def digests(self) -> dict[int, bytes]:
        """By ``lora_int_id``; b"" for an adapter whose files are not known."""
        held = sorted(needs.LIST_ADAPTERS.of(self._manager)())
        self._read = {number: self._read.get(number, b"") for number in held}
        return dict(self._read)


def adapters_in_memory(worker: Any) -> dict[int, bytes] | None:
    """Of a worker, by ``collective_rpc``; None if its adapters are not watched."""
    found = getattr(needs.LORA_MANAGER.of(needs.MODEL_RUNNER.of(worker)), _WATCH, None)
    return None if found is None else found.digests()


class AdapterDigests:
    """The digests of an engine's adapters, in the scheduler. Not thread-safe.

    ranks: how many workers have them. reads_again: whether vLLM may drop an adapter between two
    steps without a report, as dummy steps of data parallelism do.
    """

    def __init__(self, ranks: int = 1, *, reads_again: bool = False) -> None:
        self.looks = AdapterLooks(look)
        self._ranks = ranks
        self._reads_again = reads_again
        self._told: dict[int, Mapping[int, bytes] | None] = {}  # by rank
        self._logged: set[int] = set()
        self.are_forgotten = False

    def told(self, digests: Mapping[int, Mapping[int, bytes] | None]) -> None:
        """What ranks have in memory; None: it cannot be known."""
        self._told.update(digests)
        self.are_forgotten = False
        for number in self._told.get(0) or ():
            self.looks.forget(number)

    def forget(self) -> None:
        """What ranks have told is lost. They tell it again if they are asked."""
        self._told.clear()
        self.are_forgotten = True

    def in_memory(self, lora_request: LoRARequest) -> bytes | None:
        """The digest of what all ranks have in memory; b"" if it is not known; None: nothing."""
        found = {(rank or {}).get(lora_request.lora_int_id) for rank in self._told.values()}
        if not found - {None}:
            return None
        digest = found.pop()
        return digest if digest and not found else b""

    def digest(self, lora_request: LoRARequest) -> bytes | None:
        """16 bytes; None if the request must not be cached. Never raises.

        If a later call for the same request gives another result, the adapter has changed, and KV
        computed since must not be stored.
        """
        digest, why = self._digest(lora_request)
        number = lora_request.lora_int_id
        if digest is None and number not in self._logged:
            if len(self._logged) >= _MOST_LOGGED:
                self._logged.clear()
            self._logged.add(number)
            logger.warning(
                "requests with the adapter %s are not cached: %s", lora_request.lora_path, why
            )
        return digest

    def _digest(self, lora_request: LoRARequest) -> tuple[bytes | None, str]:
        """Or why there is none."""
        if len(self._told) < self._ranks or None in self._told.values():
            return None, "it is not known what this vLLM has in memory"
        held, asker = self.in_memory(lora_request), lora_request
        if held is not None and not _is_inplace(lora_request):
            if not self._reads_again:
                return held or None, _NOT_KNOWN
            asker = None
        place = (lora_request.lora_path, _is_3d(lora_request))
        found = self.looks.digest(lora_request.lora_int_id, place, asker)
        if found is None:
            return None, "its files do not answer"
        if held not in (None, found):
            return None, "its files have changed, and vLLM may read them again"
        return found or None, _NOT_KNOWN


_NOT_KNOWN = (
    "it is not a local directory, or its files cannot be read or have changed while vLLM read them"
)


def look(path: str, is_3d: bool, known: Mapping[Any, bytes]) -> tuple[Any, bytes]:
    """An adapter's files now: their state, and their digest, b"" if they have none.

    known: digests by state, of earlier looks.
    """
    state = (is_3d, *_state(path))
    return state, known.get(state) or _digest(path, state, is_3d)


def _is_3d(lora_request: LoRARequest) -> bool:
    return bool(needs.IS_3D.of(lora_request))


def _is_inplace(lora_request: LoRARequest) -> bool:
    """Whether vLLM reads the files again, in each step of the request."""
    return bool(needs.LOAD_INPLACE.of(lora_request))


def _look(lora_request: LoRARequest) -> tuple[Any, bytes]:
    """Looks without raising: a worker must not fail."""
    try:
        return look(lora_request.lora_path, _is_3d(lora_request), {})
    except Exception:
        logger.exception(
            "requests with the adapter %s are not cached; please report this",
            lora_request.lora_path,
        )
        return None, b""


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


def _digest(path: str, state: tuple[Any, ...], is_3d: bool) -> bytes:
    """b"" if config or weights are missing, unreadable, or change while they are read."""
    config, weights = state[1], state[2 : 2 + len(_WEIGHTS)]
    if config is None or not any(weights):
        return b""
    digest = hashlib.blake2b(b"3d" if is_3d else b"", digest_size=16)
    try:
        for file, status in zip(_files(path), state[1:], strict=True):
            if status is not None:
                digest.update(file.name.encode() + b"\0" + digest_file(file))
    except OSError:
        return b""
    return digest.digest() if (is_3d, *_state(path)) == state else b""

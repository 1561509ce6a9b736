"""Epochs: they separate the KV of old weights from the KV of new weights.

The name of every chunk begins with its engine's epoch. The first epoch is empty, so that replicas
share chunks. A later epoch is either random and the engine's own, or the digest of a
``weights_id``, shared by all replicas with these weights. docs/identity.md lists what begins one.

vLLM does not notify connectors of new weights, but every update goes through
``EngineCore.collective_rpc``, in the scheduler's process and between two steps. This module wraps
that method: every call that is not known to leave the weights unchanged counts as an update.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

EPOCH_BYTES = 8
WEIGHTS_ID_RPC = "lmcache_redis_weights_id"

# Methods that leave the weights unchanged. Any other counts as an update: one epoch too many costs
# misses, one too few costs wrong answers.
_HARMLESS = frozenset(
    {
        "add_lora", "check_health", "compute_weight_checksums", "get_kv_cache_spec",
        "get_model_inspection", "init_weight_transfer_engine", "list_loras", "pin_lora", "profile",
        "remove_lora", "reset_encoder_cache", "reset_mm_cache", "save_sharded_state",
        "save_tensorized_model", "shutdown_weight_transfer_engine", "sleep", "synchronize_device",
        "update_max_model_len", "wake_up",
    }
)  # fmt: skip


def named_epoch(weights_id: str | None) -> bytes:
    """The epoch of a ``weights_id``; the shared one for None."""
    if weights_id is None:
        return b""
    return hashlib.blake2b(
        weights_id.encode(), digest_size=EPOCH_BYTES, person=b"lmcr1.epoch"
    ).digest()


def new_epoch() -> bytes:
    return os.urandom(EPOCH_BYTES)


class EpochListener(Protocol):
    """Is notified of new weights, on the scheduler's thread."""

    def weights_changed(self, why: str, weights_id: str | None = None) -> None:
        """The weights may have changed. An id names the new weights."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: EpochListener) -> bool:
    """Notifies ``listener`` of new weights for as long as it lives.

    Returns False if this vLLM lacks the method to wrap.
    """
    from vllm.v1.engine.core import EngineCore

    _listeners.add(listener)
    if not callable(getattr(EngineCore, "collective_rpc", None)):
        return False
    if not hasattr(EngineCore.collective_rpc, "__wrapped__"):
        EngineCore.collective_rpc = _watched_rpc(EngineCore.collective_rpc)
        if hasattr(EngineCore, "set_weight_version"):
            EngineCore.set_weight_version = _watched_version(EngineCore.set_weight_version)
    return True


def _notify(why: str, weights_id: str | None = None) -> None:
    for listener in list(_listeners):
        listener.weights_changed(why, weights_id)


def _watched_rpc(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective_rpc)
    def watched(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == WEIGHTS_ID_RPC:
            return _name_weights(core, *args, **kwargs)
        try:
            return collective_rpc(core, method, *args, **kwargs)
        finally:
            # Also after a failure: some of the weights may be new.
            if method not in _HARMLESS:
                name = method if isinstance(method, str) else "a function"
                _notify(f"collective_rpc of {name}")

    return watched


def _watched_version(set_weight_version: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_weight_version)
    def watched(core: Any, weight_version: str) -> Any:
        result = set_weight_version(core, weight_version)
        _notify("vLLM was given a weight version", weight_version)
        return result

    return watched


def _name_weights(
    core: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
) -> list[bool]:
    """Serves ``WEIGHTS_ID_RPC`` without the workers. Returns one result per worker, as any RPC."""
    (weights_id,) = args or tuple((kwargs or {}).values()) or (None,)
    if not isinstance(weights_id, str) or not 0 < len(weights_id) <= 256:
        raise ValueError(
            f"{WEIGHTS_ID_RPC} takes one id of 1 to 256 characters, not {weights_id!r}"
        )
    _notify("the weights were named", weights_id)
    return [True] * core.vllm_config.parallel_config.world_size

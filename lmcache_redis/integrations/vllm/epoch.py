"""Epochs: what keeps the KV of old weights away from new ones.

The name of every chunk begins with its engine's epoch. The first epoch is empty, so that replicas
share; each later one is either random, the engine's own, or the digest of a ``weights_id`` that the
operator gave, which all replicas that were updated to the same weights share again. The scheduler
half alone makes names, so that a new epoch holds for all ranks from one moment on, whatever
agents and Redis do.

A new epoch begins

- when the cache is cleared (``reset_prefix_cache(reset_connector=True)``);
- when weights may have changed. vLLM does not tell connectors, but every update goes through
  ``EngineCore.collective_rpc``, in the scheduler's own process and between two steps. We listen
  there: a method that is not known to leave weights alone counts as an update;
- when vLLM is told a version of its weights (``finish_weight_update(weight_version=...)``) or
  we are told an id: ``collective_rpc("lmcache_redis_weights_id", args=("step-1200",))``.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("vllm.lmcache_redis")

EPOCH_BYTES = 8
SHARED_EPOCH = b""
WEIGHTS_ID_RPC = "lmcache_redis_weights_id"

# Methods that leave the weights as they are, of those that people call. Any other counts as an
# update: a new epoch too many costs misses, one too few wrong answers.
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
    """The epoch of an id of weights; the shared one without."""
    if weights_id is None:
        return SHARED_EPOCH
    return hashlib.blake2b(
        weights_id.encode(), digest_size=EPOCH_BYTES, person=b"lmcr1.epoch"
    ).digest()


def new_epoch() -> bytes:
    """An epoch that no other engine has."""
    return os.urandom(EPOCH_BYTES)


class EpochListener(Protocol):
    """Who is told of new weights, on the thread that schedules."""

    def weights_changed(self, why: str) -> None:
        """They may have changed."""

    def weights_named(self, weights_id: str) -> None:
        """They are the ones of this id."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: EpochListener) -> bool:
    """Has ``listener`` told of new weights, as long as it lives.

    Returns whether this vLLM has the methods that tell of them.
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


def _watched_rpc(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective_rpc)
    def watched(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == WEIGHTS_ID_RPC:
            return _name_weights(core, *args, **kwargs)
        try:
            return collective_rpc(core, method, *args, **kwargs)
        finally:
            # Also after a failure: some of the weights may be the new ones.
            if method not in _HARMLESS:
                name = method if isinstance(method, str) else "a function"
                for listener in list(_listeners):
                    listener.weights_changed(f"collective_rpc of {name}")

    return watched


def _watched_version(set_weight_version: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(set_weight_version)
    def watched(core: Any, weight_version: str) -> Any:
        result = set_weight_version(core, weight_version)
        for listener in list(_listeners):
            listener.weights_named(weight_version)
        return result

    return watched


def _name_weights(
    core: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
) -> list[bool]:
    """Ours alone: no worker sees it. Answers for each of them, as an RPC does."""
    (weights_id,) = args or tuple((kwargs or {}).values()) or (None,)
    if not isinstance(weights_id, str) or not 0 < len(weights_id) <= 256:
        raise ValueError(
            f"{WEIGHTS_ID_RPC} takes one id of 1 to 256 characters, not {weights_id!r}"
        )
    for listener in list(_listeners):
        listener.weights_named(weights_id)
    return [True] * core.vllm_config.parallel_config.world_size

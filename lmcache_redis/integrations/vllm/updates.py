"""The part of the connector that follows what happens to the engine: resets, pauses, new weights.

`engine` notices most of it, `epoch` says what it means for the names of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lmcache_redis.integrations.vllm.epoch import EpochChange, Epochs
from lmcache_redis.integrations.vllm.guard import guarded, nothing

if TYPE_CHECKING:
    from lmcache_redis.client.scheduler import SchedulerClient
    from lmcache_redis.client.worker import WorkerClient
    from lmcache_redis.integrations.vllm.bookkeeping import BlockReferences
    from lmcache_redis.integrations.vllm.engine import Engine
    from lmcache_redis.integrations.vllm.scheduler import ConnectorScheduler
    from lmcache_redis.integrations.vllm.support import SetUp


class UpdateHooks:
    """A part of the connector, which has the other attributes. See `engine.EngineListener`."""

    is_paused: bool = False  # a pause empties vLLM's caches
    _engine: Engine | None = None
    _set_up: SetUp
    _references: BlockReferences | None
    _scheduler: ConnectorScheduler | None
    _adapter: SchedulerClient | WorkerClient | None

    @contextmanager
    def _during_reset(self) -> Iterator[None]:
        """vLLM resets its prefix cache: no transfer of ours is a reason against it."""
        self._before_reset()
        if self._references is None:
            yield
            return
        with self._references.given_back():
            yield

    @guarded(nothing)
    def _before_reset(self) -> None:
        if self._scheduler is None or self._engine is None:
            return
        for request in self._scheduler.give_up_loads():
            self._engine.give_up_load(request)
        self._scheduler.change_epoch(
            Epochs.check_parameters, "the parameters in memory have changed"
        )

    @guarded(lambda self: True)
    def reset_cache(self) -> bool | None:
        """Begins a new epoch: this engine no longer loads chunks that were stored before.

        A pause empties vLLM's caches too, but leaves the weights alone: the epoch stays.
        """
        if self._scheduler is None:
            return None
        if not self.is_paused:
            self._scheduler.clear()
        return True

    @guarded(nothing)
    def change_epoch(self, change: EpochChange, why: str) -> None:
        if self._scheduler is not None:
            self._scheduler.change_epoch(change, why)

    @guarded(nothing)
    def renamed(self, suffix: str) -> None:
        """This engine is a copy of another, restored from a snapshot (either role)."""
        if self._adapter is not None:
            self._adapter.link.rename(f"{self._set_up.engine_id}/{suffix}")

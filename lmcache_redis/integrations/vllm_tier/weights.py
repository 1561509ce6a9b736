"""Which chunks an engine may use after its weights were replaced.

The name of a chunk begins with the epoch of the weights that computed it (`vllm.epoch`). A request
keeps the epoch in which it began, and uses Redis only while that is the engine's: KV of old weights
is neither loaded nor stored as that of new ones. vLLM's own tiers have no such thing: who replaces
weights also has to reset its prefix cache, with ``reset_connector``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_redis.integrations.vllm.engine import Engine, listen, watch_resets
from lmcache_redis.integrations.vllm.epoch import EpochChange, Epochs

logger = logging.getLogger("vllm.lmcache_redis")


class TierEpochs:
    """The epochs of an engine's requests, a listener of `engine`: on the scheduler's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._epochs = Epochs(None, None, engine.parameters)
        self._requests: dict[str, bytes] = {}
        self._watches_resets = False
        listen(self)

    @property
    def current(self) -> bytes:
        return self._epochs.current

    def begin_request(self, request_id: str) -> None:
        if not self._watches_resets:  # the scheduler had no block pool when it made the tier
            self._watches_resets = True
            if (pool := self._engine.block_pool()) is not None:
                watch_resets(pool, self._around_reset)
            else:
                logger.warning("this scheduler is unknown: restart engines with new weights")
        self._epochs.is_used = True
        self._requests[request_id] = self._epochs.current

    def end_request(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def are_current(self, request_id: str) -> bool:
        """Whether a request began with the weights that the engine has now."""
        return self._requests.get(request_id) == self._epochs.current

    @contextmanager
    def _around_reset(self) -> Iterator[None]:
        self.change_epoch(Epochs.check_parameters, "the parameters in memory have changed")
        yield

    def renamed(self, suffix: str) -> None:
        """Names of chunks do not depend on the engine's."""

    def change_epoch(self, change: EpochChange, why: str) -> None:
        if change(self._epochs):
            logger.info("%s: from now on chunks in Redis are those of other weights", why)

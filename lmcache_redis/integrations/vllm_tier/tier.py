# SPDX-License-Identifier: Apache-2.0
"""``RedisTierManager``: vLLM's ``SecondaryTierManager`` over a `RegionStore`.

vLLM calls it in the scheduler's process, on one thread at a time, between and during steps; no call
waits for Redis, but `drain_jobs`, which has to. A lookup takes a round trip beside a step
(``RETRY``), a load another (vLLM's ``HIT_PENDING``). Every transfer ends by its deadline, and what
failed is a miss: vLLM computes it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lmcache_redis.errors import ConfigError, LMCacheRedisError, Unsupported
from lmcache_redis.integrations.vllm import making, needs
from lmcache_redis.integrations.vllm.engine import Engine, listen, watch_resets
from lmcache_redis.integrations.vllm.epoch import EpochChange, Epochs
from lmcache_redis.integrations.vllm_tier.naming import chunk_form, describe_worker
from lmcache_redis.regions import Answer, DoorSettings, RegionChunk, RegionStore, answered

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from lmcache_redis.chunks.names import ChunkForm

logger = logging.getLogger("vllm.lmcache_redis")

_CLOSE_S = 5.0
_CHUNKS = "lmcache_redis_tier_chunks"
_UP = "lmcache_redis_tier_up"

# `RegionStore.store` or `RegionStore.load`.
Transfer = Callable[[RegionStore, Sequence[RegionChunk], Answer], None]
# Of each key of a job, whether it was moved, and when that was known.
Moved = tuple[list[bool], float]


class RedisTierManager(SecondaryTierManager):
    """See the module. given: `DoorSettings`. Raises ConfigError for impossible ones.

    An engine whose KV cannot be identified gets a tier that is off, and a line in the log.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: TieringOffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str = "REMOTE",
        **given: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality)
        self._memory = primary_kv_view.cast("B")
        self._jobs: list[tuple[TransferJob, Future[Moved]]] = []
        self._counted: dict[str, float] = {}
        self._cache: _NamedChunks | None = None
        settings = DoorSettings.of(given)
        engine = Engine.in_the_making()
        try:
            needs.require()
            if engine is None or engine.vllm_config is None:
                raise Unsupported(making.NOT_SEEN)
            form = chunk_form(engine.vllm_config, offloading_spec, _workers(engine), settings)
        except ConfigError:
            raise
        except LMCacheRedisError as error:
            logger.error("the tier in Redis stays off: %s", error)
            return
        self._cache = _NamedChunks(tier_type, RegionStore(settings), form, engine)

    # Lookups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._cache is not None:
            self._cache.begin_request(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        cache = self._cache
        if cache is None or not cache.is_current(req_context.req_id):
            return LookupResult.MISS
        found = cache.lookup(key, req_context) if cache.store.is_up else False
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._cache is not None:
            self._cache.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._cache is not None:
            self._cache.cleanup(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._cache is not None:
            self._cache.store.keep([self._cache.chunk(key) for key in keys])

    # Transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, RegionStore.store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, RegionStore.load)

    def _submit(self, job: TransferJob, transfer: Transfer) -> None:
        cache, moved = self._cache, Future[Moved]()
        self._jobs.append((job, moved))

        def done(good: list[bool]) -> None:
            moved.set_result((good, time.monotonic()))

        if cache is None or not cache.is_current(job.req_context.req_id):
            done([False] * len(job.keys))
            return
        size, chunks = cache.form.chunk_bytes, []
        try:
            for key, row in zip(job.keys, job.chunk_ids, strict=True):
                start = int(row) * self.block_size_bytes
                chunks.append(cache.chunk(key, self._memory[start : start + size]))
            transfer(cache.store, chunks, done)
        except Exception:  # nothing has begun; vLLM would end, or wait for the job for ever
            logger.exception("a transfer to or from Redis failed")
            done([False] * len(job.keys))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        jobs, self._jobs = self._jobs, []
        results = []
        for job, moved in jobs:
            if moved.done():
                results.append(self._result(job, *moved.result()))
            else:
                self._jobs.append((job, moved))
        return results

    def _result(self, job: TransferJob, good: list[bool], ended_s: float) -> JobResult:
        moved = tuple(key for key, is_good in zip(job.keys, good, strict=True) if is_good)
        if job.is_promotion and self._cache is not None:
            self._cache.mark_miss({*job.keys} - {*moved})
        return JobResult(
            job.job_id,
            all(good),
            moved if job.is_promotion else None,
            ended_s - job.submit_time,
            len(moved) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        wait(moved for _, moved in self._jobs)

    def shutdown(self) -> None:
        if self._cache is not None:
            self._cache.shutdown()
            self._cache.store.close(_CLOSE_S)
        self._memory.release()  # vLLM unmaps the region, which it cannot while this is held

    # Metrics

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {
            _CHUNKS: OffloadingCounterMetadata(
                "Chunks of the tier in Redis, by what became of them.", ("tier", "outcome")
            ),
            _UP: OffloadingGaugeMetadata("Whether Redis can be used.", ("tier",)),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats, store = OffloadingConnectorStats(), self._cache and self._cache.store
        is_up = store is not None and store.is_up
        stats.set_gauge(_UP, int(is_up), (self.tier_type,))
        counted = {} if store is None else store.metrics.snapshot()
        for name, count in counted.items():
            more = count - self._counted.get(name, 0)
            if more and not name.endswith("_bytes"):
                stats.increase_counter(_CHUNKS, more, (self.tier_type, name))
        self._counted = counted
        return stats


def _workers(engine: Engine) -> Sequence[Mapping[str, str]]:
    try:
        return engine.in_workers(describe_worker)
    except Exception as error:  # whatever an executor or a backend raises
        raise Unsupported(f"the workers cannot say how they pack KV: {error!r}") from error


class _NamedChunks(AsyncLookupManager):
    """Chunks in Redis by vLLM's keys, and vLLM's table of lookups, which asks on its own thread.

    The name of a chunk begins with the epoch of the weights that computed it (`vllm.epoch`), so KV
    of old weights is neither loaded nor stored as that of new ones. vLLM's own tiers have no such
    thing. A listener of `engine`: on the scheduler's thread.
    """

    def __init__(self, tier_type: str, store: RegionStore, form: ChunkForm, engine: Engine) -> None:
        self.store = store
        self.form = form
        self._engine = engine
        self._epochs = Epochs(None, None, engine.parameters)
        self._requests: dict[str, bytes] = {}
        self._watches_resets = False
        listen(self)
        super().__init__(tier_type)

    def chunk(self, key: OffloadKey, *views: memoryview) -> RegionChunk:
        return RegionChunk(self.form, self._epochs.current + key, views)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return answered(partial(self.store.lookup, [self.chunk(key) for key in keys]))

    def begin_request(self, request_id: str) -> None:
        if not self._watches_resets:  # the scheduler had no block pool when it made the tier
            self._watches_resets = True
            if (manager := self._engine.kv_cache_manager()) is not None:
                why = "the parameters in memory have changed"
                watch_resets(
                    manager.block_pool, partial(self.change_epoch, Epochs.check_parameters, why)
                )
            else:
                logger.warning("this scheduler is unknown: restart engines with new weights")
        self._epochs.is_used = True
        self._requests[request_id] = self._epochs.current

    def is_current(self, request_id: str) -> bool:
        """Whether the request began with the weights that the engine has now."""
        return self._requests.get(request_id) == self._epochs.current

    def cleanup(self, req_id: str) -> None:
        super().cleanup(req_id)
        self._requests.pop(req_id, None)

    def renamed(self, suffix: str) -> None:
        """Names of chunks do not depend on the engine's."""

    def adapters_read(self) -> None:
        """The tier is off with adapters."""

    def change_epoch(self, change: EpochChange, why: str) -> None:
        if change(self._epochs):
            logger.info("%s: from now on chunks in Redis are those of other weights", why)

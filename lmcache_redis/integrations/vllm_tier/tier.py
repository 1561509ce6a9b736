"""``RedisTierManager``: vLLM's ``SecondaryTierManager`` over a `RegionStore`.

vLLM calls it in the scheduler's process, on one thread at a time, between and during steps; no call
waits for Redis, but `drain_jobs`, which has to. A lookup takes a round trip beside a step
(``RETRY``), a load another (vLLM's ``HIT_PENDING``). Every transfer ends by its deadline, and what
failed is a miss: vLLM computes it.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

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

from lmcache_redis.errors import ConfigError, LMCacheRedisError
from lmcache_redis.integrations.vllm.engine import Engine
from lmcache_redis.integrations.vllm.groups import Unsupported
from lmcache_redis.integrations.vllm.identity.weights import Unidentified
from lmcache_redis.integrations.vllm_tier.naming import chunk_form, describe_worker
from lmcache_redis.integrations.vllm_tier.weights import TierEpochs
from lmcache_redis.regions import Answer, DoorSettings, RegionChunk, RegionStore

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from lmcache_redis.chunks.names import ChunkForm

logger = logging.getLogger("vllm.lmcache_redis")

_CLOSE_S = 5.0
_CHUNKS = "lmcache_redis_tier_chunks"
_UP = "lmcache_redis_tier_up"

# A transfer of the store: its chunks, and what to call with the verdict on each.
Transfer = Callable[[Sequence[RegionChunk], Answer], None]


class _EndedTransfer(NamedTuple):
    """failed: keys that were to be loaded and are not."""

    result: JobResult
    failed: Sequence[OffloadKey]


class RedisTierManager(SecondaryTierManager):
    """See the module. given: `DoorSettings`. Raises ConfigError for impossible ones.

    An engine whose KV cannot be identified gets a tier that is off: it has nothing, and takes
    nothing. The log says why.
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
        self._under_way = 0  # transfers whose answer was not taken yet
        self._answers: queue.SimpleQueue[_EndedTransfer] = queue.SimpleQueue()
        self._ended: list[_EndedTransfer] = []
        self._counted: dict[str, float] = {}
        self._cache: _NamedChunks | None = None
        settings = DoorSettings.of(given)
        engine = Engine.found()
        try:
            if engine.vllm_config is None:
                raise Unsupported("no engine of vLLM is being made that it could belong to")
            form = chunk_form(engine.vllm_config, offloading_spec, _workers(engine), settings)
        except ConfigError:
            raise
        except LMCacheRedisError as error:
            logger.error("the tier in Redis stays off: %s", error)
            return
        self._cache = _NamedChunks(tier_type, RegionStore(settings), form, TierEpochs(engine))

    # Lookups

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._cache is not None:
            self._cache.epochs.begin_request(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        cache = self._cache
        if (
            cache is None
            or cache.store.why_down
            or not cache.epochs.are_current(req_context.req_id)
        ):
            return LookupResult.MISS
        found = cache.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._cache is not None:
            self._cache.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        if self._cache is not None:
            self._cache.cleanup(req_context.req_id)
            self._cache.epochs.end_request(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._cache is not None:
            self._cache.store.keep([self._cache.chunk(key) for key in keys])

    # Transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, None if self._cache is None else self._cache.store.store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(job_metadata, None if self._cache is None else self._cache.store.load)

    def _submit(self, job: TransferJob, transfer: Transfer | None) -> None:
        keys, cache = list(job.keys), self._cache
        self._under_way += 1
        done = partial(self._answer, job, keys)
        if (
            transfer is None
            or cache is None
            or not cache.epochs.are_current(job.req_context.req_id)
        ):
            done([False] * len(keys))
            return
        rows = [int(row) * self.block_size_bytes for row in job.chunk_ids]
        size = cache.form.chunk_bytes
        pairs = zip(keys, rows, strict=True)
        transfer([cache.chunk(key, self._memory[at : at + size]) for key, at in pairs], done)

    def _answer(self, job: TransferJob, keys: Sequence[OffloadKey], good: list[bool]) -> None:
        """On a thread of the store, or of the call."""
        pairs = list(zip(keys, good, strict=True))
        result = JobResult(
            job.job_id,
            all(good),
            tuple(key for key, is_good in pairs if is_good) if job.is_promotion else None,
            time.monotonic() - job.submit_time,
            sum(good) * self.block_size_bytes,
        )
        failed = [key for key, is_good in pairs if job.is_promotion and not is_good]
        self._answers.put(_EndedTransfer(result, failed))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while not self._answers.empty():
            self._take_answer()
        ended, self._ended = self._ended, []
        for each in ended:
            if each.failed and self._cache is not None:
                self._cache.mark_miss(each.failed)
        return [each.result for each in ended]

    def drain_jobs(self) -> None:
        while self._under_way:
            self._take_answer()

    def _take_answer(self) -> None:
        self._ended.append(self._answers.get())
        self._under_way -= 1

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
        stats = OffloadingConnectorStats()
        is_up = self._cache is not None and not self._cache.store.why_down
        stats.set_gauge(_UP, int(is_up), (self.tier_type,))
        if self._cache is not None:
            counted = self._cache.store.metrics.snapshot()
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
        raise Unidentified(f"the workers cannot say how they pack KV: {error!r}") from error


class _NamedChunks(AsyncLookupManager):
    """Chunks in Redis by vLLM's keys, in the namespace of an engine and its weights.

    And vLLM's table of lookups, which asks on a thread of its own.
    """

    def __init__(
        self, tier_type: str, store: RegionStore, form: ChunkForm, epochs: TierEpochs
    ) -> None:
        self.store = store
        self.form = form
        self.epochs = epochs
        super().__init__(tier_type)

    def chunk(self, key: OffloadKey, *views: memoryview) -> RegionChunk:
        return RegionChunk(self.form, self.epochs.current + key, views)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        answers: queue.SimpleQueue[list[bool]] = queue.SimpleQueue()
        self.store.lookup([self.chunk(key) for key in keys], answers.put)
        return answers.get()

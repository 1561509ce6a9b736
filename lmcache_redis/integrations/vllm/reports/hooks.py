"""The hooks by which vLLM asks the connector for reports.

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``. A vLLM without one of these hooks
does not call it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from lmcache_redis.client.scheduler import ChunkWatch, SchedulerClient
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.integrations.vllm.groups import LayerGroup
from lmcache_redis.integrations.vllm.guard import EVENTS, guarded, nothing
from lmcache_redis.integrations.vllm.reports.stats import ConnectorStats, Recorder
from lmcache_redis.integrations.vllm.tracing import RequestSpans

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lmcache_redis.integrations.vllm.reports.events import Announcer
    from lmcache_redis.integrations.vllm.scheduler import ConnectorScheduler

logger = logging.getLogger("vllm.lmcache_redis")


class ReportingHooks:
    """A part of the connector, which has the other attributes."""

    role: KVConnectorRole
    _vllm_config: VllmConfig
    _kv_cache_config: KVCacheConfig
    _scheduler: ConnectorScheduler | None
    _adapter: SchedulerClient | WorkerClient | None

    def _begin_reports(self) -> None:
        self._recorder = Recorder(RequestSpans.of(self._vllm_config))
        self._announcer: Announcer | None = None
        self._failed_reports: set[str] = set()

    @guarded(nothing, EVENTS)
    def _begin_events(
        self, adapter: SchedulerClient, groups: Sequence[LayerGroup], hash_tokens: int
    ) -> None:
        """Has the scheduler's connector make KV events, if vLLM publishes them."""
        config = getattr(self._vllm_config, "kv_events_config", None)
        if config is not None and config.enable_kv_cache_events:
            # Here, because a vLLM that has changed what they need must still run the cache.
            from lmcache_redis.integrations.vllm.reports.events import Announcer, spec_fields

            watch = ChunkWatch(adapter.link, adapter.ranks)
            specs = spec_fields(self._kv_cache_config)
            self._announcer = Announcer(watch, groups, hash_tokens, specs)

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Which chunks can be loaded now, or no longer, see `reports.events`."""
        return () if self._announcer is None else self._announcer.take()

    @guarded(
        lambda self, *args: KVConnectorBase_V1.get_external_cache_hit_sources(self, *args),
        "the sources of hits",
    )
    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """The tokens of a planned load by the tier that has them (vLLM 0.32 or newer)."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if self._scheduler is None:
            return {}
        tokens = self._scheduler.hit_tokens(request.request_id, num_external_tokens)
        sources = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
        remote = CacheHitSource.EXTERNAL_UNSPECIFIED  # vLLM's word for a remote store
        return {sources.get(tier, remote): count for tier, count in tokens.items()}

    @guarded(nothing, "statistics")
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """What this process has counted since the last call."""
        if self.role is KVConnectorRole.WORKER:
            rank, client = self._vllm_config.parallel_config.rank, self._adapter
            is_registered = isinstance(client, WorkerClient) and client.ready
            self._recorder.set("registered", float(is_registered), str(rank))
        return self._recorder.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> Any:
        """The connector's metrics on vLLM's /metrics; None if they cannot be registered."""
        try:
            from lmcache_redis.integrations.vllm.reports.prometheus import ConnectorMetrics

            return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except Exception:
            logger.exception("the connector has no metrics; please report this")
            return None

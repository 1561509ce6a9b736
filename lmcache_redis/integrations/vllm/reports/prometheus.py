"""The connector's metrics on vLLM's /metrics, in the process that serves it.

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/metrics.py``. vLLM adds its own labels, the
model and the number of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from lmcache_redis.integrations.vllm.guard import guarded, nothing
from lmcache_redis.integrations.vllm.reports.stats import DECLARED, TIERS
from lmcache_redis.metrics import PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ConnectorMetrics(KVConnectorPromMetrics):
    """One metric for each family, with a child for each engine."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._failed_reports: set[str] = set()
        self._metrics: dict[str, Any] = {}
        _forget_former()
        workers = [str(rank) for rank in range(vllm_config.parallel_config.world_size)]
        values = {"worker": workers, "tier": TIERS, "": [""]}
        for name, declared in DECLARED.items():
            more = {"multiprocess_mode": "mostrecent"} if declared.kind is Gauge else {}
            metric = declared.make(metric_types[declared.kind], labelnames, **more)
            self._metrics[name] = metric
            # So that each is there from the start, as 0.
            for engine in per_engine_labelvalues.values():
                for label in values[declared.label]:
                    _child(metric, engine, label)

    @guarded(nothing, "metrics")
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what `stats.ConnectorStats` has counted. Never raises."""
        engine = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data.items():
            metric, kind = self._metrics[name], DECLARED[name].kind
            for label, value in values.items():
                child = _child(metric, engine, label)
                if kind is Counter:
                    child.inc(value)
                elif kind is Gauge:
                    child.set(value)
                else:
                    for each in value:
                        child.observe(each)


def _child(metric: Any, engine: Sequence[object], label: str) -> Any:
    return metric.labels(*engine, *([label] if label else []))


def _forget_former() -> None:
    """Unregisters the metrics of an earlier engine of this process, as vLLM does with its own."""
    prefix = f"{PREFIX}vllm_"
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(prefix):
            REGISTRY.unregister(collector)

# SPDX-License-Identifier: Apache-2.0
"""The connector's metrics and spans beside vLLM's own, and the hooks by which vLLM asks for them.

``ConnectorStats.data`` has a mapping for each family: from the value of its label ("" if it has
none) to a count, to the list of what was observed, or to a gauge's value. vLLM sends it between
processes as msgpack, and adds its own labels: the model and the number of the engine.
Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py`` and ``metrics.py``. A vLLM without
one of these hooks does not call it.

OpenTelemetry spans say what the cache did for a request. They are siblings of vLLM's
``llm_request``: children of the span that the request's trace headers name. They go through the
exporter that vLLM sets up in each process (``--otlp-traces-endpoint``). Ends are seen at vLLM's
steps. Source: ``vllm/tracing/otel.py``, ``do_tracing`` in ``vllm/v1/engine/output_processor.py``.

    scheduler   lmcache_redis.lookup    from the question to the agent to its answer
                lmcache_redis.load      from the allocation of its blocks to the end on all ranks
    workers     lmcache_redis.retrieve  the load on one rank
                lmcache_redis.store     for which a rank's store holds blocks

By OpenTelemetry's conventions a lookup is the call of a database's client. It names the agent's
socket: engines do not know the servers. What has failed has the status, and an ``error.type``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from lmcache_redis.client.scheduler import ChunkWatch, SchedulerClient
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.integrations.vllm import needs
from lmcache_redis.integrations.vllm.guard import EVENTS, guarded, nothing
from lmcache_redis.metrics import PREFIX, SECONDS, Declared
from lmcache_redis.tier_kinds import KINDS, Medium

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

    from lmcache_redis.integrations.vllm.engine import Engine
    from lmcache_redis.integrations.vllm.reports.events import Announcer
    from lmcache_redis.integrations.vllm.support import LayerGroup

logger = logging.getLogger("vllm.lmcache_redis")

# By the names in ``ConnectorStats.data``.
DECLARED: Final = {
    name: Declared(kind, f"vllm_{name}", meaning, label, buckets=buckets)
    for name, kind, label, buckets, meaning in (
        ("hit_tokens", Counter, "tier", (), "prompt tokens to load, by the tier that had them"),
        (
            "lookup_seconds", Histogram, "", SECONDS,
            "from a lookup to its answer, as vLLM's steps see it; the request waits",
        ),
        ("loaded_chunks", Counter, "worker", (), "chunks loaded into the worker's blocks"),
        (
            "failed_chunks", Counter, "worker", (),
            "chunks whose load failed; vLLM computes their requests",
        ),
        ("stored_chunks", Counter, "worker", (), "chunks that the agent took"),
        ("dropped_chunks", Counter, "worker", (), "chunks that the agent did not take"),
        (
            "load_seconds", Histogram, "worker", SECONDS,
            "from a load to its end, as vLLM's steps see it; the request waits",
        ),
        (
            "store_seconds", Histogram, "worker", SECONDS,
            "for which a store held blocks, as vLLM's steps see it",
        ),
        (
            "registered", Gauge, "worker", (),
            "1: an agent has mapped the worker's KV cache; 0: nothing is cached. As of the last "
            "step",
        ),
    )
}  # fmt: skip


class ConnectorStats(KVConnectorStats):
    def reset(self) -> None:
        self.data: dict[str, dict[str, Any]] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Those of both: of other workers, of the scheduler, or of later."""
        data: dict[str, dict[str, Any]] = {name: dict(each) for name, each in self.data.items()}
        for name, values in other.data.items():
            merged = data.setdefault(name, {})
            for label, value in values.items():
                if label in merged and DECLARED[name].kind is not Gauge:
                    value = merged[label] + value
                merged[label] = value
        return ConnectorStats(data)

    def reduce(self) -> dict[str, int | float]:
        """The sums of the counters, under the names that vLLM prints."""
        return {
            f"lmcache_redis {name.replace('_', ' ')}": sum(values.values())
            for name, values in self.data.items()
            if DECLARED[name].kind is Counter
        }

    def is_empty(self) -> bool:
        return not self.data


class Recorder:
    """What one process has counted since the last `take`, and the spans of its requests.

    traces: whether to make spans; vLLM has checked that OpenTelemetry is there. endpoint: the
    agent's, once it is known.
    """

    endpoint = ""

    def __init__(self, *, traces: bool = False) -> None:
        self._data: dict[str, dict[str, Any]] = {}
        self._gauges: dict[tuple[str, str], float] = {}
        self._failed_reports: set[str] = set()
        self._traces = traces
        if traces:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            self._trace = trace
            self._tracer = trace.get_tracer("lmcache_redis")  # vLLM may set its provider later
            self._propagator = TraceContextTextMapPropagator()

    def count(self, name: str, n: int, label: str = "") -> None:
        if n:
            values = self._data.setdefault(name, {})
            values[label] = values.get(label, 0) + n

    def observe(self, name: str, value: float, label: str = "") -> None:
        self._data.setdefault(name, {}).setdefault(label, []).append(value)

    def set(self, name: str, value: float, label: str = "") -> None:
        """Sets a gauge. It is reported when it has changed."""
        if self._gauges.get((name, label)) != value:
            self._gauges[name, label] = value
            self._data.setdefault(name, {})[label] = value

    def take(self) -> ConnectorStats | None:
        """What was counted since the last call; None if nothing was."""
        data, self._data = self._data, {}
        return ConnectorStats(data) if data else None

    @guarded(nothing, "spans")
    def span(
        self, name: str, of: Any, began_s: float, attributes: Mapping[str, Any], error: str = ""
    ) -> None:
        """Makes a span that ends now, if ``of``, which has a request's id, has its trace headers.

        began_s: `time.monotonic()`. error: what has failed, as one word.
        """
        if self._traces and (headers := needs.TRACE_HEADERS.of(of)):
            found = {f"lmcache_redis.{key}": value for key, value in attributes.items()}
            found["gen_ai.request.id"] = of.request_id  # as in ``llm_request``
            kind = self._trace.SpanKind.INTERNAL
            if name == "lookup":
                kind = self._trace.SpanKind.CLIENT
                found |= {"db.system.name": "redis", "db.operation.name": name}
                found["server.address"] = self.endpoint.removeprefix("ipc://")
            now_ns = time.time_ns()
            span = self._tracer.start_span(
                f"lmcache_redis.{name}",
                context=self._propagator.extract(headers),
                kind=kind,
                attributes=found,
                start_time=now_ns - int((time.monotonic() - began_s) * 1e9),
            )
            if error:
                span.set_attribute("error.type", error)
                span.set_status(self._trace.StatusCode.ERROR)
            span.end(now_ns)


class ReportingHooks(KVConnectorBase_V1):
    """A part of the connector, which has the other attributes."""

    _scheduler: Any  # `ConnectorScheduler`, which imports this module
    _adapter: SchedulerClient | WorkerClient | None

    def _begin_reports(self) -> None:
        observability = needs.OBSERVABILITY_CONFIG.of(self._vllm_config)
        endpoint = needs.OTLP_ENDPOINT.of(observability)
        self._recorder = Recorder(traces=endpoint is not None)
        self._announcer: Announcer | None = None
        self._failed_reports: set[str] = set()

    @guarded(nothing, EVENTS)
    def _begin_events(
        self,
        adapter: SchedulerClient,
        engine: Engine,
        groups: Sequence[LayerGroup],
        hash_tokens: int,
    ) -> None:
        """Has the scheduler's connector make KV events, if vLLM publishes them."""
        config = needs.KV_EVENTS_CONFIG.of(self._vllm_config)
        if config is not None and config.enable_kv_cache_events:
            # Here, because a vLLM that has changed what they need must still run the cache.
            from lmcache_redis.integrations.vllm.reports.events import Announcer, spec_fields

            watch = ChunkWatch(adapter.link, adapter.ranks)
            specs, is_paused = spec_fields(self._kv_cache_config), engine.is_paused
            self._announcer = Announcer(watch, groups, hash_tokens, specs, is_paused)

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
        if self._scheduler is None:
            return {}
        tokens = self._scheduler.hit_tokens(request.request_id)
        source = needs.HIT_SOURCE.load()
        own = {Medium.MEMORY: source.HOST, Medium.STORAGE: source.DISK}
        found: dict[Any, int] = {}
        for kind in KINDS:
            if kind.name in tokens:
                # vLLM's word for a remote store.
                place = source.EXTERNAL_UNSPECIFIED if kind.is_shared else own[kind.medium]
                found[place] = found.get(place, 0) + tokens[kind.name]
        return found

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
    def build_prom_metrics(cls, *engines: Any, **named: Any) -> ConnectorMetrics | None:
        """The metrics on vLLM's /metrics; None if they cannot be registered."""
        try:
            return ConnectorMetrics(*engines, **named)
        except Exception:
            logger.exception("the connector has no metrics; please report this")
            return None


class ConnectorMetrics(KVConnectorPromMetrics):
    """In the process that serves /metrics: one metric for each family, with a child per engine."""

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
        values = {"worker": workers, "tier": [kind.name for kind in KINDS], "": [""]}
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
        """Adds what `ConnectorStats` has counted. Never raises."""
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

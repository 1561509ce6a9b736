"""OpenTelemetry spans of what the cache did for a request: lookup, load, retrieve, store.

They are siblings of vLLM's ``llm_request``: children of the span that the request's trace headers
name. They go through the exporter that vLLM sets up in each process (``--otlp-traces-endpoint``).

    scheduler   lmcache_redis.lookup    from the question to the agent to its answer
                lmcache_redis.load      from the allocation of its blocks to the end on all ranks
    workers     lmcache_redis.retrieve  the load on one rank
                lmcache_redis.store     for which a rank's store holds blocks

Ends are seen at vLLM's steps. Source: ``vllm/tracing/otel.py``, ``do_tracing`` in
``vllm/v1/engine/output_processor.py``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcache_redis.integrations.vllm.guard import guarded, nothing

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from vllm.config import VllmConfig

# As vLLM names it in ``llm_request``.
_REQUEST_ID = "gen_ai.request.id"
_PREFIX = "lmcache_redis."

# The trace headers of a request, as W3C Trace Context names them.
Headers = Mapping[str, str]


class RequestSpans:
    """Makes the spans of one process. provider: None: the process's, which vLLM may set later."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = trace.get_tracer("lmcache_redis", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()
        self._failed_reports: set[str] = set()

    @staticmethod
    def of(vllm_config: VllmConfig) -> RequestSpans | None:
        """None unless vLLM traces requests: then it has checked that OpenTelemetry is there."""
        observability = getattr(vllm_config, "observability_config", None)
        endpoint = getattr(observability, "otlp_traces_endpoint", None)
        return None if endpoint is None else RequestSpans()

    @guarded(nothing, "spans")
    def ended(
        self,
        name: str,
        request_id: str,
        headers: Headers | None,
        began_s: float,
        attributes: Mapping[str, Any],
    ) -> None:
        """Makes a span that ends now. began_s: `time.monotonic()`. Nothing without headers."""
        if headers:
            found = {_PREFIX + key: value for key, value in attributes.items()}
            now_ns = time.time_ns()
            self._tracer.start_span(
                _PREFIX + name,
                context=self._propagator.extract(headers),
                attributes={_REQUEST_ID: request_id, **found},
                start_time=now_ns - int((time.monotonic() - began_s) * 1e9),
            ).end(now_ns)

# SPDX-License-Identifier: Apache-2.0
"""Spans: siblings of vLLM's, by the trace headers of each request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from lmcache_redis.integrations.vllm.reports.stats import Recorder, ReportingHooks
from lmcache_redis.integrations.vllm.worker import ConnectorWorker, StepMetadata, WorkerReport
from tests.engines import PATCH_VARIABLE
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts
from tests.integrations.scripted import CHUNK, FakeRequest, Scripted
from tests.integrations.test_vllm import start
from tests.integrations.test_worker import Client

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[Recorder]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder = Recorder(traces=True)
    recorder.endpoint = "ipc:///run/agent.sock"
    recorder._tracer = provider.get_tracer("lmcache_redis")
    yield recorder
    provider.shutdown()


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    """Without their prefix, except for the request's id."""
    found = {name.removeprefix("lmcache_redis."): v for name, v in (span.attributes or {}).items()}
    assert found.pop("gen_ai.request.id") == "r"
    return found


def check_parent(span: ReadableSpan) -> None:
    assert span.parent is not None
    assert span.context is not None
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert (span.start_time or 0) <= (span.end_time or 0) != 0


def traced(headers: Any) -> Any:
    return SimpleNamespace(request_id="r", trace_headers=headers)


def traced_request() -> Any:
    request: Any = FakeRequest()
    request.trace_headers = HEADERS
    return request


def test_lookups_and_loads_have_spans(spans: Recorder, exporter: InMemorySpanExporter) -> None:
    """And their tokens are counted by tier."""
    scheduler, request = Scripted(recorder=spans), traced_request()
    adapter = scheduler.adapter
    adapter.tokens = None
    assert scheduler.matched_tokens(request, 0) is None
    assert exporter.get_finished_spans() == ()
    adapter.tokens, adapter.tiers = 3 * CHUNK, ["host", "redis", "redis"]
    assert scheduler.matched_tokens(request, 0) == 3 * CHUNK
    assert scheduler.matched_tokens(request, 0) == 3 * CHUNK
    scheduler.allocated(request, [[*range(1, 40)]], 3 * CHUNK)
    by_tier = {"host": CHUNK, "redis": 2 * CHUNK}
    assert scheduler.hit_tokens("r") == by_tier
    assert scheduler.hit_tokens("another") == {}
    stats = spans.take()
    assert stats is not None
    assert stats.data["hit_tokens"] == by_tier
    assert len(stats.data["lookup_seconds"][""]) == 1
    (load_of_step,) = scheduler.build_metadata(scheduler.step()).loads
    assert load_of_step.trace_headers == HEADERS
    scheduler.reported(WorkerReport({}, failed={"r"}))
    scheduler.load_ended("r")
    lookup, load = exporter.get_finished_spans()
    for span in (lookup, load):
        check_parent(span)
    assert lookup.name == "lmcache_redis.lookup"
    assert attributes_of(lookup) == {
        "local_tokens": 0,
        "hit_tokens": 3 * CHUNK,
        "db.system.name": "redis",
        "db.operation.name": "lookup",
        "server.address": "/run/agent.sock",
    }
    assert (lookup.kind, load.kind) == (SpanKind.CLIENT, SpanKind.INTERNAL)
    assert (lookup.status.is_ok, load.status.is_ok) == (True, False)
    assert load.name == "lmcache_redis.load"
    found = {"host_tokens": CHUNK, "redis_tokens": 2 * CHUNK, "failed": True}
    found["error.type"] = "load_failed"
    assert attributes_of(load) == found


def test_retrieves_and_stores_have_spans(spans: Recorder, exporter: InMemorySpanExporter) -> None:
    from tests.integrations.test_worker import OPS, Planned

    client = Client()
    worker = ConnectorWorker(client, 0, spans, reallocates=True)  # type: ignore[arg-type]
    compared = Planned(4, "r", OPS, compare=True)
    stores = [Planned(2, "r", OPS, HEADERS), Planned(3, "untraced", OPS), compared]
    worker.begin_loads(StepMetadata(loads=[Planned(1, "r", OPS, HEADERS)]))
    worker.step_begins(StepMetadata(stores=stores))
    client.begun[1].failed = True
    for each in client.begun:
        each.over = True
    worker.ended_loads(StepMetadata())
    worker.report()
    retrieve, store = exporter.get_finished_spans()
    for span in (retrieve, store):
        check_parent(span)
    assert retrieve.name == "lmcache_redis.retrieve"
    failed = {"failed_chunks": 1, "error.type": "chunks_failed"}
    assert attributes_of(retrieve) == {"rank": 0, "chunks": 0, **failed}
    assert store.name == "lmcache_redis.store"
    assert attributes_of(store) == {"rank": 0, "chunks": 1, "dropped_chunks": 0}
    assert (retrieve.status.is_ok, store.status.is_ok) == (False, True)


def test_a_request_without_headers_has_no_span(
    spans: Recorder, exporter: InMemorySpanExporter
) -> None:
    for headers in (None, {}):
        spans.span("lookup", traced(headers), 0.0, {})
    unsampled = {"traceparent": HEADERS["traceparent"][:-2] + "00"}
    spans.span("lookup", traced(unsampled), 0.0, {})
    assert exporter.get_finished_spans() == ()


def test_without_tracing_there_are_no_spans() -> None:
    def traces(**settings: Any) -> bool:
        hooks: Any = SimpleNamespace(_vllm_config=SimpleNamespace(**settings))
        ReportingHooks._begin_reports(hooks)
        return bool(hooks._recorder._traces)

    assert not traces()
    for endpoint in (None, "http://127.0.0.1:4317"):
        observability = SimpleNamespace(otlp_traces_endpoint=endpoint)
        assert traces(observability_config=observability) is (endpoint is not None)


def test_a_tracer_that_fails_is_logged_once(
    spans: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "vllm.lmcache_redis"):
        for _ in range(2):
            spans.span("lookup", traced(HEADERS), float("nan"), {})
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "span failed: the connector no longer reports spans, and caches as before"
    ]


class Collector:
    """An OTLP collector over HTTP: keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                found = ExportTraceServiceRequest.FromString(body)
                for resource in found.resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def names(self) -> set[str]:
        return {span.name for span in self.spans}

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


# In the engine's process: a step that asks with trace headers, as vLLM's server does.
TRACED_STEP = f"""
from testkit import engine

def traced(llm, request):
    from vllm import SamplingParams

    core = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompt = {{"prompt_token_ids": [1 + n * 7919 % 4000 for n in range(600)]}}
    core.add_request("traced", prompt, sampling, trace_headers={HEADERS!r})
    while core.has_unfinished_requests():
        core.step()
    return {{}}

engine._STEPS["traced"] = traced
"""


@pytest.mark.long
@pytest.mark.engine
def test_spans_of_a_real_engine_are_siblings(
    model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    patch = tmp_path / "traced.py"
    patch.write_text(TRACED_STEP)
    with Collector() as collector:
        env = {
            PATCH_VARIABLE: str(patch),
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        options = {"otlp_traces_endpoint": collector.url, "disable_log_stats": False}
        with start(model_dir, agent, tmp_path / "engine.log", env=env, **options) as engine:
            engine.step("traced")
            engine.generate([prompts.tokens(300)], 2)  # not traced
            agent.wait_idle()
            wait_until(engine.reset_prefix_cache, what="an empty prefix cache")
            engine.step("traced")
            engine.generate([prompts.tokens(300)], 2)
            expected = {f"lmcache_redis.{name}" for name in ("lookup", "load", "retrieve", "store")}
            wait_until(lambda: expected <= collector.names(), what="spans of each kind")
    ours = [span for span in collector.spans if span.name in expected]
    (vllms, *_) = [span for span in collector.spans if span.name == "llm_request"]
    for span in [*ours, vllms]:
        assert span.trace_id.hex() == TRACE_ID
        assert span.parent_span_id.hex() == PARENT_ID
    lookup = next(span for span in ours if span.name == "lmcache_redis.lookup")
    said = {each.key: each.value.string_value for each in lookup.attributes}
    assert said["server.address"] == agent.endpoint.removeprefix("ipc://")
    names = [span.name.partition(".")[2] for span in ours]
    assert {name: names.count(name) for name in set(names)} == {
        "lookup": 2, "load": 1, "retrieve": 1, "store": 1,
    }  # fmt: skip

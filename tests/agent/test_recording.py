# SPDX-License-Identifier: Apache-2.0
"""`--record`: the lines of a real agent, their bounds, and a disk that takes none."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent.reports import recording
from lmcache_redis.agent.reports.recording import TraceRecorder
from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import Metrics
from lmcache_redis.plan import records
from lmcache_redis.plan.reading import read_trace
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 12)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lookups_hits_and_stores_are_recorded(tmp_path: Path, redis_server: RedisServer) -> None:
    path = tmp_path / "recorded.jsonl"
    with AgentServer(tmp_path / "agent", redis_server.unix_url, record=path) as agent:
        with Engine(agent.endpoint) as engine:
            assert engine.lookup("a request", HASHES, token_s=0.001) == 0
            engine.store("a request", HASHES, range(12))
            engine.scheduler.end_session("a request")
            assert engine.lookup("another", HASHES) == 192
        assert agent.counter("records_dropped") == 0
        assert agent.terminate() == 0
    start, layout, first, store, second = lines_of(path)
    assert (start["type"], start["version"]) == ("start", 1)
    assert [row["bytes"] for row in layout["rows"]] == [96 << 10]
    assert [row["pool_bytes"] for row in layout["rows"]] == [128 << 10]  # two slots
    assert layout["chunk_tokens"] == 64
    assert first["layout"] == second["layout"] == layout["name"]
    assert first["chunks"] == store["chunks"] == second["chunks"]
    assert len(first["chunks"]) == 3 * 16
    assert first["request"] == store["request"] != second["request"]
    assert store["part"] == layout["rows"][0]["part"]
    assert (first["hits"], second["hits"]) == ("", "hhh")
    assert first["token_s"] == 0.001
    # Neither the engine's hashes nor its request ids can be read from it.
    text = path.read_text()
    assert "a request" not in text
    assert all(each.hex() not in text for each in HASHES)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_trace([path], 1, 1).asked.tolist() == [3, 3]


def test_a_full_file_is_replaced_and_each_can_be_read(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    path, size = tmp_path / "recorded.jsonl", 64 << 10
    constants = {"lmcache_redis.agent.reports.recording.LIMIT_BYTES": size}
    with AgentServer(tmp_path / "agent", redis_server.unix_url, constants, record=path) as agent:
        with Engine(agent.endpoint) as engine:
            for number in range(300):
                engine.lookup(f"request {number}", HASHES)
                engine.scheduler.end_session(f"request {number}")
        assert agent.terminate() == 0
    old = tmp_path / "recorded.jsonl.1"
    assert sorted(each.name for each in tmp_path.glob("recorded*")) == [path.name, old.name]
    assert 0 < path.stat().st_size <= size // 2
    assert size // 4 < old.stat().st_size <= size // 2
    for each in (path, old):
        assert [line["type"] for line in lines_of(each)[:2]] == ["start", "layout"]
    together = read_trace([path, old], 1, 1)
    assert len(together) == len(read_trace([path], 1, 1)) + len(read_trace([old], 1, 1))


def test_a_disk_that_is_full_stops_the_recording_only(start: Starts) -> None:
    agent, engine = start(record="/dev/full")
    engine.store("r1", HASHES, range(12))
    for number in range(100):
        assert engine.lookup(f"request {number}", HASHES) == 192
        if agent.counter("records_dropped"):
            break
    assert agent.counter("records_dropped")
    assert "nothing is recorded any more" in agent.log
    assert engine.retrieve(f"request {number}", HASHES, range(12)) == set()


def test_a_writer_that_is_behind_costs_lines_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is full while the writer stands still; the next line tells how many were lost."""
    go, write = threading.Event(), TraceRecorder._write

    def stand_still(self: Any, *line: Any) -> None:
        assert go.wait(10)
        write(self, *line)

    monkeypatch.setattr(recording, "_QUEUE_LINES", 4)
    monkeypatch.setattr(TraceRecorder, "_write", stand_still)
    metrics = Metrics()
    agent: Any = SimpleNamespace(cache=SimpleNamespace(metrics=metrics))
    form: Any = SimpleNamespace(stem=lambda hash_bytes: b"stem")
    recorder = TraceRecorder(agent, str(tmp_path / "recorded.jsonl"))
    recorder._layouts["layout"] = layout("stem")
    question = m.Store(0, "r", tuple(HASHES), (), lease_ns=0)
    for _ in range(20):
        recorder.stored(question, form)
    lost = metrics.snapshot()["records_dropped"]
    assert 15 <= lost <= 16  # the writer may have taken one already
    go.set()
    while not recorder._queue.empty():
        pass
    recorder.stored(question, form)
    recorder.close()
    found = lines_of(tmp_path / "recorded.jsonl")
    assert [line["lines"] for line in found if line["type"] == "dropped"] == [lost]
    assert sum(line["type"] == "store" for line in found) == 21 - lost


def test_a_store_is_written_once_its_layout_is_known(tmp_path: Path) -> None:
    """Engines with other layouts come and go."""
    path, agent = tmp_path / "recorded.jsonl", None
    recorder = TraceRecorder(agent, str(path))  # type: ignore[arg-type]
    for number in range(2):
        found = layout(f"stem {number}")
        chunks = recording._names(HASHES)
        store = records.StoreRecord(1.0, request="r", part=found.rows[0].part, chunks=chunks)
        lookup = records.LookupRecord(1.0, request="r", layout=found.name, chunks=chunks)
        recorder._put(store)
        for _ in range(2):
            recorder._put(found, lookup)
            recorder._put(store)
    recorder.close()
    types = [line["type"] for line in lines_of(path)]
    assert types == ["start"] + 2 * ["layout", "lookup", "store", "lookup", "store"]
    assert len(read_trace([path], 1, 1)) == 4


def test_lines_that_cannot_be_made_cost_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = TraceRecorder._write

    def fail(self: Any, line: Any) -> None:
        if isinstance(line, records.StoreRecord):
            raise ValueError("a bug")
        write(self, line)

    monkeypatch.setattr(TraceRecorder, "_write", fail)
    path, agent = tmp_path / "recorded.jsonl", None
    recorder = TraceRecorder(agent, str(path))  # type: ignore[arg-type]
    found = layout("stem")
    recorder._put(records.StoreRecord(1.0, request="r", part="p", chunks="c"))
    recorder._put(found)
    recorder.close()
    assert [line["type"] for line in lines_of(path)] == ["start", "layout"]
    assert "a bug" in caplog.text


def layout(stem: str) -> records.LayoutRecord:
    """Of one row."""
    part = recording._digest(stem.encode())
    row = records.RowRecord(part, 1024, 4096)
    return records.LayoutRecord(1.0, name=part, model="m", chunk_tokens=64, rows=(row,))


def test_a_file_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    agent: Any = None
    with pytest.raises(ConfigError, match=r"--record .* cannot be written .*: name another file"):
        TraceRecorder(agent, str(tmp_path / "nowhere" / "file"))

# SPDX-License-Identifier: Apache-2.0
"""A whole run, as small as can be: who takes part, what is measured; and no worker can hang it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.plane.cases import Bench, Plan
from benchmarks.plane.messages import (
    Batch,
    Load,
    Measured,
    PrepareScan,
    Request,
    Scan,
    Setting,
    Store,
)
from benchmarks.plane.peers import (
    CEILING,
    GLIDE,
    LMCACHE,
    OURS,
    PEERS,
    REDIS_PY,
    settings_of,
    why_left_out,
)
from benchmarks.plane.process import WorkerFailed, WorkerProcess
from benchmarks.plane.rows import MOVES, Row
from benchmarks.plane.run import measure, settings_of_ours
from benchmarks.plane.server import Server
from tests.servers import RedisServer, free_port

KIB = 1 << 10
ANYWHERE = "redis://127.0.0.1:6379"
ROUNDS = 2


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=False) as server:
        yield server


@pytest.fixture(scope="module")
def measured() -> tuple[list[Row], list[str]]:
    """The rows of a run with every peer that is installed, and what it said."""
    said: list[str] = []
    ours = [*settings_of_ours((1, 4)), Setting(sealed=True)]
    plan = Plan(
        {OURS: ours, **{p: settings_of(p, (1, 2)) for p in PEERS}},
        sizes=(256 * KIB, 1024 * KIB),
        # More than the room that a full server leaves: it has to evict.
        moved_bytes=24 << 20,
        least_items=2,
        rounds=ROUNDS,
        scans=((40, 2),),
    )
    rows, server = measure(plan, None, said.append)
    assert server.split()[0] in ("redis", "valkey")
    return rows, said


@pytest.mark.long
@pytest.mark.servers
@pytest.mark.parametrize("client", [OURS, *PEERS])
def test_a_client_takes_part(measured: tuple[list[Row], list[str]], client: str) -> None:
    rows, said = measured
    reason = why_left_out(client, ANYWHERE)
    if reason is not None:
        assert f"{client}: left out: {reason}" in said
        assert "run `pip install" in reason or "run `python benchmarks/fetch.py`" in reason
        pytest.skip(f"needs {client}: {reason}")
    own = [row for row in rows if row.client == client]
    moved = {(row.op, row.value_bytes) for row in own if row.op in MOVES}
    ops = set(MOVES) - ({"steady"} if client == CEILING else set())
    assert moved == {(op, size) for op in ops for size in (256 * KIB, 1024 * KIB)}
    scanned = {row.cached for row in own if row.op == "scan"}
    assert scanned == (set() if client in (CEILING, GLIDE) else {"none", "half", "all"})
    for row in own:
        assert row.rounds == (ROUNDS if row.op in MOVES else 2 * ROUNDS)
        assert (row.gb_per_s or 0.0) > 0 if row.op in MOVES else (row.ms or 0.0) > 0
        assert not row.checksum or (client == OURS and row.op in MOVES)
    if client == OURS:
        loads = [row for row in own if row.op == "load" and not row.sealed]
        assert 2 * len([row for row in loads if row.checksum]) == len(loads) == 8
        assert len([row for row in own if row.sealed]) == 2 * len(MOVES)
        assert all(row.checksum for row in own if row.op in MOVES and row.op != "load")
    assert sum(row.default for row in own if row.op == "load") == (2 if client == OURS else 0)


@pytest.mark.long
@pytest.mark.servers
def test_no_client_was_dropped(measured: tuple[list[Row], list[str]]) -> None:
    rows, said = measured
    assert not [line for line in said if "dropped" in line or line.startswith("steady")]
    assert {row.connections for row in rows if row.client == OURS and row.op == "load"} == {*(1, 4)}


class Broken(WorkerProcess):
    """A client that fails at its first request."""

    def __init__(self) -> None:
        self.asked = 0
        self.was_closed = False

    def ask(self, request: Request, within_s: float = 0.0) -> Measured:
        self.asked += 1
        raise WorkerFailed("it is broken")

    def close(self) -> None:
        self.was_closed = True


def test_a_peer_that_fails_is_dropped_and_ours_goes_on(redis_server: RedisServer) -> None:
    said: list[str] = []
    settings = {REDIS_PY: [Setting(1)], OURS: [Setting()]}
    plan = Plan(settings, [256 * KIB], 1 << 20, 2, 1, ((10, 1),))
    server, broken = Server(redis_server.url), Broken()
    with WorkerProcess(OURS, redis_server.url) as ours:
        rows = Bench(plan, server, {OURS: ours, REDIS_PY: broken}, said.append).run().rows()
    server.close()
    assert [line for line in said if "dropped" in line] == ["redis-py: dropped: it is broken"]
    assert (broken.asked, broken.was_closed) == (1, True)
    assert {row.client for row in rows} == {OURS}


@pytest.mark.servers
def test_an_unlimited_server_is_measured_without_eviction(tmp_path: Path) -> None:
    said: list[str] = []
    plan = Plan({OURS: [Setting()]}, [256 * KIB], 1 << 20, 2, 2, ())
    with (
        RedisServer(tmp_path, unix=False, args=("--rename-command", "CONFIG", "")) as redis_server,
        WorkerProcess(OURS, redis_server.url) as ours,
    ):
        server = Server(redis_server.url)
        rows = Bench(plan, server, {OURS: ours}, said.append).run().rows()
        server.close()
    assert {row.op for row in rows} == {"first-store", "overwrite", "load"}
    assert len([line for line in said if line.startswith("steady: left out")]) == 1


def test_a_full_server_is_as_before_afterwards(redis_server: RedisServer) -> None:
    redis_server.config_set("maxmemory", "1gb")
    redis_server.config_set("maxmemory-policy", "noeviction")
    server = Server(redis_server.url)
    with server.full(1 << 20):
        assert int(redis_server.command("CONFIG", "GET", "maxmemory")[b"maxmemory"]) < 1 << 30
    for name, value in (("maxmemory", "1073741824"), ("maxmemory-policy", "noeviction")):
        assert redis_server.command("CONFIG", "GET", name)[name.encode()] == value.encode()
    redis_server.config_set("maxmemory", "0")
    server.close()


@pytest.mark.servers
def test_the_command_writes_rows_and_a_plot(tmp_path: Path) -> None:
    words = ["--quick", "--rounds", "1", "--chunk-mib", "0.25", "--moved-mib", "1"]
    words += ["--connections", "1,2", "--no-peers", "--no-scans"]
    words += ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.png")]
    assert main(["data-plane", *words]) == 0
    document = json.loads((tmp_path / "rows.json").read_text())
    assert set(document) == {"machine", "rows"}
    loads = [row for row in document["rows"] if row["op"] == "load"]
    assert [row["connections"] for row in loads] == [1, 2]
    for row in document["rows"]:
        assert set(row) == set(Row.__dataclass_fields__)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------- workers


BATCH = Batch(value_bytes=64 << 10, items=5)


def test_what_is_not_there_is_no_load_and_no_hit(redis_server: RedisServer) -> None:
    redis_server.command("FLUSHALL")
    with WorkerProcess(OURS, redis_server.url) as worker:
        worker.ask(Store(Setting(slot_bytes=16 << 10), BATCH, "gone", fresh=True))
        assert redis_server.command("DBSIZE") == 4 * BATCH.items
        redis_server.command("FLUSHALL")
        with pytest.raises(WorkerFailed, match="5 of 5 chunks failed"):
            worker.ask(Load(Setting(), BATCH, "gone"))
        with pytest.raises(WorkerFailed):
            worker.ask(Store(Setting(), BATCH, "gone", fresh=True))
    with WorkerProcess(OURS, redis_server.url) as worker:
        worker.ask(PrepareScan(Setting(), 100, 100))
        with pytest.raises(WorkerFailed, match="found 100 of 99 keys"):
            worker.ask(Scan(Setting(), 99))


@pytest.mark.servers
def test_without_a_server_a_worker_says_so() -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with (
        WorkerProcess(OURS, url) as worker,
        pytest.raises(WorkerFailed, match="RedisUnavailable"),
    ):
        worker.ask(Store(Setting(), BATCH, "a", fresh=True))


def test_a_client_that_hangs_is_ended(redis_server: RedisServer) -> None:
    """LMCache's client never answers for a key that does not exist."""
    if (reason := why_left_out(LMCACHE, redis_server.url)) is not None:
        pytest.skip(f"needs {LMCACHE}: {reason}")
    setting = Setting(1)
    with WorkerProcess(LMCACHE, redis_server.url) as worker:
        worker.ask(Store(setting, BATCH, "gone", fresh=True))
        redis_server.command("FLUSHALL")
        with pytest.raises(WorkerFailed, match=r"no answer within 0\.5 s"):
            worker.ask(Load(setting, BATCH, "gone"), within_s=0.5)
        started_s = time.monotonic()
    # Closing it ends it well before LMCache's client would.
    assert time.monotonic() - started_s < 60
    worker.close()

# SPDX-License-Identifier: Apache-2.0
"""An adapter is what vLLM has read of its files, in every worker."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.integrations.vllm.identity import lora
from lmcache_redis.integrations.vllm.identity.lora import (
    AdapterDigests,
    AdaptersInMemory,
    adapters_in_memory,
)
from tests.harness import wait_until


def write_adapter(directory: Path, seed: bytes, *, alpha: int = 16) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(f'{{"r": 8, "lora_alpha": {alpha}}}')
    header = b'{"w":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}'
    data = struct.pack("<Q", len(header)) + header + (seed * 4096)[:4096]
    (directory / "adapter_model.safetensors").write_bytes(data)
    return directory


class Engine:
    """Workers that read adapters as vLLM's do, and what their scheduler knows.

    They keep one adapter at most. reads: what is called in each reading, after vLLM's file.
    """

    def __init__(self, ranks: int = 1, **settings: Any) -> None:
        self.digests = AdapterDigests(ranks, **settings)
        self.digests.looks.deadline_s, self.digests.looks.renewed_s = 30.0, 0.0
        self.reads: list[Callable[[], object]] = []
        self._memory: list[dict[int, bytes]] = [{} for _ in range(ranks)]
        self._managers = [self._manager(memory) for memory in self._memory]
        for manager in self._managers:
            AdaptersInMemory.of(SimpleNamespace(lora_manager=manager))
        self.report()

    def _manager(self, memory: dict[int, bytes]) -> Any:
        def load(lora_request: Any) -> bytes:
            found = Path(lora_request.lora_path, "adapter_model.safetensors").read_bytes()
            if self.reads:
                self.reads.pop(0)()
            return found

        return SimpleNamespace(_load_adapter=load, list_adapters=lambda: set(memory))

    def add(self, lora_request: Any, *, report: bool = True) -> None:
        """As `LRUCacheWorkerLoRAManager.add_adapter` with ``max_cpu_loras=1``."""
        number = lora_request.lora_int_id
        for manager, memory in zip(self._managers, self._memory, strict=True):
            if number not in memory or lora_request.load_inplace:
                adapter = manager._load_adapter(lora_request)
                memory.clear()
                memory[number] = adapter
        if report:
            self.report()

    def report(self) -> None:
        workers = [SimpleNamespace(model_runner=_runner(each)) for each in self._managers]
        self.digests.told(dict(enumerate(map(adapters_in_memory, workers))))

    def digest(self, *named: Any, **settings: Any) -> bytes | None:
        return self.digests.digest(request(*named, **settings))


def _runner(manager: Any) -> Any:
    return SimpleNamespace(lora_manager=manager)


def request(path: object, number: int = 1, **settings: Any) -> Any:
    fields = {"lora_int_id": number, "lora_path": str(path), "load_inplace": False}
    return SimpleNamespace(**{**fields, **settings})


def replace(adapter: Path, by: Path) -> None:
    """As deployments do: whole files are renamed into place."""
    for path in by.iterdir():
        copy = adapter / (path.name + ".new")
        shutil.copy(path, copy)
        copy.rename(adapter / path.name)


def test_equal_files_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    engine, found = Engine(), []
    for name, seed, alpha in [("a", b"1", 16), ("b", b"1", 16), ("c", b"2", 16), ("d", b"1", 8)]:
        adapter = request(write_adapter(tmp_path / name, seed, alpha=alpha), len(found) + 1)
        to_be_read = engine.digests.digest(adapter)
        engine.add(adapter)
        found.append(engine.digests.digest(adapter))
        assert to_be_read == found[-1]
    assert all(each is not None and len(each) == 16 for each in found)
    assert found[0] == found[1]
    assert len(set(found)) == 3
    as_3d = engine.digest(tmp_path / "a", 9, is_3d_lora_weight=True)
    assert as_3d not in (*found, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_in_memory_counts_whatever_lies_on_disk(tmp_path: Path, ranks: int) -> None:
    engine = Engine(ranks)
    adapter = write_adapter(tmp_path / "adapter", b"1")
    engine.add(request(adapter))
    first = engine.digest(adapter)
    assert first is not None
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    assert engine.digest(adapter) == first
    engine.add(request(adapter))  # it is in memory
    assert engine.digest(adapter) == first
    shutil.rmtree(adapter)
    assert engine.digest(adapter) == first


def test_what_vllm_has_dropped_or_reads_again_is_looked_at(tmp_path: Path) -> None:
    engine = Engine()
    adapter, other = (write_adapter(tmp_path / each, each.encode()) for each in "12")
    engine.add(request(adapter))
    first = engine.digest(adapter)
    engine.add(request(other, 2))
    assert engine.digest(adapter) == first
    replace(adapter, by=other)
    second = engine.digest(adapter)
    assert second == engine.digest(other, 2) != first
    engine.add(request(adapter))
    assert engine.digest(adapter) == second
    # Another id for the same path is another reading.
    replace(adapter, by=write_adapter(tmp_path / "3", b"3"))
    third = engine.digest(adapter, 3)
    assert third not in (None, first, second)
    assert engine.digest(adapter) == second


def test_loading_in_place_reads_again(tmp_path: Path) -> None:
    engine = Engine()
    adapter = write_adapter(tmp_path / "adapter", b"1")
    in_place = request(adapter, load_inplace=True)
    first = engine.digests.digest(in_place)
    engine.add(in_place)
    assert engine.digests.digest(in_place) == engine.digest(adapter) == first
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    in_place = request(adapter, load_inplace=True)
    assert engine.digests.digest(in_place) is None  # until vLLM has read it
    assert engine.digest(adapter) == first
    engine.add(in_place)
    second = engine.digests.digest(in_place)
    assert second == engine.digest(adapter) not in (None, first)


def test_workers_of_data_parallelism_are_believed_if_files_agree(
    tmp_path: Path,
) -> None:
    engine = Engine(reads_again=True)
    adapter = write_adapter(tmp_path / "adapter", b"1")
    engine.add(request(adapter))
    assert engine.digest(adapter) is not None
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    engine.digests.looks.forget(1)
    assert engine.digest(adapter) is None


@pytest.mark.parametrize("how", ["renamed", "rewritten", "config", "gone", "beside", "back"])
def test_files_that_change_while_vllm_reads_them_are_not_known(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    adapter = write_adapter(tmp_path / "adapter", b"1")
    weights = adapter / "adapter_model.safetensors"

    def change() -> None:
        if how == "renamed":
            replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
        elif how == "rewritten":  # in place, of the same size, with the time put back
            times = weights.stat()
            weights.write_bytes(weights.read_bytes()[:-4096] + b"2" * 4096)
            os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
        elif how == "config":
            (adapter / "adapter_config.json").write_text("{}")
        elif how == "gone":
            weights.unlink()
        elif how == "back":  # vLLM may have read what lay there in between
            replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
            replace(adapter, by=write_adapter(tmp_path / "newer", b"1"))
        else:
            (adapter / "adapter_model.bin").write_bytes(b"x")

    engine.reads.append(change)
    engine.add(request(adapter))
    for _ in range(3):
        assert engine.digest(adapter) is None
    assert caplog.text.count("are not cached") == 1


def test_ranks_that_have_read_different_files_share_nothing(tmp_path: Path) -> None:
    engine = Engine(2)
    adapter = write_adapter(tmp_path / "adapter", b"1")
    engine.reads += [lambda: None, lambda: None]
    load = engine._managers[1]._load_adapter

    def late(lora_request: Any) -> Any:
        replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
        return load(lora_request)

    engine._managers[1]._load_adapter = late
    engine.add(request(adapter))
    assert engine.digest(adapter) is None


def test_workers_that_cannot_be_watched_have_no_digests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    engine = Engine(2)
    engine.add(request(adapter))
    assert engine.digest(adapter) is not None
    engine.digests.told({1: None})
    assert engine.digest(adapter) is None
    assert "it is not known what this vLLM has in memory" in caplog.text
    assert AdapterDigests().digest(request(adapter)) is None  # nothing was told
    assert adapters_in_memory(SimpleNamespace(model_runner=SimpleNamespace())) is None


def test_an_adapter_that_was_not_seen_loading_is_not_cached(tmp_path: Path) -> None:
    engine = Engine()
    adapter = write_adapter(tmp_path / "adapter", b"1")
    engine._memory[0][1] = b"from elsewhere"
    engine.report()
    assert engine.digest(adapter) is None


@pytest.mark.parametrize("missing", ["everything", "adapter_config.json", "weights", "readable"])
def test_an_adapter_that_cannot_be_read_is_not_cached(tmp_path: Path, missing: str) -> None:
    adapter = tmp_path / "some" / "adapter"  # a path that does not exist, such as a name on the hub
    if missing != "everything":
        adapter.parent.mkdir()
        write_adapter(adapter, b"1")
        weights = adapter / "adapter_model.safetensors"
        if missing == "adapter_config.json":
            (adapter / missing).unlink()
        else:
            weights.unlink()
        if missing == "readable":
            os.mkfifo(weights)
    assert Engine().digest(adapter) is None
    assert Engine().digest("a\0b") is None


def test_a_bug_leaves_one_adapter_uncached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    engine = Engine()
    monkeypatch.setattr(lora, "digest_file", lambda path: 1 // 0)
    assert engine.digest(adapter) is None
    engine.add(request(adapter))
    monkeypatch.undo()
    assert engine.digest(adapter) is None
    assert engine.digest(adapter, 2) is not None


class Files:
    """Stands before ``os.stat`` for files under a folder, which may hang as NFS does."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._stat = os.stat
        self.answers = threading.Event()
        self.answers.set()
        self.threads: list[int] = []

    def stat(self, path: Any, *args: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(self._folder):
            self.threads.append(threading.get_ident())
            self.answers.wait()
        return self._stat(path, *args, **options)


def looking_threads() -> int:
    return [each.name for each in threading.enumerate()].count("adapter files")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    files = Files(hanging)
    monkeypatch.setattr(os, "stat", files.stat)
    yield files
    files.answers.set()
    wait_until(lambda: not looking_threads())


def test_adapters_in_memory_are_not_looked_at(tmp_path: Path, files: Files) -> None:
    engine = Engine()
    adapter = request(write_adapter(tmp_path / "hanging" / "adapter", b"1"))
    engine.add(adapter)
    looks = len(files.threads)
    files.answers.clear()
    for _ in range(1000):
        assert engine.digests.digest(adapter) is not None
    assert len(files.threads) == looks


def test_files_that_hang_are_waited_for_once(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    engine.digests.looks.deadline_s = 0.2
    waits: list[float] = []
    wait = threading.Event.wait

    def counted(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout:
            waits.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", counted)
    adapters = [write_adapter(tmp_path / "hanging" / str(number), b"1") for number in range(20)]
    files.answers.clear()
    for _ in range(5):
        for number, adapter in enumerate(adapters, start=1):
            assert engine.digest(adapter, number) is None
    assert looking_threads() == 1
    assert len(files.threads) == 1
    assert sum(waits) < 0.5  # 0.2 s for all, and what a first one may find left of it
    files.answers.set()
    wait_until(lambda: None not in [engine.digest(a, n) for n, a in enumerate(adapters, start=1)])
    assert threading.get_ident() not in files.threads
    wait_until(lambda: not looking_threads())


def test_a_look_is_renewed_for_its_request_without_a_wait(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    adapter = request(write_adapter(tmp_path / "hanging" / "adapter", b"1"))
    first = engine.digests.digest(adapter)
    assert first is not None
    looks, elapsed_s, monotonic = len(files.threads), 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + elapsed_s)
    monkeypatch.setattr(engine.digests.looks, "counts_s", 1000.0)
    files.answers.clear()
    elapsed_s = 400.0
    assert engine.digests.digest(adapter) == first  # the next look has begun, and hangs
    wait_until(lambda: len(files.threads) == looks + 1)
    elapsed_s = 900.0
    assert engine.digests.digest(adapter) == first
    elapsed_s = 1100.0
    assert engine.digests.digest(adapter) is None
    files.answers.set()
    wait_until(lambda: engine.digests.digest(adapter) == first)


def test_a_new_request_does_not_believe_an_old_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    adapter = write_adapter(tmp_path / "adapter", b"1")
    waiting = request(adapter)
    first = engine.digests.digest(waiting)
    elapsed_s, monotonic = 0.1, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + elapsed_s)
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    second = engine.digest(adapter)
    assert second not in (None, first)
    wait_until(lambda: engine.digests.digest(waiting) == second)


def test_what_was_seen_before_a_reading_says_nothing_of_the_next(tmp_path: Path) -> None:
    engine = Engine()
    adapter, other = (write_adapter(tmp_path / each, each.encode()) for each in "12")
    waiting = request(adapter)
    first = engine.digests.digest(waiting)
    engine.add(waiting)
    replace(adapter, by=write_adapter(tmp_path / "new", b"3"))
    engine.add(request(other, 2))
    assert engine.digests.digest(waiting) not in (None, first)


def test_nothing_is_kept_of_adapters_for_ever(tmp_path: Path) -> None:
    engine = Engine()
    adapter = write_adapter(tmp_path / "adapter", b"1")
    for number in range(1, 1000):
        lora_request = request(adapter, number)
        assert engine.digests.digest(lora_request) is not None
        if number % 2:  # the others are never read
            engine.add(lora_request)
    looks = engine.digests.looks
    assert len(looks._seen) + len(looks._begun) + len(looks._known) < 400
    assert looking_threads() <= 1

"""An adapter is its files, as they were when the engine read them."""

from __future__ import annotations

import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.integrations.vllm.identity import lora
from lmcache_redis.integrations.vllm.identity.lora import AdapterDigests
from tests.harness import wait_until


def write_adapter(directory: Path, seed: bytes, *, alpha: int = 16) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(f'{{"r": 8, "lora_alpha": {alpha}}}')
    header = b'{"w":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}'
    data = struct.pack("<Q", len(header)) + header + (seed * 4096)[:4096]
    (directory / "adapter_model.safetensors").write_bytes(data)
    return directory


def digests_of(*, believed_s: float, deadline_s: float = 30.0) -> AdapterDigests:
    digests = AdapterDigests()
    digests.believed_s, digests.deadline_s = believed_s, deadline_s
    return digests


def digests_now() -> AdapterDigests:
    """Believes nothing, and waits for every look."""
    return digests_of(believed_s=0.0)


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
    found = [
        digests_now().digest(request(write_adapter(tmp_path / name, seed, alpha=alpha)))
        for name, seed, alpha in [("a", b"1", 16), ("b", b"1", 16), ("c", b"2", 16), ("d", b"1", 8)]
    ]
    assert all(each is not None and len(each) == 16 for each in found)
    assert found[0] == found[1]
    assert len(set(found)) == 3
    as_3d = digests_now().digest(request(tmp_path / "a", is_3d_lora_weight=True))
    assert as_3d not in (*found, None)


def test_another_adapter_at_a_path_is_another(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    old = digests_now().digest(request(adapter))
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    new = digests_now().digest(request(adapter))
    assert None not in (old, new)
    assert old != new


@pytest.mark.parametrize("how", ["renamed", "rewritten", "config", "gone", "beside", "back"])
def test_changed_files_of_a_loaded_adapter_end_its_caching(tmp_path: Path, how: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    kept = tmp_path / "kept"
    shutil.copytree(adapter, kept)
    digests = digests_now()
    first = digests.digest(request(adapter))
    assert first is not None
    assert digests.digest(request(adapter)) == first
    weights = adapter / "adapter_model.safetensors"
    if how == "renamed" or how == "back":
        replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    elif how == "rewritten":  # in place, of the same size, with the time put back
        times = weights.stat()
        weights.write_bytes(weights.read_bytes()[:-4096] + b"2" * 4096)
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif how == "config":
        (adapter / "adapter_config.json").write_text("{}")
    elif how == "gone":
        weights.unlink()
    else:
        (adapter / "adapter_model.bin").write_bytes(b"x")
    assert digests.digest(request(adapter)) is None
    if how == "back":
        replace(adapter, by=kept)
    assert digests.digest(request(adapter)) is None
    # Another id makes vLLM read the files again, so their current digest is right.
    if how not in ("gone",):
        assert digests.digest(request(adapter, 2)) is not None


def test_one_id_for_two_paths_is_not_cached(tmp_path: Path) -> None:
    digests = digests_now()
    one, two = (write_adapter(tmp_path / name, name.encode()) for name in ("1", "2"))
    assert digests.digest(request(one)) is not None
    assert digests.digest(request(two)) is None  # vLLM keeps the first in memory
    assert digests.digest(request(one)) is None


def test_loading_in_place_starts_again(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    digests = digests_now()
    first = digests.digest(request(adapter))
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    assert digests.digest(request(adapter)) is None
    second = digests.digest(request(adapter, load_inplace=True))
    assert second not in (None, first)
    assert digests.digest(request(adapter)) == second


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
    digests = digests_now()
    assert digests.digest(request(adapter)) is None
    shutil.rmtree(adapter, ignore_errors=True)
    adapter.parent.mkdir(exist_ok=True)
    write_adapter(adapter, b"1")
    assert digests.digest(request(adapter)) is None  # vLLM may have read it from elsewhere
    assert digests_now().digest(request("a\0b")) is None


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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    files = Files(hanging)
    monkeypatch.setattr(os, "stat", files.stat)
    yield files
    files.answers.set()
    wait_until(lambda: "adapter files" not in [each.name for each in threading.enumerate()])


def test_files_that_hang_make_a_request_uncached(tmp_path: Path, files: Files) -> None:
    adapter = write_adapter(tmp_path / "hanging" / "adapter", b"1")
    other = write_adapter(tmp_path / "other", b"2")
    digests = digests_of(believed_s=0.05, deadline_s=0.5)
    files.answers.clear()
    for number in range(500):  # the files are waited for once
        assert digests.digest(request(adapter)) is None
        assert digests.digest(request(other, 2 + number % 2)) is not None
    assert len(files.threads) == 1
    files.answers.set()
    wait_until(lambda: digests.digest(request(adapter)) is not None)


def test_files_that_begin_to_hang_are_believed_and_no_longer(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "hanging" / "adapter", b"1")
    digests = digests_of(believed_s=1000.0)
    first = digests.digest(request(adapter))
    assert first is not None
    looks, elapsed_s, monotonic = len(files.threads), 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + elapsed_s)
    files.answers.clear()
    elapsed_s = 400.0
    assert digests.digest(request(adapter)) == first
    assert len(files.threads) == looks
    elapsed_s = 600.0  # it is time to look again, and there is no wait
    assert digests.digest(request(adapter)) == first
    wait_until(lambda: len(files.threads) == looks + 1)
    elapsed_s = 900.0
    assert digests.digest(request(adapter)) == first
    elapsed_s = 1100.0
    assert digests.digest(request(adapter)) is None
    files.answers.set()
    wait_until(lambda: digests.digest(request(adapter)) == first)
    assert threading.get_ident() not in files.threads


def test_an_adapter_in_use_is_looked_at_in_time(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    digests = digests_of(believed_s=0.05)
    assert digests.digest(request(adapter)) is not None
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    wait_until(lambda: digests.digest(request(adapter)) is None)


def test_nothing_is_believed_of_files_that_are_read_again(tmp_path: Path, files: Files) -> None:
    adapter = write_adapter(tmp_path / "hanging" / "adapter", b"1")
    digests = digests_of(believed_s=1000.0, deadline_s=0.01)
    wait_until(lambda: digests.digest(request(adapter)) is not None)
    first = digests.digest(request(adapter))
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    assert digests.digest(request(adapter)) == first  # vLLM has the old files in memory
    files.answers.clear()
    assert digests.digest(request(adapter, load_inplace=True)) is None
    assert digests.digest(request(adapter)) is None  # and now perhaps the new ones
    files.answers.set()
    wait_until(lambda: digests.digest(request(adapter)) not in (None, first))


def test_an_earlier_look_says_nothing_of_files_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    looks = [threading.Event() for _ in range(3)]
    looks[0].set()
    begun: list[Any] = []
    run = lora._Look.run

    def held(look: Any) -> None:
        run(look)
        begun.append(look)
        looks[min(len(begun), 3) - 1].wait()

    monkeypatch.setattr(lora._Look, "run", held)
    elapsed_s, monotonic = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + elapsed_s)
    digests = digests_of(believed_s=1000.0, deadline_s=0.01)
    wait_until(lambda: digests.digest(request(adapter)) is not None)
    first = digests.digest(request(adapter))
    elapsed_s = 600.0
    assert digests.digest(request(adapter)) == first
    wait_until(lambda: len(begun) == 2)
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    assert digests.digest(request(adapter, load_inplace=True)) is None
    looks[1].set()
    wait_until(lambda: len(begun) == 3)
    assert digests.digest(request(adapter)) is None
    looks[2].set()
    wait_until(lambda: digests.digest(request(adapter)) not in (None, first))


def test_a_bug_leaves_one_adapter_uncached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    monkeypatch.setattr(lora, "digest_file", lambda path: 1 // 0)
    digests = digests_now()
    assert digests.digest(request(adapter)) is None
    monkeypatch.undo()
    assert digests.digest(request(adapter)) is None
    assert digests.digest(request(adapter, 2)) is not None

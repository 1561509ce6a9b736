"""An adapter is its files, as they were when the engine read them."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis.integrations.vllm.lora import AdapterDigests


def write_adapter(directory: Path, seed: bytes, *, alpha: int = 16) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(f'{{"r": 8, "lora_alpha": {alpha}}}')
    header = b'{"w":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}'
    data = struct.pack("<Q", len(header)) + header + (seed * 4096)[:4096]
    (directory / "adapter_model.safetensors").write_bytes(data)
    return directory


def request(path: object, number: int = 1, **settings: Any) -> Any:
    fields = {"lora_int_id": number, "lora_path": str(path), "load_inplace": False}
    return SimpleNamespace(**{**fields, **settings})


def replace(adapter: Path, by: Path) -> None:
    """As deployments do: whole files are renamed into place."""
    for path in by.iterdir():
        copy = adapter / (path.name + ".new")
        shutil.copy(path, copy)
        copy.rename(adapter / path.name)


def test_no_adapter_is_no_bytes() -> None:
    assert AdapterDigests().digest(None) == b""


def test_equal_files_are_equal_wherever_they_lie_and_others_are_not(tmp_path: Path) -> None:
    found = [
        AdapterDigests().digest(request(write_adapter(tmp_path / name, seed, alpha=alpha)))
        for name, seed, alpha in [("a", b"1", 16), ("b", b"1", 16), ("c", b"2", 16), ("d", b"1", 8)]
    ]
    assert all(each is not None and len(each) == 16 for each in found)
    assert found[0] == found[1]
    assert len(set(found)) == 3
    as_3d = AdapterDigests().digest(request(tmp_path / "a", is_3d_lora_weight=True))
    assert as_3d not in (*found, None)


def test_another_adapter_at_the_same_path_is_another_after_a_restart(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    old = AdapterDigests().digest(request(adapter))
    replace(adapter, by=write_adapter(tmp_path / "new", b"2"))
    new = AdapterDigests().digest(request(adapter))
    assert None not in (old, new)
    assert old != new


@pytest.mark.parametrize("how", ["renamed", "rewritten", "config", "gone", "beside", "back"])
def test_files_that_change_under_an_adapter_in_memory_end_its_caching(
    tmp_path: Path, how: str
) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    kept = tmp_path / "kept"
    shutil.copytree(adapter, kept)
    digests = AdapterDigests()
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
    digests = AdapterDigests()
    one, two = (write_adapter(tmp_path / name, name.encode()) for name in ("1", "2"))
    assert digests.digest(request(one)) is not None
    assert digests.digest(request(two)) is None  # vLLM keeps the first in memory
    assert digests.digest(request(one)) is None


def test_loading_in_place_starts_again(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", b"1")
    digests = AdapterDigests()
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
    digests = AdapterDigests()
    assert digests.digest(request(adapter)) is None
    shutil.rmtree(adapter, ignore_errors=True)
    adapter.parent.mkdir(exist_ok=True)
    write_adapter(adapter, b"1")
    assert digests.digest(request(adapter)) is None  # vLLM may have read it from elsewhere
    assert AdapterDigests().digest(request("a\0b")) is None

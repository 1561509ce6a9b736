"""What is taken from LMCache's wheel, and where it is looked for."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from lmcache_redis.bench.plane import fetch


def test_client_and_package_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "lmcache.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"lmcache/{fetch.file_name()}", b"the client")
        archive.writestr("lmcache/__init__.py", b"")
        archive.writestr("lmcache/v1/server/__main__.py", b"")
    monkeypatch.setattr(fetch, "DIRECTORY", tmp_path / "peers")
    taken = fetch.take_client(wheel, fetch.DIRECTORY)
    assert fetch.find_client() == taken
    assert taken.read_bytes() == b"the client"
    assert [path.name for path in fetch.DIRECTORY.iterdir()] == [fetch.file_name()]
    package = fetch.take_package(wheel, fetch.DIRECTORY)
    assert fetch.find_package() == package
    assert (package / "lmcache" / "v1" / "server" / "__main__.py").is_file()
    assert fetch.main() == 0, "what is there is not fetched again"


def test_a_wheel_without_the_client_leaves_nothing(tmp_path: Path) -> None:
    wheel = tmp_path / "lmcache.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lmcache/__init__.py", b"")
    with pytest.raises(KeyError):
        fetch.take_client(wheel, tmp_path / "peers")
    assert not list((tmp_path / "peers").iterdir())


def test_a_wheel_without_the_server_is_not_unpacked(tmp_path: Path) -> None:
    wheel = tmp_path / "lmcache.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lmcache/__init__.py", b"")
    with pytest.raises(KeyError):
        fetch.take_package(wheel, tmp_path / "peers")
    assert not (tmp_path / "peers").exists()

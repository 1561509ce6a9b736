# SPDX-License-Identifier: Apache-2.0
"""What is taken from LMCache's wheel, and where it is looked for."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import fetch

CLIENT = f"lmcache/{fetch.file_name()}"
SERVER = "lmcache/v1/server/__main__.py"
L2 = "lmcache/v1/distributed/api.py"


def wheel_of(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("lmcache/__init__.py", *names):
            archive.writestr(name, name)
    return path


def test_client_and_package_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DIRECTORY", tmp_path / "peers")
    monkeypatch.delitem(sys.modules, "lmcache", raising=False)  # of other tests in this process
    monkeypatch.setattr(sys, "path", [])
    wheel = wheel_of(tmp_path / "lmcache.whl", CLIENT, L2)
    package = fetch.unpack(wheel, fetch.DIRECTORY)
    client = fetch.find_client()
    assert client is not None
    assert client.read_text() == CLIENT
    assert fetch.find_package() == package
    assert (package / L2).is_file()
    assert fetch.find_server() is None
    (package / SERVER).parent.mkdir()
    assert fetch.find_server() == package
    assert fetch.main() == 0, "what is there is not fetched again"


@pytest.mark.parametrize("name", [CLIENT, L2])
def test_a_wheel_without_client_or_adapters_is_not_unpacked(tmp_path: Path, name: str) -> None:
    wheel = wheel_of(tmp_path / "lmcache.whl", name)
    with pytest.raises(KeyError):
        fetch.unpack(wheel, tmp_path / "peers")
    assert not (tmp_path / "peers").exists()

# SPDX-License-Identifier: Apache-2.0
"""Finds and downloads LMCache's wheel, with its C++ client and its server.

`python benchmarks/fetch.py` downloads LMCache's wheel with pip, without its dependencies, and
unpacks it under the virtual environment. It installs nothing. With another version in
``LMCACHE_VERSION``, that one is fetched, and the tests and benchmarks that see the variable use it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LMCACHE_VERSION = os.environ.get("LMCACHE_VERSION", "0.5.6")
DIRECTORY = Path(sys.prefix) / "bench-peers" / f"lmcache-{LMCACHE_VERSION}"
HOW_TO_FETCH = (
    "LMCache is not installed: run `python benchmarks/fetch.py`, which downloads its wheel "
    "(`pip download --no-deps lmcache`) and unpacks it without installing it"
)
_TIMEOUT_S = 300.0


def file_name() -> str:
    """The file of the C++ client for this interpreter."""
    return f"lmcache_redis{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def find_client() -> Path | None:
    """The C++ client of the unpacked wheel, else of an installed LMCache."""
    paths = [place / "lmcache" / file_name() for place in _places()]
    return next((path for path in paths if path.is_file()), None)


def find_package() -> Path | None:
    """The directory that contains the package `lmcache`, with its multiprocess server."""
    return _with("v1/distributed")


def find_server() -> Path | None:
    """The same, with the server of ``lm://`` too, which 0.5.7 no longer has."""
    return _with("v1/server")


def _with(part: str) -> Path | None:
    return next((place for place in _places() if (place / "lmcache" / part).is_dir()), None)


def _places() -> list[Path]:
    spec = importlib.util.find_spec("lmcache")
    installed = [] if spec is None or spec.origin is None else [Path(spec.origin).parent.parent]
    return [DIRECTORY, *installed]


def unpack(wheel: Path, directory: Path) -> Path:
    """Unpacks a wheel. Raises KeyError, and unpacks nothing, if adapters or client are missing."""
    with zipfile.ZipFile(wheel) as archive:
        for name in ("v1/distributed/api.py", file_name()):
            archive.getinfo(f"lmcache/{name}")
        archive.extractall(directory)
    return directory


def main() -> int:
    """Downloads what is missing; returns the exit status."""
    if find_client() is not None and find_package() is not None:
        return 0
    with tempfile.TemporaryDirectory() as directory:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words += ["--only-binary", ":all:", "--dest", directory, f"lmcache=={LMCACHE_VERSION}"]
        try:
            status = subprocess.run(words, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL).returncode
        except subprocess.TimeoutExpired:
            status = 1
        if status != 0:
            print("LMCache's wheel could not be downloaded", file=sys.stderr)
            return 1
        (wheel,) = Path(directory).glob("*.whl")
        print(f"LMCache {LMCACHE_VERSION}: {unpack(wheel, DIRECTORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

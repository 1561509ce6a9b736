"""Where LMCache's C++ client and its package lie, and how they come there.

`python -m lmcache_redis.bench.plane.fetch` downloads LMCache's wheel with pip, without its
dependencies, and unpacks it under the virtual environment; the client's file is put beside it.
Nothing is installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LMCACHE_VERSION = "0.5.6"
DIRECTORY = Path(sys.prefix) / "bench-peers"
_TIMEOUT_S = 300.0


def file_name() -> str:
    """The client's file for this interpreter."""
    return f"lmcache_redis{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def find_client() -> Path | None:
    """The client: the file fetched, else that of an installed LMCache."""
    places = [DIRECTORY]
    spec = importlib.util.find_spec("lmcache")
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent)
    return next((p / file_name() for p in places if (p / file_name()).is_file()), None)


def find_package() -> Path | None:
    """The folder that has the package `lmcache`: unpacked, else where it is installed."""
    places = [DIRECTORY / "wheel"]
    spec = importlib.util.find_spec("lmcache")
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parent.parent)
    return next((p for p in places if (p / "lmcache" / "v1" / "server").is_dir()), None)


def take_package(wheel: Path, directory: Path) -> Path:
    """Unpacks a wheel; the folder that has the package. Raises KeyError where it has none."""
    with zipfile.ZipFile(wheel) as archive:
        archive.getinfo("lmcache/v1/server/__main__.py")
        archive.extractall(directory / "wheel")
    return directory / "wheel"


def take_client(wheel: Path, directory: Path) -> Path:
    """Takes the client out of a wheel. Raises KeyError where there is none in it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / file_name()
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read(f"lmcache/{file_name()}"))
    return path


def main() -> int:
    """Fetches what is not there; returns the exit status."""
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
        print(f"LMCache {LMCACHE_VERSION}: {take_client(wheel, DIRECTORY)}")
        print(f"LMCache {LMCACHE_VERSION}: {take_package(wheel, DIRECTORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

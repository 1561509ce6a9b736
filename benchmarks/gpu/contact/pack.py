# SPDX-License-Identifier: Apache-2.0
"""The folder for first contact on a machine with a GPU and torch, but without index or compiler.

It has this checkout's Python, the native extension and the kernels as they are built here, wheels
of all that the machine may lack, for its Python, and the script that unpacks them and begins.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from lmcache_redis.device import kernels
from lmcache_redis.errors import ConfigError, LMCacheRedisError

_ROOT = Path(__file__).parents[3]
_CARRIED = ("lmcache_redis", "benchmarks", "demo", "testkit", "tests", "pyproject.toml", "LICENSE")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.c", "*.h")
_OF_TESTS = {"pytest", "pytest-timeout", "hypothesis"}
_BEFORE_PYTHON_311 = ("exceptiongroup", "tomli", "typing-extensions")  # what these need then
# From the newest to the oldest that such a machine runs.
_PLATFORMS = [
    f"manylinux{version}_{platform.machine()}"
    for version in ("_2_28", "_2_27", "_2_26", "_2_17", "2014")
]
_SCRIPT = "first-contact"


class PackFailed(LMCacheRedisError):
    """The folder cannot be made; the message says why."""


def make(folder: Path, python: str, root: Path = _ROOT) -> str:
    """Makes the folder, for such a Python ("3.12"); what to do with it. Raises PackFailed."""
    if not re.fullmatch(r"3\.\d+", python):
        raise ConfigError(f"{python!r} is no version of Python like 3.12")
    if folder.exists() and any(folder.iterdir()):
        raise PackFailed(f"{folder} is not empty: name another folder")
    built = root / "lmcache_redis"
    lacking = [name for name in kernels.NAMES if not list(built.rglob(f"{name}.ptx"))]
    if lacking or not list(built.rglob("*.so")):
        raise PackFailed("the package is not built here: python setup.py build_ext --inplace")
    folder.mkdir(parents=True, exist_ok=True)
    _download(folder / "wheels", python)
    fill(folder, python, root)
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    return (
        f"{folder}: {size / 1e6:.0f} MB, for Python {python}. Copy it to the machine with the GPU, "
        f"and run there: python3 {_SCRIPT}"
    )


def fill(folder: Path, python: str, root: Path = _ROOT) -> None:
    """All but the wheels."""
    for name in _CARRIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_LEFT_OUT)
        else:
            shutil.copy2(source, folder / name)
    (folder / "python-version").write_text(python + "\n")
    shutil.copy2(Path(__file__).with_name("unpack.py"), folder / _SCRIPT)
    (folder / _SCRIPT).chmod(0o755)


def _download(to: Path, python: str) -> None:
    platforms = [word for each in _PLATFORMS for word in ("--platform", each)]
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "--no-color", "--disable-pip-version-check", "download",
         "--quiet", "--only-binary", ":all:", "--python-version", python, *platforms,
         "--dest", to, *_requirements()],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ran.returncode:
        raise PackFailed(f"pip found no wheels for Python {python}:\n{ran.stderr.strip()}")


def _requirements() -> list[str]:
    """Of the package, without its extras, and of the marked tests."""
    wanted = [*_BEFORE_PYTHON_311]
    for each in requires("lmcache-redis") or ():
        requirement, _, marker = each.partition(";")
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if "extra ==" not in marker or name in _OF_TESTS:
            wanted.append(requirement.strip())
    return wanted

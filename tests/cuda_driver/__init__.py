# SPDX-License-Identifier: Apache-2.0
"""A ``libcuda.so.1`` without a GPU: what it does and which settings it has says `stub.h`.

A test of this process:

    tests.cuda_driver.load()                    # `lmcache_redis.device.driver` finds the library
    tests.cuda_driver.set("delay_us", 500)
    tests.cuda_driver.fail("cuMemAlloc_v2", 2)
    tests.cuda_driver.reset()                   # as if this process had not used it

and of others:

    environment = tests.cuda_driver.environment(seed=7, devices=2)
    ...                                         # a process with these variables
    tests.cuda_driver.set("hang", -1, environment)

Names that `set` and `get` take: the settings, the counts of what a process has, and of each
function "cuMemAlloc_v2.called", ".takes_us", ".hang" and, for `fail`, ".code", ".at" and ".times".
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lmcache_redis.device import driver

HERE = Path(__file__).parent
NAME = "libcuda.so.1"
PIECE_BYTES = 2 << 20  # of memory that is mapped in pieces
BY_DESCRIPTOR, BY_FABRIC = 1, 8  # types of handles of such memory
_FLAGS = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
_CONTROL = "CUDA_STUB_CONTROL"
_FIELDS = ("called", "code", "at", "times", "takes_us", "hang")


def missing() -> str | None:
    """Why the library cannot be built here."""
    return None if shutil.which("gcc") else "no gcc, which builds the driver of the tests"


@functools.cache
def build(*, batch: bool = True) -> Path:
    """The directory that holds the library; it is built if no process has built these sources yet.

    batch: else it is that of an older driver, without ``cuMemcpyBatchAsync``.
    """
    sources = sorted(HERE.glob("*.[ch]"))
    flags = [
        *_FLAGS,
        "-fvisibility=hidden",
        f"-Wl,-soname,{NAME}",
        *([] if batch else ["-DWITHOUT_BATCH"]),
    ]
    digest = hashlib.sha256(" ".join(flags).encode())
    for source in sources:
        digest.update(source.read_bytes())
    name = f"lmcache-redis-cuda-{os.getuid()}-{digest.hexdigest()[:16]}"
    directory = Path(tempfile.gettempdir(), name)
    if not (directory / NAME).exists():
        directory.mkdir(mode=0o700, exist_ok=True)
        handle, new = tempfile.mkstemp(dir=directory)
        os.close(handle)
        try:
            _run(["gcc", *flags, *(str(s) for s in sources if s.suffix == ".c"), "-o", new])
            os.replace(new, directory / NAME)
        finally:
            Path(new).unlink(missing_ok=True)
    return directory


def _run(words: list[str]) -> None:
    # A unit test starts no process by `subprocess`; the compiler is no part of what is tested.
    pid = os.posix_spawnp(words[0], words, os.environ)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"{' '.join(words)} failed"


@functools.cache
def load() -> ctypes.CDLL:
    """The library in this process, where whoever loads ``libcuda.so.1`` then gets it."""
    return ctypes.CDLL(str(build() / NAME), mode=ctypes.RTLD_GLOBAL)


def reset() -> None:
    """As if this process had not used the driver. Settings are the defaults."""
    load().stubReset()
    for number, value in enumerate(_settings().values()):
        _table(None)[number] = value
    for number in range(_first_call(), len(_slots())):
        _table(None)[number] = 0
    driver._library.cache_clear()


def environment(*, batch: bool = True, **settings: int | str) -> dict[str, str]:
    """Variables of a process that uses the library. Each call makes a new table of settings.

    settings: those of `stub.h`, and ``uuids`` of GPUs.
    """
    variables = {"LD_LIBRARY_PATH": str(build(batch=batch))}
    if "uuids" in settings:
        variables["CUDA_STUB_UUIDS"] = str(settings.pop("uuids"))
    handle, path = tempfile.mkstemp(prefix="lmcache-redis-cuda-control-")
    atexit.register(_remove, path, os.getpid())
    with os.fdopen(handle, "wb") as file:
        values = [int(settings.pop(name, value)) for name, value in _settings().items()]
        assert not settings, f"no such settings: {sorted(settings)}"
        values += [0] * (len(_slots()) - len(values))
        file.write(struct.pack(f"{len(values)}q", *values))
    variables[_CONTROL] = path
    return variables


def set(name: str, value: int, environment: Mapping[str, str] | None = None) -> None:
    """A setting of the processes of an environment; of this process without one."""
    _table(environment)[_slots()[name]] = value


def get(name: str, environment: Mapping[str, str] | None = None) -> int:
    """A setting or a count."""
    return int(_table(environment)[_slots()[name]])


def fail(
    function: str,
    code: int,
    *,
    at: int = 1,
    times: int = 1,
    environment: Mapping[str, str] | None = None,
) -> None:
    """A function of the driver returns an error.

    at: first at this call from now. times: so often; 0: for ever. A sticky error stays in any case.
    """
    for field, value in (("at", at), ("times", times), ("code", code)):
        set(f"{function}.{field}", value, environment)


def counts(environment: Mapping[str, str] | None = None) -> dict[str, int]:
    """What a process has (allocations, pinned, opened and so on), without what it has none of."""
    found = {name: get(name, environment) for name in _names("COUNTS")}
    return {name: value for name, value in found.items() if value}


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@functools.cache
def _list(macro: str) -> str:
    found = re.search(rf"#define {macro}\(X\)(( .*\\\n)+.*)\n", (HERE / "stub.h").read_text())
    assert found
    return found[1]


@functools.cache
def _names(macro: str) -> tuple[str, ...]:
    return tuple(re.findall(r"X\((\w+)", _list(macro)))


@functools.cache
def _settings() -> dict[str, int]:
    """Defaults by name."""
    return {name: int(value) for name, value in re.findall(r"X\((\w+), (\d+)\)", _list("SETTINGS"))}


def _first_call() -> int:
    return len(_settings()) + len(_names("COUNTS"))


@functools.cache
def _slots() -> dict[str, int]:
    """Places in the table, as `stub.h` has them."""
    names = [*_settings(), *_names("COUNTS")]
    names += [f"{call}.{field}" for call in _names("CALLS") for field in _FIELDS]
    return {name: number for number, name in enumerate(names)}


def _table(environment: Mapping[str, str] | None) -> memoryview | ctypes.Array[ctypes.c_int64]:
    if environment is not None:
        return _file_table(environment[_CONTROL])
    find = load().stub_table
    find.restype = ctypes.POINTER(ctypes.c_int64 * len(_slots()))
    table: ctypes.Array[ctypes.c_int64] = find().contents
    return table


@functools.lru_cache(maxsize=256)
def _file_table(path: str) -> memoryview:
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

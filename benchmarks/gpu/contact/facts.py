# SPDX-License-Identifier: Apache-2.0
"""What the driver says of itself and of the first GPU, and what the machine allows."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.contact.figures import Figure, judged
from lmcache_redis import native
from lmcache_redis.device import driver, kernels
from lmcache_redis.errors import LMCacheRedisError

QUICK: dict[str, Any] = {}

# Of ``CUdevice_attribute``, with the value that the package needs to be at its best.
_ATTRIBUTES = (
    (91, "registered host memory at its own address", 1),
    (122, "streams write 64-bit values", 1),
    (103, "memory as POSIX descriptors", 1),
    (128, "memory as fabric handles", None),
    (110, "GPUDirect RDMA", None),
    (20, "compute mode", 0),
    (75, "compute capability, major", None),
    (76, "compute capability, minor", None),
    (40, "copy engines", None),
    (88, "pageable memory access", None),
    (100, "host page tables", None),
)
_FILES = (
    "/proc/sys/kernel/yama/ptrace_scope", "/sys/kernel/mm/transparent_hugepage/enabled",
    "/proc/driver/nvidia/version",
)  # fmt: skip
_SMI_WITHIN_S = 15.0


def measure() -> Iterator[Figure]:
    """Raises DeviceError without a driver, after what is known without one."""
    for name in ("torch", "triton", "vllm", "numpy", "pytest"):
        yield Figure("facts", name, _version(name))
    yield Figure("facts", "Python", platform.python_version())
    yield Figure("facts", "kernel", platform.release())
    yield Figure("facts", "cores", len(os.sched_getaffinity(0)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Figure("facts", "memory, GiB", memory)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Figure("facts", "lockable memory, bytes (ulimit -l)", locked)
    yield Figure("facts", "/dev/shm, free GiB", shutil.disk_usage("/dev/shm").free / 2**30)
    for path in _FILES:
        yield Figure("facts", path, _first_line(path))
    yield judged("facts", "native extension", native.why_not or "there", "there", "there".__eq__)
    yield judged("facts", "kernels", _kernels(), "there", "there".__eq__)
    yield Figure("facts", "driver serves CUDA", driver.driver_version())
    yield Figure("facts", "GPUs", len(driver.device_uuids()))
    yield Figure("facts", "GPU", driver.device_name(0))
    yield Figure("facts", "UUID", driver.device_uuid(0))
    has_batches = driver.has("cuMemcpyBatchAsync")
    yield judged("facts", "batches of copies", has_batches, "True", bool)
    for number, name, best in _ATTRIBUTES:
        yield _attribute(number, name, best)
    print(_nvidia_smi(), flush=True)


def _attribute(number: int, name: str, best: int | None) -> Figure:
    try:
        value = driver.device_attribute(number, 0)
    except LMCacheRedisError as error:
        return Figure("facts", f"{number}: {name}", str(error))
    if best is None:
        return Figure("facts", f"{number}: {name}", value)
    return judged("facts", f"{number}: {name}", value, str(best), best.__eq__)


def _kernels() -> str:
    try:
        for name in kernels.NAMES:
            kernels.text(name)
    except LMCacheRedisError as error:
        return str(error)
    return "there"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError as error:
        return error.strerror or str(error)


def _nvidia_smi() -> str:
    """For the log."""
    try:
        ran = subprocess.run(
            ["nvidia-smi"], capture_output=True, text=True, timeout=_SMI_WITHIN_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no answer of nvidia-smi: {error}"
    return ran.stdout + ran.stderr

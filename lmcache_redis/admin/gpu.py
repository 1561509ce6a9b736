"""The GPUs of this node as its driver shows them, and what an agent needs of them.

The driver is asked by this process, which sees what its container sees. No context is made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_redis.admin.names import shown_bytes
from lmcache_redis.admin.rules import CRITICAL, HINT, OK, WARNING, Finding
from lmcache_redis.device import driver
from lmcache_redis.errors import DriverError

_CONTROL = Path("/dev/nvidiactl")
_DRIVER_DEADLINE_S = 15.0
_OLDEST_CUDA = 12000
_COMPUTE_MODES = {2: "prohibited", 3: "exclusive"}
_MPS_DIRECTORY = "/tmp/nvidia-mps"

# As `rules.ADVICE`.
GPU_ADVICE: dict[str, tuple[str, ...]] = {
    "GPU driver": (
        "the agent maps KV caches on GPUs through the driver, and needs 525 (CUDA 12.0) or newer",
        "install a newer driver; containers: --gpus all, or the runtime class nvidia",
    ),
    "GPUs": (
        "KV caches on GPUs are mapped only by an agent that sees these GPUs",
        "containers: --gpus all; CUDA_VISIBLE_DEVICES as for the engines",
    ),
    "compute mode": (
        "only one process may use such a GPU: the agent cannot map what the engine has there",
        "as root: nvidia-smi --compute-mode=DEFAULT",
    ),
    "MIG": (
        "a process sees one instance, and CUDA IPC does not cross to another",
        "run one agent for each instance, with the CUDA_VISIBLE_DEVICES of its engines and an "
        "endpoint of its own",
    ),
    "MPS": (
        "memory is shared between clients of one MPS server, or between processes without MPS",
        "give agent and engines one CUDA_MPS_PIPE_DIRECTORY (a shared volume in containers), or "
        "none",
    ),
    "pinned pool": (
        "GPUs copy to and from slots that are not pinned at a fraction of the speed",
        "a smaller --pool-bytes, if memory is short",
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity",
    ),
}


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """compute_mode: 0 is the default."""

    uuid: str
    name: str
    compute_mode: int


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """problem: why the driver cannot be used. cuda_version: as 12040. mps_clients: whether each
    process is one, if that can be told.
    """

    problem: str = ""
    cuda_version: int = 0
    gpus: tuple[VisibleGpu, ...] = ()
    mps_clients: Mapping[int, bool] = field(default_factory=dict)


def look_at_gpus(pids: Iterable[int]) -> GpuFacts | None:
    """The facts; None if this is no GPU node. pids: of the agent and the engines."""
    found: list[GpuFacts] = []
    # A GPU that hangs may hold the driver's first call for ever.
    thread = threading.Thread(target=lambda: found.append(_ask_driver(pids)), daemon=True)
    thread.start()
    thread.join(_DRIVER_DEADLINE_S)
    if not found:
        return GpuFacts(f"the driver has not answered within {_DRIVER_DEADLINE_S:g} s")
    return found[0] if not found[0].problem or _CONTROL.exists() else None


def _ask_driver(pids: Iterable[int]) -> GpuFacts:
    try:
        return GpuFacts(
            "",
            driver.driver_version(),
            tuple(
                VisibleGpu(
                    driver.device_uuid(each),
                    driver.device_name(each),
                    driver.device_attribute(each, driver.Attribute.COMPUTE_MODE),
                )
                for each in range(len(driver.device_uuids()))
            ),
            {pid: is_client for pid in pids if (is_client := uses_mps(pid)) is not None},
        )
    except DriverError as error:
        return GpuFacts(str(error))


def uses_mps(pid: int) -> bool | None:
    """Whether a process finds an MPS server where it looks for one; None if it cannot be seen."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        settings = dict(word.split(b"=", 1) for word in words if b"=" in word)
        where = os.fsdecode(settings.get(b"CUDA_MPS_PIPE_DIRECTORY", b"")) or _MPS_DIRECTORY
        return Path(f"/proc/{pid}/root", where.lstrip("/"), "control").exists()
    except OSError:
        return None


# --------------------------------------------------------------------- the rules


def judge_gpus(facts: GpuFacts | None, report: Mapping[str, Any]) -> Iterator[Finding]:
    """report: the agent's STATUS. Pure."""
    if facts is None:
        return
    if facts.problem:
        yield Finding(CRITICAL, "GPU driver", facts.problem)
        return
    major, minor = divmod(facts.cuda_version // 10, 100)
    severity = CRITICAL if facts.cuda_version < _OLDEST_CUDA else OK
    yield Finding(severity, "GPU driver", f"it serves CUDA {major}.{minor}")
    if not facts.gpus:
        yield Finding(WARNING, "GPUs", "none is visible here")
        return
    yield Finding(OK, "GPUs", ", ".join(f"{gpu.name} ({gpu.uuid})" for gpu in facts.gpus))
    for gpu in facts.gpus:
        if (mode := _COMPUTE_MODES.get(gpu.compute_mode)) is not None:
            yield Finding(CRITICAL, "compute mode", f"{gpu.uuid} is {mode}")
        if " MIG " in gpu.name:
            yield Finding(HINT, "MIG", f"{gpu.uuid} is an instance of a GPU: {gpu.name}")
    inside, outside = (
        ", ".join(str(pid) for pid, is_client in facts.mps_clients.items() if is_client is wanted)
        for wanted in (True, False)
    )
    if inside and outside:
        seen = f"clients of MPS: process {inside}; not: process {outside}"
        yield Finding(CRITICAL, "MPS", seen)
    elif inside:
        yield Finding(OK, "MPS", "agent and engines are clients: a fatal fault of one ends all")
    pool = report["pool"]
    locked, failure = shown_bytes(pool["locked_bytes"]), pool["lock_failure"]
    seen = f"{locked} of {shown_bytes(pool['slots'] * pool['slot_bytes'])}"
    seen += f": {failure}" if failure else ""
    yield Finding(WARNING if failure else OK, "pinned pool", seen)

# SPDX-License-Identifier: Apache-2.0
"""Reads the facts of this node and judges them: its agent, processes, memory, clock and GPUs.

The driver is asked by this process, which sees what its container sees. No context is made.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmcache_redis import __version__
from lmcache_redis.admin.forms import Sample, payload_of
from lmcache_redis.admin.rules import CRITICAL, HINT, OK, WARNING, Finding, advised
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import StripeHeader
from lmcache_redis.device import driver
from lmcache_redis.errors import CudaError, RedisError
from lmcache_redis.units import shown_bytes

# vLLM names its processes so: VLLM::EngineCore, VLLM::Worker_TP0.
_ENGINE_TITLE = "VLLM::"
_CONTROL = Path("/dev/nvidiactl")
_DRIVER_DEADLINE_S = 15.0
_OLDEST_CUDA = 12000
_COMPUTE_MODES = {2: "prohibited", 3: "exclusive"}
_MPS_DIRECTORY = "/tmp/nvidia-mps"
# Of these kernels a registration of more than 2 GiB fails.
_SMALL_PINS = ((6, 11), (6, 13))
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the cache. pid_namespace: None if it is hidden."""

    pid: int
    uid: int
    pid_namespace: str | None


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """compute_mode: 0 is the default."""

    uuid: str
    name: str
    compute_mode: int


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """problem: why the driver cannot be used. cuda_version: as 12040. mps_clients: whether each
    process is one, if that can be told. kernel: its version.
    """

    problem: str = ""
    cuda_version: int = 0
    gpus: tuple[VisibleGpu, ...] = ()
    mps_clients: Mapping[int, bool] = field(default_factory=dict)
    kernel: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """report: the agent's STATUS. stored: a header of each form of chunks found in Redis, by model.

    clock_ahead_s: of the server's clock; None if it does not tell. engines: processes that seem to
    be vLLM's, those that the agent knows and others. shm_bytes, shm_free_bytes: of the engine's
    /dev/shm that has the least free; None if none can be seen. gpus: None on a node without.
    savings: by model, of stripes in Redis, what the agent would not store with --compress lossless.
    """

    report: Mapping[str, Any]
    version: str
    gpus: GpuFacts | None
    agent: Process | None
    engines: tuple[Process, ...]
    shm_bytes: int | None
    shm_free_bytes: int | None
    clock_ahead_s: float | None
    stored: tuple[tuple[str, StripeHeader], ...]
    savings: Mapping[str, float] = field(default_factory=dict)


def look(
    report: Mapping[str, Any],
    server: PrimaryServers,
    stored: tuple[Sample, ...],
    savings: Mapping[str, float],
) -> NodeFacts:
    """The facts of the node whose agent has sent ``report``."""
    known = {engine["pid"] for engine in report["engines"]}
    pids = sorted(known | set(_engine_pids()))
    engines = map(read_process, pids)
    shm = min(filter(None, map(shm_of, pids)), key=lambda found: found[1], default=(None, None))
    return NodeFacts(
        report=report,
        version=__version__,
        gpus=look_at_gpus([report["pid"], *pids]),
        agent=read_process(report["pid"]),
        engines=tuple(engine for engine in engines if engine is not None),
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        clock_ahead_s=_clock_ahead_s(server),
        stored=tuple((each.chunk.name.key.model_name, each.header) for each in stored),
        savings=savings,
    )


def read_process(pid: int) -> Process | None:
    """The facts of a process; None if it cannot be seen."""
    found = _unless_hidden(os.stat, f"/proc/{pid}")
    if found is None:
        return None
    return Process(pid, found.st_uid, _unless_hidden(os.readlink, f"/proc/{pid}/ns/pid"))


def shm_of(pid: int) -> tuple[int, int] | None:
    """Size and free bytes of the /dev/shm that a process sees. This process may see another one."""
    found = _unless_hidden(shutil.disk_usage, f"/proc/{pid}/root/dev/shm")
    return None if found is None else (found.total, found.free)


def _unless_hidden(ask: Callable[..., _T], *of: Any) -> _T | None:
    try:
        return ask(*of)
    except OSError:
        return None


def _engine_pids() -> Iterator[int]:
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                if (each / "cmdline").read_bytes().startswith(_ENGINE_TITLE.encode()):
                    yield int(each.name)


def _clock_ahead_s(server: PrimaryServers) -> float | None:
    """How far the server's clock is ahead of this machine's."""
    began_s = time.time()
    try:
        seconds, microseconds = server.nodes[0].ask("TIME")
    except (RedisError, TypeError, ValueError):
        return None
    return int(seconds) + int(microseconds) / 1e6 - (began_s + time.time()) / 2


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
                    driver.device_attribute(driver.Attribute.COMPUTE_MODE, each),
                )
                for each in range(len(driver.device_uuids()))
            ),
            {pid: is_client for pid in pids if (is_client := uses_mps(pid)) is not None},
            tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])),
        )
    except CudaError as error:
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

_DOCKER_SHM_BYTES = 64 << 20
_FULL = 0.05
_CLOCK_S = 5.0
_WORTH_PACKING = 0.1
# As `rules.ADVICE`.
ADVICE: dict[str, tuple[str, ...]] = {
    "Redis": (
        "only the host pool serves hits, and nothing is kept for other nodes",
        "see the findings of the server",
    ),
    "namespaces": (
        "the agent opens the engine's memory as /proc/PID/fd, and must see the engine's end",
        "containers: pid: host, or the pid namespace of one container for both",
    ),
    "users": ("only the same user, or root, can open the engine's memory", "run both as one user"),
    "versions": (
        "an agent keeps running what it was started from",
        "restart the agent; engines go on",
    ),
    "engines": (
        "an engine hits only when its scheduler and all its ranks are connected",
        "start vLLM with --kv-transfer-config, all ranks of a node with the same endpoint",
        "see the engines' logs for `the cache stays off` and `no agent answers`",
    ),
    "/dev/shm": (
        "vLLM's processes talk through /dev/shm, and the KV cache of CPU engines is in it; without "
        "room a process is killed with SIGBUS",
        "docker run --shm-size 16g, or an emptyDir with medium: Memory at /dev/shm",
        "ls -l /dev/shm; rm what nothing uses",
    ),
    "slot size": (
        "agents of different --slot-bytes share nothing: each takes the other's for misses",
        "give all agents of this Redis one --slot-bytes",
    ),
    "chunk sizes": (
        "agents of different --chunk-size-tokens share nothing; nor do engines of different dtypes "
        "or parallel sizes. Parts of several KV cache groups are normal",
        "lmcache-redis inspect; give all agents one --chunk-size-tokens",
    ),
    "compression": (
        "more prompts fit, and hits come sooner over a slow link; the bits stay the same",
        "lmcache-redis agent --compress lossless; every reader understands both",
    ),
    "clocks": (
        "`inspect` and `purge --stored-longer-than` tell ages wrong by as much",
        "run an NTP client on both machines",
    ),
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


def judge_node(facts: NodeFacts) -> list[Finding]:
    """The findings of all rules, the most important first. Pure."""
    rules = (_agent, _engines, _processes, _slots_in_redis)
    found = [finding for each in rules for finding in each(facts)]
    return advised([*found, *judge_gpus(facts.gpus, facts.report)], ADVICE)


def _agent(f: NodeFacts) -> Iterator[Finding]:
    redis, version = f.report["redis"], f.report["version"]
    if redis["up"] and redis["reason"]:
        seen = f"the agent uses {redis['server']}, which fails: {redis['reason']}"
        yield Finding(WARNING, "Redis", seen)
    elif redis["up"]:
        yield Finding(OK, "Redis", f"the agent uses {redis['server']}")
    else:
        seen = f"the agent cannot use {redis['server']}: {redis['reason']}"
        yield Finding(CRITICAL, "Redis", seen)
    seen = f"the agent is {version}, the package here {f.version}"
    yield Finding(OK if version == f.version else WARNING, "versions", seen)
    if f.clock_ahead_s is not None:
        severity = OK if abs(f.clock_ahead_s) < _CLOCK_S else HINT
        side = "ahead" if f.clock_ahead_s > 0 else "behind"
        yield Finding(severity, "clocks", f"the server's is {abs(f.clock_ahead_s):.1f} s {side}")


def _engines(f: NodeFacts) -> Iterator[Finding]:
    engines = f.report["engines"]
    waiting = [engine for engine in engines if not engine["ready"]]
    severity = WARNING if waiting else OK if engines else HINT
    seen = f"{len(engines) - len(waiting)} of {len(engines)} registered workers are ready"
    yield Finding(severity, "engines", seen if engines else "none is registered")


def _processes(f: NodeFacts) -> Iterator[Finding]:
    size, free = f.shm_bytes, f.shm_free_bytes
    if size is not None and free is not None:
        few = size <= _DOCKER_SHM_BYTES or free < _FULL * size
        seen = f"{shown_bytes(free)} of {shown_bytes(size)} are free"
        yield Finding(WARNING if few else OK, "/dev/shm", seen)
    if f.agent is None:
        return
    apart = [finding for engine in f.engines for finding in _together(f.agent, engine)]
    yield from apart
    if f.engines and not apart:
        yield Finding(OK, "namespaces", "the engines share those of the agent")


def _together(agent: Process, engine: Process) -> Iterator[Finding]:
    known = {agent.pid_namespace, engine.pid_namespace} - {None}
    if len(known) > 1:
        seen = f"engine process {engine.pid} is in another pid namespace than the agent"
        yield Finding(CRITICAL, "namespaces", seen)
    if agent.uid not in (0, engine.uid):
        seen = f"engine process {engine.pid} runs as user {engine.uid}, the agent as {agent.uid}"
        yield Finding(CRITICAL, "users", seen)


def _slots_in_redis(f: NodeFacts) -> Iterator[Finding]:
    """What is in Redis beside what this agent would write."""
    slot_bytes = f.report["pool"]["slot_bytes"]
    cut: set[str] = set()
    sizes: dict[str, set[int]] = {}
    for model, header in f.stored:
        sizes.setdefault(model, set()).add(header.chunk_bytes)
        ours = stripe_payload_bytes(header.chunk_bytes, slot_bytes)
        if payload_of(header) != ours:
            cut.add(model)
    for model in sorted(cut):
        seen = f"Redis has chunks of {model} cut for another --slot-bytes than {slot_bytes}"
        yield Finding(WARNING, "slot size", seen)
    for model, found in sorted(sizes.items()):
        if len(found) > 1:
            shown = ", ".join(shown_bytes(size) for size in sorted(found))
            yield Finding(
                HINT, "chunk sizes", f"Redis has chunks of {model} of several sizes: {shown}"
            )
    for model, share in sorted(f.savings.items()):
        if share >= _WORTH_PACKING:
            seen = f"off; a stripe of {model} would have {share:.0%} fewer bytes"
            yield Finding(HINT, "compression", seen)
    if f.stored and not cut:
        yield Finding(OK, "slot size", "what is in Redis is cut as this agent cuts it")


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
    if failure:
        seen += f": {failure}"
    elif _SMALL_PINS[0] <= facts.kernel <= _SMALL_PINS[1]:
        seen += f"; kernel {facts.kernel[0]}.{facts.kernel[1]} pins 2 GiB at once at most"
    yield Finding(WARNING if failure else OK, "pinned pool", seen)

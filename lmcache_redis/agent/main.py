# SPDX-License-Identifier: Apache-2.0
"""Starting, reloading (SIGHUP) and stopping an agent: `lmcache-redis agent`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from lmcache_redis import __version__
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.embedded import embedded_redis
from lmcache_redis.agent.reports.recording import TraceRecorder
from lmcache_redis.agent.service import Service
from lmcache_redis.cache.arena import Arena
from lmcache_redis.config import AgentConfig, endpoint_path, ensure_private, parse_address
from lmcache_redis.errors import ConfigError, DeviceError, StartError
from lmcache_redis.processes import NamedThread, raise_descriptor_limit
from lmcache_redis.resp.net.commands import Use
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.settings import format_size, option_name, settings_of
from lmcache_redis.systemd import ServiceManager
from lmcache_redis.transport import bind_router

logger = logging.getLogger(__name__)

# Of an agent that ends because a GPU is lost: EX_TEMPFAIL of sysexits.h, "try again later".
EXIT_GPU_LOST = 75
_FIRST_PROBE_S = 1.5
# When the collector runs. Nothing that is made for a lookup, a copy, a message or a connection is
# part of a cycle (tests/agent/test_memory.py), so it has next to nothing to find: what an engine
# that comes and goes leaves, and what others' packages do. A full collection looks at what has come
# since the start, mostly entries of the pool: 1 ms with 10,000 of them, 20 ms with 100,000. Python
# lets it wait until what has survived is a quarter more. The first two look at new objects alone:
# less often than by default, for a lookup may make 10,000 at once, which are gone when it ends.
_GC_THRESHOLDS = (50_000, 20, 10)
_STOP_GRACE_S = 10.0
# Between looks at the file of settings.
_LOOK_S = 2.0
# For answers not sent yet when the agent ends. A peer that does not read delays the end so long.
_LAST_ANSWERS_MS = 100
# What a reload may change: numbers compared when they are needed, and the level of the log.
# All else is decided once: memory and threads are sized, engines were told (`chunk_size_tokens`,
# `lookup_deadline_s`), connections are open.
_KNOWN = settings_of(AgentConfig)
# Of errors that the limits of a process cause.
_OF_LIMITS = {None, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}
RELOADABLE = tuple(name for name, each in _KNOWN.items() if each.reloadable)


@dataclasses.dataclass(frozen=True)
class SettingsFile:
    """read: the settings as they are now, of the file and all else. Raises ``ConfigError``."""

    path: Path
    read: Callable[[], AgentConfig]

    def stamp(self) -> tuple[int, int] | None:
        """Another one when the file has changed; None while it is not there."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


def run_agent(config: AgentConfig, file: SettingsFile | None = None) -> int:
    """Runs an agent until SIGTERM or SIGINT, or until a GPU is lost; returns the exit status.

    file: read again at SIGHUP and when it changes. Without it, SIGHUP ends the process as usual:
    the terminal is closed.

    Raises ``ConfigError`` if a setting has to change: the URL is invalid, or the embedded Redis
    cannot be started; ``StartError`` if the endpoint is in use or memory is short.
    """
    started_s = time.monotonic()
    raise_descriptor_limit()
    manager = ServiceManager()
    with contextlib.ExitStack() as stack:
        with _no_traceback():
            ensure_private(endpoint_path(config.endpoint).parent)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            # Whatever has failed, it waits for no socket that is still open.
            stack.callback(context.destroy, linger=0)
            router = bind_router(context, config.endpoint)
            stack.callback(router.close, _LAST_ANSWERS_MS)
            # While it is still bound: another agent that starts now would not lose its own.
            stack.callback(endpoint_path(config.endpoint).unlink, missing_ok=True)
            url = config.redis_url
            if not url:
                url = stack.enter_context(embedded_redis(config.embedded_memory_bytes))
            arena = _arena(config)
            stack.callback(arena.close)
            uses = (Use.WARM,) if config.warm_bytes else ()
            plane = RedisPlane(RedisOptions.of_agent(config, url), uses)
            plane.start()
            agent = Agent.of(config, arena, plane)
            stack.callback(agent.cache.close, 0.0)
            recorder = None
            if config.record is not None:
                recorder = TraceRecorder(agent, config.record)
                stack.callback(recorder.close)
            service = Service(agent, router, recorder)
            _on_signals(service.stop, signal.SIGTERM, signal.SIGINT)
            status = f"serving {config.endpoint}"
            if file is not None:
                _keep_reloading(agent, service, file, manager, status)
            gc.freeze()  # what exists now lives as long as the agent: the collector skips it
            gc.set_threshold(*_GC_THRESHOLDS)
            if config.metrics is not None:
                stack.enter_context(_exporter(config.metrics, agent, service))
            _log_ready(config, plane, started_s)
            _prefault(stack, arena, lambda: len(agent.sessions) > 0)
            agent.loop.post(lambda: manager.ready(status))
            if manager.watchdog_s is not None:
                # On the loop: a loop that does not turn is what the watchdog is for.
                agent.loop.every(manager.watchdog_s / 3, manager.alive)
        try:
            service.serve()
        finally:
            manager.stopping(service.shutdown_deadline_s + _STOP_GRACE_S)
            can_exit = _stop(service, agent)
    exit_status = EXIT_GPU_LOST if agent.copies.lost is not None else 0
    if not can_exit:
        # Without what the driver's library does at exit, which a GPU that hangs would hold up.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(exit_status)
    return exit_status


@contextlib.contextmanager
def _no_traceback() -> Iterator[None]:
    """What the machine refuses at the start is a sentence: descriptors, threads, memory."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError, zmq.ZMQError) as error:
        if isinstance(error, RuntimeError) and "start new thread" not in str(error):
            raise
        said = f"the agent cannot start: {str(error) or 'out of memory'}"
        if getattr(error, "errno", None) in _OF_LIMITS:
            said += (
                "; see the limits of this process (ulimit -a, LimitNOFILE and TasksMax of systemd)"
            )
        raise StartError(said) from error


def _exporter(
    address: str, agent: Agent, service: Service
) -> contextlib.AbstractContextManager[object]:
    # Most agents have none: an HTTP server is not worth its imports then.
    from lmcache_redis.agent.reports.exported import collector_of, pages_of
    from lmcache_redis.metrics.exporter import serve_metrics

    counted = agent.cache.metrics.registry
    owner, pages = collector_of(agent), pages_of(agent, service.ask)
    return serve_metrics(parse_address(address), owner, counted, pages)


def _arena(config: AgentConfig) -> Arena:
    try:
        arena = Arena(config.pool_bytes, config.slot_bytes)
    except (ValueError, OSError) as error:
        raise StartError(
            f"a host pool of {config.pool_bytes} bytes cannot be allocated ({error}): "
            "set another --pool-bytes"
        ) from error
    if arena.numa_nodes:
        logger.info("the host pool lies on the NUMA nodes %s", [*arena.numa_nodes])
    return arena


def _prefault(stack: contextlib.ExitStack, arena: Arena, is_busy: Callable[[], bool]) -> None:
    """Faults in the host pool, on a thread, while the first requests run.

    A copy into a fresh page takes as long as four copies into a page that is present.
    """
    stop = threading.Event()

    def fault() -> None:
        started_s = time.monotonic()
        try:
            arena.prefault(stop, is_busy)
        except MemoryError:
            logger.error("there is not enough memory for the host pool: set a smaller --pool-bytes")
            return
        logger.debug("faulted in the host pool in %.2f s", time.monotonic() - started_s)

    thread = NamedThread("lmcache-redis-prefault", fault)
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)


def _on_signals(action: Callable[[], None], *signals: signal.Signals) -> None:
    if threading.current_thread() is threading.main_thread():
        for each in signals:
            signal.signal(each, lambda signum, frame: action())


def _keep_reloading(
    agent: Agent, service: Service, file: SettingsFile, manager: ServiceManager, status: str
) -> None:
    """SIGHUP or another file: reads the settings again, on the loop, and applies `RELOADABLE`.

    All settings stay as they are if one of the new ones is wrong. Kubernetes replaces files and
    sends no signal. A file counts when two looks find the same: it may be being written.
    """
    running = agent.config
    applied = before = file.stamp()

    def reload() -> None:
        nonlocal running, applied
        manager.reloading()
        applied = file.stamp()
        try:
            running = _reloaded(agent, service, running, file.read())
        except ConfigError as error:
            logger.error("not reloaded, every setting stays as it is: %s", error)
        finally:
            manager.ready(status)

    def look() -> None:
        nonlocal before
        now = file.stamp()
        if applied != now == before:
            reload()
        before = now

    _on_signals(lambda: agent.loop.post(reload), signal.SIGHUP)
    agent.loop.every(_LOOK_S, look)


def _reloaded(
    agent: Agent, service: Service, before: AgentConfig, wanted: AgentConfig
) -> AgentConfig:
    names = [field.name for field in dataclasses.fields(AgentConfig)]
    changed = [name for name in names if getattr(wanted, name) != getattr(before, name)]
    now = {name: getattr(wanted, name) for name in changed if name in RELOADABLE}
    running = dataclasses.replace(before, **now)
    for queue in agent.cache.queues:
        queue.schedule.limit_bytes = running.write_queue_limit_bytes
    if agent.disk is not None:
        agent.disk.store.limit_bytes = running.disk_size
    service.shutdown_deadline_s = running.shutdown_deadline_s
    level = logging.getLevelName(running.log_level.upper())
    root = logging.getLogger()
    root.setLevel(min(root.level, level))  # what has changed is shown at the old level or the new
    for name in now:
        was, value = (_KNOWN[name].write(getattr(each, name)) for each in (before, running))
        logger.info("reloaded %s: %s, was %s", option_name(name), value, was)
    later = [option_name(name) for name in changed if name not in RELOADABLE]
    if later:
        logger.warning("changed, but only from the next start on: %s", ", ".join(later))
    if not changed:
        logger.info("reloaded: no setting has changed")
    root.setLevel(level)
    return running


def _log_ready(config: AgentConfig, plane: RedisPlane, started_s: float) -> None:
    where = plane.deployment.url if config.redis_url else "an embedded Redis"
    state = plane.wait_probed(_FIRST_PROBE_S)
    logger.info(
        "lmcache-redis %s serves %s: %s, host pool of %s, chunks of %d tokens (%.2f s)",
        __version__, config.endpoint, where, format_size(config.pool_bytes),
        config.chunk_size_tokens, time.monotonic() - started_s,
    )  # fmt: skip
    if not state.probed:
        logger.warning("Redis has not answered yet: %s", state.reason)


def _stop(service: Service, agent: Agent) -> bool:
    shutdown_s = service.shutdown_deadline_s
    logger.info("stopping: loads and writes have %.1f s to finish", shutdown_s)
    deadline_s = service.drain(agent.loop.now() + shutdown_s)
    copied = agent.copies.close(max(0.1, deadline_s - agent.loop.now()))
    agent.cache.close(max(0.1, deadline_s - agent.loop.now()))
    agent.loop.run_posted()
    agent.cache.say_what_stays()
    answers = copied and agent.copies.lost is None
    if not copied:
        logger.error("a device does not answer")
    try:
        # Without an answer, a device may still be copying to or from the pool.
        agent.pinning.close(unpin=answers)
    except DeviceError as error:
        logger.error("the host pool stays pinned until the process ends: %s", error)
        answers = False
    agent.wakeup.close()
    logger.info("stopped")
    return answers

# SPDX-License-Identifier: Apache-2.0
"""Engines that start in seconds: forked from one process that has imported vLLM.

A vLLM spends most of its start on imports, in each of its three processes (eight seconds of CPU
each). Here one server process imports vLLM and forks the process of every engine, which forks its
other two. The rest is as in any start: new pids, a new engine core, a new connector.
`EngineProcess` starts everything afresh, as a user does; the demo's test uses that.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from testkit import engine
from tests.asynchronous import schedule_asynchronously

_IMPORT_TIMEOUT_S = 240.0
_MESSAGE_BYTES = 1 << 20
# How often a process looks for another's message. Tests beside it need the core.
_POLL_S = 0.0005
# In the environment of an engine: a file of Python that is run in it first.
PATCH_VARIABLE = "LMCACHE_REDIS_TEST_PATCH"
# A module whose `main` runs in the place of the engine's.
PROGRAM_VARIABLE = "LMCACHE_REDIS_TEST_PROGRAM"
# Where set, steps overlap as on a GPU (`asynchronous`).
ASYNCHRONOUS_VARIABLE = "LMCACHE_REDIS_TEST_ASYNCHRONOUS"
# And a directory with another vLLM than the environment's.
VLLM_VARIABLE = "LMCACHE_REDIS_TEST_VLLM"


class ForkedProcess:
    """As much of `Popen` as `Child` needs, for a process that is not our child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("an engine", timeout or 0.0)
        return status

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, signum)

    def _ended(self, timeout_s: float | None) -> int | None:
        """0 once it has ended: only its parent knows the status."""
        return 0 if select.select([self._pidfd], [], [], timeout_s)[0] else None


class ForkServer:
    """The process that imports vLLM, from ``directory`` if it is given.

    Started for the first engine, ended with the tests or for an engine with another vLLM.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                **engine.engine_environment(),
                # Models so small only lose by a second thread. Other tests need the cores.
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "passive",
                "PYTHONPATH": os.pathsep.join([directory, *sys.path] if directory else sys.path),
            },
        )
        theirs.close()
        atexit.register(self.close)
        self._socket.settimeout(_IMPORT_TIMEOUT_S)

    def fork(self, fd: int, log: IO[bytes], env: Mapping[str, str]) -> ForkedProcess:
        """A process that runs `engine.main` with a socket, a log and an environment."""
        message = json.dumps(dict(env)).encode()
        socket.send_fds(self._socket, [message], [fd, log.fileno()])
        return ForkedProcess(int(self._socket.recv(64)))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait()


_server: ForkServer | None = None


def fork_server(directory: str = "") -> ForkServer:
    """The server that has imported vLLM from ``directory``, started if it is not there."""
    global _server
    if _server is not None and _server.directory != directory:
        _server.close()
        _server = None
    if _server is None:
        _server = ForkServer(directory)
    return _server


def transfer_config(endpoint: str, **extra: Any) -> dict[str, Any]:
    """The connector's configuration; extra: of ``kv_connector_extra_config``.

    It loads every hit: on a busy machine such small models may compute faster. And it waits longer
    for an agent: there a process may stall for seconds. It asks for a KV cache that vLLM cannot
    have on a CPU: an engine starts all the same.
    """
    settings = {
        "endpoint": endpoint,
        "load_always": True,
        "agent_dead_after_s": 5.0,
        "kv_cache_layout": "BLNHC",
        **extra,
    }
    return {
        "kv_connector": "LMCacheRedisConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


class ForkedEngine(engine.EngineProcess):
    """An `EngineProcess` that is forked. With a connector it loads every hit.

    asynchronous: steps overlap as on a GPU, where vLLM itself does not switch that off.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        connector_endpoint: str | None = None,
        kv_transfer: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        asynchronous: bool = True,
        **named: Any,
    ) -> None:
        if connector_endpoint is not None:
            kv_transfer = transfer_config(connector_endpoint)
        # Engines of other tests run at the same time: none has a core of its own.
        own = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        env = own | dict(env or {})
        if asynchronous:
            env[ASYNCHRONOUS_VARIABLE] = "1"
        super().__init__(model_dir, kv_transfer=kv_transfer, env=env, **named)

    def _start(self, words: list[str], fd: int, env: Mapping[str, str]) -> Any:
        return fork_server(env.get(VLLM_VARIABLE, "")).fork(fd, self._log, os.environ | env)


def empty(emptied: engine.EngineProcess) -> None:
    """Empties vLLM's own prefix cache. No transfer in flight is a reason against it."""
    assert emptied.reset_prefix_cache()


def main(fd: int) -> None:
    """The server's process: forks an engine for every message, until the socket is closed."""
    gc.disable()  # a quarter of the imports' time
    import vllm.distributed.device_communicators.shm_broadcast
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.engine.coordinator
    import vllm.v1.engine.core_client
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker

    fork = multiprocessing.get_context("fork")
    for module in (
        vllm.v1.engine.coordinator,
        vllm.v1.engine.utils,
        vllm.v1.executor.multiproc_executor,
    ):
        module.get_mp_context = lambda: fork
    # For a second after each message it would yield its core at once, again and again.
    vllm.distributed.device_communicators.shm_broadcast.sched_yield = lambda: time.sleep(_POLL_S)
    # vLLM collects garbage several times in a start. What was imported is none.
    gc.freeze()
    gc.enable()
    listener = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    while True:
        message, fds, _, _ = socket.recv_fds(listener, _MESSAGE_BYTES, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _run(json.loads(message), *fds)
        listener.send(b"%d" % pid)
        for each in fds:
            os.close(each)


def _run(env: Mapping[str, str], fd: int, log_fd: int) -> None:
    status = 1
    try:
        os.setsid()  # as every `Child`
        os.environ.clear()
        os.environ.update(env)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        if ASYNCHRONOUS_VARIABLE in env:
            schedule_asynchronously()
        if PATCH_VARIABLE in env:
            runpy.run_path(env[PATCH_VARIABLE])
        program = importlib.import_module(env.get(PROGRAM_VARIABLE) or engine.__name__)
        program.main(fd)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""The layers of tests, and what applies to all of them.

    unit      no other process: what `pytest` runs by default
    fake      starts agents, which use a Redis of this process: needs no server binary
    servers   starts redis-servers, agents, gateways or other processes
    engine    starts a real vLLM
    matrix    does so for every vLLM version, model and server: scripts/test --matrix

    long       beside one of these: each night, and before a release: scripts/test --long
    cuda_stub  beside one of these: over the driver of the tests (`tests/cuda_driver`)

A test without these marks that uses no server fixture is a unit test, and fails if it starts a
process.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.absent import (  # noqa: F401
    pytest_fixture_setup,
    pytest_pycollect_makemodule,
    pytest_pyfunc_call,
)
from tests.servers import RedisServer

# Until the tests are collected: a quarter of the imports' time.
gc.disable()

# No deadline: tests do not depend on speed. In a fresh checkout hypothesis builds tables first.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

LAYERS = ("unit", "fake", "servers", "engine", "matrix")
# Fixtures that start servers, and so mark the tests that use them.
SERVERS = {
    "agent",
    "large_serving",
    "own_server",
    "redis_server",
    "serving",
    "shared_redis",
    "shared_server",
}

# Of the tests with engines, which two processes run.
_FIRST_HALF = tuple(
    f"tests/{name}"
    for name in (
        "demo/",
        "integrations/test_e",
        "integrations/test_s",
    )
)

_in_a_unit_test = False
_execute_child = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _execute_child_of_its_layer(
    self: object, words: object, *args: object, **named: object
) -> object:
    # The first plot of some versions of matplotlib lists the fonts.
    lists_fonts = isinstance(words, list) and words[:1] == ["fc-list"]
    if _in_a_unit_test and not lists_fonts:
        pytest.fail("a unit test starts no process: mark it with pytest.mark.servers or fake")
    return _execute_child(self, words, *args, **named)


subprocess.Popen._execute_child = _execute_child_of_its_layer  # type: ignore[attr-defined]


@functools.cache
def _loads_the_tests_driver(path: Path) -> bool:
    imports = "from tests import cuda_driver" in path.read_text()
    return imports or path.parent.name == "cuda_driver"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(layer) for layer in LAYERS):
            fixtures = set(getattr(item, "fixturenames", ()))
            item.add_marker("unit" if SERVERS.isdisjoint(fixtures) else "servers")
        if _loads_the_tests_driver(item.path):
            item.add_marker("cuda_stub")
    # In parallel runs engines start first, because they take the longest. Beside them run files
    # whose tests wait for processes, with some of those that do not in between, which use the cores
    # meanwhile. At last the rest of those: short, they end together.
    waiting = {item.path: None for item in items if item.get_closest_marker("unit") is None}
    others = [*dict.fromkeys(item.path for item in items if item.path not in waiting)]
    between = others[::2]
    places = {path: (number, 0) for number, path in enumerate(waiting)}
    for number, path in enumerate(between):
        places[path] = number * len(waiting) // len(between), 1
    last = len(waiting), 0
    items.sort(
        key=lambda item: (
            item.get_closest_marker("engine") is None,
            places.get(item.path, last),
        )
    )


def pytest_collection_finish() -> None:
    """Later garbage collections skip what was imported, also pytest's own after the tests.

    At exit it is collected: Triton looks for leaks then.
    """
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More than cores, because many tests wait. Each spends seconds on imports."""
    more = 1 if config.option.markexpr == "unit" else 3
    return len(os.sched_getaffinity(0)) + more


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """One process runs a file of tests; files with engines run in two.

    So a module's server is started once, and no more than two engines compete for the cores. The
    two parts take about as long. The matrix is divided by vLLM versions, each of which is imported
    once.
    """
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def scope_of(path: str) -> str:
        if "mark.engine" not in (config.rootpath / path).read_text():
            return path
        return f"engine {path.startswith(_FIRST_HALF)}"

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if config.option.markexpr == "matrix":
                return nodeid.partition("-")[0]
            return scope_of(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _in_a_unit_test
    _in_a_unit_test = item.get_closest_marker("unit") is not None
    try:
        return (yield)
    finally:
        _in_a_unit_test = False


def pytest_configure(config: pytest.Config) -> None:
    """Servers are found next to the interpreter too, and SIGINT has its default handler.

    Engines leave their sockets behind: in a directory that goes with this process.

    `scripts/setup` links a server there if the machine has none on its PATH. A shell starts a
    background job with SIGINT ignored, which the processes that tests interrupt would inherit.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
    sockets = tempfile.TemporaryDirectory(prefix="vllm-")
    config.add_cleanup(sockets.cleanup)
    os.environ["VLLM_RPC_BASE_PATH"] = sockets.name


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """An empty server, shared by tests that neither stop nor configure it."""
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may stop, kill and configure."""
    with RedisServer(tmp_path) as server:
        yield server

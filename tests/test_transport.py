# SPDX-License-Identifier: Apache-2.0
"""What is already at the path of an agent's endpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from lmcache_redis.errors import ConfigError
from lmcache_redis.transport import bind_router, hidden_path, why_untrusted


def test_a_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    path.write_text("mine")
    with zmq.Context() as context, pytest.raises(ConfigError, match="is not a socket"):
        bind_router(context, f"ipc://{path}").close()
    assert path.read_text() == "mine"


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with zmq.Context() as context, pytest.raises(ConfigError, match="is not a socket"):
        bind_router(context, f"ipc://{tmp_path}").close()


def test_a_socket_is_replaced_unless_it_has_a_listener(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # without listen, as if its process had been killed
        with (
            zmq.Context() as context,
            bind_router(context, f"ipc://{path}"),
            pytest.raises(ConfigError, match="is in use"),
        ):
            bind_router(context, f"ipc://{path}").close()


def test_an_agent_that_lets_nobody_in_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with zmq.Context() as context, bind_router(context, f"ipc://{path}"):
        path.rename(hidden_path(path))
        with pytest.raises(ConfigError, match="is in use"):
            bind_router(context, f"ipc://{path}").close()


@pytest.mark.parametrize("closed", ["the directory", "what it is in"])
def test_a_directory_that_this_user_may_not_enter_is_told(tmp_path: Path, closed: str) -> None:
    """It is not taken for an agent that has not started yet."""
    outer = tmp_path / "outer"
    directory = outer / "lmcache-redis"
    directory.mkdir(parents=True)
    endpoint = f"ipc://{directory}/agent.sock"
    assert why_untrusted(endpoint) is None
    assert why_untrusted(f"ipc://{outer}/none/agent.sock") is None
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    (directory if closed == "the directory" else outer).chmod(0o600)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        why = why_untrusted(endpoint)
    finally:
        os.seteuid(user)
        outer.chmod(0o700)
        directory.chmod(0o700)
    assert why == f"{directory} may not be entered by this user: run engine and agent as one user"


# The agent comes as its link opens another socket, when the monitor's has been closed.
REOPENED = """
import sys, time, zmq
from lmcache_redis.transport import AgentSocket

class Slow:
    def __init__(self, monitor):
        self.disable_monitor, self._close = monitor.disable_monitor, monitor.close

    def close(self, **named):
        self._close(**named)
        router.bind(sys.argv[1])
        time.sleep(2)

router = zmq.Context.instance().socket(zmq.ROUTER)
link = AgentSocket(sys.argv[1])
link._opened[1] = Slow(link._opened[1])
link.reopen()
link.close()
"""


@pytest.mark.servers
def test_an_agent_that_comes_as_a_link_reopens_freezes_nobody(tmp_path: Path) -> None:
    """libzmq's thread would wait for who reads the event, with a lock that the link waits for."""
    endpoint = f"ipc://{tmp_path}/agent.sock"
    done = subprocess.run([sys.executable, "-c", REOPENED, endpoint], timeout=60)
    assert done.returncode == 0

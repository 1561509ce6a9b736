"""What is already at the path of an agent's endpoint."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from lmcache_redis.errors import ConfigError
from lmcache_redis.transport import bind_router, hidden_path


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

# SPDX-License-Identifier: Apache-2.0
"""TLS against every kind of server: who is believed, who is not, and what is said about it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin.server import open_server
from lmcache_redis.errors import ConfigError, RedisError
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.options import parse_deployment
from lmcache_redis.seal import SealKeys
from tests.resp.certificates import Authority
from tests.resp.helpers import Chunk, check_moves, open_streams, running
from tests.servers import RedisServer, free_port, server_binaries, speaks_tls

pytestmark = pytest.mark.servers

SECRET = "k3y-s3cr3t"
BINARIES = server_binaries()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another CA, of the same name."""
    return Authority(tmp_path_factory.mktemp("tls2"))


@contextmanager
def tls_server(
    directory: Path,
    pair: tuple[Path, Path],
    client_ca: Path | None = None,
    kind: str = "redis",
    **more: Any,
) -> Iterator[str]:
    """A server with this certificate and key; its rediss:// URL. client_ca: of its clients."""
    executable = BINARIES[kind]
    if executable is None or not speaks_tls(executable):
        pytest.skip(f"there is no {kind} with TLS here")
    port = free_port()
    words = ["--tls-port", str(port), "--tls-cert-file", str(pair[0]), "--tls-key-file"]
    words += [str(pair[1]), "--tls-auth-clients", "yes" if client_ca else "no"]
    words += ["--tls-ca-cert-file", str(client_ca)] if client_ca else []
    with RedisServer(directory, tcp=False, args=words, executable=executable, **more):
        yield f"rediss://localhost:{port}"


def refused(url: str, connect_timeout_s: float = 5.0) -> str:
    """The sentence with which a connection fails."""
    connector = Connector(parse_deployment(RedisOptions(url)).server, connect_timeout_s, 5.0)
    with pytest.raises((RedisError, ConfigError)) as caught:
        connector.open("x")
    assert open_streams(connector) == 0
    return str(caught.value)


def check_works(url: str, **settings: Any) -> None:
    with running(url, **settings) as plane:
        assert plane.state.up, plane.state
        check_moves(plane, Chunk(1, 3_000_000, 1 << 20, seed=1), Chunk(2, 5000, 4096, seed=2))


@pytest.mark.parametrize("kind", BINARIES)
def test_a_client_certificate(
    tmp_path: Path, authority: Authority, stranger: Authority, kind: str
) -> None:
    ours, theirs = authority.issue("client", "client"), stranger.issue("client", "client")
    ca = f"?ssl_ca_certs={authority.ca}"
    with tls_server(tmp_path, authority.issue("a", "localhost"), authority.ca, kind) as url:
        check_works(f"{url}{ca}&ssl_certfile={ours[0]}&ssl_keyfile={ours[1]}")
        sealed = SealKeys([bytes(32)])
        check_works(f"{url}{ca}&ssl_certfile={ours[0]}&ssl_keyfile={ours[1]}", seal_keys=sealed)
        refused(f"{url}{ca}")
        refused(f"{url}{ca}&ssl_certfile={theirs[0]}&ssl_keyfile={theirs[1]}")
        # The key of another certificate.
        refused(f"{url}{ca}&ssl_certfile={ours[0]}&ssl_keyfile={theirs[1]}")


def test_one_side_alone_uses_tls(tmp_path: Path, authority: Authority) -> None:
    """Agents and tools ask whether the port does, or does not."""
    with tls_server(tmp_path, authority.issue("localhost", "localhost")) as url:
        plain = url.replace("rediss://", "redis://")
        options = RedisOptions(plain)
        said = [refused(plain)]
        with pytest.raises(RedisError) as caught, open_server(options):
            raise AssertionError
        said.append(str(caught.value))
        for each in said:
            assert each.endswith(": is it up, is the port right, does it use TLS (rediss://)?")
            assert "localhost:" in each
    with RedisServer(tmp_path) as server:
        assert "is there no TLS?" in refused(server.url.replace("redis://", "rediss://"), 0.5)


def test_a_locked_key_and_its_password(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("locked", "client")
    files = f"?ssl_ca_certs={authority.ca}&ssl_certfile={certificate}"
    files += f"&ssl_keyfile={authority.encrypt(key, SECRET)}"
    with tls_server(tmp_path, authority.issue("b", "localhost"), authority.ca) as url:
        check_works(f"{url}{files}&ssl_password={SECRET}")
        assert SECRET not in refused(f"{url}{files}&ssl_password=wrong{SECRET}")
        assert "ssl_password opens it" in refused(url + files)


def test_the_name_of_the_host_is_checked(tmp_path: Path, authority: Authority) -> None:
    ca = f"?ssl_ca_certs={authority.ca}"
    with tls_server(tmp_path, authority.issue("c", "another.example")) as url:
        assert "ssl_check_hostname" in refused(url + ca)
        check_works(f"{url}{ca}&ssl_check_hostname=false")
        assert refused(f"{url}?ssl_ca_certs={tmp_path}/redis.log"), "that is no certificate"


def test_an_absolute_name_is_in_the_certificate_without_its_dot(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-up gets the dot: it saves those of a search list."""
    asked: list[str] = []
    look_up = socket.getaddrinfo

    def played(host: str, *args: Any, **named: Any) -> Any:
        asked.append(host)
        return look_up("localhost" if host == "localhost." else host, *args, **named)

    with tls_server(tmp_path, authority.issue("dot", "localhost")) as url:
        monkeypatch.setattr(socket, "getaddrinfo", played)
        absolute = f"{url.replace('localhost', 'localhost.')}?ssl_ca_certs={authority.ca}"
        check_works(absolute)
        assert set(asked) == {"localhost."}
        asked.clear()
        with open_server(RedisOptions(absolute)) as server:
            assert server.nodes[0].ask("DBSIZE") > 0
        assert set(asked) == {"localhost."}


def test_a_server_that_nobody_vouches_for(
    tmp_path: Path, authority: Authority, stranger: Authority
) -> None:
    with tls_server(tmp_path, authority.self_signed("d", "localhost")) as url:
        for ca in ("", f"?ssl_ca_certs={authority.ca}"):
            said = refused(url + ca)
            assert "self" in said
            assert "ssl_ca_certs" in said
    with tls_server(tmp_path, stranger.issue("e", "localhost")) as url:
        assert "ssl_ca_certs" in refused(f"{url}?ssl_ca_certs={authority.ca}")
        # Only who asks for it gets TLS without knowing to whom.
        check_works(f"{url}?ssl_cert_reqs=none&ssl_check_hostname=false")


@pytest.mark.parametrize("kind", BINARIES)
def test_a_password_over_tls(tmp_path: Path, authority: Authority, kind: str) -> None:
    ca = f"?ssl_ca_certs={authority.ca}"
    pair = authority.issue("f", "localhost")
    with tls_server(tmp_path, pair, kind=kind, password=SECRET) as url:
        check_works(url + ca, password=SECRET)
        said = refused(url.replace("//", f"//:wrong{SECRET}@") + ca)
        assert "password" in said
        assert SECRET not in said

# SPDX-License-Identifier: Apache-2.0
"""Who may connect: TLS, networks, the number of clients."""

from __future__ import annotations

import random
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lmcache_redis.compat.gateway import server
from lmcache_redis.errors import ConfigError
from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import GET, KEY, Client, header, put
from tests.resp.certificates import Authority

Secure = Callable[..., Serving]  # with TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> dict[str, str]:
    cert, key = authority.issue("server", "localhost")
    return {"tls_cert": str(cert), "tls_key": str(key)}


@pytest.fixture
def secure(backend: DictTier, tls: dict[str, str]) -> Secure:
    return partial(Serving, backend, **tls)


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.ca)


@pytest.mark.servers
def test_tls(secure: Secure, authority: Authority) -> None:
    payload = random.Random(1).randbytes(1 << 19)
    with secure() as serving, serving.client(tls=trusting(authority)) as client:
        assert client.healthy()
        for key in (KEY, "m@1@0@ab@half"):
            client.put(key, payload)
            client.send(header(GET, key) * 3)
            for _ in range(3):
                assert client.reply()[:2] == (200, len(payload))
                assert client.receive(len(payload)) == payload
        assert client.list() == {KEY, "m@1@0@ab@half"}
        for byte in put(KEY, b"small"):
            client.send(bytes([byte]))
        assert client.get(KEY) == b"small"


@pytest.mark.servers
def test_a_client_with_tls_that_closes_after_its_puts_has_put(
    backend: DictTier, secure: Secure, authority: Authority
) -> None:
    """Also with a gateway that has to wait for room while the end of the stream comes."""
    with secure(buffer_bytes=1 << 19) as serving:
        for nbytes in (10, 5000, 120_000):
            with serving.client(tls=trusting(authority)) as client:
                client.put(f"m@1@0@{nbytes:x}@half", bytes(nbytes))
        serving.until(puts_stored=3)
        backend.open.clear()
        for number in range(7):
            with serving.client(tls=trusting(authority)) as client:
                client.put(f"m@1@0@{number:x}@half", bytes(120_000))
                client.put(f"m@2@0@{number:x}@half", bytes(5000))
            serving.until(buffer_used_bytes=125_000 * min(number + 1, 4))
        backend.open.set()
        serving.until(puts_stored=17, open_connections=0)
        assert serving.stats()["closed_connections_abandoned"] == 0


@pytest.mark.servers
def test_without_tls_nobody_gets_in_and_others_go_on(secure: Secure, authority: Authority) -> None:
    with secure() as serving:
        with serving.client() as plain:
            plain.send(header(GET))
            assert plain.ended()
        with pytest.raises(ssl.SSLError):
            serving.client(tls=ssl.create_default_context())
        serving.until(closed_connections_handshake=2)
        with serving.client(tls=trusting(authority)) as client:
            assert client.healthy()


@pytest.mark.servers
def test_a_handshake_that_does_not_go_on_is_cut_off(
    secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.3)
    with secure() as serving, serving.client() as silent:
        assert silent.ended()
        serving.until(closed_connections_handshake=1)


@pytest.mark.servers
def test_clients_with_certificates(secure: Secure, authority: Authority) -> None:
    with secure(tls_client_ca=str(authority.ca)) as serving:
        known = trusting(authority)
        known.load_cert_chain(*authority.issue("client", "somebody"))
        with serving.client(tls=known) as client:
            assert client.healthy()
        stranger = trusting(authority)
        stranger.load_cert_chain(*authority.self_signed("stranger", "stranger"))
        for context in (stranger, trusting(authority)):
            with serving.client(tls=context) as client, pytest.raises((EOFError, OSError)):
                client.healthy()  # with TLS 1.3 the client learns it with its first receive
        serving.until(closed_connections_handshake=2)


@pytest.mark.servers
def test_files_that_are_no_certificates(
    backend: DictTier, authority: Authority, tls: dict[str, str], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("nothing")
    locked = str(authority.encrypt(Path(tls["tls_key"]), "secret"))
    for settings in (
        {"tls_cert": str(wrong)},
        {"tls_cert": str(tmp_path / "missing.pem")},
        {**tls, "tls_key": locked},
        {**tls, "tls_client_ca": str(wrong)},
    ):
        with pytest.raises(ConfigError, match="--tls-"):
            Serving(backend, **settings)


def test_only_allowed_peers(backend: DictTier) -> None:
    with Serving(backend, allowed_peers="127.0.0.2, 10.0.0.0/8") as serving:
        with serving.client() as client:
            assert client.ended()
        with serving.client(source="127.0.0.2") as allowed:
            assert allowed.healthy()
        serving.until(closed_connections_refused=1, requests_health=1)


def test_an_allowed_ipv4_peer_on_an_ipv6_socket(backend: DictTier) -> None:
    with Serving(backend, listen="lm://[::]:0", allowed_peers="127.0.0.0/8") as serving:
        with serving.client() as client:
            assert client.healthy()
        with Client(serving.port, "::1") as client:
            assert client.ended()


def test_ipv6(backend: DictTier) -> None:
    with Serving(backend, listen="lm://[::1]:0") as serving:
        assert serving.gateway.url == f"lm://[::1]:{serving.port}"
        with Client(serving.port, "::1") as client:
            assert client.healthy()


def test_one_client_too_many(backend: DictTier) -> None:
    with Serving(backend, max_connections=2) as serving:
        with serving.client() as first, serving.client() as second:
            assert first.healthy()
            assert second.healthy()
            with serving.client() as third:
                assert third.ended()
            assert first.healthy()
        serving.until(open_connections=0)
        with serving.client() as again:
            assert again.healthy()
        assert serving.stats()["closed_connections_refused"] == 1


def test_one_client_too_many_of_one_address(
    backend: DictTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have half of the connections, and 512 in any case."""
    monkeypatch.setattr(server, "_LEAST_OF_A_HOST", 1)
    with (
        Serving(backend, max_connections=5) as serving,
        serving.client() as first,
        serving.client() as too,
    ):
        assert first.healthy()
        assert too.healthy()
        with serving.client() as second:
            assert second.ended()
        assert "one address may have at most 2 connections (half of --max-con" in caplog.text
        with serving.client(source="127.0.0.2") as other:
            assert other.healthy()
        assert first.healthy()


def test_the_idle_give_way_to_others(backend: DictTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is idle for longest, and none whose request is in flight."""
    monkeypatch.setattr(server, "_IDLE_S", 1.0)
    with (
        Serving(backend, max_connections=3) as serving,
        serving.client() as waiting,
        serving.client() as idle,
        serving.client() as served,
    ):
        assert idle.healthy()
        backend.open.clear()
        waiting.send(header(GET))
        time.sleep(0.6)
        assert served.healthy()
        with serving.client() as early:
            assert early.ended(), "nobody is idle for long enough"
        time.sleep(0.6)
        with serving.client() as new:
            assert new.healthy()
            assert idle.ended()
            assert served.healthy()
            backend.open.set()
            assert waiting.receive(36)
        serving.until(closed_connections_idle=1, closed_connections_refused=1)


def test_the_limit_of_open_files_limits_clients(
    backend: DictTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "free_descriptors", lambda: 130)
    with Serving(backend):
        assert "at most 2 clients, not 1024" in caplog.text


def test_an_address_in_use_is_a_setting_to_change(backend: DictTier) -> None:
    with Serving(backend) as serving, pytest.raises(ConfigError, match="--listen"):
        Serving(backend, listen=f"lm://127.0.0.1:{serving.port}")

# SPDX-License-Identifier: Apache-2.0
"""`--url`: tools that ask an agent over HTTP say what they say over its socket."""

from __future__ import annotations

import http.server
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.client import http as client_http
from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.client.http import HttpAgent
from lmcache_redis.errors import ConfigError, LMCacheRedisError
from tests.cli.test_admin import one_sentence, run
from tests.cli.test_top import Terminal
from tests.harness import AgentServer, Engine, block_hashes
from tests.scraping import get, port_in
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 16)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        yield redis


@contextmanager
def used_agent(directory: Path, redis: RedisServer, **settings: Any) -> Iterator[AgentServer]:
    """One that has stored a prompt, and missed another."""
    with (
        AgentServer(directory, redis.unix_url, metrics="127.0.0.1:0", **settings) as agent,
        Engine(agent.endpoint) as engine,
    ):
        engine.store("s", HASHES, range(16))
        assert engine.lookup("found", HASHES) == 256
        assert engine.lookup("absent", block_hashes("another", 16)) == 0
        agent.wait_idle()
        yield agent


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[AgentServer]:
    with used_agent(tmp_path_factory.mktemp("open") / "a", redis, expose_requests=True) as agent:
        yield agent


def url_of(agent: AgentServer) -> str:
    return f"http://127.0.0.1:{port_in(agent.log)}"


def same(text: str) -> str:
    """Without times, which pass, and the room before them."""
    return re.sub(r" *\b\d+(\.\d+)? (s|min|ms)\b", " T", text)


@pytest.mark.servers
@pytest.mark.parametrize(
    "words", ["status", "status --all", "why --last", "why --list", "why found"]
)
def test_it_is_what_the_socket_says(agent: AgentServer, words: str) -> None:
    by_socket = run(*words.split(), "--endpoint", agent.endpoint)
    by_url = run(*words.split(), "--url", url_of(agent))
    assert (by_url.returncode, by_url.stderr) == (0, "")
    assert same(by_url.stdout) == same(by_socket.stdout)
    assert by_url.stdout


@pytest.mark.servers
def test_documents_and_layouts(agent: AgentServer) -> None:
    url = url_of(agent)
    of_socket = agent.status()
    found = json.loads(run("status", "--json", "--url", f"{url}/").stdout)
    assert found.keys() == of_socket.keys()
    assert (found["pid"], found["counters"]) == (agent.pid, of_socket["counters"])
    (layout,) = {each["layout"] for each in of_socket["engines"]}
    compared = json.loads(run("why", "--layouts", layout, layout, "--json", "--url", url).stdout)
    assert compared["differing"] == {}
    asked = json.loads(run("why", "--list", "--most", "1", "--json", "--url", url).stdout)
    assert len(asked["requests"]) == 1
    assert "no request whose id contains 'nobody'" in one_sentence(
        run("why", "nobody", "--url", url), 1
    )


@pytest.mark.servers
def test_top(agent: AgentServer) -> None:
    terminal = Terminal("top", "--interval-s", "0.1", "--url", url_of(agent))
    terminal.wait_for("in the last 0.")
    terminal.press(b"q")
    assert terminal.end() == (0, "")


@pytest.mark.servers
def test_requests_are_shown_only_if_the_agent_is_told_to(
    tmp_path: Path, redis: RedisServer
) -> None:
    with used_agent(tmp_path / "a", redis) as agent:
        port = port_in(agent.log)
        for path in ("/why.json", "/why.json?request=found", "/why.json?layouts=a"):
            code, text = get(port, path)
            assert (code, "start it with --expose-requests" in text) == (403, True)
        for words in ("why --last", "why found", "why --layouts a b"):
            said = one_sentence(run(*words.split(), "--url", url_of(agent)), 1)
            assert "does not show requests: start it with --expose-requests" in said
        page = get(port, "/")[1]
        for text in (page, get(port, "/status.json")[1]):
            assert "absent" in text
        assert "<code>absent</code></td><td" not in page.partition("Last misses")[2]
        assert run("status", "--url", url_of(agent)).returncode == 0


@pytest.mark.servers
@pytest.mark.parametrize(
    "query", ["most=many", "most=0", "most=5000", "request=" + "x" * 70_000, "a=1&" * 99]
)
def test_wrong_questions_are_refused(agent: AgentServer, query: str) -> None:
    assert get(port_in(agent.log), f"/why.json?{query}")[0] in (400, 414)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:9464", "ftp://h:1", "http://", "http://h:x", "http://u:p@h:1", "http://h?a"],
)
def test_what_is_no_url_is_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="--url") as refused:
        HttpAgent(url)
    assert url not in str(refused.value).replace("http://HOST:PORT", "") or not url


@pytest.mark.servers
def test_a_url_and_an_endpoint_are_one_too_many() -> None:
    done = run("status", "--url", "http://h:1", "--endpoint", "ipc:///a.sock")
    assert "give one of them" in one_sentence(done, 2)


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server, f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.servers
def test_a_wrong_port_and_what_speaks_no_http(tmp_path: Path) -> None:
    with listening() as (server, url):
        server.close()
        said = one_sentence(run("status", "--url", url), 1)
        assert f"no agent answers at {url}: Connection refused" in said
    with RedisServer(tmp_path) as redis:
        url = f"http://127.0.0.1:{redis.port}"
        assert "does not speak HTTP" in one_sentence(run("status", "--url", url), 1)
        tls = url.replace("http://", "https://")
        said = one_sentence(run("status", "--url", tls, "--timeout-s", "0.3"), 1)
        assert f"no agent answers at {tls}: " in said or f"{tls} has not answered" in said
    with listening() as (_, url):  # it accepts, and is silent
        said = one_sentence(run("status", "--url", url, "--timeout-s", "0.2"), 1)
        assert f"no agent answers at {url}: " in said or f"{url} has not answered" in said


@contextmanager
def web_server(code: int, body: bytes) -> Iterator[str]:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (200, b"<html>", "is not an agent of this version"),
        (200, b"[1]", "is not an agent of this version"),
        (200, b'{"counters": {}}', "is not an agent of this version"),
        (200, b"\xff", "is not an agent of this version"),
        (200, b"[" * 200_000, "is not an agent of this version"),
        (404, b"", r"has no /status.json: is it the --metrics address of an agent\?"),
        (401, b"who\n\x1b[31mare you", r"answers 401: who \[31mare you"),
    ],
)
def test_what_is_no_agent_is_one_sentence(code: int, body: bytes, says: str) -> None:
    with web_server(code, body) as url, pytest.raises(LMCacheRedisError, match=says):
        HttpAgent(url).status()


def test_a_document_of_another_version_is_one_sentence() -> None:
    body = b'{"counters": {}, "engines": [], "redis": {}}'
    with web_server(200, body) as url:
        for words in (("status",), ("status", "--all"), ("top", "--once", "--interval-s", "0.1")):
            said = one_sentence(run(*words, "--url", url), 1)
            assert "is not an agent of this version" in said


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/\u00e9", "http://.x:80"])
def test_a_url_that_cannot_be_asked_is_told(url: str) -> None:
    with pytest.raises(LMCacheRedisError, match=r"no URL that can be asked|no agent answers"):
        HttpAgent(url).status()


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of no request, and the answer is the agent's."""
    with web_server(200, b"[1]") as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        with pytest.raises(AgentUnreachable):
            HttpAgent("http://127.0.0.1:1").status()


def test_what_others_write_moves_no_cursor() -> None:
    found = {
        "requests": [{"request_id": "a\x1b]52;c;x\x07", "b\x1b": ["\u202e", 1, None]}],
        "kept": 1,
    }
    with web_server(200, json.dumps(found).encode()) as url:
        why = HttpAgent(url).why()
    assert why["requests"] == [{"request_id": "a\\x1b]52;c;x\\x07", "b\\x1b": ["\\u202e", 1, None]}]


def test_a_proxy_without_its_agent_is_asked_again_by_top() -> None:
    with web_server(502, b"bad gateway") as url, pytest.raises(AgentUnreachable, match="502 bad"):
        HttpAgent(url).status()


def test_an_answer_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_http, "_MOST_BYTES", 1000)
    with web_server(200, b" " * 2000) as url, pytest.raises(LMCacheRedisError, match="larger than"):
        HttpAgent(url).status()


def test_a_server_that_trickles_is_not_waited_for() -> None:
    with listening() as (server, url):
        ended = threading.Event()

        def trickle() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(b"HTTP/1.1 200 OK\r\n")
                while not ended.wait(0.02):
                    client.sendall(b"A: b\r\n")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            with pytest.raises(AgentUnreachable, match=r"within 0\.3 s"):
                HttpAgent(url, 0.3).status()
        finally:
            ended.set()
            thread.join()

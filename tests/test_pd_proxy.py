# SPDX-License-Identifier: Apache-2.0
"""`examples/pd_proxy.py` between a client and engines that the test plays."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.processes import end_process
from tests.servers import free_port, wait_until

pytest.importorskip("aiohttp", reason="comes with vLLM")
pytestmark = pytest.mark.servers

PROXY = Path(__file__).parent.parent / "examples" / "pd_proxy.py"
PATH = "/v1/completions"
ASKED = {
    "prompt": [1, 2, 3],
    "max_tokens": 20,
    "max_completion_tokens": 20,
    "min_tokens": 2,
    "n": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "kv_transfer_params": {"lmcache_redis": {"tenant": "a"}, "other": 1},
}
TOLD = {"lmcache_redis": {"stored_tokens": 512}}


class PlayedEngine(ThreadingHTTPServer):
    """Records what it is asked. answer: to a request."""

    daemon_threads = True

    def __init__(self, answer: Callable[[_Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer = answer
        self.health = 200
        self.asked: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.left = threading.Event()  # a client has closed its connection too early
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def body(self) -> Any:
        """Of the only request."""
        ((_, body, _),) = self.asked
        return json.loads(body)


class _Handler(BaseHTTPRequestHandler):
    server: PlayedEngine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/health":
            self.say(b"", self.server.health)
            return
        self.server.asked.append(
            (self.path, body, {name.lower(): each for name, each in self.headers.items()})
        )
        self.server.answer(self)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, content: bytes, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, pieces: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for piece in chain(pieces, [b""]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        except OSError:
            self.server.left.set()
            self.close_connection = True


def says(document: Any, status: int = 200) -> Callable[[_Handler], None]:
    return lambda handler: handler.say(json.dumps(document).encode(), status)


@contextmanager
def played(answer: Callable[[_Handler], None]) -> Iterator[PlayedEngine]:
    with PlayedEngine(answer) as engine:
        yield engine
        engine.shutdown()


@contextmanager
def proxy(prefill: Sequence[str], decode: Sequence[str], *words: str) -> Iterator[str]:
    """Its URL."""
    port = free_port()
    command = [sys.executable, str(PROXY), "--port", str(port), *words]
    process = subprocess.Popen([*command, "--prefill", *prefill, "--decode", *decode])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or reached(url), "the proxy")
        assert process.poll() is None
        yield url
    finally:
        end_process(process, 10.0)


def reached(url: str) -> bool:
    try:
        ask(url, "/health")
    except OSError:
        return False
    return True


def ask(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@contextmanager
def streamed(url: str, **headers: str) -> Iterator[HTTPResponse]:
    """The answer to `ASKED`, as it comes."""
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection:
        connection.request("POST", PATH, json.dumps(ASKED), headers)
        with connection.getresponse() as answer:
            yield answer


def test_a_request_goes_to_both_and_its_answer_is_streamed() -> None:
    goes_on = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"data: one\n\n"
        assert goes_on.wait(60)
        yield b"data: two\n\n"

    with (
        played(says({"choices": [], "kv_transfer_params": TOLD})) as prefill,
        played(lambda handler: handler.stream(pieces())) as decode,
        proxy([prefill.url], [decode.url]) as url,
    ):
        headers = {"Authorization": "Bearer secret", "X-Request-Id": "r7"}
        with streamed(url, **headers) as answer:
            assert answer.read(len(b"data: one\n\n")) == b"data: one\n\n"
            goes_on.set()
            assert answer.read() == b"data: two\n\n"
            assert answer.headers["Content-Type"] == "text/event-stream"
    params = {"lmcache_redis": {"tenant": "a"}, "other": 1, "do_remote_decode": True}
    assert prefill.body == {
        "prompt": [1, 2, 3], "max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False,
        "kv_transfer_params": params,
    }  # fmt: skip
    both = {"lmcache_redis": {"tenant": "a", "stored_tokens": 512}, "other": 1}
    assert decode.body == {**ASKED, "kv_transfer_params": both}
    for engine in (prefill, decode):
        ((path, _, found),) = engine.asked
        assert path == PATH
        assert (found["authorization"], found["x-request-id"]) == ("Bearer secret", "r7")


@pytest.mark.parametrize("how", ["gone", "an error", "no JSON", "late", "nothing told"])
def test_no_answer_fails_because_a_prefill_does(how: str) -> None:
    hangs = threading.Event()
    prefills = {
        "gone": says({}),
        "an error": says({"error": {"message": "out of memory"}}, 500),
        "no JSON": lambda handler: handler.say(b"[1]"),
        "late": lambda handler: hangs.wait(60),
        "nothing told": says({"choices": [], "kv_transfer_params": None}),
    }
    asked = json.dumps({**ASKED, "prompt": "a  b"}, indent=3).encode()
    with (
        played(prefills[how]) as prefill,
        played(says({"choices": [1]})) as decode,
    ):
        url = f"http://127.0.0.1:{free_port()}" if how == "gone" else prefill.url
        with proxy([url], [decode.url], "--prefill-timeout-s", "0.5") as here:
            for _ in range(2):
                assert ask(here, PATH, asked) == (200, b'{"choices": [1]}')
        hangs.set()
        assert [body for _, body, _ in decode.asked] == [asked] * 2, "as the client has sent it"
        # One that could not be reached, or is late, is left out for a while.
        assert len(prefill.asked) == {"gone": 0, "late": 1}.get(how, 2)


def test_engines_take_turns_and_stand_in_for_each_other() -> None:
    with (
        played(says({"choices": []})) as prefill,
        played(says({"by": 1})) as one,
        played(says({"by": 2})) as two,
    ):
        gone = f"http://127.0.0.1:{free_port()}"
        with proxy([prefill.url], [one.url, gone, two.url]) as url:
            for _ in range(6):
                assert ask(url, PATH, ASKED)[0] == 200
            assert len(one.asked) + len(two.asked) == 6
            assert min(len(one.asked), len(two.asked)) >= 2
        with proxy([prefill.url], [gone]) as url:
            status, answer = ask(url, PATH, ASKED)
            assert status == 502
            assert "correct --decode" in json.loads(answer)["error"]["message"]


def test_all_else_is_the_decode_engines() -> None:
    with (
        played(says({})) as prefill,
        played(says({"error": {"message": "no such model"}}, 404)) as decode,
        proxy([prefill.url], [decode.url]) as url,
    ):
        refused = 404, b'{"error": {"message": "no such model"}}'
        assert ask(url, "/v1/models?of=a%20b") == refused
        assert ask(url, "/tokenize", b"any bytes") == refused
        assert [(path, body) for path, body, _ in decode.asked] == [
            ("/v1/models?of=a%20b", b""), ("/tokenize", b"any bytes")
        ]  # fmt: skip
        for wrong in (b"{", b"[1]"):
            status, answer = ask(url, PATH, wrong)
            assert status == 400
            assert "send one" in json.loads(answer)["error"]["message"]
        assert prefill.asked == []
        assert ask(url, PATH, ASKED) == refused


def test_health_is_that_of_the_decode_engines() -> None:
    with played(says({})) as decode:
        gone = f"http://127.0.0.1:{free_port()}"
        with proxy([gone], [gone, decode.url]) as url:
            status, answer = ask(url, "/health")
            assert status == 200
            assert json.loads(answer) == {
                "prefill": {gone: False}, "decode": {gone: False, decode.url: True}
            }  # fmt: skip
            decode.health = 500
            assert ask(url, "/health")[0] == 503


def test_a_client_that_goes_away_ends_its_request() -> None:
    def pieces() -> Iterator[bytes]:
        while not decode.left.is_set():
            yield b"data: more\n\n"

    with (
        played(says({})) as prefill,
        played(lambda handler: handler.stream(pieces())) as decode,
        proxy([prefill.url], [decode.url]) as url,
    ):
        with streamed(url) as answer:
            assert answer.read(4) == b"data"
        assert decode.left.wait(60)


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    def pieces() -> Iterator[bytes]:
        yield b"data: one\n\n"
        raise OSError

    with (
        played(says({})) as prefill,
        played(lambda handler: handler.stream(pieces())) as decode,
        proxy([prefill.url], [decode.url]) as url,
    ):
        with streamed(url) as answer, pytest.raises((IncompleteRead, ConnectionError)):
            answer.read()
        assert ask(url, "/health")[0] == 200


def test_its_words_teach() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROXY), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    shown = run("--help").stdout
    for word in ("share_across_tp", "vllm serve", "/health", "--prefill-timeout-s"):
        assert word in shown
    wrong = run("--prefill", "localhost:8100", "--decode", "http://a")
    assert wrong.returncode == 2
    assert "write http://HOST:PORT" in wrong.stderr
    with played(says({})) as engine:
        used = str(engine.server_port)
        wrong = run("--prefill", engine.url, "--decode", engine.url, "--port", used)
        assert wrong.returncode == 2
        assert "choose another --port" in wrong.stderr

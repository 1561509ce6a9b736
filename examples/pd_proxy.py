# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: a proxy for OpenAI's API. `python examples/pd_proxy.py --help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from aiohttp import (
    ClientError,
    ClientPayloadError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    web,
)
from yarl import URL

logger = logging.getLogger("pd_proxy")

HELP = """\
Sends each request to a prefill engine, for one token, and then to a decode engine, whose answer it
streams. The KV goes from one to the other through Redis:

  lmcache-redis agent --redis-url redis://cache:6379 &      # on each node
  KV='{"kv_connector": "LMCacheRedisConnector", "kv_role": "kv_both",
       "kv_connector_extra_config": {"share_across_tp": true}}'
  vllm serve MODEL -tp 2 --port 8100 --kv-transfer-config "$KV" &
  vllm serve MODEL -tp 1 --port 8200 --kv-transfer-config "$KV" &
  python examples/pd_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

Then ask http://127.0.0.1:8000/v1/chat/completions as you would ask vLLM. Engines of one
tensor-parallel size need no share_across_tp.

The prefill engine's answer says how many tokens it is storing; the decode engine waits for these no
longer than it would take to compute them. Without a prefill engine the decode engine computes all.
GET /health: 200 while a decode engine is well; its body names each engine. All else goes to a
decode engine. It needs aiohttp, which comes with vLLM.
"""

_APART = ("/v1/completions", "/v1/chat/completions")
# They are of the answer, or would make a prefill longer, or more than one.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "echo", "prompt_logprobs", "best_of")
# Of one connection (RFC 9110, 7.6.1), or made anew.
_NOT_FORWARDED = {
    "accept-encoding", "connection", "content-encoding", "content-length", "host", "keep-alive",
    "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip
_CONNECT_S = 2.0
_HEALTH_S = 2.0
# For so long an engine that could not be reached is asked only if there is no other.
_LEFT_OUT_S = 5.0
_MOST_BYTES = 256 << 20  # of a request: it may have images
_NOT_REACHED = (ClientError, asyncio.TimeoutError)


class Engines:
    """Engines of one kind, by URL. They take turns."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._left_out_until_s = dict.fromkeys(self.urls, 0.0)
        self._turn = -1

    def in_turn(self) -> list[str]:
        """Each once; those that could not be reached of late come last."""
        self._turn = (self._turn + 1) % len(self.urls)
        urls = [*self.urls[self._turn :], *self.urls[: self._turn]]
        return sorted(urls, key=self.is_left_out)

    def is_left_out(self, url: str) -> bool:
        return self._left_out_until_s[url] > time.monotonic()

    def not_reached(self, url: str) -> None:
        self._left_out_until_s[url] = time.monotonic() + _LEFT_OUT_S


class Proxy:
    """prefill_s: after which the decode engine no longer waits for a prefill."""

    def __init__(self, prefill: Engines, decode: Engines, prefill_s: float) -> None:
        self._prefill = prefill
        self._decode = decode
        self._prefill_s = prefill_s
        self._session: ClientSession

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MOST_BYTES)
        app.cleanup_ctx.append(self._open)
        app.add_routes([web.post(path, self.answer_apart) for path in _APART])
        app.add_routes([web.get("/health", self.health), web.route("*", "/{path:.*}", self.answer)])
        return app

    async def _open(self, app: web.Application) -> AsyncIterator[None]:
        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with ClientSession(timeout=timeout) as self._session:
            yield

    async def answer_apart(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            return _error(400, "the body is no JSON object: send one, as to OpenAI's API")
        params = asked.get("kv_transfer_params") or {}
        if isinstance(params, dict) and (told := await self._prefilled(request, asked, params)):
            body = json.dumps({**asked, "kv_transfer_params": merged(params, told)}).encode()
        return await self._decoded(request, body)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        return await self._decoded(request, await request.read())

    async def health(self, request: web.Request) -> web.Response:
        found = {
            kind: dict(zip(urls, await asyncio.gather(*map(self._is_well, urls)), strict=True))
            for kind, urls in (("prefill", self._prefill.urls), ("decode", self._decode.urls))
        }
        return web.json_response(found, status=200 if any(found["decode"].values()) else 503)

    async def _is_well(self, url: str) -> bool:
        try:
            timeout = ClientTimeout(total=_HEALTH_S)
            async with self._session.get(f"{url}/health", timeout=timeout) as answer:
                return answer.status == 200
        except _NOT_REACHED:
            return False

    async def _prefilled(
        self, request: web.Request, asked: Mapping[str, Any], params: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """What a prefill engine tells the decode engine; nothing if it fails or is left out."""
        url = self._prefill.in_turn()[0]
        if self._prefill.is_left_out(url):
            return {}
        body = json.dumps(prefill_of(asked, params)).encode()
        timeout = ClientTimeout(total=self._prefill_s, sock_connect=_CONNECT_S)
        try:
            async with await self._sent(url, request, body, timeout=timeout) as answer:
                text = await answer.text(errors="replace")
            if answer.status != 200:
                why = f"HTTP {answer.status}: {text[:200]}"
            else:
                told = json.loads(text).get("kv_transfer_params")
                return told if isinstance(told, dict) else {}
        except _NOT_REACHED as error:
            self._prefill.not_reached(url)
            why = str(error) or type(error).__name__
        except (ValueError, AttributeError):
            why = "its answer is no JSON object"
        logger.warning(
            "no prefill by %s, so the decode engine computes: %s; see its log, or correct "
            "--prefill or --prefill-timeout-s",
            url, why,
        )  # fmt: skip
        return {}

    async def _decoded(self, request: web.Request, body: bytes) -> web.StreamResponse:
        for url in self._decode.in_turn():
            try:
                answer = await self._sent(url, request, body)
            except _NOT_REACHED as error:
                self._decode.not_reached(url)
                logger.warning("no answer of %s: %s; correct --decode", url, error)
                continue
            async with answer:
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                response.headers.update(_forwarded(answer.headers))
                await response.prepare(request)
                try:
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
                    await response.write_eof()
                except ClientPayloadError as error:
                    logger.warning("an answer of %s has broken off: %s; see its log", url, error)
                    if request.transport is not None:  # so the client's breaks off too
                        request.transport.abort()
                return response
        return _error(502, "no decode engine can be reached: start one, or correct --decode")

    async def _sent(
        self, url: str, request: web.Request, body: bytes, **more: Any
    ) -> ClientResponse:
        target = URL(url + request.raw_path, encoded=True)
        headers = _forwarded(request.headers)
        return await self._session.request(
            request.method, target, data=body, headers=headers, **more
        )


def prefill_of(asked: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill engine: the same prompt, and one token."""
    one = {name: value for name, value in asked.items() if name not in _NOT_FOR_PREFILL}
    one |= {"stream": False, "max_tokens": 1, "n": 1}
    if "max_completion_tokens" in one:
        one["max_completion_tokens"] = 1
    one["kv_transfer_params"] = {**params, "do_remote_decode": True}
    return one


def merged(params: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """The client's and the prefill engine's, and also of each connector."""
    both = {**params, **told}
    for name, value in told.items():
        if isinstance(value, dict) and isinstance(params.get(name), dict):
            both[name] = {**params[name], **value}
    return both


def _forwarded(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [each for each in headers.items() if each[0].lower() not in _NOT_FORWARDED]


def _error(status: int, message: str) -> web.Response:
    """As OpenAI's API says it."""
    error = {"message": message, "type": "pd_proxy", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def url_of(text: str) -> str:
    found = urlsplit(text)
    if found.scheme not in ("http", "https") or not found.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL: write http://HOST:PORT")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for kind in ("prefill", "decode"):
        parser.add_argument(
            f"--{kind}", nargs="+", required=True, type=url_of, metavar="URL",
            help=f"the {kind} engines, which take turns",
        )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="to listen on (%(default)s)")
    parser.add_argument("--port", default=8000, type=int, help="to listen on (%(default)s)")
    parser.add_argument(
        "--prefill-timeout-s", default=60.0, type=float,
        help="after which the decode engine computes itself (%(default)s)",
    )  # fmt: skip
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    proxy = Proxy(Engines(given.prefill), Engines(given.decode), given.prefill_timeout_s)
    try:
        # A client that goes away ends its requests to the engines.
        web.run_app(proxy.app(), host=given.host, port=given.port, handler_cancellation=True)
    except OSError as error:
        parser.error(f"cannot listen on {given.host}:{given.port}: {error}; choose another --port")


if __name__ == "__main__":
    main()

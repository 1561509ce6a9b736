# SPDX-License-Identifier: Apache-2.0
"""Questions of command-line tools to an agent at its `--metrics` address, from anywhere."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.errors import ConfigError, LMCacheRedisError
from lmcache_redis.units import printable_document

_MOST_BYTES = 64 << 20
_MOST_SAID = 200
_HANDLERS = (
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPRedirectHandler,
    urllib.request.UnknownHandler,
)


class HttpAgent:
    """Asks the agent at ``url``; each answer is there within ``timeout_s``.

    url: http://HOST:PORT, or https:// of a proxy before it; a path goes before those of the agent.
    Raises ``ConfigError`` for another URL.
    """

    def __init__(self, url: str, timeout_s: float = 3.0) -> None:
        try:
            parts = urlsplit(url)
            is_known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_known = False
        if not is_known or parts.username is not None or parts.query or parts.fragment:
            # It may have a password.
            raise ConfigError("--url: write http://HOST:PORT, the agent's --metrics address")
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._opener = urllib.request.OpenerDirector()
        for handler in _HANDLERS:
            self._opener.add_handler(handler())

    def status(self) -> dict[str, Any]:
        """As `ControlClient.status`. The other questions are also the control client's."""
        return self._document("/status.json", "counters", "engines", "redis", "tiers")

    def why(self, request: str = "", most: int = 20) -> dict[str, Any]:
        query = urlencode({"request": request, "most": most})
        return self._document(f"/why.json?{query}", "requests", "kept")

    def layouts(self, *wanted: str) -> dict[str, Any]:
        query = urlencode({"layouts": wanted}, doseq=True)
        return self._document(f"/why.json?{query}", "layouts")

    def _document(self, path: str, *names: str) -> dict[str, Any]:
        """names: some that the document has if it is an agent's."""
        body = self._read(path)
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not found.keys() >= {*names}:
            raise self.other_version()
        document: dict[str, Any] = printable_document(found)
        return document

    def other_version(self) -> LMCacheRedisError:
        """What to raise for a document that lacks a field."""
        return LMCacheRedisError(f"what answers at {self._url} is not an agent of this version")

    def _read(self, path: str) -> bytes:
        """The body. On a thread: the resolver has no deadline, and a server may trickle."""
        found: list[bytes | Exception] = []

        def read() -> None:
            try:
                found.append(self._open(path))
            except Exception as error:  # raised below
                found.append(error)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if not found:
            raise AgentUnreachable(f"{self._url} has not answered within {self._timeout_s:g} s")
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _open(self, path: str) -> bytes:
        try:
            with self._opener.open(self._url + path, timeout=self._timeout_s) as answer:
                body: bytes = answer.read(_MOST_BYTES + 1)
        except urllib.error.HTTPError as error:
            raise self._refused(error, path.partition("?")[0]) from None
        except urllib.error.URLError as error:
            reason = getattr(error.reason, "strerror", None) or str(error.reason)
            raise self._unreachable(reason) from None
        except UnicodeError:
            raise ConfigError(f"--url: {self._url} is no URL that can be asked") from None
        except http.client.HTTPException:
            raise LMCacheRedisError(f"what answers at {self._url} does not speak HTTP") from None
        except OSError as error:
            raise self._unreachable(error.strerror or str(error)) from None
        if len(body) > _MOST_BYTES:
            raise LMCacheRedisError(f"the answer of {self._url} is larger than {_MOST_BYTES} bytes")
        return body

    def _refused(self, error: urllib.error.HTTPError, path: str) -> LMCacheRedisError:
        with error:
            said = _one_line(error.read(_MOST_SAID))
        if error.code == 404:
            return LMCacheRedisError(
                f"{self._url} has no {path}: is it the --metrics address of an agent?"
            )
        if error.code >= 500:
            return AgentUnreachable(f"{self._url} does not answer now: {error.code} {said}")
        return LMCacheRedisError(f"{self._url} answers {error.code}: {said}")

    def _unreachable(self, reason: str) -> AgentUnreachable:
        return AgentUnreachable(
            f"no agent answers at {self._url}: {reason}: is it the agent's --metrics address?"
        )


def _one_line(said: bytes) -> str:
    words: Sequence[str] = said.decode("utf-8", "replace").split()
    return "".join(each for each in " ".join(words) if each.isprintable())

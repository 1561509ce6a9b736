# SPDX-License-Identifier: Apache-2.0
"""Prefill at TP 2 and decode at TP 1, on two agents with a Redis between, behind the proxy."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from demo.model import write_tokenizer
from tests.demo.forked import ForkedServer
from tests.engines import ForkedEngine
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import OPTIONS, SIZES, Prompts
from tests.integrations.test_vllm import CHUNK, ready
from tests.servers import RedisServer
from tests.test_pd_proxy import ask, proxy

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

TOKENS = 8
JSON = {"Content-Type": "application/json"}
# Longer than it takes to ask the decode engine, which waits for what is stored, however slow the
# machine is.
LATE = {
    "lmcache_redis.agent.peers._FIRST_TOKEN_FIRST_S": 1.0,
    "lmcache_redis.cache.awaiting._NOT_MEASURED_S": 30.0,
}


def start(stack: ExitStack, model: Path, agent: AgentServer, log: Path, ranks: int) -> ForkedServer:
    words = ["--tensor-parallel-size", str(ranks), "--enable-prompt-tokens-details"]
    for name, value in OPTIONS.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    server = ForkedServer(model, agent.endpoint, log, words, env)
    server.settings |= {"share_across_tp": True, "load_always": True, "agent_dead_after_s": 20.0}
    stack.enter_context(server)
    wait_until(lambda: ready(agent), what="the engine at the agent")
    return server


def prefilled(url: str, prompt: list[int]) -> Any:
    """What the answer to a prefill says, if it is asked as vLLM's proxy for NIXL asks."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    params |= {"remote_block_ids": None, "remote_host": None, "remote_port": None}
    asked = {"model": "demo", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
    status, text = ask(url, "/v1/completions", asked, **JSON)
    assert status == 200, text
    return json.loads(text)["kv_transfer_params"]


def answer(url: str, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of its prompt were cached."""
    asked = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
    asked |= {"ignore_eos": True, "return_token_ids": True, **more}
    status, text = ask(url, "/v1/completions", asked, **JSON)
    assert status == 200, text
    lines = text.decode().removeprefix("data: ").split("\n\ndata: ")
    pieces = [json.loads(each) for each in lines if not each.startswith("[DONE]")]
    tokens = [
        token for piece in pieces for each in piece["choices"] for token in each["token_ids"] or ()
    ]
    details = pieces[-1]["usage"]["prompt_tokens_details"]
    return tokens, details["cached_tokens"] if details else 0


def test_a_decoder_hits_what_another_size_has_prefilled(
    plain: ForkedEngine, model_dir: Path, tmp_path: Path, redis_server: RedisServer,
    prompts: Prompts,
) -> None:  # fmt: skip
    questions = [prompts.tokens(2 * CHUNK + 10) for _ in range(5)]
    expected = [plain.generate([each], TOKENS).outputs[0] for each in questions]
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    write_tokenizer(model)
    sizes = SIZES | {"lookup_deadline_s": 60}
    with ExitStack() as agents, ExitStack() as engines, ExitStack() as prefillers:
        prefill_agent, decode_agent = (
            agents.enter_context(AgentServer(tmp_path / name, redis_server.unix_url, LATE, **sizes))
            for name in ("prefill", "decode")
        )
        decoder = start(engines, model, decode_agent, tmp_path / "decode.log", 1)
        prefiller = start(prefillers, model, prefill_agent, tmp_path / "prefill.log", 2)
        at = [f"http://127.0.0.1:{each.port}" for each in (prefiller, decoder)]
        url = engines.enter_context(proxy(at[:1], at[1:]))
        assert answer(url, questions[0]) == (expected[0], 2 * CHUNK)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        assert answer(url, questions[1], **streamed) == (expected[1], 2 * CHUNK)
        told = prefilled(at[0], questions[4])
        assert told == {"lmcache_redis": {"stored_tokens": 2 * CHUNK}}
        assert answer(at[1], questions[4], kv_transfer_params=told) == (expected[4], 2 * CHUNK)
        # What a prefill engine is not asked for is computed.
        assert answer(at[1], questions[2]) == (expected[2], 0)
        assert decode_agent.counter("retrieves_failed") == 0
        assert decode_agent.counter("loaded_chunks") == 3 * 2
        prefillers.close()
        assert answer(url, questions[3]) == (expected[3], 0)
        for agent in (prefill_agent, decode_agent):
            assert "Traceback" not in agent.log
        # At its end vLLM has some of its own.
        assert "Traceback" not in (tmp_path / "decode.log").read_text()

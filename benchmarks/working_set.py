"""Documents that do not fit into vLLM's own cache, asked about in rounds, all at once.

Each request is a document and a question that is new. The first round computes and stores; the
others can load. Cases:

    no connector
    large pool    the agent's host pool holds all documents
    small pool    it holds a quarter of them: the others come from Redis
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmcache_redis.agent.embedded import EmbeddedRedis
from lmcache_redis.demo.agent import AgentServer
from lmcache_redis.demo.engine import EngineProcess
from lmcache_redis.demo.model import CPU_SHAPE, make_model, make_prompts

_QUESTION_TOKENS = 32
_BLOCK_TOKENS = 32
_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTED = ("lookup_chunks", "hit_chunks_pool", "hit_chunks_redis", "miss_pool_full", "miss_slower")


def run(
    output_dir: Path,
    rounds: int = 5,
    documents: int = 16,
    document_tokens: int = 2048,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """One row per case: medians over ``rounds``, and counters of all of them."""
    output_dir.mkdir(parents=True, exist_ok=True)
    make_model(output_dir / "model", CPU_SHAPE, 4097 + 64)
    set_bytes = documents * document_tokens * CPU_SHAPE.kv_bytes_per_token
    cases = {"no connector": 0, "large pool": 2 * set_bytes, "small pool": set_bytes // 4}
    rows = []
    for case, pool_bytes in cases.items():
        with tempfile.TemporaryDirectory() as directory, EmbeddedRedis(3 * set_bytes) as server:
            endpoint, log = f"ipc://{directory}/agent.sock", output_dir / "agent.log"
            if not pool_bytes:
                rows.append(_case(case, output_dir, None, rounds, documents, document_tokens, say))
                continue
            with AgentServer(endpoint, server.url, log, pool_bytes=pool_bytes) as agent:
                rows.append(_case(case, output_dir, agent, rounds, documents, document_tokens, say))
    return rows


def _case(
    case: str,
    output_dir: Path,
    agent: AgentServer | None,
    rounds: int,
    documents: int,
    document_tokens: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    texts = make_prompts(documents + 1, document_tokens)
    questions = iter(make_prompts(documents * (rounds + 1), _QUESTION_TOKENS + 1))
    seconds: list[float] = []
    first_tokens: list[float] = []
    with EngineProcess(
        output_dir / "model",
        log_path=output_dir / "working-set.log",
        connector_endpoint=None if agent is None else agent.endpoint,
        options={
            "dtype": CPU_SHAPE.dtype,
            "max_model_len": document_tokens + 64,
            "disable_log_stats": False,
            "block_size": _BLOCK_TOKENS,
            # Half of the documents.
            "num_gpu_blocks_override": documents * document_tokens // (2 * _BLOCK_TOKENS) + 16,
        },
    ) as engine:
        if agent is not None:
            agent.wait_engine()
        engine.generate([texts.pop()])
        before: dict[str, int] = {}
        for number in range(rounds + 1):
            say(f"{case}, round {number} of {rounds}")
            answer = engine.generate([text + next(questions) for text in texts])
            seconds.append(answer.seconds)
            if number:
                first_tokens += answer.details["first_token_s"]
            if agent is not None:
                agent.wait_idle()
                before = before or agent.counters()
        row: dict[str, Any] = {
            "case": case,
            "first_round_s": seconds[0],
            "round_s": statistics.median(seconds[1:]),
            "requests_per_s": documents / statistics.median(seconds[1:]),
            "first_token_mean_s": statistics.mean(first_tokens),
            "first_token_worst_s": max(first_tokens),
            "agent_cpu_s": None if agent is None else _cpu_s(agent.process.pid),
        }
        after = {} if agent is None else agent.counters()
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in _COUNTED}
    return row | counts


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS

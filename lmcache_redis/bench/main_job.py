"""The main job with a real vLLM: time to first token cold, from the host pool, from Redis.

The reference case is a prompt of 4,097 tokens on a model with 64 KiB of KV a token: 256 MiB.
An engine without a connector and one with ours live side by side and answer in turn, so
that the machine's mood falls on both. Time to first token is the time of a request for one token.

    plain             no connector, nothing cached
    cold              our connector, nothing cached, earlier stores drained
    plain-rush, cold-rush   the same back to back: stores of one prompt run beside the next
    vllm-hit          the prefix is still in vLLM's own blocks
    pool-hit          vLLM's cache emptied: from the agent's host pool
    redis-hit         a new engine and a new agent: from Redis
    get               256 MiB from Redis into slots by the data plane alone, the same server

Redis is full when it begins, as a cache is after its first day: each store evicts something and
reuses its memory. A server that grows pays for fresh pages instead, which on a virtual machine
costs more than all else that a store does.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from lmcache_redis.bench.agent import AgentServer
from lmcache_redis.bench.engine import EngineProcess
from lmcache_redis.bench.model import CPU_SHAPE, make_model, make_prompts
from lmcache_redis.bench.plane.alone import load_gb_per_s
from lmcache_redis.bench.plane.messages import DEFAULT_SLOT_BYTES
from lmcache_redis.embedded import EmbeddedRedis

REDIS_BYTES = 6 << 30
POOL_BYTES = 4 << 30
_MOST_PROMPTS = 200
# Each takes three prompts of each engine, and differs by less than single prompts do.
_MOST_RUSH_ROUNDS = 5
# What the engine's own cache and the host pool hold of the prompts computed last.
_MOST_HITS = 7


def run(
    output_dir: Path,
    rounds: int = 5,
    prompt_tokens: int = 4097,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Rows with medians over ``rounds`` prompts, of hits and of rushes over fewer if many.

    Logs go to ``output_dir``.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    model = output_dir / "model"
    make_model(model, CPU_SHAPE, prompt_tokens + 64)
    times: dict[str, list[float]] = {}
    prompts = _Prompts(prompt_tokens)
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedRedis(REDIS_BYTES) as server,
        AgentServer(
            f"ipc://{directory}/agent.sock",
            server.url,
            output_dir / "agent.log",
            pool_bytes=POOL_BYTES,
        ) as agent,
    ):
        say(f"filling Redis to its limit of {REDIS_BYTES >> 30} GiB")
        _fill(server.url)
        measured = [prompts.new() for _ in range(rounds)]
        outputs = _beside_plain(output_dir, model, agent, prompts, measured, times, say)
        agent.restart()
        hits = measured[-_MOST_HITS:]
        _from_redis(output_dir, model, agent, prompts, hits, outputs, times, say)
        say("loading the same bytes with the data plane alone")
        chunk_bytes = 256 * CPU_SHAPE.kv_bytes_per_token
        loaded_bytes = prompt_tokens // 256 * chunk_bytes
        rate = load_gb_per_s(server.url, chunk_bytes, loaded_bytes, rounds)
    return _rows(times, loaded_bytes / rate / 1e9)


def _fill(url: str) -> None:
    """Values that the stores will evict, each as large as a stripe."""
    value = bytes(DEFAULT_SLOT_BYTES)
    with redis.Redis.from_url(url) as client:
        for number in range(REDIS_BYTES // len(value)):
            client.set(f"filler:{number}", value)


def _beside_plain(
    output_dir: Path,
    model: Path,
    agent: AgentServer,
    prompts: _Prompts,
    measured: list[list[int]],
    times: dict[str, list[float]],
    say: Callable[[str], None],
) -> list[Any]:
    options = prompts.options()
    say("starting an engine without a connector, and one with it")
    with (
        EngineProcess(model, log_path=output_dir / "plain.log", options=options) as plain,
        EngineProcess(
            model,
            log_path=output_dir / "cold.log",
            connector_endpoint=agent.endpoint,
            options=options,
        ) as ours,
    ):
        agent.wait_engine()
        for engine in (plain, ours):
            engine.generate([prompts.new()])
        agent.wait_idle()
        say("cold, back to back")
        for number in range(min(len(measured), _MOST_RUSH_ROUNDS)):
            rush = [prompts.new() for _ in range(3)]
            for engine in (plain, ours) if number % 2 == 0 else (ours, plain):
                name = "plain-rush" if engine is plain else "cold-rush"
                seconds = [engine.generate([prompt]).seconds for prompt in rush]
                times.setdefault(name, []).append(statistics.mean(seconds[1:]))
                agent.wait_idle()
        outputs = []
        # These last: what is loaded from Redis later must not be what it evicts first.
        for number, prompt in enumerate(measured):
            say(f"cold, prompt {number + 1} of {len(measured)}")
            # In turn, and in turns who is first.
            for engine in (plain, ours) if number % 2 == 0 else (ours, plain):
                answer = engine.generate([prompt])
                times.setdefault("plain" if engine is plain else "cold", []).append(answer.seconds)
                agent.wait_idle()
            outputs.append(answer.outputs)
        hits, outputs = measured[-_MOST_HITS:], outputs[-_MOST_HITS:]
        for prompt in hits:
            times.setdefault("vllm-hit", []).append(ours.generate([prompt]).seconds)
        ours.reset_prefix_cache()
        say("hits in the host pool")
        for prompt, output in zip(hits, outputs, strict=True):
            answer = ours.generate([prompt])
            _check(answer, output, len(prompt))
            times.setdefault("pool-hit", []).append(answer.seconds)
    return outputs


def _from_redis(
    output_dir: Path,
    model: Path,
    agent: AgentServer,
    prompts: _Prompts,
    hits: list[list[int]],
    outputs: list[Any],
    times: dict[str, list[float]],
    say: Callable[[str], None],
) -> None:
    say("starting a new engine; the agent is new too, its host pool is empty")
    with EngineProcess(
        model,
        log_path=output_dir / "warm.log",
        connector_endpoint=agent.endpoint,
        options=prompts.options(),
    ) as engine:
        agent.wait_engine()
        engine.generate([prompts.new()])
        agent.wait_idle()
        for prompt, output in zip(hits, outputs, strict=True):
            answer = engine.generate([prompt])
            _check(answer, output, len(prompt))
            times.setdefault("redis-hit", []).append(answer.seconds)


def _check(answer: Any, output: Any, prompt_tokens: int) -> None:
    cached = answer.details["cached_tokens"][0]
    if answer.outputs != output or cached < prompt_tokens // 256 * 256:
        raise RuntimeError(f"not a hit with the same answer: {cached} tokens were cached")


class _Prompts:
    """Prompts of random tokens, never the same twice."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._left = make_prompts(_MOST_PROMPTS, tokens)

    def new(self) -> list[int]:
        return self._left.pop()

    def options(self) -> dict[str, Any]:
        return {"dtype": CPU_SHAPE.dtype, "max_model_len": self._tokens + 64}


def _rows(times: dict[str, list[float]], get_s: float) -> list[dict[str, Any]]:
    beside = {"cold": "plain", "cold-rush": "plain-rush"}
    rows = []
    for case, seconds in times.items():
        ratio = None
        if case in beside:
            pairs = zip(seconds, times[beside[case]], strict=True)
            ratio = statistics.median(ours / plain for ours, plain in pairs)
        rows.append(
            {
                "case": case,
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "max_s": max(seconds),
                "ratio_to_plain": ratio,
                "rounds": len(seconds),
            }
        )
    rows.append(
        {"case": "get", "median_s": get_s, "min_s": None, "max_s": None, "ratio_to_plain": None,
         "rounds": len(times["plain"])}
    )  # fmt: skip
    return rows

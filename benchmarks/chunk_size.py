# SPDX-License-Identifier: Apache-2.0
"""Time to first token by the chunk size, for models with little and with much KV a token.

Larger chunks are fewer: a load has less to account for. But a prompt shares only whole chunks with
what is cached, so more of its end is computed. Engines of one model run side by side, each with an
agent of another chunk size, and answer in turn. Documents are in Redis only. Each is asked about
once, with a question of 64 tokens that is new: every other one whole, which is a multiple of all
chunk sizes, and the rest up to a random token.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.report import ratios, rotated
from demo.model import CPU_SHAPE, VOCABULARY, ModelShape, make_model, make_prompts
from lmcache_redis.agent.embedded import embedded_redis
from testkit.agent import AgentServer
from testkit.engine import SPIN_S, EngineProcess

# By KiB of KV a token.
SHAPES = {
    1: ModelShape(layers=1, dtype="float32", itemsize=4, heads=1),
    8: ModelShape(layers=1, dtype="float32", itemsize=4),
    64: CPU_SHAPE,
}
_QUESTION_TOKENS = 64
# The smallest of vLLM's on a CPU.
_BLOCK_TOKENS = 32
_POOL_BYTES = 1 << 30
WHOLE, PART = "whole", "part"


def run(
    output_dir: Path,
    rounds: int = 15,
    prompt_tokens: int = 4096,
    sizes: Sequence[int] = (256, 128, 64),
    token_kib: int = 64,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """A row for each chunk size and kind of request: medians over ``rounds``, and ratios to the
    first size.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    between = prompt_tokens // 4, prompt_tokens
    longest = prompt_tokens + _QUESTION_TOKENS
    shape = SHAPES[token_kib]
    model = output_dir / f"model of {token_kib} KiB a token"
    make_model(model, shape, longest + 64)
    documents = make_prompts(2 * rounds + 2, prompt_tokens)
    chance = random.Random(5)
    times: dict[tuple[str, int], list[float]] = {}
    cached: dict[tuple[str, int], list[int]] = {}
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        url = stack.enter_context(embedded_redis(8 << 30))
        agents, engines = {}, {}
        for size in sizes:
            agent = AgentServer(
                f"ipc://{directory}/{size}.sock",
                url,
                output_dir / f"agent, {size}.log",
                pool_bytes=_POOL_BYTES,
                chunk_size_tokens=size,
                key_prefix=f"chunks-of-{size}",
            )
            agents[size] = stack.enter_context(agent)
            engine = EngineProcess(
                model,
                log_path=output_dir / f"engine, {size}.log",
                connector_endpoint=agent.endpoint,
                options={
                    "dtype": shape.dtype,
                    "max_model_len": longest + 64,
                    "block_size": _BLOCK_TOKENS,
                    "num_gpu_blocks_override": 2 * (longest + 64) // _BLOCK_TOKENS,
                },
            )
            engines[size] = stack.enter_context(engine)
            agent.wait_engine()
            say(f"chunks of {size} tokens: storing {len(documents)} documents")
            for document in documents:
                engine.generate([document])
            agent.wait_idle()
            agent.restart().wait_engine()
        # The first two warm the engines up: they also measure what computing takes.
        for number, document in enumerate(documents):
            say(f"document {number + 1} of {len(documents)}")
            kind = WHOLE if number % 2 else PART
            shared = prompt_tokens if number % 2 else chance.randint(*between)
            question = [chance.randint(3, VOCABULARY - 1) for _ in range(_QUESTION_TOKENS)]
            for size in rotated([*sizes], number):
                engines[size].reset_prefix_cache()
                time.sleep(SPIN_S)
                answer = engines[size].generate([document[:shared] + question])
                agents[size].wait_idle()
                if number >= 2:
                    times.setdefault((kind, size), []).append(answer.seconds)
                    tokens = answer.details["cached_tokens"][0]
                    cached.setdefault((kind, size), []).append(tokens)
    return [
        {
            "request": kind,
            "chunk_tokens": size,
            "chunk_kib": size * shape.kv_bytes_per_token >> 10,
            "median_s": statistics.median(times[kind, size]),
            "ratio": statistics.median(ratios(times[kind, size], times[kind, sizes[0]])),
            "cached_tokens": statistics.median(cached[kind, size]),
            "rounds": rounds,
        }
        for kind in (WHOLE, PART)
        for size in sizes
    ]

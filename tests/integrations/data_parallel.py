# SPDX-License-Identifier: Apache-2.0
"""A program: one prompt, asked of each of two data parallel cores in turn.

vLLM's offline class does not start them, so it uses the server's class. It runs in the place of
`engine.main`: for any request it answers, for each question, with its tokens and how many were
cached.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from itertools import count
from typing import Any

CHUNK = 256
RANKS = (0, 1, 0, 1)
_WITHIN_S = 60.0


async def ask_all(
    model: str, kv_transfer: dict[str, Any], options: dict[str, Any]
) -> list[tuple[list[int], int]]:
    """All but the first ask until they hit: a store, or a core that registers, may be late."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, kv_transfer_config=kv_transfer, **options)  # type: ignore[arg-type]
    )
    prompt: Any = {"prompt_token_ids": [1 + n * 7919 % 4000 for n in range(2 * CHUNK + 1)]}
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    answers, numbers = [], count()
    until_s = time.monotonic() + _WITHIN_S
    try:
        for rank in RANKS:
            while True:
                name = f"r{next(numbers)}"
                outputs = llm.generate(prompt, sampling, name, data_parallel_rank=rank)
                last = [output async for output in outputs][-1]
                assert await llm.reset_prefix_cache()
                if last.num_cached_tokens or not answers or time.monotonic() > until_s:
                    break
            answers.append((list(last.outputs[0].token_ids), last.num_cached_tokens))
    finally:
        llm.shutdown()
    return answers


def main(fd: int) -> None:
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as stream:

        def tell(**answer: Any) -> None:
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()

        spec = json.loads(stream.readline())
        tell(ready=True)
        stream.readline()
        tell(seconds=0.0, answers=asyncio.run(ask_all(**spec)))

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
from typing import Any

CHUNK = 256
RANKS = (0, 1, 0, 1)


async def ask_all(
    model: str, kv_transfer: dict[str, Any], options: dict[str, Any]
) -> list[tuple[list[int], int]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=model, kv_transfer_config=kv_transfer, **options)  # type: ignore[arg-type]
    )
    prompt = [1 + n * 7919 % 4000 for n in range(2 * CHUNK + 1)]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    answers = []
    try:
        for number, rank in enumerate(RANKS):
            asked: Any = {"prompt_token_ids": prompt}
            outputs = llm.generate(asked, sampling, f"r{number}", data_parallel_rank=rank)
            last = [output async for output in outputs][-1]
            answers.append((list(last.outputs[0].token_ids), last.num_cached_tokens))
            # vLLM refuses this while a store holds blocks.
            deadline_s = time.monotonic() + 60.0
            while not await llm.reset_prefix_cache() and time.monotonic() < deadline_s:
                await asyncio.sleep(0.05)
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

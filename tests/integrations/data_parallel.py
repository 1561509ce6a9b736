"""A program: one prompt, asked of each of two data parallel cores in turn.

    python -m tests.integrations.data_parallel MODEL ENDPOINT

The last line of its output is JSON: for each question, its tokens and how many were cached.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
from typing import Any

CHUNK = 256
RANKS = (0, 1, 0, 1)


def fork_engines() -> None:
    """The cores are forked from this process, which has imported vLLM."""
    import vllm.v1.engine.coordinator
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker

    fork = multiprocessing.get_context("fork")
    for module in (
        vllm.v1.engine.coordinator,
        vllm.v1.engine.utils,
        vllm.v1.executor.multiproc_executor,
    ):
        module.get_mp_context = lambda: fork


async def ask_all(model: str, endpoint: str) -> list[tuple[list[int], int]]:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    extra = {"endpoint": endpoint}
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            max_model_len=1024,
            skip_tokenizer_init=True,
            enforce_eager=True,
            data_parallel_size=2,
            kv_transfer_config={  # type: ignore[arg-type]
                "kv_connector": "LMCacheRedisConnector",
                "kv_role": "kv_both",
                "engine_id": "shared",
                "kv_connector_extra_config": extra,
            },
        )
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


if __name__ == "__main__":
    fork_engines()
    print(json.dumps(asyncio.run(ask_all(*sys.argv[1:]))), flush=True)

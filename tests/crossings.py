# SPDX-License-Identifier: Apache-2.0
"""Which files a store and a hit cross, and which of them call each other, both ways.

    .venv/bin/python -m tests.crossings

A vLLM, its agent and a client of Redis run in this process, with a real server. Counted are the
files of the package in which something is called, the arrows between them (a function of one
calls one of the other), and the pairs with arrows both ways: a reader of one has to read the other.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lmcache_redis

_PACKAGE = str(Path(lmcache_redis.__file__).parent) + os.sep
_TOKENS = 1024
_WAIT_S = 60.0


class Trip:
    """What is called from entry to exit, in every thread that was started since `watch`."""

    current: Trip | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._functions: set[CodeType] = set()
        self._calls: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Trip:
        Trip.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Trip.current = None

    def called(self, caller: str, code: CodeType) -> None:
        self._functions.add(code)
        self._calls[caller, code.co_filename] += 1

    @property
    def arrows(self) -> set[tuple[str, str]]:
        return {
            (_short(one), _short(other))
            for one, other in self._calls
            if one != other and one.startswith(_PACKAGE)
        }

    @property
    def pairs(self) -> list[tuple[str, str]]:
        arrows = self.arrows
        return sorted({(a, b) for a, b in arrows if a < b and (b, a) in arrows})

    def __str__(self) -> str:
        files = {code.co_filename for code in self._functions}
        return (
            f"{self.name}: {len(files)} files, {len(self._functions)} functions, "
            f"{self._calls.total()} calls, {len(self.arrows)} arrows, {len(self.pairs)} pairs"
        )


def _short(path: str) -> str:
    return path.removeprefix(_PACKAGE).removesuffix(".py")


def _seen(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and (trip := Trip.current) is not None:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            trip.called(frame.f_back.f_code.co_filename if frame.f_back else "", code)


def watch() -> None:
    """From now on, for this thread and those that are started later."""
    threading.setprofile(_seen)
    sys.setprofile(_seen)


def store_and_hit(directory: Path) -> tuple[Trip, Trip]:
    """A prompt is computed and stored; it is loaded from Redis by the same engine, which forgot."""
    os.environ.update(
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
    )
    from vllm import LLM, SamplingParams

    from tests.agent.here import AgentHere
    from tests.matrix.models import write_model
    from tests.servers import RedisServer

    options: dict[str, Any] = {"pool_bytes": 64 << 20, "slot_bytes": 1 << 20}
    with (
        RedisServer(directory) as server,
        AgentHere(directory / "agent", server.url, chunk_size_tokens=256, **options) as here,
    ):
        extra = {"endpoint": here.endpoint, "load_always": True}
        llm = LLM(
            str(write_model("llama", directory / "model")),
            skip_tokenizer_init=True,
            max_model_len=2048,
            block_size=32,
            enforce_eager=True,
            num_gpu_blocks_override=128,
            kv_transfer_config={
                "kv_connector": "LMCacheRedisConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)

        def ask(first: int) -> None:
            prompt = {"prompt_token_ids": [first + n % 97 for n in range(_TOKENS)]}
            llm.generate([prompt], sampling, use_tqdm=False)

        def wait_for(counter: str, least: float) -> None:
            ends_at = time.monotonic() + _WAIT_S
            while here.counter(counter) < least and time.monotonic() < ends_at:
                time.sleep(0.02)
            assert here.counter(counter) >= least, counter

        ask(3)  # connections, threads and registrations
        wait_for("stored_chunks", 3)
        with Trip("a store, and its missed lookup") as store:
            ask(7)
            ask(1)  # what its last step computed is stored with a later one
            wait_for("stored_chunks", 9)
        assert llm.reset_prefix_cache()
        forgotten = threading.Event()
        pool = here.agent.cache.pool
        here.agent.loop.post(lambda: (pool.clear(), forgotten.set()))
        assert forgotten.wait(_WAIT_S)
        with Trip("a hit, from Redis to blocks") as hit:
            ask(7)
            wait_for("retrieved_chunks", 3)
        assert here.counter("hit_chunks_redis") >= 3
        llm.llm_engine.engine_core.shutdown()
    return store, hit


def main() -> None:
    watch()
    with tempfile.TemporaryDirectory(prefix="crossings-") as directory:
        store, hit = store_and_hit(Path(directory))
    for trip in (store, hit):
        print(trip)
    both = sorted({*store.pairs, *hit.pairs})
    print(f"Pairs of files that call each other, in either: {len(both)}")
    for one, other in both:
        print(f"  {one} and {other}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""LMCache's server and a real vLLM with the door between: the same tokens, whatever happens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lmcache_l2 import PLUGIN
from benchmarks.lmcache_mp import LMCacheServer, running_lmcache
from tests.engines import PATCH_VARIABLE, ForkedEngine, empty
from tests.integrations.conftest import OPTIONS, Prompts
from tests.servers import RedisServer, stripe_keys, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

CHUNK = 256
POOL_BYTES = 256 << 20
NO_HANG_S = 10.0
# Forked workers have LMCache's imports when vLLM looks for kernels in all modules, and this object
# of llvmlite has every attribute that it is asked for.
PATCH = """
import sys
import llvmlite.binding.ffi as ffi
sys.path.append({wheel!r})
ffi._lib_fn_wrapper.get = lambda self, name: None
"""


@contextlib.contextmanager
def stack(
    wheel: Path, model_dir: Path, redis: RedisServer, log: Path
) -> Iterator[tuple[LMCacheServer, ForkedEngine]]:
    """A server whose pool is a buffer only, so that every hit comes from Redis, and an engine."""
    patch = log.with_name("patch.py")
    patch.write_text(PATCH.format(wheel=str(wheel)))
    adapter = {**PLUGIN, "adapter_params": {"url": redis.url, "timeout_s": 5.0}}
    with running_lmcache(0, POOL_BYTES, log, buffer=True, adapter=adapter) as server:
        env = {**server.environment, PATCH_VARIABLE: str(patch), "VLLM_CPU_KVCACHE_SPACE": "1"}
        with ForkedEngine(
            model_dir,
            kv_transfer=server.kv_transfer,
            log_path=log.with_suffix(".engine"),
            options=OPTIONS,
            env=env,
            # With any connector but ours, vLLM's resets fail while a step is in flight.
            asynchronous=False,
        ) as engine:
            yield server, engine


def test_a_new_server_hits_and_survives_redis(
    wheel: Path,
    plain: ForkedEngine,
    model_dir: Path,
    redis_server: RedisServer,
    tmp_path: Path,
    prompts: Prompts,
) -> None:
    questions = [prompts.tokens(n * CHUNK + 30) for n in (4, 2, 1)]
    expected = [plain.generate([each], 12).outputs for each in questions]
    assert expected[0] != expected[1]

    def ask(engine: ForkedEngine, number: int = 0) -> int:
        """Cached tokens of a question; the answer is right, and in time."""
        empty(engine)
        started_s = time.monotonic()
        answer = engine.generate([questions[number]], 12)
        assert answer.outputs == expected[number]
        assert time.monotonic() - started_s < NO_HANG_S
        return int(answer.details["cached_tokens"][0])

    with stack(wheel, model_dir, redis_server, tmp_path / "cold") as (server, engine):
        assert ask(engine) == 0
        assert ask(engine, 1) == 0
        server.wait_idle()
        assert server.adapter_status()["stored_chunks"] >= 6

    with stack(wheel, model_dir, redis_server, tmp_path / "warm") as (server, engine):
        assert ask(engine) == 4 * CHUNK
        assert server.adapter_status()["loaded_chunks"] == 4

        with redis_server.client() as client:  # a byte flipped in every chunk
            for key in stripe_keys(client):
                client.setrange(key, client.strlen(key) // 2, b"!!")
        assert ask(engine) == 0
        server.wait_idle()
        assert ask(engine) == 4 * CHUNK, "what was bad is stored again"

        with redis_server.client() as client:  # evicting
            client.delete(*sorted(stripe_keys(client))[::2])
        ask(engine)
        server.wait_idle()

        redis_server.stop()
        assert ask(engine) == 0
        redis_server.cont()
        wait_until(lambda: server.adapter_status()["is_healthy"], "Redis after its pause")

        redis_server.kill()
        assert ask(engine, 1) == 0
        redis_server.start()
        wait_until(lambda: server.adapter_status()["is_healthy"], "Redis after its restart")
        # A new one: what could not be stored is still in LMCache's memory.
        assert ask(engine, 2) == 0
        server.wait_idle()
        loaded = server.adapter_status()["loaded_chunks"]
        assert ask(engine, 2) == CHUNK
        assert server.adapter_status()["loaded_chunks"] == loaded + 1

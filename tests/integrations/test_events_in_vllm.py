# SPDX-License-Identifier: Apache-2.0
"""The event stream of a real engine across a reset and evictions, as every kind of router reads it.

`Router` checks after each batch that they all have the same, and that no block is told twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts
from tests.integrations.router import Router
from tests.integrations.test_vllm import CHUNK, start
from tests.servers import RedisServer, stripe_keys

pytestmark = [pytest.mark.engine, pytest.mark.long]
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

HOST, REDIS = ("CPU", "LOCAL"), ("STORAGE", "REMOTE")
# With the default all blocks of a chunk would be in one.
BLOCK = 32


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, args=("--notify-keyspace-events", "Egex")) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    """Its host pool has room for about eight chunks of 2 MiB."""
    settings = {"chunk_size_tokens": CHUNK, "slot_bytes": 256 << 10, "pool_bytes": 18 << 20}
    with AgentServer(tmp_path / "agent", redis_server.unix_url, **settings) as server:
        yield server


def test_routers_know_what_is_there_after_a_reset_and_evictions(
    model_dir: Path,
    agent: AgentServer,
    redis_server: RedisServer,
    tmp_path: Path,
    prompts: Prompts,
) -> None:
    shared = prompts.tokens(CHUNK + CHUNK // 2)
    one, two = (shared + prompts.tokens(CHUNK // 2 + 1) for _ in range(2))
    router = Router(tmp_path)
    options = {**router.options, "block_size": BLOCK}
    with (
        router,
        redis_server.client() as client,
        start(model_dir, agent, tmp_path / "engine.log", **options) as engine,
    ):

        def told_until(there: dict[tuple[str, str | None], set[object]], what: str) -> None:
            def is_told() -> bool:
                router.told(lambda: engine.generate([prompts.tokens(20)], 1))
                return all({*router.there[place]} == each for place, each in there.items())

            wait_until(is_told, what)

        def settle() -> None:
            """What the last step has computed is stored with the next one, and told behind that."""
            for _ in range(2):
                router.told(lambda: engine.generate([prompts.tokens(20)], 1))
                agent.wait_idle()

        def keys() -> set[bytes]:
            settle()
            return {*stripe_keys(client)}

        engine.generate([two], 1)
        of_two = keys()
        engine.generate([one], 1)
        of_one = keys() - of_two
        blocks_one, blocks_two = ({*router.of_prompt(each, 2 * CHUNK)} for each in (one, two))
        assert len(blocks_one & blocks_two) == len(shared) // BLOCK
        both = blocks_one | blocks_two
        told_until({HOST: both, REDIS: both}, "both prompts in both places")

        assert engine.reset_prefix_cache()
        told_until({HOST: both, REDIS: both}, "both prompts after a reset")
        assert router.resets == 1

        # The second chunk of one prompt leaves Redis: that of the other shares half of its blocks.
        client.delete(*of_one)
        told_until({HOST: both, REDIS: blocks_two}, "a chunk that was deleted")

        # And the host pool, in which the other prompt's chunks were used last.
        engine.generate([two], 1)

        def is_evicted() -> bool:
            engine.generate([prompts.tokens(CHUNK + 1)], 1)
            settle()
            return not blocks_one <= {*router.there[HOST]}

        wait_until(is_evicted, "a chunk that was evicted")
        assert {*router.there[HOST]} & both == blocks_two
        assert blocks_two <= {*router.there[REDIS]}

        # Another reset, now with more than those.
        settle()
        before = {place: {*router.there[place]} for place in (HOST, REDIS)}
        assert engine.reset_prefix_cache()
        told_until(before, "everything after another reset")
        assert router.resets == 2
        assert [*router.sequence] == [*range(len(router.sequence))]

# SPDX-License-Identifier: Apache-2.0
"""Real engines: what somebody else has put into vLLM's blocks is stored under no name of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.engines import ForkedEngine, transfer_config
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts
from tests.integrations.sibling import BROUGHT_TOKENS, FIRST_TOKEN, beside
from tests.integrations.test_vllm import CHUNK, start

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROOT = Path(__file__).parents[2]


def test_kv_of_another_connector_is_not_stored(
    plain: ForkedEngine, model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    brought = [FIRST_TOKEN, *prompts.tokens(BROUGHT_TOKENS + 2 * CHUNK)]
    longer = [*brought, *prompts.tokens(2 * CHUNK)]
    own = [FIRST_TOKEN + 1, *prompts.tokens(2 * CHUNK)]
    expected = [plain.generate([each], 4).outputs[0] for each in (own, longer)]
    both, env = beside(transfer_config(agent.endpoint)), {"PYTHONPATH": str(ROOT)}
    with start(model_dir, agent, tmp_path / "engine.log", kv_transfer=both, env=env) as engine:
        engine.generate([brought], 8)
        engine.generate([longer], 8)  # finds the blocks in vLLM's own cache
        assert engine.generate([own], 4).outputs[0] == expected[0]
        engine.generate([own], 4)  # what was planned before this step has begun
        wait_until(lambda: agent.counter("stored_chunks") == 2, what="the store")
    with start(model_dir, agent, tmp_path / "alone.log") as alone:
        answer = alone.generate([longer], 4)
        assert (answer.outputs[0], answer.details["cached_tokens"][0]) == (expected[1], 0)
        answer = alone.generate([own], 4)
        assert answer.details["cached_tokens"][0] == 2 * CHUNK
    assert agent.counter("stored_chunks") > 2

# SPDX-License-Identifier: Apache-2.0
"""vLLM's resets with a step in flight, in a process that also steps the engine, as trainers do."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.engines import PATCH_VARIABLE, transfer_config
from tests.harness import AgentServer
from tests.integrations.conftest import Prompts
from tests.integrations.test_vllm import start

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(300)]


@pytest.mark.parametrize("is_on", [True, False])
def test_resets_succeed_while_a_step_is_in_flight(
    is_on: bool, model_dir: Path, tmp_path: Path, agent: AgentServer, prompts: Prompts
) -> None:
    """As without a connector."""
    patch, log_path = Path(__file__).with_name("resets.py"), tmp_path / "engine.log"
    # A setting that does not exist: the cache stays off.
    wrong = {} if is_on else {"unknown": 1}
    transfer = transfer_config(agent.endpoint, **wrong)
    env = {PATCH_VARIABLE: str(patch), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with start(model_dir, None, log_path, kv_transfer=transfer, env=env) as engine:
        engine._send({"do": "resets", "prompts": [prompts.tokens(n) for n in (300, 520, 600)]})
        found = engine.finish().details
    log = log_path.read_text()
    assert ("the cache stays off" in log) != is_on
    assert "is now off" not in log
    for name in ("reset", "pause"):
        assert found[name] == {"in_flight": 1, "done": True, "local": 0}, name
    for step in (3, 4, 9):
        assert found[f"running {step}"] == {"in_flight": 1, "done": True}
    assert found["again"] == found["answers"]

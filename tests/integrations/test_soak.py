# SPDX-License-Identifier: Apache-2.0
"""Every kind of fault for each model; `soak.py` has more models, and runs for an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.soak import FAULTS, TOGETHER, soak_family

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

CALM = [False] * 4
# After every two faults a round in which all is well again.
FAULTY = [True, True, False] * (len(FAULTS) // 2)


# Not qwen3-next: in bfloat16, long answers of vLLM alone depend on what else is in the batch.
@pytest.mark.parametrize("family", ["gemma3", "llama", "mistral"])
def test_every_answer_is_the_one_without_a_connector(family: str, tmp_path: Path) -> None:
    soak = soak_family(family, 20, CALM, FAULTY, seed=1, directory=tmp_path)
    assert soak.wrong == 0
    assert soak.compared_chunks > 0
    assert soak.false_alarms == 0
    assert soak.loaded_chunks > 0, "a model with a sliding window hits too"
    assert soak.answers == TOGETHER * len(CALM + FAULTY)
    assert soak.turns > 0
    assert soak.faults == dict.fromkeys(soak.faults, 1)
    assert set(soak.faults) == set(FAULTS)

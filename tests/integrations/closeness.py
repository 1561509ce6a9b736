# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): adds the step ``gap``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testkit import engine

_BEST = 20


def _gap(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """How much less likely a token is than the best one, as a difference of logarithms."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=_BEST, detokenize=False)
    prompts = [{"prompt_token_ids": request["prompt"]}]
    (found,) = llm.generate(prompts, sampling, use_tqdm=False)[0].outputs[0].logprobs
    best = max(each.logprob for each in found.values())
    token = found.get(request["token"])
    return {"gap": 1000.0 if token is None else best - token.logprob}


engine._STEPS["gap"] = _gap

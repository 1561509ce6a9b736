# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): adds the step ``mixed``.

It answers the prompt in PROMPT without an adapter, beside one prompt for each adapter in ADAPTERS,
and writes the tokens to MIXED.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testkit import engine


def _mixed(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompt, adapters = json.loads(os.environ["PROMPT"]), json.loads(os.environ["ADAPTERS"])
    how = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    loras = [LoRARequest(path, number, path) for number, path in enumerate(adapters, start=1)]
    # Those with adapters come first, and are there until the last step.
    prompts = [*({"prompt_token_ids": prompt[1:]} for _ in loras), {"prompt_token_ids": prompt}]
    sampling = [*(SamplingParams(**how, max_tokens=64) for _ in loras)]
    sampling.append(SamplingParams(**how, max_tokens=8))
    found = llm.generate(prompts, sampling, use_tqdm=False, lora_request=[*loras, None])
    Path(os.environ["MIXED"]).write_text(json.dumps(list(found[-1].outputs[0].token_ids)))
    return {}


engine._STEPS["mixed"] = _mixed

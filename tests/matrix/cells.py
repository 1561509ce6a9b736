# SPDX-License-Identifier: Apache-2.0
"""One cell of the matrix: a model in one vLLM, with and without the cache, on some servers.

Three engines answer the same questions: one without a connector; one with, which computes and
stores, and then reads the agent's host pool; and a new one with few blocks, which reads the server
after a restart of the agent. Every answer must equal that of the engine without a connector.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from testkit.engine import Answer, EngineFailed
from tests.engines import VLLM_VARIABLE, ForkedEngine, empty, transfer_config
from tests.harness import AgentServer, wait_until
from tests.matrix.models import (
    IMAGE_TOKENS,
    MAX_TOKENS,
    VOCABULARY,
    write_adapter,
    write_image,
    write_model,
)
from tests.servers import RedisServer

CHUNK_TOKENS = 256
ANSWER_TOKENS = 12
_OFF = re.compile(r"the cache stays off: (.*)")
# Lines of a log with an exception, and those that only say that another process had one.
_EXCEPTION = re.compile(
    r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(\w+(?:Error|Exception): .+)$", re.MULTILINE
)
_ELSEWHERE = (
    "Engine core init", "EngineCore encountered", "in subprocess", "Worker failed",
    "WorkerProc init",
)  # fmt: skip
# Paths, times and request ids.
_OF_ONE_RUN = re.compile(r" \(/.*?\)|\[\w+\]:\[.*?\] |(?<='0)-\w+")


@dataclass(frozen=True)
class Case:
    """A model and how engines run it.

    images: whether every prompt is asked with each of two images.
    few_blocks: the block pool of the engine with few blocks: one long prompt fits, all do not.
    near_nats: in bfloat16 the shape of a batch decides between tokens that are nearly equally
        likely, also without a connector: an answer is compared up to the first difference where
        the expected token leads the next one by less.
    may_be_off: whether it depends on the machine that the cache is on.
    """

    name: str
    model: str
    few_blocks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    lora: bool = False
    draft: str = ""  # the draft model of ``speculative_config``
    images: bool = False
    near_nats: float = 0.0
    may_be_off: bool = False


_STATE_OPTIONS = {"dtype": "bfloat16", "block_size": 256, "mamba_cache_mode": "align"}
_STATE_OPTIONS_32 = {**_STATE_OPTIONS, "dtype": "float32"}
# vLLM 0.32 keeps a state of Mamba-2 from inside a longer step, which its code for CPUs cannot do.
_MAMBA_2_OPTIONS = {**_STATE_OPTIONS_32, "max_num_batched_tokens": 256}
_ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
_DRAFT = {"method": "draft_model", "num_speculative_tokens": 3}
_EAGLE = {"method": "eagle", "num_speculative_tokens": 2}
_MTP = {"method": "mtp", "num_speculative_tokens": 1}
_LORA_OPTIONS = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}

CASES = [
    Case("Llama", "llama", 40),
    Case("SmolLM2-135M, real weights", "smollm2", 40),
    Case("Gemma-3", "gemma3", 150),
    Case("gpt-oss", "gpt-oss", 60),
    Case("gpt-oss, bfloat16", "gpt-oss", 60, {"dtype": "bfloat16"}, near_nats=0.1),
    # In a batch, vLLM's MLA on CPUs without AMX answers otherwise than one by one.
    Case("DeepSeek-V2 (MLA)", "deepseek-v2", 300, {"max_num_seqs": 1}, may_be_off=True),
    Case("Mistral, window", "mistral", 40),
    Case("Qwen3-Next", "qwen3-next", 60, _STATE_OPTIONS, near_nats=0.1),
    Case("Falcon-H1", "falcon-h1", 60, _MAMBA_2_OPTIONS),
    Case("Nemotron-H", "nemotron-h", 60, _MAMBA_2_OPTIONS),
    # In a batch, vLLM's short convolution on CPUs answers otherwise than one by one.
    Case("LFM2", "lfm2", 60, {**_STATE_OPTIONS_32, "max_num_seqs": 1}),
    Case("Llama-4", "llama4", 100),
    Case("OLMo-3", "olmo3", 100),
    Case("Cohere-2", "cohere2", 100),
    Case("Llama, LoRA", "llama", 40, _LORA_OPTIONS, lora=True),
    Case("Llama, ngram", "llama", 40, {"speculative_config": _NGRAM}),
    # The draft is the model itself: every token is accepted.
    Case("Llama, draft model", "llama", 40, {"speculative_config": _DRAFT}, draft="llama"),
    Case("Llama, EAGLE", "llama", 40, {"speculative_config": _EAGLE}, draft="eagle"),
    Case("MiMo, MTP", "mimo", 40, {"speculative_config": _MTP}),
    Case("BLIP-2, images", "blip2", 40, {"skip_tokenizer_init": False}, images=True),
    Case("Llama, TP 2", "llama", 40, {"tensor_parallel_size": 2}, _ONE_CORE_EACH),
    Case("gpt-oss, TP 2", "gpt-oss", 60, {"tensor_parallel_size": 2}, _ONE_CORE_EACH),
    Case("Llama, PP 2", "llama", 40, {"pipeline_parallel_size": 2}, _ONE_CORE_EACH),
]


def _cause(log: str) -> str:
    """The first exception in an engine's log, shortened."""
    found = _EXCEPTION.findall(log)
    cause = next((each for each in found if not any(s in each for s in _ELSEWHERE)), "")
    return _OF_ONE_RUN.sub("", cause).strip()[:200]


@dataclass
class Result:
    """What a cell has shown: a row of the table."""

    vllm: str
    case: str
    server: str
    off: str = ""
    asked_tokens: int = 0
    host_tokens: int = 0
    redis_tokens: int = 0
    batch_tokens: int = 0
    vllm_alone: str = ""  # why the engine without a connector does not run
    wrong: str = ""  # how the cell failed
    passed: int = 0  # without engines: how many settings or tests

    def append_to(self, path: Path) -> None:
        with path.open("a") as rows:
            rows.write(json.dumps(asdict(self)) + "\n")


class Question(NamedTuple):
    prompt: list[int]
    image: str | None = None  # its path

    @property
    def tokens(self) -> int:
        return len(self.prompt) + (IMAGE_TOKENS if self.image else 0)


_LENGTHS = (100, 128, 256, 257, 511, 513, 700, 1024, 1025, 1300, 2100)
_FEW_LENGTHS = (128, 257, 700, 1024, 1300)


def questions(images: Sequence[str | None] = (None,), few: bool = False) -> list[Question]:
    """Prompts shorter than, equal to and longer than the chunk and the models' windows.

    The last ones extend others, so that they hit the chunks of those.
    """
    tokens = random.Random(1)

    def prompt(count: int) -> list[int]:
        return [tokens.randrange(3, VOCABULARY) for _ in range(count)]

    lengths = _FEW_LENGTHS if few else _LENGTHS
    by_length = {length: prompt(length) for length in lengths}
    asked = [*by_length.values(), by_length[700] + prompt(400), by_length[1300] + prompt(300)]
    return [Question(each, image) for image in images for each in asked]


class Cell:
    """A model in one vLLM.

    models, directory: where models are kept, and a folder for this cell's files. few: half of the
    questions.
    """

    def __init__(
        self, case: Case, vllm: Path | None, models: Path, directory: Path, few: bool = False
    ) -> None:
        self._case = case
        self._directory = directory
        self._model = self._written(case.model, models)
        self._lora: tuple[str, int, str] | None = None
        if case.lora:
            self._lora = ("adapter", 1, str(write_adapter(models / "adapter")))
        self._images: list[str | None] = [None]
        if case.images:
            self._images = [str(write_image(directory / f"{n}.png", n)) for n in range(2)]
        self._env = {"VLLM_CPU_KVCACHE_SPACE": "1", **case.env}
        if vllm is not None:
            # Before 0.29, block hashes are equal in all processes only with a seed.
            self._env |= {VLLM_VARIABLE: str(vllm), "PYTHONHASHSEED": "0"}
        self._options = {"dtype": "float32", "max_model_len": MAX_TOKENS, **case.options}
        if case.draft:
            draft = {"model": str(self._written(case.draft, models))}
            self._options["speculative_config"] = case.options["speculative_config"] | draft
        self._questions = questions(self._images, few)
        self._expected: list[list[int]] = []
        self._leads: list[list[float]] = []  # of each token over the next one

    def _written(self, name: str, models: Path) -> Path:
        if not (models / name / "config.json").exists():
            write_model(name, models / name)
        return models / name

    def run(self, version: str, servers: Mapping[str, RedisServer]) -> list[Result]:
        """The results on each server that runs; raises AssertionError if an answer differs."""
        results = [Result(version, self._case.name, name) for name in servers]
        try:
            with self._engine("plain") as engine:
                self._learn(engine)
        except EngineFailed:
            for result in results:
                log = self._log("plain").read_text(errors="replace")
                result.vllm_alone = _cause(log) or "its process has ended"
            return results
        with self._engine("cold", connector=True) as engine:
            for result in results:
                server = servers[result.server]
                self._compute_and_read_the_host_pool(engine, server, result)
        if not any(result.off for result in results):
            few = {"max_num_batched_tokens": 1024, **self._options}
            few["num_gpu_blocks_override"] = self._case.few_blocks
            with self._engine("new", connector=True, **few) as engine:
                for result in results:
                    self._read_the_server(engine, servers[result.server], result)
        return results

    def _learn(self, engine: ForkedEngine) -> None:
        """What the engine without a connector answers."""
        answers = [self._generate(engine, [each], logprobs=2) for each in self._questions]
        self._expected = [answer.outputs[0] for answer in answers]
        self._leads = [answer.details["margins"][0] for answer in answers]
        different = {tuple(answer) for answer in self._expected}
        # Few prompts may have the same answer by chance: wrong KV shows in the others.
        assert len(different) >= 0.9 * len(answers), "many prompts have the same answer"

    def _check(self, answers: Sequence[list[int]], result: Result, phase: str) -> None:
        where = f"{result.server}, {phase}"
        compared = 0
        for answer, expected, leads in zip(answers, self._expected, self._leads, strict=True):
            pairs = enumerate(zip(answer, expected, strict=True))
            first = next((n for n, (one, other) in pairs if one != other), None)
            compared += ANSWER_TOKENS if first is None else first
            if first is not None:
                is_near = leads[first] < self._case.near_nats
                assert is_near, f"{where}: other tokens than without a connector"
        # Far from all near: the comparison says something.
        assert compared > len(answers) * ANSWER_TOKENS / 3, f"{where}: too few tokens to compare"

    def _compute_and_read_the_host_pool(
        self, engine: ForkedEngine, server: RedisServer, result: Result
    ) -> None:
        with self._agent(server, "cold") as agent:
            result.off = self._off("cold", agent)
            empty(engine)
            answers, _ = self._ask(engine)
            self._check(answers, result, "cold")
            if result.off:
                return
            agent.wait_idle()
            empty(engine)
            answers, hits = self._ask(engine)
            self._check(answers, result, "from the host pool")
            result.asked_tokens = sum(question.tokens for question in self._questions)
            result.host_tokens = sum(hits)
            agent.wait_idle()

    def _read_the_server(self, engine: ForkedEngine, server: RedisServer, result: Result) -> None:
        with self._agent(server, "new") as agent:
            assert not self._off("new", agent)
            empty(engine)
            answers, hits = self._ask(engine)
            self._check(answers, result, "from the server")
            result.redis_tokens = sum(hits)
            assert agent.counter("hit_chunks_redis") > 0
            empty(engine)
            # Twice, in two orders: blocks are reused, and requests preempted.
            for order in (1, -1):
                batch = self._generate(engine, self._questions[::order])
                self._check(batch.outputs[::order], result, "at once, with few blocks")
            result.batch_tokens = sum(batch.details["cached_tokens"])
            agent.wait_idle()

    def _ask(self, engine: ForkedEngine) -> tuple[list[list[int]], list[int]]:
        """One by one: the answers, and the tokens of each prompt that were cached."""
        answers = [self._generate(engine, [question]) for question in self._questions]
        return (
            [answer.outputs[0] for answer in answers],
            [answer.details["cached_tokens"][0] for answer in answers],
        )

    def _generate(self, engine: ForkedEngine, asked: Sequence[Question], **sampling: Any) -> Answer:
        prompts = [question.prompt for question in asked]
        images = [question.image for question in asked if question.image] or None
        return engine.generate(prompts, ANSWER_TOKENS, self._lora, images, **sampling)

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def _off(self, name: str, agent: AgentServer) -> str:
        """Waits until the agent knows the engine. Else the sentence why its cache is off."""

        def sentence() -> str:
            found = _OFF.search(self._log(name).read_text(errors="replace"))
            return found[1] if found else ""

        def ready() -> bool:
            engines = agent.status()["engines"]
            return bool(engines) and all(engine["ready"] for engine in engines)

        wait_until(lambda: sentence() or ready(), what="the engine at the agent", timeout_s=60.0)
        return sentence()

    def _engine(self, name: str, *, connector: bool = False, **options: Any) -> ForkedEngine:
        # A busy machine is late, not dead.
        kv_transfer = transfer_config(self._endpoint, agent_dead_after_s=10.0)
        return ForkedEngine(
            self._model,
            kv_transfer=kv_transfer if connector else None,
            log_path=self._log(name),
            options=self._options | options,
            env=self._env,
        )

    @functools.cached_property
    def _endpoint(self) -> str:
        return self._make_agent(None).endpoint

    def _make_agent(self, redis_url: str | None) -> AgentServer:
        return AgentServer(
            self._directory / "agent",
            redis_url,
            chunk_size_tokens=CHUNK_TOKENS,
            slot_bytes=(1 << 20) - 4096,
            pool_bytes=512 << 20,
        )

    @contextmanager
    def _agent(self, server: RedisServer, phase: str) -> Iterator[AgentServer]:
        with self._make_agent(server.unix_url) as agent:
            yield agent
        _, failed, how = agent.log.partition("Traceback")
        assert not failed, f"{phase}: the agent logged an exception: {how}"

# SPDX-License-Identifier: Apache-2.0
"""The main job with a real vLLM: time to first token cold, from the host pool, from Redis.

The reference case is a prompt of 4,097 tokens on a model with 64 KiB of KV a token: 256 MiB. An
engine without a connector and one with ours run side by side and answer in turn, so that changes of
the machine's speed affect both. Time to first token is the time of a request for one token.

    plain             no connector, nothing cached
    cold              our connector, nothing cached, earlier stores drained
    plain-rush, cold-rush   the same back to back: a prompt is computed while the last is stored
    vllm-hit          the prefix is still in vLLM's own blocks
    pool-hit          vLLM's cache emptied: from the agent's host pool
    redis-hit         a new engine and a new agent: from Redis
    get               256 MiB from the same Redis into slots, by the data plane alone

Redis is full at the start, as a cache is after its first day: each store evicts a value and reuses
its memory. A server that grows needs fresh pages instead, which on a virtual machine cost more than
everything else in a store.

With ``compress`` or ``shares`` the KV is bfloat16, and a further engine answers in turn: `packed`,
whose agent packs what it stores, or `shared`, which cuts chunks for other tensor-parallel sizes;
also `packed-rush`, `packed-pool-hit`, `packed-redis-hit`, ...
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import redis

from benchmarks.plane.client import PlaneClient
from benchmarks.plane.values import Arena
from benchmarks.report import ratios, rotated
from demo.model import CPU_SHAPE, ModelShape, make_model, make_prompts
from lmcache_redis.agent.embedded import embedded_redis
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.resp import RedisOptions
from testkit.agent import AgentServer
from testkit.engine import KEPT_HEAP, SPIN_S, Answer, EngineProcess

REDIS_BYTES = 6 << 30
POOL_BYTES = 4 << 30
HALF = ModelShape(layers=8, dtype="bfloat16", itemsize=2)
OURS, PACKED, SHARED = "cold", "packed", "shared"
_MOST_PROMPTS = 200
# Each takes three prompts per engine, and varies less than single prompts.
_MOST_RUSH_ROUNDS = 5
# How many of the last prompts the engine's own cache and the host pool hold.
_MOST_HITS = 7


def run(
    output_dir: Path,
    rounds: int = 5,
    prompt_tokens: int = 4097,
    compress: bool = False,
    shares: bool = False,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Rows with medians over ``rounds`` prompts; over at most 7 for hits and 5 for rushes.

    Logs go to ``output_dir``.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    shape = HALF if compress or shares else CPU_SHAPE
    forms = {OURS: "off"}
    forms |= {PACKED: "lossless"} if compress else {}
    forms |= {SHARED: "off"} if shares else {}
    make_model(output_dir / "model", shape, prompt_tokens + 64)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(embedded_redis(REDIS_BYTES))
        agents = {
            name: stack.enter_context(
                AgentServer(
                    f"ipc://{directory}/{name}.sock", url, output_dir / f"agent, {name}.log",
                    pool_bytes=POOL_BYTES // len(forms), compress=form, key_prefix=f"{name}:",
                )
            )
            for name, form in forms.items()
        }  # fmt: skip
        say(f"filling Redis to its limit of {REDIS_BYTES >> 30} GiB")
        _fill(url)
        job = _Job(output_dir, shape, agents, prompt_tokens, rounds, say)
        job.beside_plain()
        for name, agent in agents.items():
            agent.restart()
            job.from_redis(name)
        say("loading the same bytes with the data plane alone")
        chunk_bytes = 256 * shape.kv_bytes_per_token
        plane_s = _plane_alone(url, chunk_bytes, prompt_tokens // 256, rounds)
    return _rows(job.times, plane_s)


def _plane_alone(url: str, chunk_bytes: int, chunks: int, rounds: int) -> float:
    """The median of the seconds in which the data plane loads so many chunks."""
    values = Arena(chunk_bytes * chunks).values(chunk_bytes, chunks, DEFAULT_SLOT_BYTES)
    seconds = []
    options = RedisOptions(url, op_timeout_s=10.0)
    with contextlib.closing(PlaneClient(options, DEFAULT_SLOT_BYTES)) as client:
        for number in range(rounds + 1):
            client.prepare(f"main-job/{number}", values)
            client.store()
            values.wipe()
            started_s = time.perf_counter()
            client.load()
            seconds.append(time.perf_counter() - started_s)
            values.check()
    return statistics.median(seconds[1:])  # the first opens connections


def _fill(url: str) -> None:
    """Fills Redis with values of a stripe's size, which the stores evict."""
    value = bytes(DEFAULT_SLOT_BYTES)
    with redis.Redis.from_url(url) as client:
        for number in range(REDIS_BYTES // len(value)):
            client.set(f"filler:{number}", value)


class _Job:
    """Engines of one model, prompts of random tokens that never repeat, and times."""

    def __init__(
        self,
        output_dir: Path,
        shape: ModelShape,
        agents: Mapping[str, AgentServer],
        prompt_tokens: int,
        rounds: int,
        say: Callable[[str], None],
    ) -> None:
        self.times: dict[str, list[float]] = {}
        self._output_dir = output_dir
        self._shape = shape
        self._agents = agents
        self._tokens = prompt_tokens
        self._say = say
        self._unused = make_prompts(_MOST_PROMPTS, prompt_tokens)
        self._measured = [self._unused.pop() for _ in range(rounds)]
        self._outputs: list[Any] = []

    def beside_plain(self) -> None:
        """Cold prompts with and without a connector; hits in vLLM's blocks and the host pool."""
        self._say("starting an engine without a connector, and with it")
        with contextlib.ExitStack() as stack:
            engines = {
                name: stack.enter_context(self._engine(name)) for name in ("plain", *self._agents)
            }
            for engine in engines.values():
                engine.generate([self._unused.pop()])
            self._wait_idle()
            self._rush(engines)
            # These come last, so that Redis does not evict them before they are loaded.
            for number, prompt in enumerate(self._measured):
                self._say(f"cold, prompt {number + 1} of {len(self._measured)}")
                # In turn; the first one changes with the prompt.
                for name in rotated([*engines], number):
                    answer = self._ask(name, engines[name], prompt)
                    self._wait_idle()
                self._outputs.append(answer.outputs)
            for prompt in self._measured[-_MOST_HITS:]:
                self._ask("vllm-hit", engines[OURS], prompt)
            self._say("hits in the host pool")
            for name in self._agents:
                engines[name].reset_prefix_cache()
            for number, hit in enumerate(self._hits()):
                for name in rotated([*self._agents], number):
                    self._hit(_case(name, "pool-hit"), engines[name], hit)

    def from_redis(self, name: str) -> None:
        """Hits of a new engine, through an agent with an empty host pool."""
        self._say("starting a new engine; the agent is new too, its host pool is empty")
        with self._engine(name) as engine:
            engine.generate([self._unused.pop()])
            self._wait_idle()
            for hit in self._hits():
                self._hit(_case(name, "redis-hit"), engine, hit)

    def _wait_idle(self) -> None:
        for agent in self._agents.values():
            agent.wait_idle()

    def _rush(self, engines: Mapping[str, EngineProcess]) -> None:
        self._say("cold, back to back")
        for number in range(min(len(self._measured), _MOST_RUSH_ROUNDS)):
            rush = [self._unused.pop() for _ in range(3)]
            for name in rotated([*engines], number):
                time.sleep(SPIN_S)
                seconds = [engines[name].generate([prompt]).seconds for prompt in rush]
                case = f"{name}-rush"
                self.times.setdefault(case, []).append(statistics.mean(seconds[1:]))
                self._wait_idle()

    def _hits(self) -> list[tuple[list[int], Any]]:
        """The last prompts, with what they were answered."""
        return list(zip(self._measured[-_MOST_HITS:], self._outputs[-_MOST_HITS:], strict=True))

    def _hit(self, case: str, engine: EngineProcess, hit: tuple[list[int], Any]) -> None:
        prompt, expected = hit
        answer = self._ask(case, engine, prompt)
        cached = answer.details["cached_tokens"][0]
        if answer.outputs != expected or cached < len(prompt) // 256 * 256:
            raise RuntimeError(f"not a hit with the same answer: {cached} tokens were cached")

    def _ask(self, case: str, engine: EngineProcess, prompt: list[int]) -> Answer:
        time.sleep(SPIN_S)
        answer = engine.generate([prompt])
        self.times.setdefault(case, []).append(answer.seconds)
        return answer

    @contextlib.contextmanager
    def _engine(self, name: str) -> Iterator[EngineProcess]:
        agent = self._agents.get(name)
        # bfloat16 rounds otherwise in steps of another length: a hit computes one token.
        whole = (self._tokens - 1) // 256 * 256
        options = {"max_num_batched_tokens": whole} if PACKED in self._agents else {}
        with EngineProcess(
            self._output_dir / "model",
            log_path=self._output_dir / f"{name}.log",
            connector_endpoint=None if agent is None else agent.endpoint,
            connector={"share_across_tp": True} if name == SHARED else None,
            options=options | {"dtype": self._shape.dtype, "max_model_len": self._tokens + 64},
            env=KEPT_HEAP,
        ) as engine:
            if agent is not None:
                agent.wait_engine()
            yield engine


def _case(name: str, what: str) -> str:
    return what if name == OURS else f"{name}-{what}"


def _rows(times: dict[str, list[float]], get_s: float) -> list[dict[str, Any]]:
    beside = dict.fromkeys((OURS, PACKED, SHARED), "plain")
    beside |= {f"{name}-rush": "plain-rush" for name in beside}
    rows: list[dict[str, Any]] = []
    for case, seconds in times.items():
        reference = times.get(beside.get(case, ""))
        rows.append(
            {
                "case": case,
                "median_s": statistics.median(seconds),
                "min_s": min(seconds),
                "max_s": max(seconds),
                "ratio_to_plain": reference and statistics.median(ratios(seconds, reference)),
                "rounds": len(seconds),
            }
        )
    unknown = dict.fromkeys(("min_s", "max_s", "ratio_to_plain"))
    rows.append({"case": "get", "median_s": get_s, **unknown, "rounds": len(times["plain"])})
    return rows

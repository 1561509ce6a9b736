# SPDX-License-Identifier: Apache-2.0
"""Random prompts, few blocks, random faults: every answer is compared with one without a connector.

The tests run it until every kind of fault has struck; by hand it runs for as long as you like:

    .venv/bin/python -m tests.integrations.soak --model mistral --minutes 60
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines import PATCH_VARIABLE, ForkedEngine, transfer_config
from tests.harness import AgentServer, wait_until
from tests.matrix.models import write_model
from tests.servers import RedisServer, stripe_keys

ENGINE_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "block_size": 32,
    # Few: requests wait for blocks, are preempted, and get blocks that others have just released.
    "num_gpu_blocks_override": 70,
    "max_num_batched_tokens": 1024,
}
# Several groups share the blocks, and a window of a prefill holds as many as the steps in flight.
_WINDOWS_OPTIONS = ENGINE_OPTIONS | {"num_gpu_blocks_override": 330, "max_num_batched_tokens": 512}
_STATE_OPTIONS = ENGINE_OPTIONS | {
    "dtype": "bfloat16",  # vLLM's kernel for the CPU has no other
    "block_size": 256,
    "mamba_cache_mode": "align",
    "max_model_len": 4096,
    "num_gpu_blocks_override": 48,
    "max_num_batched_tokens": 1024,
}
# vLLM 0.32 keeps a state of Mamba-2 from inside a longer step, which its code for CPUs cannot do.
_MAMBA_2_OPTIONS = _STATE_OPTIONS | {"dtype": "float32", "max_num_batched_tokens": 256}
_LFM2_OPTIONS = _STATE_OPTIONS | {"dtype": "float32", "max_num_seqs": 1}
_VOCABULARY = 4000
_TOKENS = 4
TOGETHER = 4
_CHUNK_TOKENS = 128
_CANARY_EVERY = 4
_TURN_TOKENS = 75  # more than half a chunk: turns complete chunks while they are decoded
_TURNS = 3
_CONVERSATIONS = 3
_LASTING = ["redis stopped", "redis killed", "agent stopped", "agent killed"]
FAULTS = [*_LASTING, "redis emptied", "parts evicted", "parts corrupted", "agent restarted"]


@dataclass(frozen=True)
class Family:
    """A small model of random weights, whose greedy tokens differ by prompt.

    options: of an engine in which blocks are few. changes: of the model that the matrix has.
    repeats: an engine without a connector gives the same answer again, whatever it has in its own
    prefix cache. If not, only canaries tell. tie: in bfloat16, the difference of log probabilities
    that rounding makes.
    """

    options: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    repeats: bool = True
    tie: float = 0.15


MODELS: dict[str, Family] = {
    "llama": Family(ENGINE_OPTIONS),
    # Its only KV cache group is a sliding window, shorter than most prompts.
    "mistral": Family(ENGINE_OPTIONS, {"sliding_window": 256}),
    "smollm2": Family(ENGINE_OPTIONS),
    # Half of its layers: as many groups, of one layer each.
    "gemma3": Family(_WINDOWS_OPTIONS, {"num_hidden_layers": 6}),
    "gpt-oss": Family(_WINDOWS_OPTIONS),
    "olmo3": Family(_WINDOWS_OPTIONS),
    "cohere2": Family(_WINDOWS_OPTIONS),
    "llama4": Family(_WINDOWS_OPTIONS),
    "qwen3-next": Family(_STATE_OPTIONS, tie=0.3),
    "falcon-h1": Family(_MAMBA_2_OPTIONS),
    "nemotron-h": Family(_MAMBA_2_OPTIONS),
    "lfm2": Family(_LFM2_OPTIONS, repeats=False),
}


def make_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts of 350 to 1,450 tokens; most begin as another one does."""
    prompts: list[list[int]] = []
    for _ in range(count):
        prefix: list[int] = []
        if prompts and rng.random() < 0.7:
            other = rng.choice(prompts)
            prefix = other[: rng.randrange(50, len(other))]
        length = rng.randrange(max(350, len(prefix) + 1), 1450)
        prompts.append(
            prefix + [rng.randrange(1, _VOCABULARY) for _ in range(length - len(prefix))]
        )
    return prompts


@dataclass(frozen=True)
class Question:
    """A prompt, and what an engine without a connector answers.

    turn: it is one of a conversation, and its answer has ``_TURN_TOKENS`` tokens.
    """

    prompt: list[int]
    answer: list[int]
    turn: bool = False


def make_questions(
    plain: ForkedEngine, prompts: list[list[int]], rng: random.Random
) -> list[Question]:
    """The answers to ``prompts``, and conversations that grow by turns."""
    answers = plain.generate(prompts, _TOKENS).outputs
    questions = [Question(*each) for each in zip(prompts, answers, strict=True)]
    talks = [prompt[:450] for prompt in prompts[:_CONVERSATIONS]]
    for _ in range(_TURNS):
        answers = plain.generate(talks, _TURN_TOKENS).outputs
        for number, talk in enumerate(talks):
            questions.append(Question(talk, answers[number], turn=True))
            more = [rng.randrange(1, _VOCABULARY) for _ in range(rng.randrange(10, 150))]
            talks[number] = talk + answers[number] + more
    return questions


@dataclass
class Soak:
    """Counts of questions, answers, wrong answers, hit tokens and faults.

    turns: answers in conversations. ties: answers that differ from a token on that an engine
    without a connector takes for as good: in bfloat16 the best two may differ by no more than the
    rounding, which depends on what else is in the batch. loaded_chunks: loaded into blocks before
    the first fault. compared_chunks: parts compared by the agents that were not killed.
    false_alarms: canaries that found other KV than was cached.
    """

    questions: int = 0
    answers: int = 0
    turns: int = 0
    wrong: int = 0
    ties: int = 0
    widest_tie: float = 0.0
    cached_tokens: int = 0
    loaded_chunks: int = 0
    compared_chunks: int = 0
    false_alarms: int = 0
    faults: dict[str, int] = field(default_factory=dict)


class Faults:
    """Does something bad to the agent or to Redis, and mends it a moment later."""

    def __init__(self, rng: random.Random, agent: AgentServer, redis: RedisServer) -> None:
        self._rng = rng
        self._agent = agent
        self._redis = redis
        self._mend: Callable[[], Any] | None = None
        self._next: list[str] = []
        self._long = ""
        self._kinds: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "redis stopped": (redis.stop, redis.cont),
            "redis killed": (redis.kill, redis.start),
            "redis emptied": (lambda: redis.command("FLUSHALL"), lambda: None),
            "parts evicted": (self._evict, lambda: None),
            "parts corrupted": (self._corrupt, lambda: None),
            "agent stopped": (agent.stop, agent.cont),
            "agent killed": (agent.kill, agent.start),
            "agent restarted": (agent.restart, lambda: None),
        }

    def _some_keys(self, client: Any) -> list[bytes]:
        return [key for key in stripe_keys(client) if self._rng.random() < 0.3]

    def _evict(self) -> None:
        """Deletes parts at random, and restarts the agent so that it reads what is left."""
        with self._redis.client() as client:
            if keys := self._some_keys(client):
                client.delete(*keys)
        self._agent.restart()

    def _corrupt(self) -> None:
        """Changes a byte of parts at random, and restarts the agent so that it reads them."""
        with self._redis.client() as client:
            for key in self._some_keys(client):
                where = self._rng.randrange(max(1, client.strlen(key)))
                byte = client.getrange(key, where, where)
                client.setrange(key, where, bytes([(byte or b"\0")[0] ^ 0x40]))
        self._agent.restart()

    def strike(self) -> tuple[str, float]:
        """One fault, and for how many seconds it lasts until it is to be mended.

        Every kind has its turn before one comes again. One in each turn outlasts every lease.
        What lasts no longer than its stroke has nothing to be mended.
        """
        if not self._next:
            self._next = self._rng.sample(FAULTS, len(FAULTS))
            self._long = self._rng.choice(_LASTING)
        name = self._next.pop()
        strike, self._mend = self._kinds[name]
        strike()
        if name not in _LASTING:
            return name, 0.0
        return name, 7.0 if name == self._long else self._rng.random() * 2.5

    def mend(self) -> None:
        """Undoes the last fault."""
        mend, self._mend = self._mend, None
        if mend is not None:
            mend()


def run_soak(
    soak: Soak,
    engine: ForkedEngine,
    questions: list[Question],
    rounds: Iterable[bool],
    rng: random.Random,
    faults: Faults,
    gap: Callable[[list[int], int], float] | None,
    tie: float,
    tell: Callable[[str], None] = lambda line: None,
) -> Soak:
    """Asks several questions at a time, half of the rounds with vLLM's own cache emptied before.

    One round in four asks turns of conversations. rounds: for each, whether a fault strikes. gap:
    how much worse a token after a prompt is than the best; None if answers must be equal. tie:
    by how much it may be.
    """
    turns = [n for n, question in enumerate(questions) if question.turn]
    for number, struck in enumerate(rounds):
        if rng.random() < 0.5:
            engine.reset_prefix_cache()
        talk = number % 4 == 3
        among = turns if talk else range(len(questions))
        count = _TURN_TOKENS if talk else _TOKENS
        chosen = [rng.choice(among) for _ in range(TOGETHER)]
        engine.begin_generate([questions[n].prompt for n in chosen], count)
        if struck:
            time.sleep(rng.random() * 0.5)
            name, seconds = faults.strike()
            soak.faults[name] = soak.faults.get(name, 0) + 1
            time.sleep(seconds)
            faults.mend()
        answer = engine.finish()
        wrong = []
        for n, tokens in zip(chosen, answer.outputs, strict=True):
            expected = questions[n].answer[:count]
            if tokens == expected:
                continue
            same = next(i for i in range(count) if tokens[i] != expected[i])
            worse = 1000.0
            if gap is not None:
                worse = gap(questions[n].prompt + tokens[:same], tokens[same])
            if worse > tie:
                wrong.append(n)
                tell(f"question {n}: token {same} is {worse:.3f} worse")
                continue
            soak.ties += 1
            soak.widest_tie = max(soak.widest_tie, worse)
        soak.answers += len(chosen)
        soak.turns += len(chosen) if talk else 0
        soak.wrong += len(wrong)
        soak.cached_tokens += sum(answer.details["cached_tokens"])
        if wrong:
            tell(f"wrong answers to prompts {wrong} of {chosen}")
        tell(f"{soak.answers} answers, {soak.wrong} wrong, faults {soak.faults}")
    return soak


def rounds_of(seconds: float, share: float, rng: random.Random) -> Iterator[bool]:
    """Rounds for so long, in a share of which a fault strikes."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        yield rng.random() < share


def soak_family(
    family: str,
    prompts: int,
    calm: Iterable[bool],
    faulty: Iterable[bool],
    seed: int,
    directory: Path,
    tell: Callable[[str], None] = lambda line: None,
) -> Soak:
    """A model, its answers without a connector, and then the soak with all that belongs to it.

    calm and faulty: the rounds before the first fault, and the others.
    """
    rng = random.Random(seed)
    model = write_model(family, directory / family, **MODELS[family].changes)
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    few = MODELS[family].options
    rich = {name: few[name] for name in few if name != "num_gpu_blocks_override"}
    patch = {PATCH_VARIABLE: str(Path(__file__).with_name("closeness.py"))}
    plain = ForkedEngine(model, log_path=directory / "plain.log", options=rich, env=env | patch)

    def gap(prompt: list[int], token: int) -> float:
        plain._send({"do": "gap", "prompt": prompt, "token": token})
        return float(plain.finish().details["gap"])

    with plain:
        questions = make_questions(plain, make_prompts(rng, prompts), rng)
        plain.reset_prefix_cache()
        with (
            RedisServer(directory) as redis,
            AgentServer(
                directory / "agent",
                redis.unix_url,
                chunk_size_tokens=_CHUNK_TOKENS,
                pool_bytes=16 << 20,
                canary_every=_CANARY_EVERY,
            ) as agent,
            ForkedEngine(
                model,
                kv_transfer=transfer_config(agent.endpoint, load_always=False),
                log_path=directory / "engine.log",
                options=few,
                env=env | {PATCH_VARIABLE: str(Path(__file__).with_name("many_canaries.py"))},
            ) as engine,
        ):  # fmt: skip
            wait_until(
                lambda: (engines := agent.status()["engines"]) and all(e["ready"] for e in engines),
                what="the engine at the agent",
            )
            soak = Soak(questions=len(questions))
            ties, tie = gap if few["dtype"] == "bfloat16" else None, MODELS[family].tie
            tell(
                f"{len(questions)} questions, {sum(each.turn for each in questions)} of them turns"
            )
            for _ in range(2):  # the second time they are loaded, however slow the machine is
                engine.generate([each.prompt for each in questions[:TOGETHER]], _TOKENS)
                agent.wait_idle()
                engine.reset_prefix_cache()
            # Of their own: they use as many numbers as there are keys.
            faults = Faults(random.Random(seed), agent, redis)
            run_soak(soak, engine, questions, calm, rng, faults, ties, tie, tell)
            soak.loaded_chunks = agent.counter("retrieved_chunks")
            soak.compared_chunks = agent.counter("compared_chunks")
            run_soak(soak, engine, questions, faulty, rng, faults, ties, tie, tell)
            soak.compared_chunks += agent.counter("compared_chunks")
            soak.false_alarms = agent.log.count("is not what its engine has computed")
            return soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="mistral")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--calm-minutes", type=float, default=1.0, help="before the first fault")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        rng = random.Random(arguments.seed)
        soak = soak_family(
            arguments.model,
            40,
            rounds_of(arguments.calm_minutes * 60, 0.0, rng),
            rounds_of(arguments.minutes * 60, 0.4, rng),
            arguments.seed,
            Path(directory),
            lambda line: print(line, flush=True),
        )
    print(soak)
    wrong = soak.wrong if MODELS[arguments.model].repeats else 0
    raise SystemExit(1 if wrong or soak.false_alarms else 0)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Random requests, aborts, evictions and resets in vLLM's own scheduler, each from a seed.

    python -m tests.integrations.random_runs --cases 10000 --mode async --seed 0

prints what happened, and the seed of each case that failed; ``--seed S --cases 1`` runs one again.

    sync      one step after the other
    async     one or two steps in flight
    faults    either; a method of the connector's own parts raises at a random call

With another vLLM before the installed one on PYTHONPATH, its scheduler runs. `played` says what is
checked in each step; at the end no block is held, and vLLM's own cache can be emptied.
"""

from __future__ import annotations

import argparse
import collections
import logging
import random
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

from tests.integrations.played import PlayedEngine
from tests.integrations.played_faults import Fault
from tests.integrations.test_groups import full, has_field, local, replayed, ring, state, window

# The steps that may be in flight when another is scheduled.
_IN_FLIGHT = {"sync": (0,), "async": (1, 2), "faults": (0, 1, 2)}
MODES = tuple(_IN_FLIGHT)
CHUNK = 16
MODELS: dict[str, list[Any]] = {
    "full attention": [full(4)],
    "a window": [window(10, block=4)],
    "a window shorter than a chunk": [window(10, block=4), full(4)],
    "a window longer than a chunk": [full(4), window(40, block=4)],
    "two windows": [window(10, block=4), window(33, block=4), full(4)],
    "tokens that a window keeps longer": [full(4), window(10, 3, block=4)],
    "attention chunks": [full(4), local(32, block=4)],
    "attention chunks shorter than a chunk": [full(4), local(8, block=4)],
    "states": [state(8), state(8), full(8)],
    "states and a window": [state(8), full(8), window(12, block=8)],
    "states of larger blocks": [state(16), full(4)],
    "a window of smaller blocks": [window(10, block=4), full(8)],
    "a window of larger blocks": [full(4), window(20, block=8)],
    # Groups that vLLM's own prefix cache leaves out.
    "a buffer of one request": [ring(8), full(4)],
    "a buffer between others": [window(10, block=4), ring(8), state(8), full(8)],
}
if has_field(SlidingWindowMLASpec, "bounded_replay"):  # vLLM 0.31 or newer
    MODELS |= {
        "a window that is replayed": [full(4), replayed(12, block=4), full(16)],
        "a buffer and a replayed window": [replayed(12, block=4), ring(8), full(4)],
    }
# The longest request: 171 tokens and 30 of its answer. Windows also hold the tokens of a step. vLLM
# admits a preempted request only if all of it fits.
FEW_BLOCKS = {1: 56, 2: 80, 3: 98, 4: 108}
# Of each group, for the tokens of another step in flight.
_BLOCKS_IN_FLIGHT = 16
_ROUNDS = 16
_LOST = 0.05  # in this share of rounds steps are lost


def write_config(directory: Path) -> Path:
    """A model's settings. The scheduler looks at little more than the length of its context."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=100,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(directory)
    return directory


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(50) for _ in range(count)]


def played(
    config_dir: Path, model: str, seed: int, *, num_blocks: int = 300, **options: Any
) -> tuple[PlayedEngine, random.Random]:
    """An engine of one of `MODELS`, and what its random numbers come from."""
    rng, specs = random.Random(seed), MODELS[model]
    return (
        PlayedEngine(
            config_dir, specs, chunk_tokens=CHUNK, num_blocks=num_blocks, rng=rng, **options
        ),
        rng,
    )


def use(
    engine: PlayedEngine,
    rng: random.Random,
    rounds: int,
    *,
    resets_of_running: float = 0.3,
    lost: float = 0.0,
) -> None:
    """Requests that begin like others, aborts, evictions, lost steps, and resets of vLLM's cache.

    lost: the share of rounds in which the steps in flight raise.
    """
    common = [tokens(rng, 150) for _ in range(2)]
    for _ in range(rounds):
        for _ in range(rng.randrange(4)):
            prompt = rng.choice(common)[: rng.randrange(1, 150)]
            stops = rng.random() < 0.5
            engine.ask(prompt + tokens(rng, rng.randrange(20)), rng.randrange(1, 30), stops=stops)
        for _ in range(rng.randrange(6)):
            engine.step()
        if rng.random() < 0.1 and engine.asked:
            engine.abort(rng.choice(engine.asked))
        if rng.random() < 0.1:
            engine.evict(0.3)
        if rng.random() < lost:
            engine.lose_steps()
        if rng.random() < 0.3:
            engine.reset(running=rng.random() < resets_of_running)
    engine.run()


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    model: str
    few: bool
    fail: float
    canaries: str
    in_flight: int
    drafts: int
    faulty: bool

    @classmethod
    def of(cls, seed: int, mode: str, model: str = "") -> Case:
        rng = random.Random(f"{mode} {seed}")
        model = model or rng.choice(list(MODELS))
        return cls(
            seed,
            model,
            few=rng.random() < 0.5,
            fail=rng.choice((0.0, 0.2)),
            canaries=rng.choice(("none", "none", "some", "all")),
            in_flight=rng.choice(_IN_FLIGHT[mode]),
            drafts=0 if _has_states(model) else rng.choice((0, 1, 3)),
            faulty=mode == "faults",
        )

    def run(self, config_dir: Path, rounds: int = _ROUNDS) -> dict[str, int]:
        """What happened; raises what went wrong."""
        groups = len(MODELS[self.model])
        few = FEW_BLOCKS[groups] + self.in_flight * _BLOCKS_IN_FLIGHT * (groups - 1)
        engine, rng = played(
            config_dir,
            self.model,
            self.seed,
            num_blocks=few if self.few else 300,
            fail=self.fail,
            in_flight=self.in_flight,
            drafts=self.drafts,
            may_fail=self.faulty,
        )
        engine.agent.canary_every = 0 if self.canaries == "none" else 3
        engine.agent.compare_only = self.canaries == "all"
        if not self.faulty:
            use(engine, rng, rounds, lost=_LOST)
            assert self.canaries != "all" or engine.counts.loads == 0
            return engine.counts.totals()
        with Fault(engine.connector, rng) as fault:
            try:
                use(engine, rng, rounds)
            except Exception as error:
                error.add_note(str(fault))
                raise
        return {**engine.counts.totals(), "faults": fault.struck}


def _has_states(model: str) -> bool:
    # vLLM keeps blocks of their own for drafts beside states: not played.
    return any(hasattr(spec, "mamba_cache_mode") for spec in MODELS[model])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--model", choices=list(MODELS), default="")
    parser.add_argument("--verbose", action="store_true", help="tracebacks, and vLLM's log")
    arguments = parser.parse_args()
    if not arguments.verbose:
        logging.disable(logging.CRITICAL)
    from vllm import version

    totals: collections.Counter[str] = collections.Counter()
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        config_dir = write_config(Path(directory))
        for seed in range(arguments.seed, arguments.seed + arguments.cases):
            case = Case.of(seed, arguments.mode, arguments.model)
            try:
                totals.update(case.run(config_dir))
            except Exception as error:
                failed.append(seed)
                why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                print(f"{asdict(case)}: {why} {getattr(error, '__notes__', '')}", flush=True)
                if arguments.verbose:
                    traceback.print_exc()
    done = f"{arguments.mode}: {arguments.cases} cases: {dict(totals)}"
    print(f"vLLM {version.__version__}, {done}; failed: {failed}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()

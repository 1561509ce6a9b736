# SPDX-License-Identifier: Apache-2.0
"""Time to first token by the rate of the link to Redis: computed, always loaded, and adaptive.

Three engines of one small model run side by side and answer in turn: one without a connector, one
that always loads (``load_always``), and one with the defaults. With ``compress`` both of the latter
have the defaults, and bfloat16 KV; one agent packs it. All chunks are in a Redis behind a link that
a token bucket limits (`link`); host pools and vLLM's own caches are empty before each request.
Rates fall from one to the next. After a change each engine answers one request that is not counted,
but reported: in it a load may be late.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.link import LimitedLink
from benchmarks.plots import COLOURS, draw
from benchmarks.report import ratios, rotated
from demo.model import ModelShape, make_model, make_prompts
from testkit.agent import AgentServer
from testkit.engine import KEPT_HEAP, SPIN_S, EngineProcess

# 8 KiB of KV a token.
SHAPE = ModelShape(layers=1, dtype="float32", itemsize=4)
HALF = ModelShape(layers=2, dtype="bfloat16", itemsize=2)
PLAIN, ALWAYS, ADAPTIVE, PACKED = "no connector", "always loads", "adaptive", "adaptive, packed"
_COLUMNS = {PLAIN: "plain", ALWAYS: "always", ADAPTIVE: "adaptive", PACKED: "packed"}
_POOL_BYTES = 512 << 20


def run(
    output_dir: Path,
    rounds: int = 5,
    prompt_tokens: int = 2049,
    mbits: Sequence[float] = (10_000, 3_000, 1_000, 300, 100, 20),
    compress: bool = False,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """One row for each rate: medians over ``rounds`` prompts, and ratios to no connector."""
    output_dir.mkdir(parents=True, exist_ok=True)
    shape = HALF if compress else SHAPE
    make_model(output_dir / "small-model", shape, prompt_tokens + 64)
    loaders = (ADAPTIVE, PACKED) if compress else (ALWAYS, ADAPTIVE)
    prompts = make_prompts(2 * len(mbits) * (rounds + 1) + 4, prompt_tokens)
    warm_up, prompts = prompts[:4], prompts[4:]
    # Those that load have prompts of their own, which no other has loaded.
    own = dict(zip(loaders, (prompts[::2], prompts[1::2]), strict=True))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        link = stack.enter_context(LimitedLink(Path(directory)))
        agents = {}
        started = _engine(output_dir, PLAIN, prompt_tokens, None, shape.dtype)
        engines = {PLAIN: stack.enter_context(started)}
        for number, name in enumerate(loaders):
            endpoint = f"ipc://{directory}/{number}.sock"
            log = output_dir / f"agent, {name}.log"
            form = "lossless" if name == PACKED else "off"
            agent = AgentServer(endpoint, link.url, log, pool_bytes=_POOL_BYTES, compress=form)
            agents[name] = stack.enter_context(agent)
            engine = _engine(output_dir, name, prompt_tokens, endpoint, shape.dtype)
            engines[name] = stack.enter_context(engine)
            agent.wait_engine()
        say(f"storing {len(prompts)} prompts")
        for name in loaders:
            for prompt in own[name]:
                engines[name].generate([prompt])
                agents[name].wait_idle()
        for name, agent in agents.items():
            agent.restart().wait_engine()
            engines[name].reset_prefix_cache()
        # Engines learn what computing takes.
        for prompt in warm_up:
            for engine in engines.values():
                engine.generate([prompt])
        rows = []
        for mbit in mbits:
            link.limit(mbit)
            times: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(rounds + 1):
                say(f"{mbit:g} Mbit/s, request {number} of {rounds}")
                asked = {PLAIN: warm_up[0]} | {name: own[name].pop() for name in loaders}
                for name in rotated([*engines], number):
                    engines[name].reset_prefix_cache()
                    if name in agents:
                        agents[name].wait_idle()
                    time.sleep(SPIN_S)
                    times[name].append(engines[name].generate([asked[name]]).seconds)
            rows.append(_row(mbit, times, agents[loaders[1]]))
        return rows


def plot(rows: Sequence[dict[str, Any]], path: Path) -> Path:
    """Time to first token by the link's rate."""

    def panels(axes: Any) -> None:
        (panel,) = axes
        rates = [row["mbit_per_s"] for row in rows]
        names = [name for name in _COLUMNS if f"{_COLUMNS[name]}_s" in rows[0]]
        for name, colour in zip(names, COLOURS, strict=False):
            values = [row[f"{_COLUMNS[name]}_s"] for row in rows]
            panel.plot(rates, values, marker="o", color=colour, label=name)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlabel("link to Redis, Mbit/s")
        panel.set_ylabel("time to first token, s (median)")

    return draw(path, "Hits by the rate of the link to Redis", 1, 1, panels)


def _engine(
    output_dir: Path, name: str, prompt_tokens: int, endpoint: str | None, dtype: str
) -> EngineProcess:
    kv_transfer = {
        "kv_connector": "LMCacheRedisConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"endpoint": endpoint, "load_always": name == ALWAYS},
    }
    return EngineProcess(
        output_dir / "small-model",
        log_path=output_dir / f"{name}.log",
        kv_transfer=None if endpoint is None else kv_transfer,
        options={"dtype": dtype, "max_model_len": prompt_tokens + 64},
        env=KEPT_HEAP,
    )


def _row(mbit: float, times: dict[str, list[float]], agent: AgentServer) -> dict[str, Any]:
    row: dict[str, Any] = {"mbit_per_s": mbit}
    for name, seconds in times.items():
        row[f"{_COLUMNS[name]}_s"] = statistics.median(seconds[1:])
        if name != PLAIN:
            to_plain = ratios(seconds[1:], times[PLAIN][1:])
            row[f"{_COLUMNS[name]}_to_plain"] = statistics.median(to_plain)
    if PACKED in times:
        to_adaptive = ratios(times[PACKED][1:], times[ADAPTIVE][1:])
        row["packed_to_adaptive"] = statistics.median(to_adaptive)
    row["adaptive_first_s"] = times[ADAPTIVE][0]
    status = agent.status()
    row |= {name: status["counters"][name] for name in ("miss_slower", "lookups_cut", "probes")}
    # What the agent believes.
    row["measured_mbit_per_s"] = status["loads"]["tiers"]["redis"]["bytes_per_s"] * 8 // 1_000_000
    (row["prefill_tokens_per_s"],) = status["loads"]["prefill_tokens_per_s"].values()
    return row

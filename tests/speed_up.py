# SPDX-License-Identifier: Apache-2.0
"""The table of docs/speed-up.md, computed from models, GPUs and networks.

python -m tests.speed_up     writes it into the page

A GPU computes prefill at half of its peak (dense bfloat16, data sheet), with two operations a
token for each parameter that takes part. A network carries 94 % of its rate. Attention, which makes
long prompts slower to compute, is left out: it would make each gain larger.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "speed-up.md"
_TABLE = re.compile(r"(<!-- speed-up: begin -->\n).*?(<!-- speed-up: end -->)", re.DOTALL)
SHARE_OF_PEAK = 0.5
SHARE_OF_WIRE = 0.94
GBIT = (10, 25, 100, 200)
PEAK_TFLOPS = {"L4": 121, "L40S": 362, "A100": 312, "H100": 989, "B200": 2250}


@dataclass(frozen=True)
class Model:
    name: str
    kv_bytes_per_token: int
    active_parameters: float


# 2 (K and V) x layers x KV heads x head size x 2 bytes; DeepSeek-V3: layers x 576 x 2 bytes (MLA).
LLAMA_8B = Model("Llama-3.1-8B", 2 * 32 * 8 * 128 * 2, 8.0e9)
QWEN_8B = Model("Qwen3-8B", 2 * 36 * 8 * 128 * 2, 8.2e9)
QWEN_30B = Model("Qwen3-30B-A3B", 2 * 48 * 4 * 128 * 2, 3.3e9)
LLAMA_70B = Model("Llama-3.3-70B", 2 * 80 * 8 * 128 * 2, 70.6e9)
DEEPSEEK = Model("DeepSeek-V3", 61 * 576 * 2, 37e9)
ROWS = (
    (LLAMA_8B, 1, "L4"),
    (QWEN_8B, 1, "L40S"),
    (QWEN_8B, 1, "A100"),
    (QWEN_8B, 1, "H100"),
    (QWEN_8B, 1, "B200"),
    (QWEN_30B, 1, "H100"),
    (LLAMA_70B, 4, "H100"),
    (DEEPSEEK, 8, "H100"),
)


def row(model: Model, gpus: int, gpu: str) -> str:
    tokens_per_s = gpus * PEAK_TFLOPS[gpu] * 1e12 * SHARE_OF_PEAK / (2 * model.active_parameters)
    kv_bytes_per_s = tokens_per_s * model.kv_bytes_per_token
    break_even_gbit = kv_bytes_per_s * 8 / 1e9 / SHARE_OF_WIRE
    cells = [
        model.name,
        f"{gpus} {gpu}",
        f"{tokens_per_s:,.0f}",
        f"{break_even_gbit:.0f}",
        *(gain(gbit / break_even_gbit) for gbit in GBIT),
    ]
    return f"| {' | '.join(cells)} |"


def gain(factor: float) -> str:
    return f"{factor:.1f}" if factor > 1 else "none"


def table() -> str:
    names = ["model", "GPUs", "tokens/s", "break-even, Gbit/s"]
    names += [f"at {gbit}" for gbit in GBIT]
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return "\n".join([*lines, *(row(*each) for each in ROWS)])


def page() -> str:
    return _TABLE.sub(lambda found: f"{found[1]}{table()}\n{found[2]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())

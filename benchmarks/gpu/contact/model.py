# SPDX-License-Identifier: Apache-2.0
"""A small transformer whose prefix goes through an agent and comes back: its logits stay the same.

Random weights, attention and a feed-forward layer per block: enough that a wrong byte of KV, or a
page in the wrong place, changes the logits.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.engine import CHUNK_TOKENS, Engine, Shape
from benchmarks.gpu.contact.figures import Figure, judged, zero
from testkit.agent import AgentServer

if TYPE_CHECKING:
    import torch

_LAYERS, _HEADS, _HEAD, _BLOCK_TOKENS, _WORDS = 8, 8, 64, 16, 1000
_TAIL_TOKENS = 32
QUICK: dict[str, Any] = {"tokens": 256, "rounds": 1, "pool_bytes": 64 << 20}
_NO_SERVER_URL = "redis://127.0.0.1:9"  # the discard port: refused at once


class Model:
    """Weights of every layer; `__call__` continues after a KV."""

    def __init__(self, device: torch.device) -> None:
        import torch

        torch.manual_seed(0)
        width = _HEADS * _HEAD
        self._embedding = torch.randn(_WORDS, width, device=device)
        self._layers = [
            tuple(torch.randn(width, n * width, device=device) / width**0.5 for n in (3, 1, 2))
            for _ in range(_LAYERS)
        ]
        self._down = torch.randn(2 * width, width, device=device) / (2 * width) ** 0.5

    def __call__(
        self, tokens: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Logits of the tokens, and the KV of all, each ``[tokens, heads, head]`` in bfloat16."""
        import torch

        hidden = self._embedding[tokens]
        kv = []
        for number, (qkv, out, up) in enumerate(self._layers):
            query, key, value = (
                each.view(len(tokens), _HEADS, _HEAD) for each in (hidden @ qkv).chunk(3, dim=1)
            )
            key, value = key.bfloat16(), value.bfloat16()
            if past:
                key, value = (
                    torch.cat(pair) for pair in zip(past[number], (key, value), strict=True)
                )
            kv.append((key, value))
            before = len(key) - len(tokens)
            mask = torch.ones(len(tokens), len(key), dtype=torch.bool, device=hidden.device)
            attended = torch.nn.functional.scaled_dot_product_attention(
                *(each.float().transpose(0, 1) for each in (query, key, value)),
                attn_mask=mask.tril(before),
            )
            hidden = hidden + attended.transpose(0, 1).reshape(len(tokens), -1) @ out
            hidden = hidden + torch.relu(hidden @ up) @ self._down
            hidden = torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])
        return hidden @ self._embedding.T, kv


def measure(
    part: str = "model", tokens: int = 2048, rounds: int = 10, pool_bytes: int = 1 << 30
) -> Iterator[Figure]:
    """In torch's memory: on the first GPU, else on the CPU, which says nothing about a GPU.

    Raises EngineFailed, with the agent's log, if the agent does not map the memory.
    """
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    versions = f"{device.type}, torch {torch.__version__}"
    yield judged(part, "the model is on", versions, "cuda", lambda _: device.type == "cuda")
    shape = Shape("model", 2 * _LAYERS, _BLOCK_TOKENS * _HEADS * _HEAD * 2, CHUNK_TOKENS // 16)
    where = Path(tempfile.mkdtemp(prefix="lmcr-"))
    agent = AgentServer(
        f"ipc://{where}/agent.sock", _NO_SERVER_URL, where / "agent.log",
        pool_bytes=pool_bytes, chunk_size_tokens=CHUNK_TOKENS, write_queue_bytes=0,
    )  # fmt: skip
    wrong, taken = 0, []
    with agent, torch.no_grad():
        engine = Engine(agent, shape, tokens // CHUNK_TOKENS, device)
        pages = engine.memory.view(torch.bfloat16).view(
            2 * _LAYERS, -1, _BLOCK_TOKENS, _HEADS, _HEAD
        )
        model = Model(device)
        for _ in range(rounds):
            prompt = torch.randint(0, _WORDS, (tokens,), device=device)
            tail = torch.randint(0, _WORDS, (_TAIL_TOKENS,), device=device)
            _, kv = model(prompt, [])
            for at, each in enumerate(part for layer in kv for part in layer):
                pages[at, engine.source_blocks] = each.view(-1, _BLOCK_TOKENS, _HEADS, _HEAD)
            _, hashes = engine.store()
            pages[:, engine.target_blocks] = 0
            started_s = time.perf_counter()
            engine.retrieve(hashes)
            taken.append(time.perf_counter() - started_s)
            loaded = pages[:, engine.target_blocks].view(2 * _LAYERS, tokens, _HEADS, _HEAD)
            back = [(loaded[2 * n], loaded[2 * n + 1]) for n in range(_LAYERS)]
            wrong += not torch.equal(model(tail, kv)[0], model(tail, back)[0])
        engine.close()
    yield zero(part, f"other logits in {rounds} rounds", wrong)
    yield Figure(part, f"lookup and retrieve of {tokens} tokens, ms", median(taken) * 1e3)

# SPDX-License-Identifier: Apache-2.0
"""K and V come out of Redis by what docs/reference/value-format.md says of shares, and no more."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.platforms import current_platform

from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm.identity.heads import cut_by_head
from tests.harness import AgentServer, Engine, block_hashes
from tests.integrations.layers import BLOCK, Backend, config_of, cpu_layer
from tests.servers import RedisServer, stripe_keys
from tests.value_reader import PLACES, Array, keys_and_values, read_chunks

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM for the CPU"),
]

DOCS = Path(__file__).parents[2] / "docs" / "reference"
TOKENS, BLOCKS_A_CHUNK, CHUNKS = BLOCK, 2, 2
BLOCKS = [5, 2, 9, 4]  # of the prompt


class Family(NamedTuple):
    """groups: how many layers each has, and its reach."""

    heads: int
    size: int
    dtype: torch.dtype
    order: str  # of `PLACES`
    groups: tuple[tuple[int, Reach], ...]
    shape: Callable[[int, int, int], tuple[int, ...]]  # blocks, heads, size
    backend: str = ""  # the order of its dimensions; else vLLM's, for CPUs
    shares: int | None = None


class KnownEngine(Engine):
    """An engine of some ranks, whose layers' backend has written known K and V."""

    block_size_tokens = TOKENS

    def __init__(self, endpoint: str, family: Family, ranks: int) -> None:
        self.family, self.ranks = family, ranks
        self.layers: list[dict[str, Any]] = []
        count = sum(layers for layers, _ in family.groups)
        super().__init__(
            endpoint, world_size=ranks, layers=count, num_blocks=12, dtype=family.dtype,
            identity={"rank": "any"},
        )  # fmt: skip

    def new_caches(
        self, rank: int, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        family = self.family
        heads = family.heads // self.ranks
        shape = family.shape(self.num_blocks, heads, family.size)
        self.layers.append({})
        for name in names:
            layer = cpu_layer("amx" if family.order == "CPUs, amx" else "vec")
            layer.num_kv_heads, layer.head_size = heads, family.size
            layer.kv_cache = torch.zeros(shape, dtype=dtype)
            if family.backend:
                layer.impl = Backend(family.backend)
            self.layers[rank][name] = layer
        return {name: layer.kv_cache for name, layer in self.layers[rank].items()}

    def groups_of(self, rank: int, caches: dict[str, torch.Tensor], dtype: str) -> list[CacheGroup]:
        names, groups = iter(caches), []
        for count, reach in self.family.groups:
            own = {name: caches[name] for _, name in zip(range(count), names, strict=False)}
            config = config_of(self.layers[rank], rank, self.ranks)
            config.model_config.dtype = self.family.dtype
            heads, pairs = cut_by_head(
                config, own, self.family.heads, self.family.shares,
                num_blocks=self.num_blocks, block_size_tokens=TOKENS, block_strides={},
            )  # fmt: skip
            groups.append(CacheGroup(own, dtype, TOKENS, reach, pairs, heads=heads))
        return groups

    def ops(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], skip_first_n_tokens: int = 0
    ) -> list[TransferOp]:
        found = []
        for number, (_, reach) in enumerate(self.family.groups):
            own = reach.blocks_per_part(BLOCKS_A_CHUNK, TOKENS)
            blocks = [n for at, n in enumerate(block_ids) if at % 2 >= BLOCKS_A_CHUNK - own]
            found.append(TransferOp(blocks, self.chunks(hashes), group=number))
        return found

    def write(self, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[int]) -> None:
        """keys, values: of all heads, [layer, token, head, element]."""
        slots = torch.tensor([n * TOKENS + at for n in blocks for at in range(TOKENS)])
        for rank, layers in enumerate(self.layers):
            own = slice(rank * len(keys[0, 0]) // self.ranks, None)
            for number, layer in enumerate(layers.values()):
                found = [
                    each[number, :, own][:, : layer.num_kv_heads].contiguous()
                    for each in (keys, values)
                ]
                layer.impl.do_kv_cache_update(layer, *found, layer.kv_cache, slots)


def fused(blocks: int, heads: int, size: int) -> tuple[int, ...]:
    return blocks, heads, TOKENS, 2 * size


def divided(blocks: int, heads: int, size: int) -> tuple[int, ...]:
    return blocks, 2, heads, TOKENS, size


ALL = ((3, FULL_REACH),)
ROWS = "blocks, heads, tokens, K and V"  # as vLLM's backends for GPUs
APART = "blocks, K or V, heads, tokens"
WINDOWS = ((1, FULL_REACH), (2, Reach("window", 20)))  # of a chunk the last block
FAMILIES = {
    "Llama, GQA": Family(4, 64, torch.float32, "CPUs, vec", ALL, fused),
    "Llama, two heads a share": Family(4, 64, torch.float32, "CPUs, vec", ALL, fused, shares=2),
    "Gemma-3, windows": Family(2, 256, torch.float32, "CPUs, vec", WINDOWS, fused),
    "Llama, AMX": Family(4, 64, torch.bfloat16, "CPUs, amx", ALL, fused),
    "rows of K and V": Family(4, 64, torch.bfloat16, "GPUs", ALL, fused, ROWS, 2),
    "K and V apart": Family(2, 96, torch.float16, "segments", ALL, divided, APART),
}


def test_the_page_has_the_places_of_the_reader() -> None:
    page = re.sub(r"\s+", "", (DOCS / "value-format.md").read_text())
    source = (Path(__file__).parents[1] / "value_reader.py").read_text()
    for backend in PLACES:
        block = source.partition(f'"{backend}": (')[2].partition("),\n    ")[0]
        places = [each.replace("//", "/") for each in re.findall(r"E: (.*),\n", block)]
        assert len(places) == 2
        row = f"{backend}K{places[0]}V{places[1]}".replace(" ", "")
        assert row in page, row


def numbers(tensor: torch.Tensor) -> Array:
    """As the reader's: numpy has no bfloat16."""
    is_bfloat16 = tensor.dtype == torch.bfloat16
    return (tensor.view(torch.uint16) if is_bfloat16 else tensor).numpy()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_page_is_enough_to_read_keys_and_values(
    tmp_path: Path, redis_server: RedisServer, name: str, ranks: int
) -> None:
    family = FAMILIES[name]
    if family.order == "CPUs, amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("needs a CPU with AMX")
    hashes, tokens = block_hashes("prompt", len(BLOCKS)), len(BLOCKS) * TOKENS
    shape = (sum(count for count, _ in family.groups), tokens, family.heads, family.size)
    keys, values = (torch.randn(shape).to(family.dtype) for _ in "KV")
    with (
        AgentServer(tmp_path / "agent", redis_server.unix_url, compress="off") as agent,
        KnownEngine(agent.endpoint, family, ranks) as engine,
    ):
        engine.write(keys, values, BLOCKS)
        engine.store("r", hashes, BLOCKS)
        agent.wait_idle()
        layouts = [
            dict.fromkeys(each["layout"] for each in worker["groups"])
            for worker in agent.status()["engines"]
        ]
    with redis_server.client() as client:
        found = read_chunks(stripe_keys(client), client.get)
    namespaces = [layout[:16].encode() for layout in layouts[0]]
    assert {place for place in found if place[0] in namespaces} == {
        (namespace, hashes[at]) for namespace in namespaces for at in (1, 3)
    }
    first = 0
    for namespace, (count, reach) in zip(namespaces, family.groups, strict=True):
        layers = slice(first, first := first + count)
        own = reach.blocks_per_part(BLOCKS_A_CHUNK, TOKENS) * TOKENS
        for chunk in range(CHUNKS):
            end = (chunk + 1) * BLOCKS_A_CHUNK * TOKENS
            shares = found[namespace, hashes[2 * chunk + 1]]
            assert len(shares) == family.shares or family.shares is None
            read = keys_and_values(shares, family.heads, TOKENS, family.size, family.order)
            for mine, theirs in zip(read, (keys, values), strict=True):
                expected = numbers(theirs[layers, end - own : end])
                assert np.array_equal(mine, expected)

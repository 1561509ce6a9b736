# SPDX-License-Identifier: Apache-2.0
"""Every layout that vLLM can lay a KV cache out in, through vLLM's own functions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from lmcache_redis.device.blocks import view_tensors
from lmcache_redis.device.context import export_kv_caches
from lmcache_redis.device.cpu import CpuDevice
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.device.shares import Share, find_share
from lmcache_redis.errors import DeviceError
from tests.device.layouts import empty_slots, one

pytestmark = pytest.mark.engine  # imports vLLM, which takes as long as starting a small one

BLOCKS, TOKENS, LAYERS = 11, 8, 3
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def make_caches(
    name: str, padding: int, kernel_block: int, heads: int = 2
) -> tuple[dict[str, Any], int]:
    """Tensors by layer, and vLLM's block stride, from an allocation of random bytes."""
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    layouts = pytest.importorskip("vllm.v1.kv_cache_layout")
    layout = layouts.KVCacheLayout[name]
    spec = interface.FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=4, dtype=torch.float16
    )
    page = spec.page_size_bytes + padding
    if padding:
        spec = dataclasses.replace(spec, page_size_padded=page)
    layer_stride, block_stride = interface.compute_layout_strides(spec, BLOCKS, LAYERS, layout)[:2]
    size = BLOCKS * LAYERS * page
    tensor = interface.KVCacheTensor(
        size=size,
        layers=[f"layer.{layer}" for layer in range(LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    raw = torch.randint(-128, 128, (size,), dtype=torch.int8)
    views = interface.create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block or None)
    return dict(zip(tensor.layers, views, strict=True)), block_stride


CASES = [(name, 0, 0) for name in LAYOUTS]
CASES += [(name, 64, 0) for name in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")]
CASES += [(name, 0, TOKENS // 2) for name in ("LBHNC", "LBNHC")]


@pytest.mark.parametrize(("name", "padding", "kernel_block"), CASES)
def test_a_chunk_moves_between_blocks(name: str, padding: int, kernel_block: int) -> None:
    caches, block_stride = make_caches(name, padding, kernel_block)
    rows = (TOKENS // kernel_block) if kernel_block else 1
    hints = dict.fromkeys(caches, block_stride)
    before = {layer: tensor.view(torch.int16).clone() for layer, tensor in caches.items()}

    _, handles, (pages,), _ = export_kv_caches([caches], BLOCKS, hints)
    layout = KVLayout((), "float16", "cpu", TOKENS, BLOCKS, pages.segments, pages.page_format)
    assert layout.block_bytes >= sum(tensor[:rows].nbytes for tensor in caches.values())
    device = CpuDevice([layout], handles)
    source, target = [2, 3, 9], [7, 0, 10]
    slots = empty_slots(len(source) * layout.block_bytes, 500)
    device.gather(one(source, slots))
    device.scatter(one(target, slots, skip=1))
    device.close()

    # All of the engine's elements, unless padding is copied along.
    of_a_block = sum(tensor[:rows].numel() for tensor in caches.values())
    elements = sum(math.prod(each.segments + each.shape) for each in pages.pages)
    assert elements == (of_a_block if layout.block_bytes == 2 * of_a_block else 0)
    assert {each.dtype for each in pages.pages} <= {"float16"}

    moved = dict(zip(target[1:], source[1:], strict=True))
    for layer, tensor in caches.items():
        after = tensor.view(torch.int16)
        for block in range(BLOCKS):
            here = slice(block * rows, (block + 1) * rows)
            there = moved.get(block, block)
            assert torch.equal(after[here], before[layer][there * rows : (there + 1) * rows])


def test_layouts_of_equal_page_sizes_are_told_apart() -> None:
    formats = set()
    for name in ("LBHNC", "LBNHC", "BLHNC", "BLNHC"):
        caches, block_stride = make_caches(name, 0, 0)
        shared = export_kv_caches([caches], BLOCKS, dict.fromkeys(caches, block_stride))
        formats.add(shared.groups[0].page_format)
    assert len(formats) == 4


@pytest.mark.parametrize("kernel_block", [0, TOKENS // 2])
def test_head_major_layouts_are_cut_by_head(kernel_block: int) -> None:
    """A share of two heads of four has the bytes and the format of all heads of two."""
    found = set()
    for name, heads in (("LBHNC", 4), ("LBHNC", 2), ("BLHNC", 4), ("BLHNC", 2)):
        if kernel_block and name == "BLHNC":
            continue  # vLLM has no such layout
        caches, block_stride = make_caches(name, 0, kernel_block, heads)
        hints, dims = dict.fromkeys(caches, block_stride), dict.fromkeys(caches, 1)
        views, storages = view_tensors(caches)
        pages = find_share(views, BLOCKS, dims, Share(0, 0, 2), hints)
        segments, whole = pages.segments, storages[0].nbytes() // BLOCKS
        assert sum(each.page_bytes for each in segments) == whole * 2 // heads
        found.add((pages.page_format, pages.pages, *(each.page_bytes for each in segments)))
    assert len(found) == 1


@pytest.mark.parametrize("name", ["LBNHC", "BLNHC", "BHLNC", "LHBNC"])
def test_other_layouts_are_not(name: str) -> None:
    caches, block_stride = make_caches(name, 0, 0)
    hints, dims = dict.fromkeys(caches, block_stride), dict.fromkeys(caches, 1)
    with pytest.raises(DeviceError, match="not head-major"):
        find_share(view_tensors(caches)[0], BLOCKS, dims, Share(0, 0, 2), hints)

# SPDX-License-Identifier: Apache-2.0
"""Packed payloads of a real model's KV: ratios by layer, and speed beside a copy.

The KV is that of SmolLM2 (`scripts/setup` fetches it), laid out as an agent stores it: chunks of
256 tokens, in each layer a segment of K and one of V; "in turns" are pages in which K and V of each
head take turns, as vLLM's on CPUs. Without SmolLM2, random numbers stand in.

Speeds are GB/s of plain bytes on one core: buffers of 1 MiB, among so many that no cache has them;
then of 32 KiB, as the pages of blocks would be if packing were part of the copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.packing.texts import texts
from benchmarks.plots import COLOURS, draw
from benchmarks.report import ratios
from demo.weights import find_smollm2
from lmcache_redis import native
from lmcache_redis.chunks import packing
from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.metadata import itemsize
from lmcache_redis.config import DEFAULT_SLOT_BYTES

CHUNK_TOKENS = 256
BUFFER_BYTES = 1 << 20
PAGE_BYTES = 32 << 10
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
VECTORS = ("plain", "avx2", "avx512", "numpy")

Bytes = npt.NDArray[np.uint8]
# By text: the bytes of each layer, K or V, token, head and element.
Caches = dict[str, npt.NDArray[np.uint8]]


def read(tokens: int, dtypes: Sequence[str]) -> dict[str, Caches]:
    """What the model makes of each text, by dtype.

    It computes in bfloat16, for other numbers of two or four bytes in float32; what is narrower is
    cast, as vLLM does with a scale of 1.
    """
    import torch

    found = find_smollm2()
    if found is None:
        shape = (30, 2, tokens, 3, 64)
        made = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return {dtype: {"random numbers": _bytes_of(made, dtype)} for dtype in dtypes}
    caches: dict[str, Caches] = {dtype: {} for dtype in dtypes}
    for computed in ("bfloat16", "float32"):
        wanted = [
            each for each in dtypes if (each in ("float16", "float32")) != (computed[0] == "b")
        ]
        for text, numbers in _compute(found, computed, tokens) if wanted else ():
            for dtype in wanted:
                caches[dtype][text] = _bytes_of(numbers, dtype)
    return caches


def _compute(model_path: Path, dtype: str, tokens: int) -> Iterator[tuple[str, Any]]:
    """Each text, and its tensor: layers, K and V, tokens, heads, elements."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval()
    for name, text in texts().items():
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
        ids = ids[:, : ids.shape[1] // CHUNK_TOKENS * CHUNK_TOKENS]
        with torch.no_grad():
            layers = model.model(ids, use_cache=True).past_key_values.layers
        # Of a layer: heads, tokens, elements.
        pairs = [torch.stack([layer.keys[0], layer.values[0]]) for layer in layers]
        yield name, torch.stack(pairs).transpose(2, 3)


def _bytes_of(numbers: Any, dtype: str) -> npt.NDArray[np.uint8]:
    import torch

    cast = numbers.to(getattr(torch, dtype)).contiguous()
    found: npt.NDArray[np.uint8] = cast.view(torch.uint8).numpy()
    return found


def _chunks(cache: npt.NDArray[np.uint8], turns: bool) -> Iterator[Bytes]:
    """The bytes of each chunk: layer by layer."""
    for start in range(0, cache.shape[2], CHUNK_TOKENS):
        chunk = cache[:, :, start : start + CHUNK_TOKENS]
        yield (chunk.transpose(0, 2, 3, 1, 4) if turns else chunk).reshape(-1)


def _ratio(parts: list[Bytes], dtype: str) -> float:
    """Of plain bytes to stored ones: those of parts that do not get shorter are plain."""
    into = np.empty(max(part.nbytes for part in parts), np.uint8)
    stored = [_pack(part, itemsize(dtype), into) or part.nbytes for part in parts]
    return sum(part.nbytes for part in parts) / sum(stored)


def _pack(plain: Bytes, element_bytes: int, into: Bytes) -> int:
    return packing.pack(plain.data, element_bytes, into.data)


def _stripes(chunk: Bytes) -> list[Bytes]:
    size = stripe_payload_bytes(chunk.nbytes, DEFAULT_SLOT_BYTES)
    return [chunk[start : start + size] for start in range(0, chunk.nbytes, size)]


def ratio_rows(caches: dict[str, Caches]) -> list[dict[str, Any]]:
    """A row for each text and dtype: all stripes, and the worst and best of the layers."""
    rows = []
    for dtype, by_text in caches.items():
        for text, cache in by_text.items():
            apart = [stripe for chunk in _chunks(cache, False) for stripe in _stripes(chunk)]
            turns = [stripe for chunk in _chunks(cache, True) for stripe in _stripes(chunk)]
            row: dict[str, Any] = {
                "dtype": dtype,
                "text": text,
                "tokens": cache.shape[2],
                "ratio": _ratio(apart, dtype),
                "in turns": _ratio(turns, dtype),
            }
            for which, name in enumerate("KV"):
                layers = [_ratio([layer[which].reshape(-1)], dtype) for layer in cache]
                row |= {
                    f"{name} least": min(layers),
                    f"{name} median": statistics.median(layers),
                    f"{name} most": max(layers),
                }
            rows.append(row)
    return rows


def layer_rows(by_text: Caches, dtype: str) -> list[dict[str, Any]]:
    """A row for each layer, a column for K and V of each text."""
    return [
        {"layer": layer}
        | {
            f"{text} {name}": _ratio([cache[layer, which].reshape(-1)], dtype)
            for text, cache in by_text.items()
            for which, name in enumerate("KV")
        }
        for layer in range(len(next(iter(by_text.values()))))
    ]


def plot(rows: Sequence[dict[str, Any]], dtype: str, path: Path) -> Path:
    """Ratios by layer, of K and of V; rows: those of `layer_rows`."""

    def panels(axes: Any) -> None:
        for panel, which in zip(axes, "KV", strict=True):
            texts_of = [name for name in rows[0] if name.endswith(f" {which}")]
            for name, colour in zip(texts_of, COLOURS, strict=False):
                values = [row[name] for row in rows]
                panel.plot(values, marker="o", color=colour, label=name.removesuffix(f" {which}"))
            panel.set_title(which)
            panel.set_xlabel("layer")
            panel.set_ylabel("plain bytes of one stored byte")

    return draw(path, f"SmolLM2-135M's KV in {dtype}, packed", 1, 2, panels)


def speed_rows(caches: dict[str, Caches], rounds: int, moved_mib: int) -> list[dict[str, Any]]:
    """A row for each dtype and kind of vectors, and one for noise, which is refused."""
    count = moved_mib * (1 << 20) // BUFFER_BYTES
    plain, stored, back = (np.ones((count, BUFFER_BYTES), np.uint8) for _ in range(3))
    rows = []
    for dtype in (*caches, "noise"):
        if dtype == "noise":
            plain[:] = np.random.default_rng(1).integers(0, 256, BUFFER_BYTES, np.uint8)
        else:
            parts = [chunk for cache in caches[dtype].values() for chunk in _chunks(cache, False)]
            np.copyto(plain.reshape(-1), np.resize(np.concatenate(parts), plain.size))
        element_bytes = 2 if dtype == "noise" else itemsize(dtype)
        usable = [vectors for vectors in VECTORS if _use(vectors)]
        for vectors, nbytes in (
            *((each, BUFFER_BYTES) for each in usable),
            (usable[-1], PAGE_BYTES),
        ):
            _use(vectors)
            cut, into, again = (each.reshape(-1, nbytes) for each in (plain, stored, back))
            row = {"dtype": dtype, "vectors": vectors, "KiB": nbytes >> 10}
            rows.append(row | _speeds(cut, into, again, element_bytes, rounds))
    return rows


def _use(vectors: str) -> bool:
    """Whether this processor has them; numpy where the native extension is missing."""
    if native.packing is None:
        return vectors == "numpy"
    return vectors != "numpy" and bool(native.packing.use_vectors(vectors))


def _speeds(
    plain: npt.NDArray[np.uint8],
    stored: npt.NDArray[np.uint8],
    back: npt.NDArray[np.uint8],
    element_bytes: int,
    rounds: int,
) -> dict[str, Any]:
    """Medians. The ratios are those of each round, because a slow round slows all."""
    used, good = [0] * len(plain), [True]

    def copy() -> None:
        for i, each in enumerate(plain):
            stored[i] = each

    def pack() -> None:
        for i, each in enumerate(plain):
            used[i] = _pack(each, element_bytes, stored[i])

    def unpack() -> None:
        for i, nbytes in enumerate(used):
            if nbytes:
                packed = stored[i, :nbytes].data
                good.append(packing.unpack(packed, element_bytes, back[i].data))

    times: dict[str, list[float]] = {"copy": [], "pack": [], "unpack": []}
    for _ in range(rounds):
        for name, work in (("copy", copy), ("pack", pack), ("unpack", unpack)):
            times[name].append(_timed(work))
    packed = [i for i, nbytes in enumerate(used) if nbytes]
    if not all(good) or not np.array_equal(back[packed], plain[packed]):
        raise AssertionError("other bytes came back")
    gigabytes = plain.nbytes / 1e9
    of_copy = {name: statistics.median(ratios(times["copy"], times[name])) for name in times}
    return {
        "ratio": plain.nbytes / sum(nbytes or plain.shape[1] for nbytes in used),
        "memcpy GB/s": gigabytes / statistics.median(times["copy"]),
        "pack GB/s": gigabytes / statistics.median(times["pack"]),
        "pack/memcpy": of_copy["pack"],
        "unpack GB/s": gigabytes / statistics.median(times["unpack"]) if packed else None,
        "unpack/memcpy": of_copy["unpack"] if packed else None,
    }


def _timed(work: Callable[[], None]) -> float:
    """Seconds of the processor's time: other programs do not count."""
    started = time.thread_time()
    work()
    return time.thread_time() - started

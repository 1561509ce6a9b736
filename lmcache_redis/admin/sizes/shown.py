# SPDX-License-Identifier: Apache-2.0
"""The size of a model as JSON, and as text. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from lmcache_redis.admin.names import table
from lmcache_redis.admin.sizes.sizing import ModelSize
from lmcache_redis.units import gigabytes, shown_bytes

_REACHES = {
    "all": "full",
    "window": "window of {:,} tokens",
    "local": "chunks of {:,} tokens",
    "state": "one state",
}


def size_json(size: ModelSize) -> dict[str, Any]:
    """Sizes in bytes, as docs/how-much-redis.md describes them."""
    asked = size.options
    return {
        "model": size.model,
        "model_type": size.model_type,
        "kv_cache_dtype": size.types.kv,
        "tp": asked.tp,
        "bytes_per_token": size.bytes_per_token,
        "engine_bytes_per_token": size.engine_bytes_per_token,
        "state_bytes": size.state_bytes,
        "chunk_tokens": size.chunk_tokens,
        "groups": [
            {
                "kind": group.kind,
                "reach": group.reach.kind,
                "reach_tokens": group.reach.tokens,
                "layers": group.layers,
                "bytes_per_token": group.bytes_per_token,
                "engine_bytes_per_token": group.engine_bytes_per_token,
                "state_bytes": group.state_bytes,
                "parts_per_chunk": group.shards,
                "expected_ratio": group.ratio,
                "part": dataclasses.asdict(group.part),
            }
            for group in size.groups
        ],
        "prompt": {
            "tokens": asked.prompt_tokens,
            "payload_bytes": size.payload_bytes,
            "packed_bytes": size.packed_bytes,
            "stored_bytes": size.stored_bytes,
            "loaded_bytes": size.loaded_bytes,
            "saved_by_windows_bytes": size.saved_by_windows,
            "saved_by_states_bytes": size.saved_by_states,
        },
        "memory": {"bytes": asked.memory_bytes, "tokens": size.tokens, "prompts": size.prompts},
        "break_even": {
            "prefill_tokens_per_s": asked.prefill_tokens_per_s,
            "bytes_per_s": size.break_even_bytes_per_s,
        },
    }


def size_lines(size: ModelSize) -> Iterator[str]:
    """`size`."""
    asked, tokens = size.options, size.options.prompt_tokens
    yield f"{size.model}: {size.model_type}, keys and values of {size.types.kv}"
    rows = [["layers", "", "a token", f"a chunk of {size.chunk_tokens} tokens"]]
    for group in size.groups:
        reach = _REACHES[group.reach.kind].format(group.reach.tokens)
        kind = reach if group.kind == "state" else f"{group.kind}, {reach}"
        token = shown_bytes(group.bytes_per_token) if group.bytes_per_token else "-"
        rows.append([str(group.layers), kind, token, shown_bytes(group.chunk_bytes)])
    total = shown_bytes(sum(group.chunk_bytes for group in size.groups))
    rows.append(["all", "", shown_bytes(size.bytes_per_token), total])
    yield from (f"  {line}" for line in table(rows))
    if size.state_bytes:
        yield (
            f"states      {shown_bytes(size.state_bytes)}, kept after each step of up to "
            f"{asked.step_tokens:,} tokens (--max-num-batched-tokens)"
        )
    if asked.tp > 1:
        ratio = size.engine_bytes_per_token / max(1, size.bytes_per_token)
        more = f", {ratio:.1f} times as much: several hold the same heads" if ratio > 1 else ""
        parts = sum(group.shards for group in size.groups)
        yield (
            f"ranks       {asked.tp} ranks hold {shown_bytes(size.engine_bytes_per_token)} a token"
            f"{more}; a chunk is stored in {parts} parts, each once"
        )
    overhead = size.stored_bytes / size.packed_bytes - 1
    packed = ""
    if size.packed_bytes < size.payload_bytes:
        packed = f", packed {shown_bytes(size.packed_bytes)}"
    yield (
        f"a prompt    of {tokens:,} tokens takes {shown_bytes(size.stored_bytes)} of Redis: "
        f"{shown_bytes(size.payload_bytes)}{packed}, and {100 * overhead:.1f} % for headers, keys "
        "and rounding"
    )
    if asked.compress:
        ratio = size.payload_bytes / size.packed_bytes
        yield (
            f"packed      {ratio:.2f} times smaller: expected of {size.types.kv}, not measured; "
            "`lmcache-redis status` tells what an agent has saved"
        )
    yield (
        f"memory      {shown_bytes(asked.memory_bytes)} hold {size.tokens:,} tokens: "
        f"{size.prompts:,} prompts of {tokens:,} that share no prefix"
    )
    even = size.break_even_bytes_per_s
    yield (
        f"break-even  {gigabytes(even)}/s ({8 * even / 1e9:.1f} Gbit/s): with less, loading takes "
        f"longer than computing at {asked.prefill_tokens_per_s:,.0f} tokens/s"
    )
    for what, saved in (("windows", size.saved_by_windows), ("states", size.saved_by_states)):
        if saved > 0:
            share = saved / (saved + size.loaded_bytes)
            yield f"a hit       {what} save {shown_bytes(saved)} of loading, {100 * share:.0f} %"

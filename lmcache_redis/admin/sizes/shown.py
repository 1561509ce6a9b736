"""The size of a model as JSON and as lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmcache_redis.admin.names import gigabytes, shown_bytes
from lmcache_redis.admin.sizes.sizing import ModelSize, SizedGroup
from lmcache_redis.errors import ConfigError

_REACHES = {
    "all": "full",
    "window": "window of {:,} tokens",
    "local": "chunks of {:,} tokens",
    "state": "one state",
}


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """What is asked of a size: a server's memory, the length of prompts, the rate of prefill."""

    memory_bytes: int = 64 << 30
    prompt_tokens: int = 8192
    prefill_tokens_per_s: float = 8000.0

    def check(self, size: ModelSize) -> None:
        """Raises ConfigError if prompts are shorter than what is stored."""
        if self.prompt_tokens < size.chunk_tokens:
            raise ConfigError(
                f"--prompt-tokens {self.prompt_tokens}: prompts are stored in chunks of "
                f"{size.chunk_tokens} tokens, and a shorter one is never a hit: give more"
            )


def size_json(size: ModelSize, asked: SizeQuestion) -> dict[str, Any]:
    """Sizes in bytes, as docs/how-much-redis.md describes them."""
    tokens = asked.prompt_tokens
    return {
        "model": size.model,
        "model_type": size.model_type,
        "kv_cache_dtype": size.types.kv,
        "tp": size.options.tp,
        "bytes_per_token": size.bytes_per_token,
        "engine_bytes_per_token": size.engine_bytes_per_token,
        "state_bytes": size.state_bytes,
        "chunk_tokens": size.chunk_tokens,
        "groups": [_group_json(group) for group in size.groups],
        "prompt": {
            "tokens": tokens,
            "payload_bytes": size.payload_bytes(tokens),
            "stored_bytes": size.stored_bytes(tokens),
            "loaded_bytes": size.loaded_bytes(tokens),
            "saved_by_windows_bytes": size.saved_by_windows(tokens),
            "saved_by_states_bytes": size.saved_by_states(tokens),
        },
        "memory": {
            "bytes": asked.memory_bytes,
            "tokens": size.tokens_in(asked.memory_bytes, tokens),
            "prompts": size.prompts_in(asked.memory_bytes, tokens),
        },
        "break_even": {
            "prefill_tokens_per_s": asked.prefill_tokens_per_s,
            "bytes_per_s": size.break_even_bytes_per_s(asked.prefill_tokens_per_s, tokens),
        },
    }


def _group_json(group: SizedGroup) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "reach": group.reach.kind,
        "reach_tokens": group.reach.tokens,
        "layers": group.layers,
        "bytes_per_token": group.bytes_per_token,
        "engine_bytes_per_token": group.engine_bytes_per_token,
        "state_bytes": group.state_bytes,
        "parts_per_chunk": group.shards,
        "part": dataclasses.asdict(group.part),
    }


def size_lines(size: ModelSize, asked: SizeQuestion) -> Iterator[str]:
    """`size`."""
    tokens, memory = asked.prompt_tokens, asked.memory_bytes
    yield f"{size.model}: {size.model_type}, keys and values of {size.types.kv}"
    rows = [["layers", "", "a token", f"a chunk of {size.chunk_tokens} tokens"]]
    for group in size.groups:
        reach = _REACHES[group.reach.kind].format(group.reach.tokens)
        kind = reach if group.kind == "state" else f"{group.kind}, {reach}"
        token = shown_bytes(group.bytes_per_token) if group.bytes_per_token else "-"
        rows.append([str(group.layers), kind, token, shown_bytes(group.chunk_bytes)])
    total = shown_bytes(sum(group.chunk_bytes for group in size.groups))
    rows.append(["all", "", shown_bytes(size.bytes_per_token), total])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
    if size.state_bytes:
        yield (
            f"states      {shown_bytes(size.state_bytes)}, kept after each step of up to "
            f"{size.options.step_tokens:,} tokens (--max-num-batched-tokens)"
        )
    yield from _ranks(size)
    stored, payload = size.stored_bytes(tokens), size.payload_bytes(tokens)
    yield (
        f"a prompt    of {tokens:,} tokens takes {shown_bytes(stored)} of Redis: "
        f"{shown_bytes(payload)}, and {100 * (stored / payload - 1):.1f} % for headers, keys and "
        "rounding"
    )
    yield (
        f"memory      {shown_bytes(memory)} hold {size.tokens_in(memory, tokens):,} tokens: "
        f"{size.prompts_in(memory, tokens):,} prompts of {tokens:,} that share no prefix"
    )
    yield from _break_even(size, asked)


def _ranks(size: ModelSize) -> Iterator[str]:
    ranks = size.options.tp
    if ranks == 1:
        return
    engine = size.engine_bytes_per_token
    seen = f"{ranks} ranks hold {shown_bytes(engine)} a token"
    if engine > size.bytes_per_token:
        seen += f", {engine / size.bytes_per_token:.1f} times as much: several hold the same heads"
    parts = sum(group.shards for group in size.groups)
    yield f"ranks       {seen}; a chunk is stored in {parts} parts, each once"


def _break_even(size: ModelSize, asked: SizeQuestion) -> Iterator[str]:
    tokens, rate = asked.prompt_tokens, asked.prefill_tokens_per_s
    even = size.break_even_bytes_per_s(rate, tokens)
    yield (
        f"break-even  {gigabytes(even)}/s ({8 * even / 1e9:.1f} Gbit/s): with less, loading takes "
        f"longer than computing at {rate:,.0f} tokens/s"
    )
    loaded = size.loaded_bytes(tokens)
    for saved, what in (
        (size.saved_by_windows(tokens), "windows save"),
        (size.saved_by_states(tokens), "states save"),
    ):
        if saved > 0:
            share = saved / (saved + loaded)
            yield f"a hit       {what} {shown_bytes(saved)} of loading, {100 * share:.0f} %"

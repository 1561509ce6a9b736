# SPDX-License-Identifier: Apache-2.0
"""`size`: how much Redis a model needs, and how fast."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from lmcache_redis.cli.options import AsJson, choice, number, print_found
from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import parse_size

# Less was meant in another unit.
_LEAST_MEMORY_BYTES = 1 << 20
# Of a prompt, and of what is computed in a second.
MOST_TOKENS = 10**9

MODEL_HELP = "As for `vllm serve`: a name in the local Hugging Face cache, or a directory"
PromptTokens = Annotated[
    int, number("--prompt-tokens", int, (1, MOST_TOKENS), "Length of a usual prompt.")
]
PrefillRate = Annotated[
    float,
    number(
        "--prefill-tokens-per-s", float, (1, MOST_TOKENS), "Prefill rate of all engines together."
    ),
]
Ranks = Annotated[int, number("--tp", int, (1, 255), "vLLM's --tensor-parallel-size.")]
Revision = Annotated[str, typer.Option("--revision", metavar="NAME", help="vLLM's option.")]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="TYPE",
        help="vLLM's option: auto, bfloat16, float16, fp8, fp8_ds_mla; or float32.",
    ),
]


class Compress(enum.Enum):
    """The agents' setting."""

    off = "off"
    lossless = "lossless"


def size(
    model: Annotated[
        str, typer.Argument(help=f"{MODEL_HELP}, or its config.json.", metavar="MODEL")
    ],
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of Redis, as 64GiB.")
    ] = "64GiB",
    prompt_tokens: PromptTokens = 8192,
    prefill_tokens_per_s: PrefillRate = 8000,
    revision: Revision = "main",
    tp: Ranks = 1,
    kv_cache_dtype: KvCacheDtype = "auto",
    mamba_ssm_cache_dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="vLLM's option.")
    ] = "auto",
    max_num_batched_tokens: Annotated[
        int, number("--max-num-batched-tokens", int, (1, MOST_TOKENS), "vLLM's option.")
    ] = 8192,
    chunk_size_tokens: Annotated[
        int, number("--chunk-size-tokens", int, (1, MOST_TOKENS), "The agents' option.")
    ] = 256,
    compress: Annotated[
        Compress, choice("--compress", Compress, "The agents' option: expected, not measured.")
    ] = Compress.lossless,
    as_json: AsJson = False,
) -> None:
    """Show how much KV a model makes a token, how much of it fits, and how fast Redis must be.

    Reads config.json; downloads nothing and needs no server. An unknown model is an error.

    Examples:

      lmcache-redis size Qwen/Qwen3-8B

      lmcache-redis size config.json --memory 256GiB --tp 8 --compress off
    """
    from lmcache_redis.admin.sizes.configs import find_model
    from lmcache_redis.admin.sizes.shown import size_json, size_lines
    from lmcache_redis.admin.sizes.sizing import SizeOptions, size_model

    memory_bytes = parse_size(memory, "--memory")
    if memory_bytes < _LEAST_MEMORY_BYTES:
        raise ConfigError(f"--memory: {memory!r} is {memory_bytes} bytes: write it as 64GiB")
    options = SizeOptions(
        tp=tp,
        kv_cache_dtype=kv_cache_dtype,
        state_dtype=mamba_ssm_cache_dtype,
        step_tokens=max_num_batched_tokens,
        chunk_size_tokens=chunk_size_tokens,
        compress=compress is Compress.lossless,
        memory_bytes=memory_bytes,
        prompt_tokens=prompt_tokens,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    found = size_model(*find_model(model, revision), options)
    print_found(as_json, size_json(found), size_lines(found))

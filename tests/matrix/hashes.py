# SPDX-License-Identifier: Apache-2.0
"""The block hashes of this vLLM for known tokens; ``test_upgrades.py`` asks every version."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

BLOCK_TOKENS = 32


def block_hashes(algorithm: str, salt: str | None) -> list[str]:
    """Of two blocks."""
    hashed = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hashed)
    request: Any = SimpleNamespace(
        lora_request=None, cache_salt=salt, mm_features=[], prompt_embeds=None
    )
    found: list[Any] = [None]
    for begin in (0, BLOCK_TOKENS):
        end = begin + BLOCK_TOKENS
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, begin, end, 0)
        tokens = range(begin, end)
        found.append(kv_cache_utils.hash_block_tokens(hashed, found[-1], tokens, extra))
    return [each.hex() for each in found[1:]]


if __name__ == "__main__":
    hashes = {
        f"{algorithm} {salt}": block_hashes(algorithm, salt)
        for algorithm in ("sha256", "sha256_cbor")
        for salt in (None, "salt")
    }
    json.dump([vllm.__version__, hashes], sys.stdout)

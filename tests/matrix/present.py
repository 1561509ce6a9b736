# SPDX-License-Identifier: Apache-2.0
"""Which needs of vLLM's insides this vLLM has: run by ``test_needs.py`` with every version."""

from __future__ import annotations

import json
import sys

import vllm

from lmcache_redis.integrations.vllm import needs

if __name__ == "__main__":
    found = {f"{each.owner}.{each.name}": each.is_present(loads=True) for each in needs.ALL}
    json.dump([vllm.__version__, found], sys.stdout)

# SPDX-License-Identifier: Apache-2.0
"""Memory alone: its limit, and that it is given back."""

from __future__ import annotations

import pytest

from lmcache_redis.errors import ConfigError
from lmcache_redis.objects import ChunkBackend, in_memory
from tests.objects.samples import key_of, tensor_of


def test_close_frees_all_memory() -> None:
    backend = ChunkBackend([in_memory(1_000_000)])
    memory = backend._thread._memory
    for _ in range(2):
        assert backend.put(key_of(1), tensor_of(1, (100_000,)))
    assert memory.spare_bytes == 100_000, "of the chunk that was replaced"
    backend.close()
    assert memory.spare_bytes == 0


@pytest.mark.parametrize("limit_bytes", [0, -1])
def test_a_limit_is_positive(limit_bytes: int) -> None:
    with pytest.raises(ConfigError, match="limit_bytes"):
        in_memory(limit_bytes)

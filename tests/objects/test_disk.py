# SPDX-License-Identifier: Apache-2.0
"""A directory: what a backend adds to the disk tier (`tests/cache/disk`)."""

from __future__ import annotations

import pytest

from lmcache_redis.errors import ConfigError
from tests.cache.disk.directory import FILE_BYTES
from tests.objects.conftest import OpenDisk
from tests.objects.samples import (
    fill,
    held,
    key_of,
)


def test_layouts_share_a_directory_and_its_limit(open_disk: OpenDisk) -> None:
    fill(tier := open_disk(4 * FILE_BYTES), [1, 2, 3])
    tier.close()
    tier = open_disk(4 * FILE_BYTES, layout=b"l" * 32)
    assert tier.stored_keys() == []
    assert tier.get(key_of(1)) is None
    assert not tier.remove(key_of(1))
    fill(tier, [1, 9])
    assert held(tier) == [1, 9]
    tier.close()
    assert held(open_disk(4 * FILE_BYTES)) == [2, 3]


def test_a_layout_is_a_fingerprint(open_disk: OpenDisk) -> None:
    with pytest.raises(ConfigError, match="32 bytes"):
        open_disk(layout=b"short")

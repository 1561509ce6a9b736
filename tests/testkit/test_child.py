# SPDX-License-Identifier: Apache-2.0
"""A child and what it has started end together."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_redis.errors import LMCacheRedisError
from testkit import child
from tests.servers import wait_until

pytestmark = pytest.mark.servers


class Leaving(child.Child):
    failure = LMCacheRedisError


def test_what_a_child_leaves_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_GRACE_S", 0.2)
    with Leaving(["tests.testkit.leaving"], (tmp_path / "log").open("a+b"), {}) as leaving:
        pid = leaving._receive(int, 30.0)
        assert leaving.process.wait(30) == 0
        assert Path(f"/proc/{pid}").exists()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of what was left")

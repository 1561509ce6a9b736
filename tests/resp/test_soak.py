# SPDX-License-Identifier: Apache-2.0
"""The soak that runs for ten minutes by hand, for one fault of each ground."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.resp.soak import GROUNDS, soak

pytestmark = [pytest.mark.servers, pytest.mark.long]


@pytest.mark.parametrize("name", sorted(GROUNDS))
def test_no_byte_is_wrong_and_hits_come_back(name: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        ground = GROUNDS[name](tmp_path, stack, random.Random(1))
        result = soak(ground, seconds=60.0, seed=1, faults=1)
    assert result.problems == []
    assert len(result.struck) == 1
    assert result.loaded

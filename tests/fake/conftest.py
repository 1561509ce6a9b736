# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake.server import FakeRedisServer


@pytest.fixture
def fake() -> Iterator[FakeRedisServer]:
    with FakeRedisServer() as server:
        yield server

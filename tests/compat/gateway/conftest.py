# SPDX-License-Identifier: Apache-2.0
"""A dict behind a gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import Client


@pytest.fixture
def backend() -> DictTier:
    return DictTier()


@pytest.fixture
def serving(backend: DictTier) -> Iterator[Serving]:
    with Serving(backend) as serving:
        yield serving


@pytest.fixture
def client(serving: Serving) -> Iterator[Client]:
    with serving.client() as client:
        yield client

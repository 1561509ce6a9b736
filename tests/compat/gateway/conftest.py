"""A dict behind a gateway, and the loops that it can run on."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterator

import pytest

from lmcache_redis.compat.gateway.main import new_loop
from tests.compat.gateway.serving import DictTier, Serving
from tests.compat.gateway.wire import Client

NewLoop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(params=["asyncio", "uvloop"])
def any_loop(request: pytest.FixtureRequest) -> NewLoop:
    if request.param == "asyncio":
        return asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    return new_loop


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

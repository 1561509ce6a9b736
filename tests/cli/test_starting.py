# SPDX-License-Identifier: Apache-2.0
"""What leaves the command line before a command begins."""

from __future__ import annotations

import pytest

from lmcache_redis.cli.starting import without_secrets

OPEN = "redis://cache:6379/2"
SECRET = "redis://:pw@cache:6379"


@pytest.mark.parametrize("url", [SECRET, "redis+sentinel://h/m?sentinel_password=pw"])
def test_a_url_with_a_password_becomes_a_variable(url: str) -> None:
    for words in (["--redis-url", url], [f"--redis-url={url}"]):
        given = ["-m", "lmcache_redis.cli", "agent", *words, "--ttl-s", "5"]
        kept, found = without_secrets(given)
        assert kept == ["-m", "lmcache_redis.cli", "agent", "--ttl-s", "5"]
        assert found == {"LMCACHE_REDIS_URL": url}


@pytest.mark.parametrize(
    "words",
    [
        ["agent"],
        ["agent", "--redis-url", OPEN, "--ttl-s", "5"],
        ["agent", f"--redis-url={OPEN}"],
        ["agent", "--redis-url"],
        ["inspect", SECRET],
    ],
)
def test_the_rest_stays_as_it_is(words: list[str]) -> None:
    assert without_secrets(words) == (words, {})

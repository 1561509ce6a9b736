# SPDX-License-Identifier: Apache-2.0
"""Which chunks may be written for how long, and which claims are given back."""

from __future__ import annotations

import pytest

from lmcache_redis.cache.claims import Claims


@pytest.fixture
def claims() -> Claims:
    claims = Claims()
    claims.add([b"a", b"b"], 20.0, now_s=10.0)
    return claims


def test_a_claim_holds_until_it_is_made_again(claims: Claims) -> None:
    claims.add([b"a"], 30.0, now_s=15.0)
    assert [claims.until_s(each) for each in (b"a", b"b", b"c")] == [30.0, 20.0, 0.0]


def test_what_has_run_out_is_forgotten_with_the_next_claim(claims: Claims) -> None:
    claims.add([b"a"], 30.0, now_s=15.0)  # it is the last to run out now
    claims.add([b"c"], 40.0, now_s=20.0)
    assert [claims.until_s(each) for each in (b"a", b"b", b"c")] == [30.0, 0.0, 40.0]


def test_those_that_end_together_are_given_back_together(claims: Claims) -> None:
    assert claims.end(b"a", now_s=15.0), "the first one"
    assert not claims.end(b"b", now_s=15.0)
    assert not claims.end(b"b", now_s=15.0), "it has ended"
    assert (claims.until_s(b"a"), claims.take_ended()) == (0.0, [b"a", b"b"])
    claims.add([b"c"], 40.0, now_s=20.0)
    assert claims.end(b"c", now_s=39.0), "the first one again"
    assert claims.take_ended() == [b"c"]


def test_what_has_run_out_is_not_given_back(claims: Claims) -> None:
    """It may be another's by now."""
    assert not claims.end(b"a", now_s=20.0)
    assert not claims.end(b"never claimed", now_s=0.0)
    assert claims.take_ended() == []

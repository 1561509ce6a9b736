"""What an engine measures of its steps, and what a request may ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.integrations.vllm.requests import CachePolicy, PrefillRate, RequestOptions


def test_a_rate_is_the_time_of_steps_by_their_prompt_tokens() -> None:
    rate = PrefillRate()
    assert rate.token_s == 0.0
    for number in range(10):
        rate.ended(1000, 10.0 * number, 10.0 * number + 2.0)
    assert rate.token_s == pytest.approx(0.002)


def test_small_steps_are_not_measured() -> None:
    rate = PrefillRate()
    rate.ended(63, 1.0, 9.0)
    assert rate.token_s == 0.0


def test_overlapping_steps_count_from_the_last_end() -> None:
    """vLLM schedules a step while the one before it is running."""
    rate = PrefillRate()
    rate.ended(1000, 0.0, 1.0)
    rate.ended(1000, 0.1, 2.0)
    rate.ended(1, 0.2, 2.5)
    rate.ended(1000, 1.1, 3.5)
    assert rate.token_s == pytest.approx(0.001)


def test_new_steps_count_more() -> None:
    rate = PrefillRate()
    for number in range(20):
        rate.ended(1000, 10.0 * number, 10.0 * number + 1.0)
    for number in range(20, 30):
        rate.ended(1000, 10.0 * number, 10.0 * number + 4.0)
    assert rate.token_s == pytest.approx(0.004, rel=0.1)


POLICY = CachePolicy(16)


def request(params: Any) -> Any:
    return SimpleNamespace(request_id="request-7", kv_transfer_params=params)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (None, RequestOptions()),
        ([], RequestOptions()),
        ({"another connector's": 1}, RequestOptions()),
        ({"lmcache_redis": {"load": False}}, RequestOptions(load=False)),
        ({"lmcache_redis": {"store": False}}, RequestOptions(store=False)),
        ({"lmcache_redis": {"max_load_tokens": 512}}, RequestOptions(max_load_tokens=512)),
        ({"lmcache_redis": {"max_load_tokens": 0}}, RequestOptions(max_load_tokens=0)),
    ],
)
def test_a_request_may_ask_for_less(params: Any, options: RequestOptions) -> None:
    assert RequestOptions.of(request(params), POLICY) == options


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("no", "Expected `object`, got `str`"),
        ({"loads": True}, "unknown field `loads`"),
        ({"loads": True}, "give some of load (bool), store (bool) and max_load_tokens (int)"),
        ({"\ud800": True}, "surrogates not allowed"),
        ({1: True}, "Expected `str`"),
        ([], "Expected `object`, got `array`"),
        ({"load": "false"}, "Expected `bool`, got `str` - at `$.load`"),
        ({"max_load_tokens": True}, "got `bool` - at `$.max_load_tokens`"),
        ({"max_load_tokens": -1}, "Expected `int` >= 0 - at `$.max_load_tokens`"),
        ({"max_load_tokens": 1.5}, "got `float` - at `$.max_load_tokens`"),
    ],
)
def test_options_that_make_no_sense_are_not_followed(
    wish: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert RequestOptions.of(request({"lmcache_redis": wish}), POLICY) == RequestOptions()
    (record,) = caplog.records
    assert "request-7" in record.getMessage()
    assert words in record.getMessage()

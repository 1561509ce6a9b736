# SPDX-License-Identifier: Apache-2.0
"""What an engine measures of its steps, and what a request may ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis import tenants
from lmcache_redis.integrations.vllm.prefill import PrefillRate
from lmcache_redis.integrations.vllm.requests import CachePolicy, RequestOptions, TenantNames


def test_a_rate_is_the_time_of_steps_by_their_prompt_tokens() -> None:
    """Small steps are not measured."""
    rate = PrefillRate()
    for number, (tokens, token_s) in enumerate([(63, 0.0), (1000, 0.002), (63, 0.002)]):
        rate.scheduled(tokens, 10.0 * number)
        rate.ended(10.0 * number + 2.0)
        assert rate.token_s == pytest.approx(token_s)


def measured(*steps: tuple[int, float]) -> PrefillRate:
    """A rate after steps of so many tokens, with their seconds per token."""
    rate, now_s = PrefillRate(), 10.0
    for tokens, token_s in steps:
        rate.scheduled(tokens, now_s)
        now_s += tokens * token_s
        rate.ended(now_s)
    return rate


def test_single_steps_that_take_longer_make_no_difference() -> None:
    """The first ones of a process do, and those beside other work of the machine."""
    steps = [(2048, 0.003), *[(2048, 0.001)] * 2, (2048, 0.005), (2048, 0.001)]
    for count in range(2, len(steps) + 1):
        assert measured(*steps[:count]).token_s == pytest.approx(0.001)
    assert measured(*steps, *[(2048, 0.002)] * 3).token_s == pytest.approx(0.002), "it is slower"


def test_a_small_step_bounds_what_large_ones_take() -> None:
    small, large = (100, 0.004), (1000, 0.001)
    assert measured(*[small] * 9).token_s == pytest.approx(0.004), "none else is known"
    assert measured(*[small] * 9, large).token_s == pytest.approx(0.001)
    assert measured(large, *[small] * 9).token_s == pytest.approx(0.001)
    assert measured(*[(1000, 0.009)] * 5, small).token_s == pytest.approx(0.004), "it was slow"


def test_an_engine_is_busy_with_steps_and_the_rest_of_prompts() -> None:
    rate = PrefillRate()
    first, second = begun(rate, "first", 500), begun(rate, "second", 1000)
    assert rate.busy_s(0.0) == 0.0, "not measured"
    rate.scheduled(1000, 0.0)
    rate.ended(1.0)
    assert rate.busy_s(1.5) == pytest.approx(1.5)
    second.num_computed_tokens = 1000
    rate.scheduled(1000, 2.0)
    assert rate.busy_s(2.25) == pytest.approx(1.25)
    first.num_computed_tokens = 500
    rate.scheduled(500, 2.3)
    assert rate.busy_s(2.5) == pytest.approx(1.0)
    rate.ended(3.0)
    assert rate.busy_s(3.1) == pytest.approx(0.4)
    assert rate.busy_s(9.0) == 0.0, "late"


def begun(rate: PrefillRate, name: str, tokens: int) -> Any:
    found = SimpleNamespace(request_id=name, num_prompt_tokens=tokens, num_computed_tokens=0)
    rate.begun.begin(found)
    return found


def test_a_prompt_is_left_until_its_last_token_was_scheduled() -> None:
    rate = PrefillRate()
    first, second = begun(rate, "first", 1000), begun(rate, "second", 500)
    assert rate.begun.left_tokens() == 1500
    first.num_computed_tokens = 800
    second.num_computed_tokens = 501  # and a token of its answer
    assert rate.begun.left_tokens() == 200
    second.num_computed_tokens = 0  # preempted: it asks again before it begins
    assert rate.begun.left_tokens() == 200
    rate.begun.end("first")
    rate.begun.end("never begun")
    assert rate.begun.left_tokens() == 0


def test_overlapping_steps_count_from_the_last_end() -> None:
    """vLLM schedules a step while the one before it is running."""
    rate = PrefillRate()
    rate.scheduled(1000, 0.0)
    rate.scheduled(1000, 0.1)
    rate.ended(1.0)
    rate.scheduled(1, 1.05)
    rate.scheduled(1000, 1.1)
    rate.ended(2.0)
    rate.ended(2.5)
    rate.ended(3.5)
    assert rate.token_s == pytest.approx(0.001)


def test_steps_that_have_failed_are_forgotten() -> None:
    rate = PrefillRate()
    rate.scheduled(1000, 0.0)
    rate.scheduled(1000, 4.0)
    rate.scheduled(1000, 4.5)
    rate.failed(5.0, in_flight=1)
    rate.ended(6.0)
    assert rate.token_s == pytest.approx(0.001)
    assert rate.busy_s(6.0) == 0.0


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
    assert RequestOptions.of(request(params), POLICY, TenantNames()) == options


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("no", "Expected `object`, got `str`"),
        ({"loads": True}, "unknown field `loads`"),
        ({"loads": True}, "give some of load (bool), store (bool), max_load_tokens (int), sto"),
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
    found = RequestOptions.of(request({"lmcache_redis": wish}), POLICY, TenantNames())
    assert found == RequestOptions()
    (record,) = caplog.records
    assert "request-7" in record.getMessage()
    assert words in record.getMessage()


def salted(salt: str | None, **options: Any) -> Any:
    made = request({"lmcache_redis": options} if options else None)
    made.cache_salt = salt
    return made


def tenant_of(made: Any) -> str:
    return str(RequestOptions.of(made, POLICY, TenantNames()).tenant)


def test_a_request_names_its_tenant_or_has_one_by_its_salt() -> None:
    by_salt = tenant_of(salted("the salt"))
    assert tenants.is_sent(by_salt)
    assert tenants.shown(by_salt) == tenants.shown(tenant_of(salted("the salt", store=False)))
    assert tenants.shown(by_salt) != tenants.shown(tenant_of(salted("another")))
    assert tenant_of(salted("the salt", tenant="team a")) == "team a"
    assert tenant_of(salted("the salt", tenant=None)) == tenant_of(salted("the salt", tenant=""))
    assert tenant_of(salted("the salt", tenant="")) == by_salt
    assert tenant_of(salted("the salt", tenant="team a", load="no")) == "team a"
    assert tenant_of(salted(None)) == tenant_of(request(None)) == ""


BAD_NAMES = ["other", "#1", "a,b", " a", "a\n", "a" * 65, 7, "\ud800", ["a"], "none", "*"]


def test_a_bad_tenant_hides_no_salt_and_voids_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each kind is logged once."""
    names = TenantNames()
    by_salt = RequestOptions(store=False, tenant=tenants.of_salt("the salt"))
    for name in BAD_NAMES * 3:
        made = salted("the salt", tenant=name, store=False)
        assert RequestOptions.of(made, POLICY, names) == by_salt, name
    assert len(caplog.records) == 7
    for record in caplog.records:
        assert "request-7: the tenant" in record.getMessage()
        assert "without commas and without blanks at the ends" in record.getMessage()
        assert record.getMessage().isprintable()

# SPDX-License-Identifier: Apache-2.0
"""What tenants have asked for: bounded, and counters that never fall."""

from __future__ import annotations

import random
from collections import Counter
from typing import cast

import pytest

from lmcache_redis.agent.limits import TenantLimits
from lmcache_redis.agent.reports.exported import tenants_of
from lmcache_redis.agent.uses import MOST_KEPT, MOST_ROWS, Tenants
from lmcache_redis.tenants import NONE, OTHER


def ask(tenants: Tenants, name: str, tokens: int) -> None:
    for use in tenants.uses_of(name):
        use.lookups += 1
        use.lookup_tokens += tokens


def rows(tenants: Tenants) -> dict[str, int]:
    return {name: use.lookup_tokens for name, use in tenants.rows().items()}


def test_few_have_a_row_each() -> None:
    tenants = Tenants()
    for number in range(MOST_ROWS):
        ask(tenants, f"t{number}", 10 + number)
    assert rows(tenants) == {f"t{number}": 10 + number for number in range(MOST_ROWS)}


def test_the_largest_get_rows_and_nothing_moves() -> None:
    tenants = Tenants()
    for number in range(MOST_ROWS):
        ask(tenants, f"small {number}", 10)
    ask(tenants, "large", 1000)
    assert rows(tenants)[OTHER] == 1000, "it is among the others when it asks"
    ask(tenants, "large", 7)
    found = rows(tenants)
    assert (found["large"], found[OTHER]) == (7, 1000), "what was counted there stays there"
    assert sum(name.startswith("small") for name in found) == MOST_ROWS - 1
    assert tenants.report()["large"]["lookup_tokens"] == 1007
    assert next(iter(tenants.report())) == "large"


def test_no_series_falls_and_none_is_lost() -> None:
    """As a Prometheus sees it: the growth of all series is what was asked for."""
    rng, tenants = random.Random(7), Tenants()
    grown: Counter[str] = Counter()
    last: dict[str, int] = {}
    asked = 0
    for _ in range(4000):
        name, tokens = f"t{int(rng.paretovariate(0.4)) % 60}", rng.randrange(1, 500)
        ask(tenants, name, tokens)
        asked += tokens
        if rng.random() < 0.05:
            for series, value in rows(tenants).items():
                assert value >= last.get(series, 0)
                grown[series] += value - last.get(series, 0)
                last[series] = value
    for _ in range(2):  # the last look of those that have lost their row
        for series, value in rows(tenants).items():
            grown[series] += value - last.get(series, 0)
            last[series] = value
    assert grown.total() == asked
    assert len(last) > MOST_ROWS + 1, "some have lost their row"


def test_at_most_so_many_are_kept() -> None:
    tenants = Tenants()
    ask(tenants, "large", 1000)
    for number in range(5 * MOST_KEPT):  # a salt a request
        ask(tenants, f"{number:08x}", 1)
        others = tenants.rows().get(OTHER)
    report = tenants.report()
    assert len(report) <= MOST_KEPT + 1
    assert report["large"]["lookup_tokens"] == 1000
    assert sum(each["lookup_tokens"] for each in report.values()) == 1000 + 5 * MOST_KEPT
    assert others is not None
    assert others.lookup_tokens >= 4 * MOST_KEPT


def test_a_loss_of_seconds_is_taken_from_later_savings() -> None:
    tenants = Tenants()
    seen = []
    for seconds in (5.0, -3.0, 1.0, 4.0):
        for use in tenants.uses_of(NONE):
            use.saved(10, seconds)
        (metric,) = (
            each
            for each in tenants_of(tenants.rows())
            if each.name.endswith("tenant_saved_prefill_seconds")
        )
        seen.append(metric.samples[0].value)
    assert seen == [5.0, 5.0, 5.0, 7.0]
    assert tenants.report()[NONE]["saved_prefill_s"] == 7.0


class FullLimits:
    """Of the tenants that have no room."""

    def why_not(self, tenant: str) -> str | None:
        return "full" if tenant.startswith("full") else None


@pytest.mark.parametrize(
    ("first", "other", "payer"),
    [
        ("", "team", "team"),
        ("team", "another", "team"),
        ("full", "team", "team"),
        ("full", "full too", "full"),
        ("team", "full", "team"),
        ("full", NONE, NONE),
    ],
)
def test_who_has_room_pays(first: str, other: str, payer: str) -> None:
    tenants = Tenants()
    tenants.limits = cast(TenantLimits, FullLimits())
    assert tenants.payer(first, other) == payer

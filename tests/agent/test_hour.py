# SPDX-License-Identifier: Apache-2.0
"""The hour that an agent keeps for its page, and how it is drawn."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from lmcache_redis.agent.reports.charts import charts
from lmcache_redis.agent.reports.history import MINUTES, SAMPLE_S, History, Minute
from lmcache_redis.metrics import Metrics

NOTHING = Metrics().snapshot()


def counters(**changed: float) -> dict[str, float]:
    return {**NOTHING, **changed}


def test_a_minute_is_what_grew_in_it() -> None:
    history = History()
    history.take(counters(), 6000.0)
    history.take(counters(lookup_chunks=4, hit_chunks_host=1, retrieved_bytes=5), 6015.0)
    history.take(counters(lookup_chunks=6, hit_chunks_host=1, retrieved_bytes=5), 6060.0)
    history.take(counters(lookup_chunks=9, hit_chunks_redis=2, hit_chunks_host=1), 6075.0)
    found = history.minutes(
        counters(lookup_chunks=10, hit_chunks_redis=2, hit_chunks_host=1, saved_tokens=7), 6076.0
    )
    assert len(found) == MINUTES
    assert found[:-2] == [Minute()] * (MINUTES - 2)
    assert found[-2] == Minute(asked_chunks=6, to_engines_bytes=5, hits=(1, 0, 0))
    assert found[-1] == Minute(asked_chunks=4, to_engines_bytes=-5, saved_tokens=7, hits=(0, 0, 2))


def test_it_keeps_an_hour_in_a_ring_of_one_size() -> None:
    history = History()
    before = history.nbytes
    assert before <= 1 << 20
    for number in range(2000):
        history.take(counters(lookup_chunks=number), 100.0 + number * SAMPLE_S)
    assert history.nbytes == before
    found = history.minutes(counters(lookup_chunks=2000), 100.0 + 2000 * SAMPLE_S)
    assert [each.asked_chunks for each in found[1:-1]] == [60 / SAMPLE_S] * (MINUTES - 2)
    # The counters of a day ago are gone: nothing is drawn after a pause of an hour.
    later = history.minutes(counters(lookup_chunks=2000), 100.0 + 2000 * SAMPLE_S + 3700)
    assert later == [Minute()] * (MINUTES - 1) + [Minute(asked_chunks=1)]


def bars(html: str, title: str) -> dict[str, list[tuple[float, float]]]:
    """By class, the places and heights of the bars of a chart."""
    for figure in ElementTree.fromstring(f"<a>{html}</a>").iter("figure"):
        (chart,) = figure.findall("svg")
        if chart.get("aria-label") == f"{title} by minute":
            return {
                path.get("class", ""): [
                    (float(x), float(height))
                    for x, height in re.findall(r"M(\d+) [\d.]+v-([\d.]+)h", path.get("d", ""))
                ]
                for path in chart.findall("path")
            }
    raise AssertionError(f"no chart {title}")


def test_the_bars_are_shares_and_amounts() -> None:
    hour = [Minute()] * (MINUTES - 2) + [
        Minute(asked_chunks=4, to_engines_bytes=1 << 20, saved_tokens=50, hits=(1, 0, 2)),
        Minute(asked_chunks=2, to_engines_bytes=1 << 20, from_engines_bytes=1 << 20,
               saved_tokens=100, saved_prefill_s=1.5),
    ]  # fmt: skip
    html = charts(hour)
    first, last = (MINUTES - 2) * 10, (MINUTES - 1) * 10
    assert bars(html, "Hit rate") == {
        "host": [(first, 25.0)], "redis": [(first, 50.0)],
        "computed": [(first, 25.0), (last, 100.0)],
    }  # fmt: skip
    assert bars(html, "Bytes") == {
        "host": [(first, 50.0), (last, 50.0)], "redis": [(last, 50.0)],
    }  # fmt: skip
    assert bars(html, "Tokens not computed") == {"host": [(first, 50.0), (last, 100.0)]}
    assert "50 % of 6 chunks" in html
    assert "2 MiB to, " in html
    assert "150 tokens, 1.50 s of prefill" in html


def test_an_hour_of_nothing_is_empty() -> None:
    html = charts([Minute()] * MINUTES)
    assert "- of 0 chunks" in html
    for title in ("Hit rate", "Bytes", "Tokens not computed"):
        assert bars(html, title) == {}

"""Reading what `--metrics` serves, and the page of its families."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from lmcache_redis.metrics.exporter import Family

Samples = dict[tuple[str, tuple[str, ...]], float]


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples_in(text: str) -> Samples:
    """Values by name and labels' values in the order of their names; without buckets."""
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def port_in(log: str) -> int:
    """The port that a process chose for `--metrics 127.0.0.1:0`."""
    found = re.search(r"metrics at http://127\.0\.0\.1:(\d+)/metrics", log)
    assert found is not None
    return int(found[1])


def metrics_table(families: Sequence[Family]) -> str:
    """The families as a Markdown table. docs/metrics.md has copies."""
    rows = [
        "| metric | type | labels | meaning | when it is high |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows += [
        f"| `{family.exposed_name}` | {family.kind} | {', '.join(family.labels)} | "
        f"{family.meaning} | {family.high} |"
        for family in families
    ]
    return "\n".join(rows)

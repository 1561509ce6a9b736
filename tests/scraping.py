"""Reading what `--metrics` serves, and the page of its families."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
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


def exposed_name(metric: Metric) -> str:
    return metric.name + ("_total" if metric.type == "counter" else "")


def undocumented(metrics: Iterable[Metric], section: str) -> set[str]:
    """The rows that a section of docs/reference/metrics.md lacks, and those that it has in vain.

    Its last column, what to do when the value is high, is written by hand.
    """
    _, _, page = (
        (ROOT / "docs" / "reference" / "metrics.md").read_text().partition(f"## {section}\n")
    )
    found = set(re.findall(r"^(\| `lmcache_redis_.*\|) [^|]*\|$", page.partition("\n## ")[0], re.M))
    rows = {
        f"| `{exposed_name(metric)}` | {metric.type} | {_labels(metric)} | {metric.documentation} |"
        for metric in metrics
    }
    return rows ^ found


def _labels(metric: Metric) -> str:
    return ", ".join(label for label in metric.samples[0].labels if label != "le")

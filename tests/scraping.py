# SPDX-License-Identifier: Apache-2.0
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


def head(port: int, path: str) -> tuple[int, int, bytes]:
    """The status, the length that is said, and the body, which is empty."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="HEAD")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.status, int(answer.headers["Content-Length"]), answer.read()


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


def documented(section: str = "") -> set[tuple[str, str]]:
    """Name and type of each metric in the lists of docs/reference/metrics.md, or of a section."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    _, _, lists = page.partition("## Of an agent\n")
    text = page.partition(f"## {section}\n")[2].partition("\n## ")[0] if section else lists
    found = set()
    for item in re.findall(r"^- [\w ]+: ((?:.|\n  )+)$", text, re.M):
        others, _, histograms = re.sub(r"\s\([^)]*\)", "", item).partition("histogram")
        for names, kind in ((others, ""), (histograms, "histogram")):
            for name in re.findall(r"`([^`]+)`", names):
                found.add((name, kind or ("counter" if "_total" in name else "gauge")))
    return found


def undocumented(metrics: Iterable[Metric], section: str) -> set[tuple[str, str]]:
    """What a section of docs/reference/metrics.md lacks, and what it has in vain."""
    return {(_documented_name(metric), metric.type) for metric in metrics} ^ documented(section)


def _documented_name(metric: Metric) -> str:
    labels = ",".join(label for label in metric.samples[0].labels if label != "le")
    return exposed_name(metric).removeprefix("lmcache_redis_") + (f"{{{labels}}}" if labels else "")

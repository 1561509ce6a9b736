# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus that scrapes agents, and the queries of the Grafana dashboard put to it.

The dashboard and the alerts are files of the repository, in `deploy/`.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from lmcache_redis.errors import ConfigError, LMCacheRedisError
from lmcache_redis.processes import end_process

_DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD = _DEPLOY / "grafana" / "dashboard.json"
ALERTS = _DEPLOY / "prometheus" / "alerts.yml"
# The job that the dashboard and the alerts expect.
JOB = "lmcache-redis"
_START_S = 30.0
_END_S = 10.0
_POLL_S = 0.05
_UNITS = {
    "percentunit": (100, "%"),
    "Bps": (1e-6, "MB/s"),
    "bytes": (1e-6, "MB"),
    "s": (1e3, "ms"),
    "reqps": (1, "a second"),
}


class PrometheusFailed(LMCacheRedisError):
    """Prometheus did not start, or did not answer a query."""


@dataclass(frozen=True, slots=True)
class Panel:
    """queries: each with the legend of its series."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def panels() -> list[Panel]:
    """The panels of the dashboard that have queries."""
    dashboard = json.loads(DASHBOARD.read_text())
    return [
        Panel(
            each["title"],
            each["fieldConfig"]["defaults"]["unit"],
            tuple((target["expr"], target["legendFormat"]) for target in each["targets"]),
        )
        for each in dashboard["panels"]
        if each["type"] != "row"
    ]


def variables() -> dict[str, str]:
    """The queries of the dashboard's variables by their names."""
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    return {each["name"]: each["query"]["query"] for each in listed if each["type"] == "query"}


def filled_in(query: str, rate_interval: str) -> str:
    """A query for all that can be chosen, whose whole time is one interval."""
    query = re.sub(r"\$__(rate_interval|range)\b", rate_interval, query)
    return re.sub(r"\$(namespace|cache|node|model)\b", ".*", query)


def find(program: str) -> str | None:
    """`prometheus` or `promtool`: on the PATH, or beside this Python."""
    beside = Path(sys.prefix) / "bin" / program
    return shutil.which(program) or (str(beside) if beside.exists() else None)


def check_installed() -> None:
    """Raises ConfigError if `Prometheus` could not start."""
    if not DASHBOARD.exists():
        raise ConfigError("--metrics needs a checkout of the repository: the dashboard is there")
    if find("prometheus") is None:
        raise ConfigError(
            "--metrics needs prometheus: run scripts/setup as root on Debian, or put it on the PATH"
        )


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Prometheus:
    """A server on 127.0.0.1 that scrapes ``targets`` (ADDRESS:PORT). A context manager.

    directory: of its files. interval: between scrapes, and between evaluations of ``alerts``, the
    text of a rules file. labels: of all that is scraped.
    """

    directory: Path
    targets: Sequence[str]
    interval: str = "1s"
    alerts: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> Prometheus:
        self.directory.mkdir(parents=True, exist_ok=True)
        scraped = {"targets": [*self.targets], "labels": dict(self.labels)}
        config = {
            "global": {"scrape_interval": self.interval, "evaluation_interval": self.interval},
            "scrape_configs": [{"job_name": JOB, "static_configs": [scraped]}],
            "rule_files": ["alerts.yml"] if self.alerts else [],
        }
        # JSON is YAML.
        (self.directory / "prometheus.yml").write_text(json.dumps(config))
        (self.directory / "alerts.yml").write_text(self.alerts)
        program = find("prometheus")
        assert program is not None, "check_installed() was not called"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={self.directory}/prometheus.yml",
                    f"--storage.tsdb.path={self.directory}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_process(self._process, _END_S)

    @property
    def _log(self) -> Path:
        return self.directory / "prometheus.log"

    def _wait_ready(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                self._get("/-/ready")
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    said = self._log.read_text(errors="replace").strip()
                    raise PrometheusFailed(f"Prometheus did not start: {error}\n{said}") from error
            time.sleep(_POLL_S)

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            data: bytes = answer.read()
            return data

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of every series now. Raises PrometheusFailed."""
        try:
            words = urllib.parse.urlencode({"query": expression})
            found = json.loads(self._get(f"/api/v1/query?{words}"))
        except urllib.error.HTTPError as error:
            raise PrometheusFailed(f"{expression}: {error.read().decode()}") from error
        except OSError as error:
            raise PrometheusFailed(f"{expression}: {error}") from error
        result: Sequence[Mapping[str, Any]] = found["data"]["result"]
        return [(dict(each["metric"]), float(each["value"][1])) for each in result]

    def label_values(self, query: str) -> set[str]:
        """The answer to a variable's query, ``label_values(SERIES, LABEL)``."""
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert found is not None, query
        return {labels[found[2]] for labels, _ in self.query(filled_in(found[1], "1m"))}

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        return {labels["alertname"] for labels, _ in self.query('ALERTS{alertstate="firing"}')}


def dashboard_table(prometheus: Prometheus, rate_interval: str) -> Table:
    """What each panel of the dashboard shows now."""
    table = Table(title="the dashboard's queries, answered")
    shown = panels()
    # In a narrow window, or with large numbers, it is the series that is folded.
    table.add_column("panel", no_wrap=True, min_width=max(len(panel.title) for panel in shown))
    table.add_column("series", overflow="fold")
    table.add_column("value", no_wrap=True)
    for panel in shown:
        for title, series, value in _rows(prometheus, panel, rate_interval):
            table.add_row(title, series, value)
    return table


def _rows(
    prometheus: Prometheus, panel: Panel, rate_interval: str
) -> Iterator[tuple[str, str, str]]:
    """The panel's rows; only the first has its title, and zeros are left out."""
    factor, unit = _UNITS.get(panel.unit, (1, ""))
    title = panel.title
    for expression, legend in panel.queries:
        for labels, value in prometheus.query(filled_in(expression, rate_interval)):
            if value and not math.isnan(value):
                yield title, _series(legend, labels), f"{value * factor:,.4g} {unit}".strip()
                title = ""
    if title:
        yield title, "", "0"


def _series(legend: str, labels: Mapping[str, str]) -> str:
    if not legend:
        return " ".join(labels.values())
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), legend)

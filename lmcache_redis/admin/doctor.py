"""Facts, measurements and rules together: what to change about the servers behind a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from lmcache_redis.admin.bandwidth import measure_bandwidth, measure_ping
from lmcache_redis.admin.facts import gather
from lmcache_redis.admin.findings import Facts, Finding, Need, Severity
from lmcache_redis.admin.rules import by_importance, judge
from lmcache_redis.admin.server import Node, Server
from lmcache_redis.errors import RedisError


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings of all servers, the most important first."""

    facts: tuple[Facts, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        """0 where nothing is critical and nothing warns, else 1."""
        return int(any(f.severity <= Severity.WARNING for f in self.findings))


def diagnose(server: Server, prefix: bytes, need: Need, *, bandwidth: bool) -> Diagnosis:
    """Look at every node, measure it, and judge. Changes no setting.

    bandwidth: write a few MiB under temporary keys and read them back. Raises RedisError
    where a server cannot be asked at all.
    """
    facts = tuple(_examined(server, node, prefix, need, bandwidth) for node in server.nodes)
    return Diagnosis(facts, findings_of(facts))


def findings_of(facts: Iterable[Facts]) -> tuple[Finding, ...]:
    """What the rules say of every server, each with its address. Pure."""
    return tuple(
        by_importance(
            dataclasses.replace(finding, where=each.where)
            for each in facts
            for finding in judge(each)
        )
    )


def _examined(server: Server, node: Node, prefix: bytes, need: Need, bandwidth: bool) -> Facts:
    facts = gather(server, node, need)
    facts = dataclasses.replace(facts, ping_s=measure_ping(node))
    if not bandwidth:
        return facts
    try:
        measured = measure_bandwidth(server, node, prefix)
    except RedisError as error:
        return dataclasses.replace(facts, bandwidth_refused=str(error))
    return dataclasses.replace(
        facts,
        read_bytes_per_s=measured.read_bytes_per_s,
        write_bytes_per_s=measured.write_bytes_per_s,
    )

"""What to change about a server, and why: from facts alone. Pure.

A rule looks at `Facts`, where None means that something could not be seen, and says one
thing or nothing. `judge` asks them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lmcache_redis.admin import rules_memory as memory
from lmcache_redis.admin import rules_way as way
from lmcache_redis.admin.findings import Facts, Finding

# Of findings that matter equally, the earlier here comes first.
RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    way.role,
    way.one_of_a_cluster,
    memory.memory_limit,
    memory.policy,
    memory.stopped_writes,
    memory.snapshots,
    way.password,
    way.output_buffer,
    way.value_limits,
    way.loads,
    way.latency,
    memory.append_only,
    way.connections,
    way.stores,
    way.io_threads,
    way.encryption,
    memory.huge_pages,
    memory.replicas,
    way.version,
    memory.fragmentation,
    way.unseen,
)


def judge(facts: Facts) -> list[Finding]:
    """What every rule says, the most important first; of equals, in the order of RULES."""
    said = (rule(facts) for rule in RULES)
    return by_importance(finding for finding in said if finding is not None)


def by_importance(findings: Iterable[Finding]) -> list[Finding]:
    """Sorted by severity; findings of one severity keep their order."""
    return sorted(findings, key=lambda finding: finding.severity)

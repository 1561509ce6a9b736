"""Rules about memory: its limit, what is evicted, and what forks or wastes it. Pure."""

from __future__ import annotations

from lmcache_redis.admin.findings import Facts, Finding, Severity, setting
from lmcache_redis.admin.sizes import shown_bytes

# Shares of the machine's memory: the most that is safe, the most beside forks, what to set.
_MOST_OF_MEMORY = 0.85
_MOST_WITH_FORKS = 0.45
_ADVISED_OF_MEMORY = 0.75
_SLOW_FORK_US = 100_000
_LEAST_USED_BYTES = 1 << 30
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/enabled"

CRITICAL, WARNING, HINT, OK = Severity


def memory_limit(facts: Facts) -> Finding | None:
    limit, machine = facts.maxmemory_bytes, facts.machine_bytes
    if limit is None:
        return None
    if limit == 0:
        advised = int(machine * _ADVISED_OF_MEMORY) >> 20 if machine else None
        size = f"{advised}mb" if advised else "SIZE"
        return Finding(
            CRITICAL,
            "maxmemory",
            "there is no memory limit",
            "a cache fills whatever it is given: the server grows until the system ends it",
            setting("maxmemory", size),
        )
    tokens = limit // facts.need.kv_bytes_per_token
    seen = f"{shown_bytes(limit)}, room for the KV of about {tokens:,} tokens"
    if facts.evicted_keys:
        seen += f"; full, {facts.evicted_keys:,} keys evicted so far"
    if machine and limit > machine * _MOST_OF_MEMORY:
        return Finding(
            WARNING,
            "maxmemory",
            f"{seen}, on a machine that has {shown_bytes(machine)}",
            "buffers and fragmentation come on top: the machine may run out of memory",
            setting("maxmemory", f"{int(machine * _ADVISED_OF_MEMORY) >> 20}mb"),
        )
    return Finding(OK, "maxmemory", seen)


def policy(facts: Facts) -> Finding | None:
    if not facts.policy:
        return None
    if facts.policy == "noeviction":
        why = "once full, every store is refused: the cache keeps its oldest content for good"
        severity = CRITICAL
    elif facts.policy.startswith("volatile-"):
        why = (
            "only keys that expire are evicted: unless every agent runs with --ttl-s, a full "
            "server refuses every store"
        )
        severity = WARNING
    elif facts.policy == "allkeys-random":
        why = "prefixes that all requests share are evicted as readily as those nobody reads"
        severity = WARNING
    else:
        return Finding(OK, "maxmemory-policy", facts.policy)
    return Finding(
        severity, "maxmemory-policy", facts.policy, why, setting("maxmemory-policy", "allkeys-lru")
    )


def stopped_writes(facts: Facts) -> Finding | None:
    if not facts.save_failed or facts.stops_writes is False:
        return None
    return Finding(
        CRITICAL,
        "failed save",
        "the last background save failed",
        "by default (stop-writes-on-bgsave-error) the server then refuses every store",
        setting("save", '""'),
    )


def snapshots(facts: Facts) -> Finding | None:
    if facts.save == "" or (facts.save is None and facts.saved is None):
        return None if facts.save is None else Finding(OK, "snapshots", "off")
    if facts.save is None and not facts.saved:
        return Finding(OK, "snapshots", "none since the server started")
    limit, machine = facts.maxmemory_bytes, facts.machine_bytes
    no_room = bool(machine) and (limit == 0 or (limit or 0) > (machine or 0) * _MOST_WITH_FORKS)
    seen = f"save {facts.save}" if facts.save else "background saves have been made"
    if facts.fork_us and facts.fork_us >= _SLOW_FORK_US:
        seen += f"; the last fork stopped the server for {facts.fork_us / 1000:.0f} ms"
    why = (
        "each save forks: the server stands still while page tables are copied, and every "
        "store until it ends costs a second copy of what it overwrites"
    )
    if no_room:
        why += "; with this memory limit the machine has no room for that copy"
    return Finding(CRITICAL if no_room else WARNING, "snapshots", seen, why, setting("save", '""'))


def append_only(facts: Facts) -> Finding | None:
    if facts.append_only is None:
        return None
    if not facts.append_only:
        return Finding(OK, "append-only file", "off")
    return Finding(
        WARNING,
        "append-only file",
        "on",
        "every store goes to disk as well, and each rewrite forks; KV can be computed again",
        setting("appendonly", "no"),
    )


def replicas(facts: Facts) -> Finding | None:
    if not facts.replicas:
        return None
    return Finding(
        HINT,
        "replicas",
        f"{facts.replicas} attached",
        "each doubles what a store sends, and its first synchronisation forks or holds a "
        "copy of the cache; a cache that is lost only has to be filled again",
        ("run the cache without replicas, unless losing it at once is worse than that",),
    )


def huge_pages(facts: Facts) -> Finding | None:
    topic = "transparent huge pages"
    if facts.disable_huge_pages:
        return Finding(OK, topic, "the server switches them off for itself (disable-thp yes)")
    if facts.huge_pages in ("never", "madvise"):
        return Finding(OK, topic, facts.huge_pages)
    off = f"as root on the server's machine: echo madvise > {_HUGE_PAGES}"
    why = (
        "with them a fork copies 2 MiB for every write, and freed values leave memory that "
        "cannot be given back"
    )
    never_forks = facts.save == "" and facts.append_only is False and facts.replicas == 0
    if facts.huge_pages == "always" and facts.disable_huge_pages is False and never_forks:
        return Finding(OK, topic, "in use, which speeds up first stores; nothing forks here")
    if facts.huge_pages == "always":
        sure = facts.disable_huge_pages is False
        seen = "always" + ("" if sure else "; whether the server exempts itself is not seen")
        return Finding(
            WARNING if sure else HINT, topic, seen, why, ("redis.conf: disable-thp yes", off)
        )
    return Finding(
        HINT,
        topic,
        "cannot be seen from here",
        why,
        (f"on the server's machine: cat {_HUGE_PAGES}", off),
    )


def fragmentation(facts: Facts) -> Finding | None:
    used, ratio = facts.used_bytes, facts.fragmentation
    if used is None or ratio is None or used < _LEAST_USED_BYTES:
        return None
    if ratio < 1.5:
        return Finding(OK, "fragmentation", f"{ratio:.2f}")
    return Finding(
        HINT,
        "fragmentation",
        f"{ratio:.2f}: {shown_bytes(used * ratio)} for {shown_bytes(used)} of data",
        "that memory could hold KV; agents with different --slot-bytes cause it, for one",
        (
            *setting("activedefrag", "yes"),
            "where that is refused: restart the server, which empties it",
        ),
    )

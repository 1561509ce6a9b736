"""What an agent exports to Prometheus: its families, and their values from its status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from lmcache_redis.agent.agent import Agent, status_report
from lmcache_redis.metrics import COUNTERS, Distribution
from lmcache_redis.metrics.exporter import (
    TIER_FAMILIES,
    Family,
    OwnerSource,
    Source,
    Values,
    labelled,
)


def _reasons(prefix: str) -> Mapping[str, str]:
    """The counters with this prefix, by the rest of their names."""
    return {name.removeprefix(prefix): name for name in COUNTERS if name.startswith(prefix)}


# Of counters: the family, and the value of its label for each counter.
_BY_LABEL: Final = MappingProxyType(
    {
        Family(
            "hit_chunks",
            "counter",
            "chunks found by lookups, by the tier that had them",
            ("tier",),
        ): {"host": "hit_chunks_pool", "disk": "hit_chunks_disk", "redis": "hit_chunks_redis"},
        Family(
            "missed_chunks",
            "counter",
            "chunks not loaded, by reason (the counters `miss_*` of `status`)",
            ("reason",),
            "`absent` is a new prompt or an eviction. `redis_error`: Redis or its network fails. "
            "`corrupt`, `foreign`: another program writes these keys. `sealed`: agents have other "
            "seal keys. `pool_full`, `deadline`: the "
            "host pool is small for the requests at once. `slower`: Redis is far or busy.",
        ): _reasons("miss_"),
        Family(
            "dropped_chunks",
            "counter",
            "chunks not stored, by reason (the counters `drop_*` of `status`)",
            ("reason",),
            "`queue_full`: Redis takes writes more slowly than prompts are computed. `redis_full`: "
            "give it an eviction policy. `pool_full`: a larger `--pool-bytes`. `lease`, "
            "`device_error`: see the agent's log.",
        ): _reasons("drop_"),
        **TIER_FAMILIES,
        Family(
            "cut_lookups",
            "counter",
            "lookups answered with fewer chunks than found, by reason",
            ("reason",),
            "loads are slower than the agent expected (`slower`) or than `--lookup-deadline-s`",
        ): {"slower": "lookups_cut", "deadline": "lookups_timed_out"},
    }
)
_HIGH = {
    "differing_chunks": "answers may have been wrong: see the ERROR in the agent's log, and "
    "[canaries](canary.md)",
    "wire_errors": "a program that is no engine of this version talks to the agent",
    "sessions_timed_out": "an engine does not end its requests: see its log",
    "heartbeat_losses": "engines hang or are killed",
    "retrieves_failed": "loads fail while blocks wait for them; vLLM computes those blocks",
    "evictions": "with many misses: a larger `--pool-bytes`",
    "redis_reconnects": "the server restarts, or the network loses connections",
    "redis_errors": "see the agent's log",
    "clears_failed": "see the agent's log; `lmcache-redis purge` removes chunks",
}
_LABELLED = {counter for values in _BY_LABEL.values() for counter in values.values()}
# The other counters have families of their own.
_ALONE = {
    name: Family(name, "counter", meaning, high=_HIGH.get(name, ""))
    for name, meaning in COUNTERS.items()
    if name not in _LABELLED
}

_HISTOGRAMS: Final[Mapping[Family, Mapping[tuple[str, ...], str]]] = MappingProxyType(
    {
        Family(
            "lookup_seconds",
            "histogram",
            "from a lookup to its answer, loads included; the request waits",
            high="loads are slow, or wait for room in the host pool",
        ): {(): "lookup_seconds"},
        Family("lookup_hit_chunks", "histogram", "chunks of a lookup that hit"): {(): "hit_chunks"},
        Family(
            "load_seconds",
            "histogram",
            "of one chunk into the host pool, with its wait for the chunks before it",
            ("tier",),
            "Redis, the disk or the network is busy",
        ): {("disk",): "disk_load_seconds", ("redis",): "redis_load_seconds"},
        Family(
            "load_rate_bytes_per_second",
            "histogram",
            "rate of the tier's loads, measured whenever a chunk arrives",
            ("tier",),
        ): {("disk",): "disk_load_rate", ("redis",): "redis_load_rate"},
        Family(
            "store_seconds",
            "histogram",
            "for which a store held an engine's blocks",
            high="copies are slow: more `--copy-threads`, or cores that nothing else uses",
        ): {(): "store_seconds"},
        Family(
            "retrieve_seconds",
            "histogram",
            "from a retrieve to filled blocks",
            high="as `store_seconds`",
        ): {(): "retrieve_seconds"},
        Family(
            "canary_distance",
            "histogram",
            "between cached KV and what an engine has computed, of one part of a chunk",
            high="more than 0.15, or 0.4 of states, counts as other KV ([canaries](canary.md))",
        ): {(): "canary_distance"},
    }
)

_GAUGES: Final = (
    Family("info", "gauge", "1; the version of the agent", ("version",)),
    Family("pool_size_bytes", "gauge", "size of the host pool"),
    Family("pool_used_bytes", "gauge", "slots of the host pool in use; a full pool is normal"),
    Family(
        "pool_pinned_bytes",
        "gauge",
        "slots that requests, loads or stores hold now",
        high="near the size: lookups wait for room; a larger `--pool-bytes`",
    ),
    Family(
        "queue_bytes",
        "gauge",
        "chunks that wait to be written to Redis",
        high="near `--write-queue-bytes`: the ends of prompts are dropped",
    ),
    Family("waiting_lookups", "gauge", "lookups that wait for room in the host pool"),
    Family("sessions", "gauge", "requests that the agent knows"),
    Family("redis_up", "gauge", "1 if Redis answers, 0 while the breaker is open"),
    Family("disk_up", "gauge", "1 if the disk tier answers"),
    Family("disk_used_bytes", "gauge", "size of the disk tier's files"),
    Family(
        "load_bytes_per_second",
        "gauge",
        "measured rate of loads, 0 before the first",
        ("tier",),
    ),
    Family(
        "tier_slow",
        "gauge",
        "1 while nothing is loaded from the tier because computing is faster",
        ("tier",),
        "1 for long: the tier is too slow for this model; a nearer or larger server",
    ),
    Family(
        "distrusted_layouts",
        "gauge",
        "layouts of which nothing is loaded, because canaries have found other KV than was cached",
        high="see `differing_chunks`",
    ),
    Family("engines", "gauge", "registered workers, ready or not", ("model", "layout", "ready")),
)

# Of each model; the names are fields of `ModelUse`.
_MODELS: Final = tuple(
    Family(f"model_{name}", "counter", meaning, ("model",))
    for name, meaning in (
        ("lookups", "lookups answered"),
        ("lookup_tokens", "prompt tokens asked for by lookups, in whole chunks"),
        ("hit_tokens", "prompt tokens found by lookups"),
        ("retrieved_bytes", "bytes scattered into blocks of its engines"),
        ("gathered_bytes", "bytes gathered from blocks of its engines"),
    )
)

FAMILIES: Final = (*_BY_LABEL, *_ALONE.values(), *_MODELS, *_HISTOGRAMS, *_GAUGES)


def source_of(agent: Agent) -> Source:
    """The agent's values, read on its loop."""

    def read() -> Values:
        return values_of(status_report(agent), agent.cache.metrics.distributions())

    return OwnerSource(agent.loop.post, read)


def values_of(status: Mapping[str, Any], distributions: Mapping[str, Distribution]) -> Values:
    """The values of FAMILIES from a STATUS document and histograms."""
    counters: Mapping[str, int] = status["counters"]
    values = labelled(_BY_LABEL, counters)
    values |= {name: {(): counters[name]} for name in _ALONE}
    values |= {
        family.name: {label: distributions[name] for label, name in labels.items()}
        for family, labels in _HISTOGRAMS.items()
    }
    values |= {
        family.name: {
            (model,): use[family.name.removeprefix("model_")]
            for model, use in status["models"].items()
        }
        for family in _MODELS
    }
    return {**values, **_gauges(status)}


def _gauges(status: Mapping[str, Any]) -> Values:
    pool, disk = status["pool"], status["disk"]
    slot_bytes = pool["slot_bytes"]
    tiers = {name.lower(): tier for name, tier in status["loads"]["tiers"].items()}
    engines = Counter(
        (each["model"], each["layout"], "yes" if each["ready"] else "no")
        for each in status["engines"]
    )
    return {
        "info": {(status["version"],): 1},
        "pool_size_bytes": {(): pool["slots"] * slot_bytes},
        "pool_used_bytes": {(): pool["used_slots"] * slot_bytes},
        "pool_pinned_bytes": {(): pool["pinned_slots"] * slot_bytes},
        "queue_bytes": {(): status["queues"]["write_bytes"]},
        "waiting_lookups": {(): status["loads"]["waiting"]},
        "sessions": {(): status["sessions"]},
        "redis_up": {(): status["redis"]["up"]},
        "disk_up": {(): disk["up"]} if disk else {},
        "disk_used_bytes": {(): disk["used_bytes"]} if disk else {},
        "load_bytes_per_second": {(name,): tier["bytes_per_s"] for name, tier in tiers.items()},
        "tier_slow": {(name,): tier["is_slow"] for name, tier in tiers.items()},
        "distrusted_layouts": {(): len(status["canaries"]["distrusted"])},
        "engines": {labels: float(count) for labels, count in engines.items()},
    }

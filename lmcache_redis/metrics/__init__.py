# SPDX-License-Identifier: Apache-2.0
"""Every counter and histogram of an agent, declared once.

`Metrics` makes them with prometheus_client, a set for each cache. Code and STATUS know each by a
name of its own, because several are one exposed metric with a label. What else is exposed is
declared where its values are: `agent.reports.exported`, `compat.gateway.server`, and
`integrations.vllm.reports.stats`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from lmcache_redis.tier_kinds import HOST, KINDS, TierKind

PREFIX: Final = "lmcache_redis_"


class Declared(NamedTuple):
    """A metric before it is made.

    kind: Counter, Gauge or Histogram. name: as exposed, without `PREFIX` and ``_total``. parts: for
    each name in code, the value of the label, and what it counts; empty for the metric as a whole.
    """

    kind: type
    name: str
    meaning: str
    label: str = ""
    parts: Mapping[str, tuple[str, str]] = MappingProxyType({})
    buckets: tuple[float, ...] = ()

    def make(self, kind: Any = None, labels: Sequence[str] = (), **more: Any) -> Any:
        """kind: in place of its own. labels: before its own."""
        if self.buckets:
            more["buckets"] = self.buckets
        names = [*labels, *filter(None, [self.label])]
        make = kind or self.kind
        return make(name=PREFIX + self.name, documentation=self.meaning, labelnames=names, **more)

    def meanings(self) -> dict[str, str]:
        """What each counter means, by its name in code."""
        parts = {name: meaning for name, (_, meaning) in self.parts.items()}
        return parts or {self.name: self.meaning}


def _parts(prefix: str, **meanings: str) -> dict[str, tuple[str, str]]:
    """By value of the label, which follows the prefix in code."""
    return {prefix + value: (value, meaning) for value, meaning in meanings.items()}


def _of_tiers(
    counter: Callable[[TierKind], str], meaning: str = "", host: str = ""
) -> dict[str, tuple[str, str]]:
    """For each kind of tier. meaning: where it has ``{title}``, the kind's. host: of the pool's."""
    found = {}
    for kind in KINDS:
        if kind is not HOST:
            said = meaning.format(title=kind.title, place=kind.place)
            found[counter(kind)] = kind.name, said
        elif host:
            found[counter(kind)] = kind.name, host
    return found


def _moved(what: str, meaning: str) -> dict[str, tuple[str, str]]:
    return _of_tiers(lambda kind: kind.counter(what), meaning)


def _reasons(prefix: str, meaning: str, own: str) -> dict[str, tuple[str, str]]:
    """Of tiers that count by outcome nowhere else. own: the field for those that do."""
    return {
        f"{prefix}{kind.name}": (kind.name, meaning.format(title=kind.title))
        for kind in KINDS
        if kind is not HOST and not getattr(kind, own)
    }


def _steps(first: int, end: int) -> tuple[float, ...]:
    """1, 2.5 and 5 times each power of ten."""
    return tuple(float(f"{n}e{power}") for power in range(first, end) for n in ("1", "2.5", "5"))


SECONDS: Final = _steps(-4, 2)

# Counters without a label.
_ALONE: Final = {
    # engines and sessions
    "registrations": "KV caches registered by engine workers",
    "unregistrations": "KV caches unregistered, by their engine or because it went away",
    "heartbeat_losses": "clients of engines dropped: silent, or ended, and not unregistered before",
    "sessions_opened": "sessions (one a request) opened by a lookup",
    "sessions_ended": "sessions ended by their engine",
    "sessions_timed_out": "sessions that the agent ended because their engine did not",
    "wire_errors": "messages refused because they broke the protocol",
    "records_dropped": "lines of --record not written: the disk was too slow, or failed",
    # lookups
    "lookups": "lookups answered",
    "lookup_chunks": "chunks asked for by lookups",
    "awaited_chunks": "chunks that came while lookups waited for another engine to store them",
    "probes": "chunks loaded to learn the rate of a tier",
    "warmed_chunks": "chunks loaded by --warm-bytes, before anybody asked for them",
    "warmed_bytes": "their bytes",
    # what loads have saved (`agent.sessions`)
    "saved_tokens": "prompt tokens loaded into blocks instead of computed",
    "saved_untimed_tokens": "saved tokens whose seconds are not known: their engine had not "
    "measured its prefill",
    "saved_prefill_seconds": "prefill of saved tokens, less the wait for their loads; a loss is "
    "taken from later savings",
    # host pool to engine, and back
    "retrieves": "retrieve jobs finished",
    "retrieves_failed": "retrieve jobs with at least one chunk not delivered",
    "retrieved_chunks": "chunks scattered into blocks of an engine",
    "retrieved_bytes": "bytes scattered into blocks of an engine",
    "stores": "store jobs finished",
    "gathered_chunks": "chunks gathered from blocks of an engine",
    "gathered_bytes": "bytes gathered from blocks of an engine",
    "skipped_chunks": "chunks not stored again because the host pool or a shared tier had them",
    # canaries: chunks that an engine computed although they were cached
    "compared_chunks": "parts of chunks compared with what an engine has computed",
    "differing_chunks": "parts of chunks that were not what an engine has computed",
    "uncompared_chunks": "parts of canaries not compared: no longer in the host pool, not read "
    "in time, or without numbers",
    "loaded_hits": "hits that an engine began to load, one a request",
    "local_hits": "of these, behind a prefix that vLLM had itself: no canary compares such hits",
    "failed_removals": "attempts to remove a wrong chunk from a tier that failed; others follow",
    # host pool and connections
    "evictions": "chunks evicted from the host pool to make room",
    "clears": "CLEAR requests carried out in the host pool",
    "clears_failed": "CLEAR requests that failed in Redis, or in another shared tier",
    "cleared_keys": "keys removed from Redis, and other shared tiers, by CLEAR requests",
    "redis_connects": "connections to Redis made",
    "redis_reconnects": "connections to Redis lost; they are made again",
    "redis_errors": "failed Redis operations of any kind",
}

DECLARED: Final = (
    *(Declared(Counter, name, meaning) for name, meaning in _ALONE.items()),
    Declared(
        Counter, "hit_chunks", "chunks found by lookups, by the tier that had them", "tier",
        _of_tiers(
            lambda kind: kind.hits,
            "chunks found {place} and loaded into the host pool",
            host="chunks found in the host pool",
        ),
    ),
    Declared(
        Counter, "cut_lookups", "lookups answered with fewer chunks than there may be, by reason",
        "reason",
        {
            "lookups_cut": ("slower", "lookups cut short because their loads fell behind"),
            "lookups_timed_out": ("deadline", "lookups cut short by their deadline"),
            "lookups_failed": ("error", "lookups cut short because a tier failed or was silent"),
        },
    ),
    Declared(
        Counter, "missed_chunks",
        "chunks not loaded, by reason (the counters `miss_*` of `status`)", "reason",
        _parts(
            "miss_",
            absent="chunks neither in the host pool nor in Redis",
            incomplete="chunks with missing stripes (evicted, or only partly written)",
            mixed_stores="chunks whose stripes came from two different stores",
            corrupt="chunks with a wrong checksum, a damaged header or a wrong size",
            foreign="chunks of another layout, another key or an unknown format version",
            sealed="chunks sealed with a key that is not in the key file, or not sealed",
            redis_error="chunks not loaded because Redis failed or could not be reached",
            redis_silent="chunks not loaded because Redis had not answered in time",
            deadline="chunks not loaded before the lookup deadline",
            pool_full="chunks not loaded because every slot of the host pool was in use",
            slower="chunks not loaded because computing them was expected to be faster",
            mapping="chunks not looked for because the memory of an engine was still being mapped",
        )
        | _reasons("miss_", "chunks not loaded from {title}; the next tier was asked", "misses"),
    ),
    Declared(
        Counter, "dropped_chunks",
        "chunks not stored, by reason (the counters `drop_*` of `status`)", "reason",
        _parts(
            "drop_",
            queue_full="chunks not written because the write queue was full",
            pool_full="chunks not stored because every slot of the host pool was in use",
            redis_error="chunks not written because Redis failed or could not be reached",
            redis_full="chunks not written because Redis was at its memory limit",
            lease="chunks not stored because their blocks were read too late",
            device_error="chunks not stored because an engine's blocks could not be read",
            shutdown="chunks not stored because the agent was shut down",
            admission="chunks kept in the host pool alone, until --store-after requests name them",
            quota="chunks not written to Redis because their tenant has used its --tenant-bytes",
        )
        | _reasons(
            "drop_", "chunks not written to {title}: its queue was full, or it failed", "drops"
        ),
    ),
    Declared(
        Counter, "loaded_chunks", "chunks read into memory", "tier",
        _moved("loaded_chunks", "chunks read from {title}"),
    ),
    Declared(
        Counter, "loaded_bytes", "payload bytes read into memory", "tier",
        _moved("loaded_bytes", "payload bytes read from {title}"),
    ),
    Declared(
        Counter, "stored_chunks", "chunks written completely", "tier",
        _moved("stored_chunks", "chunks written to {title} completely"),
    ),
    Declared(
        Counter, "stored_bytes", "payload bytes of chunks written, as they lie", "tier",
        _moved("stored_bytes", "payload bytes written to {title}, as they lie"),
    ),
    Declared(
        Counter, "plain_bytes", "the same bytes before --compress", "tier",
        _moved("plain_bytes", "payload of what was written to {title}"),
    ),
    Declared(
        Histogram, "lookup_seconds",
        "from a lookup to its answer, loads included; the request waits", buckets=SECONDS,
    ),
    Declared(
        Histogram, "lookup_hit_chunks", "chunks of a lookup that hit",
        parts={"hit_chunks": ("", "")}, buckets=tuple(float(1 << power) for power in range(13)),
    ),
    Declared(
        Histogram, "load_seconds",
        "of one chunk into the host pool, with its wait for the chunks before it", "tier",
        _of_tiers(lambda kind: kind.load_seconds), SECONDS,
    ),
    Declared(
        Histogram, "load_rate_bytes_per_second",
        "rate of the tier's loads, measured whenever a chunk arrives", "tier",
        _of_tiers(lambda kind: kind.load_rate), _steps(6, 11),
    ),
    Declared(
        Histogram, "store_seconds", "for which a store held an engine's blocks", buckets=SECONDS
    ),
    Declared(
        Histogram, "retrieve_seconds", "from a retrieve to filled blocks", buckets=SECONDS
    ),
    Declared(
        Histogram, "canary_distance",
        "between cached KV and what an engine has computed, of one part of a chunk",
        buckets=_steps(-4, 1),
    ),
)  # fmt: skip

# By names in code, which are those in STATUS.
COUNTERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: meaning
        for each in DECLARED
        if each.kind is Counter
        for name, meaning in each.meanings().items()
    }
)


class Metrics:
    """The metrics of one cache. Every method may be called from any thread.

    since_s: when everything was zero (`time.monotonic()`).
    """

    __slots__ = ("_by_name", "registry", "since_s")

    def __init__(self) -> None:
        self.since_s = time.monotonic()
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Any] = {}
        for each in DECLARED:
            made = each.make(registry=self.registry)
            for name in each.meanings():
                self._by_name[name] = made.labels(each.parts[name][0]) if each.label else made

    def count(self, name: str, n: int = 1) -> None:
        """Adds `n` (zero or more) to the counter `name`, which must be one of COUNTERS."""
        self._by_name[name].inc(n)

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        self._by_name[name].observe(value)

    def raise_to(self, name: str, total: float) -> None:
        """Sets a counter that something else counts, unless it is higher. Call it on one thread."""
        self._by_name[name].inc(max(0.0, total - self._value(name)))

    def snapshot(self) -> dict[str, float]:
        """Every counter, in the order of COUNTERS. Seconds are floats, all others whole numbers."""
        return {
            name: self._value(name) if name.endswith("_seconds") else int(self._value(name))
            for name in COUNTERS
        }

    def _value(self, name: str) -> float:
        (metric,) = self._by_name[name].collect()
        return float(metric.samples[0].value)

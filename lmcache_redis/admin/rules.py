# SPDX-License-Identifier: Apache-2.0
"""Judges the facts of a server: what to change, and why. Pure."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lmcache_redis.admin.facts import Facts
from lmcache_redis.chunks.frame import HEADER_BYTES
from lmcache_redis.config import (
    DEFAULT_CONNECTIONS,
    DEFAULT_SLOT_BYTES,
)
from lmcache_redis.resp.net.advice import NAME_THE_CLUSTER, NAME_THE_PRIMARY
from lmcache_redis.resp.net.endpoint import Transport
from lmcache_redis.units import gigabytes, shown_age, shown_bytes

OLDEST_VERSION = (6, 2)
STRIPE_BYTES = DEFAULT_SLOT_BYTES + HEADER_BYTES
# An agent has one GET in flight per connection: one reply has to fit, with room to spare.
LEAST_BUFFER_BYTES = 4 * STRIPE_BYTES
# What the connections of one agent need.
LEAST_CLIENTS_BYTES = 2 * DEFAULT_CONNECTIONS * STRIPE_BYTES
# Shares of the machine's memory: the safe maximum, and what to set.
_MOST_OF_MEMORY, _ADVISED_OF_MEMORY = 0.85, 0.75
# A cache that holds fewer prompts, or for less long, is emptied before it helps.
_FEW_PROMPTS, _YOUNG_S = 10, 300.0


class Severity(enum.IntEnum):
    """How serious a finding is. With CRITICAL or WARNING the doctor's exit status is 1."""

    CRITICAL = 0
    WARNING = 1
    HINT = 2
    OK = 3


CRITICAL, WARNING, HINT, OK = Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding about one server: what was seen, why it matters, and how to change it."""

    severity: Severity
    topic: str
    seen: str
    why: str = ""
    change: tuple[str, ...] = ()
    where: str = ""


def _set(name: str, value: str) -> tuple[str, str]:
    """How to change a setting: the command for the running server, and the line of redis.conf."""
    line = value.strip('"') if " " in value else value
    return f"CONFIG SET {name} {value}", f"redis.conf: {name} {line}"


# Why these are no policies for a cache, by how they begin.
_POLICIES = {
    "noeviction": "a full server refuses every store: the cache keeps its oldest content forever",
    "volatile-": "only keys that expire are evicted: unless every agent runs with --ttl-s, a full "
    "server refuses every store",
    "allkeys-random": "prefixes that all requests share are evicted as readily as those never read "
    "again",
}
# Why each topic matters and what to change, unless its rule below says so. Findings of equal
# severity are sorted in the order of these topics.
ADVICE: dict[str, tuple[str, ...]] = {
    "role": (
        "a replica takes no writes: nothing would ever be stored",
        NAME_THE_PRIMARY,
    ),
    "cluster": (
        "it answers only for its own slots: stores and loads of all other keys fail",
        f"{NAME_THE_CLUSTER}, for agents too",
    ),
    "braces": (
        "by the first text in braces of a key a cluster decides which server has it: the others "
        "have none of these chunks",
        "give a --key-prefix and a model name without braces",
    ),
    "maxmemory": ("",),
    "maxmemory-policy": ("", *_set("maxmemory-policy", "allkeys-lru")),
    "failed save": (
        "by default (stop-writes-on-bgsave-error) the server then refuses every store",
        *_set("save", '""'),
    ),
    "snapshots": (
        "each save forks: the server stops while page tables are copied, and until the save "
        "ends every store costs a second copy of the memory it overwrites (of 2 MiB with huge "
        "pages)",
        *_set("save", '""'),
    ),
    "password": (
        "any client that reaches the port can read KV, and plant KV that engines then use",
        "ACL SETUSER default >PASSWORD, and LMCACHE_REDIS_PASSWORD for every agent",
    ),
    "client-output-buffer-limit": (
        f"a stripe is up to {shown_bytes(STRIPE_BYTES)}: the server would close connections in "
        "the middle of loads",
        *_set("client-output-buffer-limit", '"normal 0 0 0"'),
    ),
    "maxmemory-clients": (
        "the server closes the connections that use most memory: those of loads and stores",
        *_set("maxmemory-clients", "0"),
    ),
    "bandwidth": ("agents get the same error",),
    "load bandwidth": (
        "users notice a hit that is twice as fast as computing the tokens again",
        "give the server cores of its own, a faster network or more io-threads, or use more",
        "see what your model needs: --model and --prefill-tokens-per-s",
    ),
    "latency": ("", "move the server nearer, or start agents with more --connections"),
    "append-only file": (
        "every store goes to disk as well, and each rewrite forks; KV can be computed again",
        *_set("appendonly", "no"),
    ),
    "store bandwidth": (
        "what cannot be stored in time is dropped and computed again; engines do not wait",
        "accept it if most prompts repeat; else a faster network, or more servers",
    ),
    "io-threads": (
        "one core copies for all clients; with more threads the server reads and writes "
        "sockets in parallel; with two cores or fewer leave it",
        "redis.conf: io-threads 4",
        "before Redis 8 also: io-threads-do-reads yes",
        "then restart the server: not settable while it runs",
    ),
    "TLS": (
        "KV and the password cross the network unencrypted; TLS costs bandwidth",
        "redis.conf: tls-port 6380, tls-cert-file, tls-key-file; then --redis-url rediss://...",
    ),
    "version": (
        "older than 6.2, the oldest version that agents are tested with",
        "run Redis 7.2 or Valkey 8, or later",
    ),
    "not seen": (
        "this user or this service does not show it: rules that need it are skipped",
        "ACL SETUSER USER +info +config|get, or see the service's own settings",
    ),
}


def judge(facts: Facts) -> list[Finding]:
    """The findings of all rules, the most important first."""
    rules = (_access, _memory, _settings, _speed)
    return advised((finding for each in rules for finding in each(facts)), ADVICE)


def advised(findings: Iterable[Finding], advice: Mapping[str, tuple[str, ...]]) -> list[Finding]:
    """The findings with what their rules left to the table, the most important first."""
    topics = list(advice)
    found = []
    for each in findings:
        why, *change = advice[each.topic]
        why, changes = each.why or why, each.change or tuple(change)
        if each.severity is OK:  # then there is nothing to explain
            why, changes = "", ()
        found.append(dataclasses.replace(each, why=why, change=changes))
    return sorted(found, key=lambda f: (f.severity, topics.index(f.topic)))


def _access(f: Facts) -> Iterator[Finding]:
    if f.role not in (None, "master", "primary"):
        yield Finding(CRITICAL, "role", f"the server is a {f.role}")
    if f.cluster_enabled and not f.as_cluster:
        yield Finding(CRITICAL, "cluster", "the server is one node of a Redis Cluster")
    if f.all_here:
        names = ", ".join(map(repr, f.all_here))
        yield Finding(WARNING, "braces", f"all chunks are here whose keys have {names}")
    if f.version is not None:
        seen = f"{f.product} {'.'.join(map(str, f.version))}"
        yield Finding(OK if f.version >= OLDEST_VERSION else WARNING, "version", seen)
    if f.unseen:
        yield Finding(HINT, "not seen", "; ".join(f.unseen))
    if not f.has_password and f.transport is Transport.UNIX:
        yield Finding(OK, "password", "none: the socket's file permissions control access")
    else:
        severity = OK if f.has_password else HINT if f.local else CRITICAL
        yield Finding(severity, "password", "set" if f.has_password else "none")
    if f.transport is Transport.TLS and not f.certificate_checked:
        seen = "on, but the server's certificate is not checked"
        why = "an attacker on the network path can read and replace KV"
        change = "leave ssl_cert_reqs=none out of the URL, and name the CA with ssl_ca_certs"
        yield Finding(WARNING, "TLS", seen, why, (change,))
    elif f.transport is Transport.TLS:
        yield Finding(OK, "TLS", "on")
    elif f.transport is Transport.UNIX or f.local:
        yield Finding(OK, "TLS", "off, on this machine")
    else:
        network = "private network" if f.private else "public address"
        yield Finding(HINT if f.private else WARNING, "TLS", f"off, on a {network}")


def _memory(f: Facts) -> Iterator[Finding]:
    limit = f.maxmemory_bytes
    advised_mb = int((f.machine_bytes or 0) * _ADVISED_OF_MEMORY) >> 20
    change = _set("maxmemory", f"{advised_mb}mb" if advised_mb else "SIZE")
    if limit == 0:
        why = "a cache uses all memory it gets: the server grows until the system kills it"
        yield Finding(CRITICAL, "maxmemory", "there is no memory limit", why, change)
    elif limit is not None:
        yield _limit(f, limit, change)
    if f.policy:
        why = next((why for begin, why in _POLICIES.items() if f.policy.startswith(begin)), "")
        severity = CRITICAL if f.policy == "noeviction" else WARNING if why else OK
        yield Finding(severity, "maxmemory-policy", f.policy, why)


def _limit(f: Facts, limit: int, change: tuple[str, str]) -> Finding:
    """Whether a memory limit is too large for the machine, or too small for the cache."""
    need = f.need
    tokens = int(limit * f.nodes / (need.memory_per_token or need.kv_bytes_per_token))
    prompts = tokens // need.prompt_tokens
    seen = (
        f"{shown_bytes(limit)}, room for the KV of about {tokens:,} tokens, or {prompts:,} prompts "
        f"of {need.prompt_tokens:,} ({need.of})"
    )
    if f.nodes > 1:
        seen += f", with the {f.nodes - 1} other servers"
    if f.evicted_keys:
        seen += f"; full, {f.evicted_keys:,} keys evicted so far"
    why = ""
    more = ("a larger maxmemory, or more servers", "lmcache-redis size MODEL --memory SIZE")
    if f.machine_bytes and limit > f.machine_bytes * _MOST_OF_MEMORY:
        seen += f", on a machine that has {shown_bytes(f.machine_bytes)}"
        why = "buffers and fragmentation come on top: the machine may run out of memory"
        more = change
    elif f.evicted_keys and f.oldest_idle_s is not None and f.oldest_idle_s < _YOUNG_S:
        seen += f", of the chunks left none unused for more than {shown_age(f.oldest_idle_s)}"
        why = "a prompt that comes again later than that is computed again"
    elif prompts < _FEW_PROMPTS:
        why = f"fewer than {_FEW_PROMPTS} prompts: one is evicted before it comes again"
    elif f.pool_bytes is not None and limit * f.nodes < f.pool_bytes:
        seen += f"; the host pool of this node's agent has {shown_bytes(f.pool_bytes)}"
        why = "what the pool evicts has left the server before: it adds hardly any hits"
    return Finding(WARNING if why else OK, "maxmemory", seen, why, more)


def _settings(f: Facts) -> Iterator[Finding]:
    if f.save_failed:
        yield Finding(CRITICAL, "failed save", "the last background save failed")
    if f.save is not None:
        yield Finding(WARNING if f.save else OK, "snapshots", f.save or "off")
    if f.append_only is not None:
        on = f.append_only
        yield Finding(WARNING if on else OK, "append-only file", "on" if on else "off")
    if f.normal_buffer is not None:
        hard, soft, soft_s = f.normal_buffer
        is_low = any(0 < limit < LEAST_BUFFER_BYTES for limit in (hard, soft))
        seen = f"normal {hard} {soft} {soft_s}"
        yield Finding(CRITICAL if is_low else OK, "client-output-buffer-limit", seen)
    if (limit := f.clients_memory_bytes) is not None:
        is_low = 0 < limit < LEAST_CLIENTS_BYTES
        seen = f"{shown_bytes(limit)} for all clients" if limit else "no limit"
        yield Finding(WARNING if is_low else OK, "maxmemory-clients", seen)


def _unless_busy(f: Facts, severity: Severity, topic: str, seen: str) -> tuple[Severity, str, str]:
    """What a machine without a free core measures says little of the server."""
    if severity in (CRITICAL, WARNING) and f.load_per_core > 1.0:
        severity = HINT
        seen += f"; measured while this machine was busy (load {f.load_per_core:.1f} a core)"
    return severity, topic, seen


def _speed(f: Facts) -> Iterator[Finding]:
    rate = f.need.prefill_tokens_per_s
    token_bytes = f.need.loaded_per_token or f.need.kv_bytes_per_token
    # At this rate a hit takes as long as computing; and what prefill makes: this server's share.
    need = token_bytes * rate / f.nodes
    # Packed, no more is written than takes memory.
    written = min(f.need.kv_bytes_per_token, f.need.memory_per_token or math.inf)
    made = written * rate / f.nodes
    split = f" over {f.nodes} servers" if f.nodes > 1 else ""
    read, write = f.read_bytes_per_s, f.write_bytes_per_s
    if f.ping_s is not None:
        most = DEFAULT_CONNECTIONS * STRIPE_BYTES / max(f.ping_s, 1e-6)
        severity = OK if most >= 2 * need else HINT if most >= need else WARNING
        seen = f"{f.ping_s * 1000:.2f} ms a round trip (median PING)"
        why = (
            f"each of {DEFAULT_CONNECTIONS} connections waits one round trip a stripe: at most "
            f"{gigabytes(most)}/s, and hits need {gigabytes(need)}/s"
        )
        yield Finding(severity, "latency", seen, why)
    if f.bandwidth_refused:
        yield Finding(WARNING, "bandwidth", f"could not be measured: {f.bandwidth_refused}")
    if read is not None:
        ratio = read / need
        seen = (
            f"loads {gigabytes(read)}/s; {shown_bytes(token_bytes)} of KV a token x {rate:,.0f} "
            f"tokens/s of prefill = {gigabytes(token_bytes * rate)}/s{split}: a hit is {ratio:.1f} "
            "times as fast"
        )
        severity = OK if ratio >= 2 else WARNING if ratio >= 1 else CRITICAL
        yield Finding(*_unless_busy(f, severity, "load bandwidth", seen))
    if write is not None:
        severity = OK if write >= made else HINT if write >= made / 4 else WARNING
        seen = f"stores {gigabytes(write)}/s, prefill makes {gigabytes(made)}/s{split}"
        yield Finding(*_unless_busy(f, severity, "store bandwidth", seen))
    if f.io_threads is not None:
        is_slow = read is not None and read < need and not f.local
        severity = OK if f.io_threads > 1 else WARNING if is_slow else HINT
        yield Finding(severity, "io-threads", str(f.io_threads))

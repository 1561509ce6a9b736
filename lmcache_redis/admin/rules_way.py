"""Rules about the way to the keys: who answers, who may ask, and how fast bytes move. Pure."""

from __future__ import annotations

from lmcache_redis.admin.findings import Facts, Finding, Severity, setting
from lmcache_redis.admin.sizes import gigabytes, shown_bytes
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.resp.endpoint import Transport
from lmcache_redis.resp.options import DEFAULT_GET_CONNECTIONS
from lmcache_redis.stripe import HEADER_BYTES

OLDEST_VERSION = (6, 2)
STRIPE_BYTES = DEFAULT_SLOT_BYTES + HEADER_BYTES
# An agent keeps one GET outstanding on a connection: a reply, and room to spare.
LEAST_BUFFER_BYTES = 4 * STRIPE_BYTES
_FEW_CORES = 2

CRITICAL, WARNING, HINT, OK = Severity


def role(facts: Facts) -> Finding | None:
    if facts.role is None or facts.role in ("master", "primary"):
        return None
    return Finding(
        CRITICAL,
        "role",
        f"the server is a {facts.role}",
        "a replica takes no writes: nothing would ever be stored",
        ("point --redis-url at the primary",),
    )


def one_of_a_cluster(facts: Facts) -> Finding | None:
    if not facts.cluster_enabled or facts.as_cluster:
        return None
    return Finding(
        CRITICAL,
        "cluster",
        "the server is one node of a Redis Cluster",
        "it answers only for its own slots: stores and loads of all other keys fail",
        ("write redis+cluster://HOST:PORT instead of redis://HOST:PORT, for agents too",),
    )


def version(facts: Facts) -> Finding | None:
    if facts.version is None:
        return None
    seen = f"{facts.product} {'.'.join(map(str, facts.version))}"
    if facts.version >= OLDEST_VERSION:
        return Finding(OK, "version", seen)
    return Finding(
        WARNING,
        "version",
        seen,
        "older than 6.2, the oldest that agents are tested with",
        ("run Redis 7.2 or Valkey 8, or later",),
    )


def output_buffer(facts: Facts) -> Finding | None:
    if facts.normal_buffer is None:
        return None
    hard, soft, soft_s = facts.normal_buffer
    limits = [limit for limit in (hard, soft) if limit]
    seen = f"normal {hard} {soft} {soft_s}"
    if not limits or min(limits) >= LEAST_BUFFER_BYTES:
        return Finding(OK, "client-output-buffer-limit", seen)
    return Finding(
        CRITICAL if 0 < hard < LEAST_BUFFER_BYTES else WARNING,
        "client-output-buffer-limit",
        seen,
        f"a stripe is up to {shown_bytes(STRIPE_BYTES)}: the server would cut connections in "
        "the middle of loads",
        setting("client-output-buffer-limit", '"normal 0 0 0"'),
    )


def value_limits(facts: Facts) -> Finding | None:
    for name, limit, least, value in (
        ("proto-max-bulk-len", facts.bulk_limit_bytes, STRIPE_BYTES, "512mb"),
        ("client-query-buffer-limit", facts.query_buffer_bytes, LEAST_BUFFER_BYTES, "1gb"),
    ):
        if limit is not None and limit < least:
            return Finding(
                CRITICAL,
                name,
                shown_bytes(limit),
                f"a stripe is up to {shown_bytes(STRIPE_BYTES)}: the server would refuse stores",
                setting(name, value),
            )
    return None


def connections(facts: Facts) -> Finding | None:
    if facts.clients is None or not facts.max_clients:
        return None
    seen = f"{facts.clients} of {facts.max_clients} in use"
    if facts.clients < facts.max_clients * 0.8:
        return Finding(OK, "maxclients", seen)
    return Finding(
        WARNING,
        "maxclients",
        seen,
        "an agent that gets no connection counts the server as down",
        (
            *setting("maxclients", str(max(10_000, 2 * facts.max_clients))),
            "where that is refused: raise the server's limit of open files first (LimitNOFILE)",
        ),
    )


def io_threads(facts: Facts) -> Finding | None:
    if facts.io_threads is None:
        return None
    if facts.io_threads > 1:
        return Finding(OK, "io-threads", str(facts.io_threads))
    if facts.cores is not None and facts.cores <= _FEW_CORES:
        return Finding(OK, "io-threads", f"1, on {facts.cores} cores that engines use too")
    slow = facts.read_bytes_per_s is not None and facts.read_bytes_per_s < _share(facts)
    old = facts.product == "redis" and facts.version is not None and facts.version < (8,)
    reads = ("redis.conf: io-threads-do-reads yes",) if old else ()
    return Finding(
        WARNING if slow and not facts.local else HINT,
        "io-threads",
        "1: one core moves every byte",
        "a load waits for the copies of all others; with threads, sockets are written and "
        "read beside each other",
        ("redis.conf: io-threads 4", *reads, "then restart the server: not settable while it runs"),
    )


def password(facts: Facts) -> Finding | None:
    if facts.has_password:
        return Finding(OK, "password", "set")
    if facts.transport is Transport.UNIX:
        return Finding(OK, "password", "none: the socket's permissions decide who may enter")
    return Finding(
        HINT if facts.local else CRITICAL,
        "password",
        "none",
        "whoever reaches the port reads prompts' KV, and can plant KV that engines then use",
        ("ACL SETUSER default >PASSWORD, and LMCACHE_REDIS_PASSWORD for every agent",),
    )


def encryption(facts: Facts) -> Finding | None:
    if facts.transport is Transport.TLS and not facts.certificate_checked:
        return Finding(
            WARNING,
            "TLS",
            "on, but the server's certificate is not checked",
            "whoever sits in between can read and replace KV",
            ("leave ssl_cert_reqs=none out of the URL, and name the CA with ssl_ca_certs",),
        )
    if facts.transport is not Transport.TCP or facts.local:
        how = "on" if facts.transport is Transport.TLS else "off, on this machine"
        return Finding(OK, "TLS", how)
    return Finding(
        HINT if facts.private else WARNING,
        "TLS",
        "off, on a private network" if facts.private else "off, on a public address",
        "KV and the password cross the network readable; TLS costs bandwidth",
        ("redis.conf: tls-port 6380, tls-cert-file, tls-key-file; then --redis-url rediss://...",),
    )


def latency(facts: Facts) -> Finding | None:
    if facts.ping_s is None:
        return None
    seen = f"{facts.ping_s * 1000:.2f} ms a round trip (median PING)"
    most = DEFAULT_GET_CONNECTIONS * STRIPE_BYTES / max(facts.ping_s, 1e-6)
    if most >= 2 * _share(facts):
        return Finding(OK, "latency", seen)
    return Finding(
        WARNING if most < _share(facts) else HINT,
        "latency",
        seen,
        f"each of {DEFAULT_GET_CONNECTIONS} connections waits one for every stripe: at most "
        f"{gigabytes(most)}/s, and prefill makes {gigabytes(_share(facts))}/s",
        ("move the server nearer, or start agents with more --get-connections",),
    )


def loads(facts: Facts) -> Finding | None:
    if facts.read_bytes_per_s is None:
        if not facts.bandwidth_refused:
            return None
        seen = f"could not be measured: {facts.bandwidth_refused}"
        return Finding(WARNING, "bandwidth", seen, "an agent would meet the same")
    read, need = facts.read_bytes_per_s, _share(facts)
    seen = f"loads {gigabytes(read)}/s; {facts.need.sum}" + _split(facts)
    if read >= 2 * need:
        return Finding(OK, "load bandwidth", f"{seen}: a hit is {read / need:.1f} times as fast")
    why = (
        "a hit takes longer than computing the tokens again"
        if read < need
        else f"a hit is only {read / need:.1f} times as fast as computing the tokens again"
    )
    return Finding(
        CRITICAL if read < need else WARNING,
        "load bandwidth",
        seen,
        why,
        (
            "give the server cores of its own"
            if facts.local
            else "give the server a faster network or more io-threads, or use more servers",
            "see what your model needs: --kv-bytes-per-token and --prefill-tokens-per-s",
        ),
    )


def stores(facts: Facts) -> Finding | None:
    if facts.write_bytes_per_s is None:
        return None
    write, need = facts.write_bytes_per_s, _share(facts)
    seen = f"stores {gigabytes(write)}/s, prefill makes {gigabytes(need)}/s" + _split(facts)
    if write >= need:
        return Finding(OK, "store bandwidth", seen)
    return Finding(
        HINT if write >= need / 4 else WARNING,
        "store bandwidth",
        seen,
        "what cannot be stored in time is dropped and computed again; engines do not wait",
        ("accept it if most prompts repeat; else a faster network, or more servers",),
    )


def unseen(facts: Facts) -> Finding | None:
    if not facts.unseen:
        return None
    return Finding(
        HINT,
        "not seen",
        "; ".join(facts.unseen),
        "this user, or this service, does not show it: what is not listed was not looked at",
        ("ACL SETUSER USER +info +config|get, or see the service's own settings",),
    )


def _share(facts: Facts) -> float:
    """What this server has to carry of the bytes a second that prefill makes."""
    return facts.need.bytes_per_s / facts.nodes


def _split(facts: Facts) -> str:
    return f" over {facts.nodes} servers" if facts.nodes > 1 else ""

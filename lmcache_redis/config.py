# SPDX-License-Identifier: Apache-2.0
"""All settings: types, defaults, bounds and help texts, each declared once (`settings`).

A config is built once and never changes.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_redis.errors import ConfigError
from lmcache_redis.processes import memory_limit_bytes
from lmcache_redis.settings import (
    check_all,
    format_size,
    option_name,
    setting,
    settings_of,
)
from lmcache_redis.sources import Given, meant
from lmcache_redis.tenants import parse_limits

_PORT = re.compile(r"0|[1-9][0-9]{0,4}")

_IPC = "ipc://"
ENDPOINT_VARIABLE = "LMCACHE_REDIS_ENDPOINT"
SEAL_KEY_FILE_VARIABLE = "LMCACHE_REDIS_SEAL_KEY_FILE"
COMPRESS_VARIABLE = "LMCACHE_REDIS_COMPRESS"
# Where a service manager makes a directory for the agent.
_SERVICE_DIRECTORY = Path("/run/lmcache-redis")

MIN_SLOT_BYTES = 4096
COMPRESSIONS = ("off", "lossless")
# With a header of 640 bytes a value stays just under 1 MiB, a size class of Redis's allocator.
DEFAULT_SLOT_BYTES = (1 << 20) - 4096
_BESIDE_SLOTS_BYTES = 4096  # of a pool
# Why these values: docs/internals/decisions.md.
DEFAULT_CONNECTIONS = 4
DEFAULT_NETWORK_THREADS = 1
MAX_CONNECTIONS = 64
MAX_TTL_S = 10 * 366 * 86_400


def machine_share(most_bytes: int) -> int:
    """A quarter of the memory that there is in whole MiB, ``most_bytes`` at most."""
    return min(most_bytes, memory_limit_bytes() // 4 >> 20 << 20)


def private_directory() -> Path:
    """The directory of the default endpoint, which only this user can enter.

    ``/run/lmcache-redis`` if a service manager has made it for this user, else
    ``/tmp/lmcache-redis-UID``: the same in a login session, in a service and in a job.
    """
    uid = os.geteuid()
    try:
        if _SERVICE_DIRECTORY.stat().st_uid == uid:
            return _SERVICE_DIRECTORY
    except OSError:
        pass
    return Path(f"/tmp/lmcache-redis-{uid}")


def tools_endpoint() -> str:
    """The default endpoint of tools: for root, who can enter it, also that of a service's agent."""
    own = default_endpoint()
    service = _SERVICE_DIRECTORY / "agent.sock"
    asks_service = os.geteuid() == 0 and not os.environ.get(ENDPOINT_VARIABLE)
    # Of what it may not enter, too, it does not exist.
    if asks_service and not os.path.exists(endpoint_path(own)) and os.path.exists(service):
        return f"{_IPC}{service}"
    return own


def service_user() -> str | None:
    """The user of this node's service, if there is one and it is not this user."""
    try:
        uid = _SERVICE_DIRECTORY.stat().st_uid
    except OSError:
        return None
    if uid == os.geteuid():
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def default_endpoint() -> str:
    """The endpoint of agent and engines if none is given."""
    return os.environ.get(ENDPOINT_VARIABLE) or f"ipc://{private_directory() / 'agent.sock'}"


def endpoint_path(endpoint: str) -> Path:
    """The socket of an ipc:// endpoint."""
    return Path(endpoint.removeprefix(_IPC))


def why_unsafe(directory: Path) -> str | None:
    """Why other users may put files into ``directory``; None if they cannot.

    The directory, and a link to it, must belong to this user or to root, and only they may write
    into it. Raises OSError if it does not exist.
    """
    found = directory.stat()
    if not {found.st_uid, directory.lstat().st_uid} <= {0, os.geteuid()}:
        return f"{directory} belongs to another user"
    if found.st_mode & 0o022:
        if found.st_mode & stat.S_ISVTX:  # such as /tmp, which everybody needs as it is
            return f"others can write to {directory}: use a directory below it"
        return f"others can write to {directory}: run `chmod go-w {directory}`"
    return None


def ensure_private(directory: Path) -> None:
    """Makes the directory (mode 0700), or raises ``ConfigError`` if others can enter it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigError(
            f"the directory {directory} of the endpoint cannot be used ({error.strerror}): "
            "choose another --endpoint"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{directory} does not belong to this user: choose another --endpoint")
    if found.st_mode & 0o077:
        advice = f"choose a directory below it, {_IPC}{directory / 'lmcache' / 'agent.sock'}"
        # Where there is anything else, others may need the directory as it is.
        if not found.st_mode & stat.S_ISVTX and all(
            each.is_socket() for each in directory.iterdir()
        ):
            advice = f"run `chmod 700 {directory}` or choose another --endpoint"
        raise ConfigError(
            f"others can enter {directory}, and any process that reaches the endpoint can read KV: "
            f"{advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """The settings that agents and gateways share: Redis, the disk, and what is seen of both."""

    redis_url: str | None = setting(
        "server: redis://, unix://, redis+sentinel:// or redis+cluster://, with TLS rediss for "
        "redis; none: an agent runs its own, a gateway has memory and disk alone",
        None,
        form="URL",
        repr=False,  # it may hold a password
    )
    redis_username: str | None = setting("ACL user, if not in the URL", None)
    redis_password: str | None = setting(
        "password, if not in the URL", None, secret=True, repr=False
    )
    redis_sentinel_password: str | None = setting(
        "password of the Sentinels, if not in the URL", None, secret=True, repr=False
    )
    redis_password_file: str | None = setting(
        "file with the password, read at each connect", None, form="FILE"
    )
    redis_credential_provider: str | None = setting(
        "PACKAGE.MODULE:FACTORY, which returns a CredentialProvider of redis-py, asked at each "
        "connect",
        None,
        form="NAME",
    )
    seal_key_file: str | None = setting(
        "file of keys, one a line: the first seals values (AES-256-GCM), all of them open them; "
        "values that are not sealed are misses",
        None,
        form="FILE",
    )
    compress: str = setting(
        "lossless: keep floating-point numbers in Redis in fewer bytes, bit for bit, where that "
        "saves some; every reader understands both",
        "lossless",
        choices=COMPRESSIONS,
    )
    key_prefix: bytes = setting("prefix of every key, for a server that others use too", b"")
    disk_path: str | None = setting(
        "directory for the disk tier, which survives restarts", None, form="DIRECTORY"
    )
    disk_size: int = setting(
        "maximum size of the files in --disk-path",
        64 << 30,
        (1 << 20, 1 << 60),
        reloadable=True,
    )
    shutdown_deadline_s: float = setting(
        "time for requests in progress and queued writes at the end of the process",
        5.0,
        (0, 600),
        reloadable=True,
    )
    log_level: str = setting(
        "level of the log", "info", choices=("debug", "info", "warning", "error"), reloadable=True
    )
    log_format: str = setting(
        "lines for people, or JSON objects, one a line", "text", choices=("text", "json")
    )
    metrics: str | None = setting(
        "ADDRESS:PORT where Prometheus finds /metrics, and probes /healthz",
        None,
        form="ADDRESS:PORT",
    )

    def __post_init__(self) -> None:
        check_all(self)
        if self.metrics is not None:
            parse_address(self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig(TierSettings):
    """All settings of an agent. Raises ``ConfigError`` for impossible values."""

    endpoint: str = setting(
        "socket of the agent: ipc://PATH, in a directory that only its user can enter",
        default_endpoint,
        shown="ipc:// in a private directory",
        form="ipc://PATH",
    )
    chunk_size_tokens: int = setting(
        "tokens per chunk; an engine rounds up to whole blocks", 256, (1, 1 << 20)
    )
    pool_bytes: int = setting(
        "memory of the host pool, a hard limit",
        lambda: machine_share(4 << 30),
        shown="4GiB, at most a quarter of the memory",
        between=(MIN_SLOT_BYTES + _BESIDE_SLOTS_BYTES, 1 << 50),
    )
    warm_bytes: int = setting(
        "fill this much of a new host pool with the chunks that Redis uses most, once an engine is "
        "registered, behind all loads; 0: none",
        0,
        (0, 1 << 50),
    )
    slot_bytes: int = setting(
        "slot size and maximum payload of a stripe; the same on all agents of one Redis",
        DEFAULT_SLOT_BYTES,
        (MIN_SLOT_BYTES, 512 << 20),
    )
    write_queue_bytes: int | None = setting(
        "limit of chunks queued for Redis, and for disk; then the ends of prompts are dropped",
        None,
        shown="half of the host pool",
        between=(0, 1 << 50),
        reloadable=True,
    )
    embedded_memory_bytes: int = setting(
        "memory limit of the embedded Redis",
        lambda: machine_share(8 << 30),
        shown="8GiB, at most a quarter of the memory",
        between=(16 << 20, 1 << 50),
    )
    lookup_deadline_s: float = setting(
        "maximum wait for a lookup; shorter where computing is faster",
        10.0,
        (0.01, 600),
    )
    op_timeout_s: float = setting(
        "maximum time of an exchange with Redis; then the server is probed", 2.0, (0.01, 600)
    )
    connections: int = setting(
        "connections for loads, and as many for stores", DEFAULT_CONNECTIONS, (1, MAX_CONNECTIONS)
    )
    network_threads: int = setting(
        "threads for the load connections, and as many for the store connections",
        DEFAULT_NETWORK_THREADS,
        (1, MAX_CONNECTIONS),
    )
    ttl_s: int = setting("seconds until a stored chunk expires; 0: never", 0, (0, MAX_TTL_S))
    ttl_refresh: bool = setting("restart a chunk's TTL when it is loaded", False)
    tenant_bytes: str | None = setting(
        "how much each tenant may write to Redis within the TTL, or within a day without one; "
        "*=SIZE: each other tenant",
        None,
        form="NAME=SIZE",
        repeatable=True,
    )
    copy_threads: int = setting(
        "threads that copy into blocks, and as many out of them, for each GPU, and for CPU engines",
        2,
        (1, 64),
    )
    direct_copy_bytes: int = setting(
        "size of pages from which on they are copied to and from a GPU without a kernel",
        64 << 10,
        (1, 1 << 50),
    )
    batch_copies: str = setting(
        "many copies to and from a GPU in one call to the driver, where it can, or one by one",
        "auto",
        choices=("auto", "off"),
    )
    canary_every: int = setting(
        "one hit in this many is computed and compared with the cached KV; 0: never",
        1000,
        (0, 1_000_000_000),
    )
    expose_requests: bool = setting(
        "serve ids of requests at --metrics: /why.json, and the last misses of the page", False
    )
    store_after: int = setting(
        "write a chunk to Redis and disk once this number of requests has named it; before, only "
        "the host pool keeps it",
        1,
        (1, 255),
    )
    record: str | None = setting(
        "file to record names, sizes and times of chunks in, for `lmcache-redis plan`; no tokens",
        None,
        form="FILE",
    )

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        check_endpoint(self.endpoint)
        _check_slot_fits(self.slot_bytes, self.pool_bytes)
        check_redis(self)
        if self.tenant_bytes is not None:
            parse_limits(self.tenant_bytes)

    @property
    def write_queue_limit_bytes(self) -> int:
        """``write_queue_bytes``, resolved."""
        return self.pool_bytes // 2 if self.write_queue_bytes is None else self.write_queue_bytes


def _check_slot_fits(slot_bytes: int, pool_bytes: int) -> None:
    """Raises ``ConfigError``, which begins with the option that is not at its default."""
    if pool_bytes < slot_bytes + _BESIDE_SLOTS_BYTES:
        slot, pool = format_size(slot_bytes), format_size(pool_bytes)
        given = f"--slot-bytes is {slot}, and --pool-bytes {pool}"
        if slot_bytes == DEFAULT_SLOT_BYTES:
            given = f"--pool-bytes is {pool}, and --slot-bytes {slot}"
        raise ConfigError(
            f"{given}: the pool must hold a slot, and {format_size(_BESIDE_SLOTS_BYTES)} more"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """All settings of an engine: ``kv_connector_extra_config`` of vLLM."""

    endpoint: str = setting(
        "socket of the agent on this node", default_endpoint, shown="the agent's default"
    )
    agent_dead_after_s: float = setting(
        "seconds of silence after which the agent counts as dead and vLLM computes", 1.5, (0.6, 60)
    )
    weights_id: str | None = setting("a name for weights that are not local files", None)
    weights_run: str | None = setting(
        "the name of a training run: its engines share the KV of equal weight versions", None
    )
    check_weights: bool = setting(
        "at each reset of vLLM's prefix cache, compare the parameters in memory with those before",
        True,
    )
    load_always: bool = setting("load every hit, also where computing is faster", False)
    share_across_tp: bool = setting(
        "share with engines of other tensor-parallel sizes that set this too: their sums round "
        "differently, so tokens that are nearly equal may change. Needs head-major pages (BLHNC) "
        "and unquantized weights; lookups and loads take longer",
        False,
    )
    share_across_versions: bool = setting(
        "share with other versions of vLLM that set this too: their KV differs in its last bits. "
        "Needs a text model without quantization; the first 16 hits of an engine are only compared",
        False,
    )
    kv_shares: int | None = setting(
        "values that the KV heads of a chunk are divided into, the same on all engines",
        None,
        shown="by heads, 8 at most",
        between=(1, 255),  # a byte of a key
    )
    # The values are vLLM's names.
    kv_cache_layout: str | None = setting(
        "order of vLLM's KV cache in memory (vLLM 0.29 or newer): all layers of a block are one "
        "piece (shares are not), which a GPU copies without a kernel. Engines of another order do "
        "not share. Not in a `MultiConnector`",
        None,
        choices=("BLNHC", "BLHNC"),
    )

    def __post_init__(self) -> None:
        check_all(self)
        check_endpoint(self.endpoint)
        for name in ("weights_id", "weights_run"):
            if (given := getattr(self, name)) is not None and not 1 <= len(given) <= 256:
                raise ConfigError(f"{option_name(name)} is {given!r}: write 1 to 256 characters")
        if self.kv_shares is not None and not self.share_across_tp:
            raise ConfigError("--kv-shares needs share_across_tp: set that as well")

    @staticmethod
    def from_extra_config(extra: Mapping[str, Any]) -> ClientConfig:
        """The config. Raises ``ConfigError`` for an unknown name or an impossible value."""
        known = list(settings_of(ClientConfig))
        if unknown := sorted(set(extra) - set(known)):
            raise ConfigError(
                f"kv_connector_extra_config has {', '.join(unknown)}{meant(unknown[0], known)}; "
                f"it may have {', '.join(known)}"
            )
        return Given(dict(extra), {name: name for name in extra}).config(ClientConfig)


def check_endpoint(endpoint: str) -> None:
    """Raises ``ConfigError`` unless it is the absolute path of a socket."""
    path = endpoint_path(endpoint)
    if endpoint.startswith(_IPC) and path.is_absolute() and len(os.fsencode(path)) <= 100:
        return
    where = ENDPOINT_VARIABLE if endpoint == os.environ.get(ENDPOINT_VARIABLE) else "--endpoint"
    why = ""
    if endpoint.startswith("tcp://"):
        why = "tcp:// is not served, because any user of the machine could connect to it; "
    raise ConfigError(
        f"{where} {endpoint}: {why}write ipc://PATH, an absolute path of at most 100 bytes"
    )


def parse_address(text: str, option: str = "--metrics", scheme: str = "") -> tuple[str, int]:
    """Address and port of ``ADDRESS:PORT`` behind a scheme; port 0 means any free one.

    Raises ``ConfigError``, which names the option.
    """
    host, _, port = text.removeprefix(scheme).rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    is_port = _PORT.fullmatch(port) is not None and int(port) <= 65_535
    try:
        address = ipaddress.ip_address(host[1:-1] if in_brackets else host)
        if text.startswith(scheme) and is_port and in_brackets == (address.version == 6):
            return str(address), int(port)
    except ValueError:
        pass
    raise ConfigError(
        f"{option} is {text!r}: write {scheme}ADDRESS:PORT, an IPv6 address in brackets"
    )


def check_redis(settings: Any) -> None:
    """Raises ``ConfigError`` unless connections, threads and TTL are possible.

    settings: of an agent, or ``RedisOptions``.
    """
    known = settings_of(AgentConfig)
    for name in ("connections", "network_threads", "ttl_s", "compress"):
        known[name].check(getattr(settings, name))
    if settings.ttl_refresh and not settings.ttl_s:
        raise ConfigError("--ttl-refresh needs a --ttl-s: set that as well")

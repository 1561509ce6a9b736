"""All settings: types, defaults, bounds and help texts.

A config is built once and never changes. The options of commands and the table in
docs/settings.md are made from its fields.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_redis.errors import ConfigError
from lmcache_redis.processes import memory_limit_bytes

_LETTERS = "KMGTPE"
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate(_LETTERS, start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_PORT = re.compile(r"0|[1-9][0-9]{0,4}")

_IPC = "ipc://"
SEAL_KEY_FILE_VARIABLE = "LMCACHE_REDIS_SEAL_KEY_FILE"
# vLLM's names of those in which the layers of a block are one piece of memory.
KV_CACHE_LAYOUTS = ("BLNHC", "BLHNC")
LOG_LEVELS = ("debug", "info", "warning", "error")

MIN_SLOT_BYTES = 4096
# With a header of 512 bytes a value stays just under 1 MiB, a size class of Redis's allocator.
DEFAULT_SLOT_BYTES = (1 << 20) - 4096
# Why these values: docs/data-plane.md.
DEFAULT_GET_CONNECTIONS = 4
DEFAULT_SET_CONNECTIONS = 4
DEFAULT_NETWORK_THREADS = 1
MAX_CONNECTIONS = 64
MAX_TTL_S = 10 * 366 * 86_400


def parse_size(text: str | int) -> int:
    """Bytes of ``4GiB``, ``512MB``, ``1.5G`` (binary) or a plain number.

    Raises ``ConfigError`` for anything else.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else None
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{text!r} is not a size: write it as 4GiB, 512MB or a number of bytes")
    return int(float(match.group(1)) * _UNITS[unit])


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a size."""
    for power, letter in reversed([*enumerate(_LETTERS, start=1)]):
        if size_bytes >= 1024**power and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{letter}iB"
    return str(size_bytes)


def machine_share(most_bytes: int) -> int:
    """A quarter of the memory that there is in whole MiB, ``most_bytes`` at most."""
    return min(most_bytes, memory_limit_bytes() // 4 >> 20 << 20)


def private_directory() -> Path:
    """The directory of the default endpoint, which only this user can enter.

    ``$XDG_RUNTIME_DIR/lmcache-redis``, else ``lmcache-redis-UID`` in the system's directory for
    temporary files.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "lmcache-redis"
    return Path(tempfile.gettempdir()) / f"lmcache-redis-{os.getuid()}"


def default_endpoint() -> str:
    """The endpoint of agent and engines if none is given."""
    return f"ipc://{private_directory() / 'agent.sock'}"


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
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            f"{directory} does not belong to this user: remove it or choose another --endpoint"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"others can enter {directory}, and any process that reaches the endpoint can read KV: "
            f"run `chmod 700 {directory}` or choose another --endpoint"
        )


def setting(
    help_text: str,
    default: Any = dataclasses.MISSING,
    *,
    shown: str = "",
    size: bool = False,
    environment_only: str = "",
    **more: Any,
) -> Any:
    """A dataclass field for a setting: its help text and its default or the factory of that.

    shown: the default as users read it. size: in bytes, which users may write as 4GiB.
    environment_only: the environment variable that sets it; it has no option.
    """
    if callable(default):
        more["default_factory"] = default
    elif default is not dataclasses.MISSING:
        more["default"] = default
    meta = {"help": help_text, "shown": shown, "size": size, "environment_only": environment_only}
    return field(metadata=meta, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """The settings that agents and gateways share: Redis, the disk, and what is seen of both."""

    redis_url: str | None = setting(
        "URL of the server: redis://, unix://, redis+sentinel:// or redis+cluster://, with TLS "
        "rediss://, rediss+sentinel:// or rediss+cluster://; without it an agent runs its own "
        "Redis, and a gateway keeps chunks only in memory and on disk",
        None,
        repr=False,  # it may hold a password
    )
    redis_username: str | None = setting("ACL user, if not in the URL", None)
    redis_password: str | None = setting(
        "password, if not in the URL",
        None,
        environment_only="LMCACHE_REDIS_PASSWORD",
        repr=False,
    )
    redis_password_file: str | None = setting(
        "file that contains the password, read again at each connect", None
    )
    redis_credential_provider: str | None = setting(
        "PACKAGE.MODULE:FACTORY: called at the start, returns a CredentialProvider of redis-py, "
        "which is asked for user and password at each connect",
        None,
    )
    seal_key_file: str | None = setting(
        "file of the keys that values are sealed with (AES-256-GCM), one a line: the first seals, "
        "all of them open; values that are not sealed are misses",
        None,
    )
    key_prefix: bytes = setting("prefix of every key, for a server that others use too", b"")
    disk_path: str | None = setting("directory for the disk tier, which survives restarts", None)
    disk_size: int = setting("maximum total size of the files in --disk-path", 64 << 30, size=True)
    shutdown_deadline_s: float = setting(
        "maximum time for requests in progress and queued writes when the process stops", 5.0
    )
    log_level: str = setting("level of the log: debug, info, warning or error", "info")
    metrics: str | None = setting(
        "ADDRESS:PORT where Prometheus finds /metrics, and probes /healthz", None
    )

    def __post_init__(self) -> None:
        check_between("disk_size", self.disk_size, 1 << 20, 1 << 60)
        check_between("shutdown_deadline_s", self.shutdown_deadline_s, 0, 600)
        check_one_of("log_level", self.log_level, LOG_LEVELS)
        if self.metrics is not None:
            parse_address(self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig(TierSettings):
    """All settings of an agent. Raises ``ConfigError`` for impossible values."""

    endpoint: str = setting(
        "socket of the agent: ipc://PATH, in a directory that only its user can enter",
        default_endpoint,
        shown="ipc:// in a private directory",
    )
    chunk_size_tokens: int = setting("tokens per chunk; an engine rounds up to whole blocks", 256)
    pool_bytes: int = setting(
        "memory of the host pool, a hard limit",
        lambda: machine_share(4 << 30),
        shown="4GiB, at most a quarter of the machine's or container's memory",
        size=True,
    )
    slot_bytes: int = setting(
        "slot size and maximum payload of a stripe; the same on all agents of one Redis",
        DEFAULT_SLOT_BYTES,
        size=True,
    )
    write_queue_bytes: int | None = setting(
        "limit of chunks queued for Redis, and of those queued for disk; beyond it the ends of "
        "prompts are dropped and counted",
        None,
        shown="half of the host pool",
        size=True,
    )
    embedded_memory_bytes: int = setting(
        "memory limit of the embedded Redis",
        lambda: machine_share(8 << 30),
        shown="8GiB, at most a quarter of the machine's or container's memory",
        size=True,
    )
    lookup_deadline_s: float = setting(
        "maximum wait of a request for a lookup; it is shorter where computing is faster", 10.0
    )
    op_timeout_s: float = setting(
        "maximum time for one exchange with Redis; after it the server is probed", 2.0
    )
    session_timeout_s: float = setting(
        "time after which the chunks pinned by a request are released", 60.0
    )
    heartbeat_timeout_s: float = setting("time after which a silent engine is unregistered", 10.0)
    get_connections: int = setting("connections for loads", DEFAULT_GET_CONNECTIONS)
    set_connections: int = setting("connections for stores", DEFAULT_SET_CONNECTIONS)
    network_threads: int = setting(
        "threads for the load connections, and as many for the store connections",
        DEFAULT_NETWORK_THREADS,
    )
    ttl_s: int = setting("seconds until a stored chunk expires; 0: never", 0)
    ttl_refresh: bool = setting("restart a chunk's TTL when it is loaded", False)
    copy_threads: int = setting(
        "threads that copy into blocks, and as many that copy out of them; each GPU has its own, "
        "CPU engines share one set",
        2,
    )
    device: str = setting("memory that engines may register: auto, cpu or cuda", "auto")
    direct_copy_bytes: int = setting(
        "pages of so many bytes and more are copied between a GPU and the host pool without a "
        "kernel",
        64 << 10,
    )
    canary_every: int = setting(
        "one hit in this many is computed and compared with the cached KV; 0: never", 1000
    )
    record: str | None = setting(
        "file to record lookups and stores in, for `lmcache-redis plan`: names, sizes and times of "
        "chunks, no tokens",
        None,
    )
    record_size: int = setting(
        "maximum total size of --record FILE and FILE.1, which has the lines before",
        1 << 30,
        size=True,
    )

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        _check_endpoint(self.endpoint)
        check_between("chunk_size_tokens", self.chunk_size_tokens, 1, 1 << 20)
        check_between("slot_bytes", self.slot_bytes, MIN_SLOT_BYTES, 512 << 20)
        check_between("pool_bytes", self.pool_bytes, self.slot_bytes + 4096, 1 << 50)
        check_between("embedded_memory_bytes", self.embedded_memory_bytes, 16 << 20, 1 << 50)
        check_between("write_queue_bytes", self.write_queue_limit_bytes, 0, 1 << 50)
        for name in ("lookup_deadline_s", "op_timeout_s"):
            check_between(name, getattr(self, name), 0.01, 600)
        for name in ("session_timeout_s", "heartbeat_timeout_s"):
            check_between(name, getattr(self, name), 1, 86_400)
        check_redis(self)
        check_between("copy_threads", self.copy_threads, 1, 64)
        check_one_of("device", self.device, ("auto", "cpu", "cuda"))
        check_between("direct_copy_bytes", self.direct_copy_bytes, 1, 1 << 50)
        check_between("canary_every", self.canary_every, 0, 1_000_000_000)
        check_between("record_size", self.record_size, 64 << 10, 1 << 50)

    @property
    def write_queue_limit_bytes(self) -> int:
        """``write_queue_bytes``, resolved."""
        return self.pool_bytes // 2 if self.write_queue_bytes is None else self.write_queue_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """All settings of an engine: ``kv_connector_extra_config`` of vLLM."""

    endpoint: str = field(default_factory=default_endpoint)
    agent_dead_after_s: float = 1.5
    weights_id: str | None = None
    weights_run: str | None = None
    check_weights: bool = True
    load_always: bool = False
    kv_cache_layout: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.endpoint, str):
            raise ConfigError(f"endpoint is {self.endpoint!r}: write ipc://PATH")
        _check_endpoint(self.endpoint)
        check_between("agent_dead_after_s", self.agent_dead_after_s, 0.6, 60)
        for option in ("weights_id", "weights_run"):
            name = getattr(self, option)
            if name is not None and not (isinstance(name, str) and 1 <= len(name) <= 256):
                raise ConfigError(f"{option} is {name!r}: write a name of 1 to 256 characters")
        for option in ("check_weights", "load_always"):
            if not isinstance(value := getattr(self, option), bool):
                raise ConfigError(f"{option} is {value!r}: write true or false")
        if self.kv_cache_layout not in (None, *KV_CACHE_LAYOUTS):
            raise ConfigError(
                f"kv_cache_layout is {self.kv_cache_layout!r}: write one of "
                f"{', '.join(KV_CACHE_LAYOUTS)}, or leave it out"
            )

    @staticmethod
    def from_extra_config(extra: Mapping[str, Any]) -> ClientConfig:
        """The config. Raises ``ConfigError`` for an unknown name or an impossible value."""
        known = [f.name for f in dataclasses.fields(ClientConfig)]
        unknown = sorted(set(extra) - set(known))
        if unknown:
            raise ConfigError(
                f"kv_connector_extra_config has {', '.join(unknown)}; "
                f"it may have {', '.join(known)}"
            )
        return ClientConfig(**extra)


def option_name(name: str) -> str:
    """The command-line option of a setting."""
    return "--" + name.replace("_", "-")


def shown_default(setting: dataclasses.Field[Any]) -> str:
    """The default of a setting as users read it."""
    shown: str = setting.metadata["shown"]
    if shown:
        return shown
    default: Any = setting.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default in ("", b""):
        return "none"
    if setting.metadata.get("size"):
        return format_size(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _check_endpoint(endpoint: str) -> None:
    if endpoint.startswith("tcp://"):
        raise ConfigError(
            f"--endpoint {endpoint}: tcp:// is not served, because any user of the machine could "
            "connect to it; write ipc://PATH"
        )
    if not endpoint.startswith(_IPC):
        raise ConfigError(f"--endpoint {endpoint}: write ipc://PATH")
    path = endpoint_path(endpoint)
    if not path.is_absolute() or len(os.fsencode(path)) > 100:
        raise ConfigError(
            f"--endpoint {endpoint}: an ipc:// endpoint is an absolute path of at most 100 bytes"
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


def check_between(name: str, value: Any, least: float, most: float) -> None:
    """Raises ``ConfigError`` unless a setting is a number within its bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        is_size = name.endswith(("_bytes", "_size"))
        given, low, high = (
            format_size(n) if is_size and type(n) is int else repr(n) for n in (value, least, most)
        )
        raise ConfigError(f"{option_name(name)} is {given}: set it to between {low} and {high}")


def check_redis(settings: Any) -> None:
    """Raises ``ConfigError`` unless connections, threads and TTL are possible.

    settings: of an agent, or ``RedisOptions``.
    """
    for name in ("get_connections", "set_connections", "network_threads", "ttl_s"):
        count = getattr(settings, name)
        if type(count) is not int:
            raise ConfigError(f"{option_name(name)} is {count!r}: set it to a whole number")
        least, most = (0, MAX_TTL_S) if name == "ttl_s" else (1, MAX_CONNECTIONS)
        check_between(name, count, least, most)
    if settings.ttl_refresh and not settings.ttl_s:
        raise ConfigError("--ttl-refresh needs a --ttl-s: set that as well")


def check_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises ``ConfigError`` unless a setting is one of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{option_name(name)} is {value!r}: choose one of {', '.join(allowed)}")

"""The options of a plane. No repr shows a secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lmcache_redis.errors import ConfigError
from lmcache_redis.seal import SealKeys, read_seal_keys

if TYPE_CHECKING:
    from lmcache_redis.config import AgentConfig

# Why these values: docs/data-plane.md.
DEFAULT_GET_CONNECTIONS = 4
DEFAULT_SET_CONNECTIONS = 4
DEFAULT_NETWORK_THREADS = 1
MAX_CONNECTIONS = 64
MAX_TTL_S = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True, repr=False)
class RedisOptions:
    """The options of a plane, checked on construction.

    url: see `endpoint`. key_prefix: precedes every key. username, password: override those of the
    URL. get_connections, set_connections: connections for stripes, of a server or, divided, of all
    shards of a cluster. network_threads: threads for each of the two; more than one is for servers
    that are faster than a thread. connect_timeout_s: for name look-up, connect and TLS handshake
    together. op_timeout_s: for a request and all of its reply; deadlines of operations shorten it.
    probe_interval_s: between two probes of a server that is down. heartbeat_s: between two PINGs to
    a server that is up. ttl_s: seconds until a stored chunk expires (0: never), with ttl_refresh
    counted from its last load. seal_keys: values are sealed with the first, and only sealed values
    are loaded. verify_checksums: False loads damaged values as good; only to measure the cost of
    checksums. Raises ConfigError for impossible values; `check_url` checks the
    URL.
    """

    url: str
    key_prefix: bytes = b""
    username: str | None = None
    password: str | None = None
    get_connections: int = DEFAULT_GET_CONNECTIONS
    set_connections: int = DEFAULT_SET_CONNECTIONS
    network_threads: int = DEFAULT_NETWORK_THREADS
    connect_timeout_s: float = 1.0
    op_timeout_s: float = 1.0
    probe_interval_s: float = 0.2
    heartbeat_s: float = 2.0
    ttl_s: int = 0
    ttl_refresh: bool = False
    seal_keys: SealKeys | None = None
    verify_checksums: bool = True

    @staticmethod
    def of_agent(config: AgentConfig, url: str) -> RedisOptions:
        """The options of an agent, for one server. Raises ConfigError, also for its seal keys."""
        return RedisOptions(
            url,
            config.key_prefix,
            config.redis_username,
            config.redis_password,
            config.get_connections,
            config.set_connections,
            config.network_threads,
            op_timeout_s=config.op_timeout_s,
            ttl_s=config.ttl_s,
            ttl_refresh=config.ttl_refresh,
            seal_keys=read_seal_keys(config.seal_key_file),
        )

    def __post_init__(self) -> None:
        for name in ("get_connections", "set_connections", "network_threads"):
            count = getattr(self, name)
            if type(count) is not int or not 1 <= count <= MAX_CONNECTIONS:
                raise ConfigError(
                    f"{name} is {count!r}: set it to a number from 1 to {MAX_CONNECTIONS}"
                )
        if type(self.ttl_s) is not int or not 0 <= self.ttl_s <= MAX_TTL_S:
            raise ConfigError(
                f"ttl_s is {self.ttl_s!r}: set it to 0 (never) to {MAX_TTL_S} seconds"
            )
        if self.ttl_refresh and not self.ttl_s:
            raise ConfigError("ttl_refresh needs a ttl_s: set that as well")
        for name in ("connect_timeout_s", "op_timeout_s", "probe_interval_s", "heartbeat_s"):
            seconds = getattr(self, name)
            if not isinstance(seconds, (int, float)) or not 0.001 <= seconds <= 3600:
                raise ConfigError(f"{name} is {seconds!r}: set it to 0.001 to 3600 seconds")

    def __repr__(self) -> str:
        return (
            f"RedisOptions(url={redacted_url(self.url)!r}, key_prefix={self.key_prefix!r}, "
            f"get_connections={self.get_connections}, set_connections={self.set_connections}, "
            f"network_threads={self.network_threads}, "
            f"connect_timeout_s={self.connect_timeout_s}, op_timeout_s={self.op_timeout_s})"
        )


def redacted_url(url: str) -> str:
    """The URL without credentials and parameters, which may contain secrets.

    Removes everything before the last @, so that no password with an unescaped slash, question
    mark or hash leaks.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "(not a URL)"
    if "@" in rest:
        rest = "***@" + rest.rpartition("@")[2]
    elif _may_hide_secret(url):
        return f"{scheme}://***"
    return f"{scheme}://{rest.partition('?')[0].partition('#')[0]}"


def _may_hide_secret(url: str) -> bool:
    """A URL without @ whose port is not a number: perhaps a truncated password."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme != "unix" and parts.port is None and ":" in parts.netloc.rpartition("]")[2]
        )
    except ValueError:
        return True

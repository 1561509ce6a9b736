"""The options of a plane. Shows no secret."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from lmcache_redis.config import (
    DEFAULT_GET_CONNECTIONS,
    DEFAULT_NETWORK_THREADS,
    DEFAULT_SET_CONNECTIONS,
    AgentConfig,
    TierSettings,
    check_redis,
)
from lmcache_redis.errors import ConfigError
from lmcache_redis.resp.net.credentials import Credentials, load_provider
from lmcache_redis.seal import SealKeys, read_seal_keys


@dataclass(frozen=True, slots=True, repr=False)
class RedisOptions:
    """The options of a plane, checked on construction.

    url: see `net.endpoint`. key_prefix: precedes every key. username, password: override those of
    the URL. password_file: contains the password, and is read at each connect; `password` precedes
    it. credential_provider: one of redis-py, instead of user and password; asked at each connect,
    on any thread of the plane. get_connections, set_connections: connections for stripes, of a
    server or, divided, of all shards of a cluster. network_threads: threads for each of the two;
    more than one is for servers that are faster than a thread. connect_timeout_s: for name look-up,
    connect and TLS handshake together. op_timeout_s: for a request and all of its reply; deadlines
    of operations shorten it. probe_interval_s: between two probes of a server that is down.
    heartbeat_s: between two PINGs to a server that is up. ttl_s: seconds until a stored chunk
    expires (0: never), with ttl_refresh counted from its last load. seal_keys: values are sealed
    with the first, and only sealed values are loaded. verify_checksums: False loads damaged values
    as good; only to measure the cost of checksums. Raises ConfigError for impossible values;
    `check_url` checks the URL.
    """

    url: str
    key_prefix: bytes = b""
    username: str | None = None
    password: str | None = None
    password_file: str | None = None
    credential_provider: Credentials | None = None
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
    def of_settings(settings: TierSettings, url: str, **more: Any) -> RedisOptions:
        """The options for a server, by the settings of an agent or a gateway.

        Raises ConfigError, also for the seal keys and the credential provider.
        """
        provider = settings.redis_credential_provider
        return RedisOptions(
            url,
            settings.key_prefix,
            settings.redis_username,
            settings.redis_password,
            settings.redis_password_file,
            None if provider is None else load_provider(provider),
            seal_keys=read_seal_keys(settings.seal_key_file),
            **more,
        )

    @staticmethod
    def of_agent(config: AgentConfig, url: str) -> RedisOptions:
        """The options of an agent. Raises what `of_settings` raises."""
        return RedisOptions.of_settings(
            config,
            url,
            get_connections=config.get_connections,
            set_connections=config.set_connections,
            network_threads=config.network_threads,
            op_timeout_s=config.op_timeout_s,
            ttl_s=config.ttl_s,
            ttl_refresh=config.ttl_refresh,
        )

    def __post_init__(self) -> None:
        check_redis(self)
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

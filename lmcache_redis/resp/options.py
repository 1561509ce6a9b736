# SPDX-License-Identifier: Apache-2.0
"""The options of a plane, and what its URL names. Shows no secret.

    redis://[user[:password]@]host[:port][/db]              TCP, IPv4 or IPv6 ([::1])
    unix://[user[:password]@]/path/to/socket                unix socket
    redis+sentinel://[...@]host[:port],.../name[/db]        the master that Sentinels call `name`
    redis+cluster://[...@]host[:port],...                   all shards; the hosts are the seeds
    rediss://..., rediss+sentinel://..., rediss+cluster://  the same over TLS
    valkey://, valkeys:// and so on                         the same as redis:// and rediss://

Parameters: db (of one server); sentinel_username and sentinel_password; and for TLS those of
redis-py: ssl_ca_certs, ssl_ca_path, ssl_certfile, ssl_keyfile, ssl_password, ssl_cert_reqs
(required, optional, none), ssl_check_hostname. User, password, name and path are percent-decoded.
Messages quote only the scheme and names of parameters: if a password is not escaped, any other part
may contain a piece of it.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import pkgutil
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from lmcache_redis import native
from lmcache_redis.config import (
    DEFAULT_CONNECTIONS,
    DEFAULT_NETWORK_THREADS,
    AgentConfig,
    TierSettings,
    check_redis,
)
from lmcache_redis.errors import ConfigError, RedisAuthError
from lmcache_redis.resp.net.commands import Use
from lmcache_redis.resp.net.endpoint import Credentials, Endpoint, Origin, Transport, brief
from lmcache_redis.resp.net.tls import TLS_FILES
from lmcache_redis.seal import SealKeys, read_seal_keys

# Of servers: of who names none.
DEFAULT_USER = "default"
WRONG_SCHEME = (
    "the Redis URL must begin with redis://, unix:// (socket path), redis+sentinel:// or "
    "redis+cluster://; for TLS with rediss://, rediss+sentinel:// or rediss+cluster:// (valkey and "
    "valkeys are the same)"
)
# As clients of Valkey write it.
_ALIASES = {"valkey": Transport.TCP.value, "valkeys": Transport.TLS.value}
_ESCAPE = "characters like : / ? # @ in a user or password must be percent-encoded"
_TLS_PARAMETERS = (*TLS_FILES, "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_PARAMETERS = ("sentinel_username", "sentinel_password")
_SECRET = (*_SENTINEL_PARAMETERS, "ssl_password")
# User and password, hosts, path, parameters.
_PARTS = re.compile(r"(?:([^/?#]*)@)?([^/?#@]*)(/[^?#]*)?(?:\?([^#]*))?")
# An IPv6 address in brackets or a name, and the port.
_ADDRESS = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]*))(?::(.*))?")


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """The options of a plane, checked on construction.

    url: see the module. key_prefix: precedes every key. username, password: override those of
    the URL. password_file: contains the password, and is read at each connect; `password` precedes
    it. credential_provider: one of redis-py, instead of user and password; asked at each connect,
    on any thread of the plane. sentinel_password: of Sentinels, overrides that of the URL.
    connections: for loads, and as many for stores, of a server or, divided, of all shards of a
    cluster. network_threads: threads for each of the two; more than one is for servers that are
    faster than a thread. connect_timeout_s: for name look-up, connect and TLS handshake together.
    op_timeout_s: for a request and all of its reply; deadlines of operations shorten it.
    probe_interval_s: between two probes of a server that is down. heartbeat_s: between two PINGs to
    a server that is up. ttl_s: seconds until a stored chunk expires (0: never), with ttl_refresh
    counted from its last load. seal_keys: values are sealed with the first, and only sealed values
    are loaded. compress: "lossless" packs payloads that are stored, see `codecs`. verify_checksums:
    False loads damaged values as good; only to measure the cost of checksums. Raises ConfigError
    for impossible values; `check_url` checks the URL.
    """

    url: str = field(repr=False)
    key_prefix: bytes = b""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    password_file: str | None = field(default=None, repr=False)
    credential_provider: Credentials | None = field(default=None, repr=False)
    sentinel_password: str | None = field(default=None, repr=False)
    connections: int = DEFAULT_CONNECTIONS
    network_threads: int = DEFAULT_NETWORK_THREADS
    connect_timeout_s: float = 1.0
    op_timeout_s: float = 1.0
    probe_interval_s: float = 0.2
    heartbeat_s: float = 2.0
    ttl_s: int = 0
    ttl_refresh: bool = False
    seal_keys: SealKeys | None = field(default=None, repr=False)
    compress: str = "off"
    verify_checksums: bool = True

    @property
    def packs(self) -> bool:
        """Whether stores are packed: not by numpy, which would hold the GIL for seconds a GiB."""
        return self.compress == "lossless" and native.packing is not None

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
            settings.redis_sentinel_password,
            seal_keys=read_seal_keys(settings.seal_key_file),
            compress=settings.compress,
            **more,
        )

    @staticmethod
    def of_agent(config: AgentConfig, url: str) -> RedisOptions:
        """The options of an agent. Raises what `of_settings` raises."""
        return RedisOptions.of_settings(
            config,
            url,
            connections=config.connections,
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


# --------------------------------------------------------------- credentials


@dataclass(frozen=True, slots=True)
class StaticPassword:
    """The credentials of a URL, or of options."""

    username: str | None
    password: str = field(repr=False)

    def get_credentials(self) -> tuple[str, ...]:
        return (self.password,) if self.username is None else (self.username, self.password)


@dataclass(frozen=True, slots=True)
class PasswordFile:
    """The password is the file's content, without line ends at its end."""

    username: str | None
    path: str

    def get_credentials(self) -> tuple[str, ...]:
        """Raises RedisAuthError if the file cannot be read or is empty."""
        try:
            password = Path(self.path).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise RedisAuthError(
                f"the password file {self.path} cannot be read ({error.strerror})"
            ) from None
        except UnicodeDecodeError:
            raise RedisAuthError(f"the password file {self.path} is not UTF-8") from None
        if not password:
            raise RedisAuthError(f"the password file {self.path} is empty")
        return StaticPassword(self.username, password).get_credentials()


def load_provider(path: str) -> Credentials:
    """What the factory at `package.module:factory` returns, called without arguments.

    Raises ConfigError if that fails, or returns something without `get_credentials`.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"the credential provider is {path!r}: write PACKAGE.MODULE:FACTORY")
    try:
        provider = pkgutil.resolve_name(path)()
    except Exception as error:
        why = f"{type(error).__name__}: {brief(str(error))}"
        raise ConfigError(f"the credential provider {path} cannot be made: {why}") from None
    if not callable(getattr(provider, "get_credentials", None)):
        raise ConfigError(
            f"the credential provider {path} has no get_credentials(): name a factory that returns "
            "a redis.credentials.CredentialProvider"
        )
    return provider  # type: ignore[no-any-return]


# ------------------------------------------------------------------- the URL


class Topology(enum.Enum):
    """The value: what follows the transport in the scheme."""

    STANDALONE = ""
    SENTINEL = "+sentinel"
    CLUSTER = "+cluster"


_TLS_FOR_BOTH = "rediss+sentinel:// is TLS to Sentinels and servers, redis+sentinel:// to neither"
_OF_SENTINELS = Origin(
    password="put ?sentinel_password= into the Redis URL, or set LMCACHE_REDIS_SENTINEL_PASSWORD",
    tls=_TLS_FOR_BOTH,
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """All servers of a URL.

    url: without user, passwords and what else is secret. seeds: the server itself, the Sentinels,
    or some nodes of the cluster. server: transport and credentials of data servers; its address is
    valid only for a single server. service: the master's name on the Sentinels.
    """

    url: str
    topology: Topology
    seeds: tuple[Endpoint, ...]
    server: Endpoint
    service: str = ""

    def at(self, host: str, port: int) -> Endpoint:
        """The data server at an address, which Sentinels or a cluster name."""
        first = self.seeds[0].where
        if self.topology is Topology.SENTINEL:
            origin = Origin(
                f"the Sentinel at {first}", "replica-announce-ip of the servers", tls=_TLS_FOR_BOTH
            )
        else:
            settings = "cluster-announce-ip and cluster-announce-hostname of its nodes"
            origin = Origin(f"the cluster at {first}", settings)
        return dataclasses.replace(self.server, host=host, port=port, origin=origin)


def uses_of(deployment: Deployment, ttl_refresh: bool) -> tuple[Use, ...]:
    """What agents use of these servers, beside what they always use, without routers."""
    topology = deployment.topology
    uses = {
        Use.TTL_REFRESH: ttl_refresh,
        Use.DATABASE: deployment.server.db,
        Use.CLUSTER: topology is Topology.CLUSTER,
        Use.SENTINEL: topology is Topology.SENTINEL,
    }
    return tuple(use for use, is_used in uses.items() if is_used)


def user_of(credentials: Credentials | None) -> str:
    """The name of the user; empty if only a credential provider knows it."""
    if credentials is None:
        return DEFAULT_USER
    if isinstance(credentials, StaticPassword | PasswordFile):
        return credentials.username or DEFAULT_USER
    return ""


def check_url(options: RedisOptions) -> None:
    """Raises ConfigError, saying what to change, unless the URL names servers."""
    parse_deployment(options)


def parse_deployment(options: RedisOptions) -> Deployment:
    """The servers that `options` names. Raises ConfigError; touches no network."""
    transport, topology, rest = _split_scheme(options.url)
    parts = _PARTS.fullmatch(rest)
    if parts is None:
        raise ConfigError(f"the Redis URL cannot be read: {_ESCAPE}")
    user, hosts, path, query = (part or "" for part in parts.groups())
    parameters = _parameters(query, transport, topology)
    _check_hosts(hosts, path, topology)
    service, db = _service_and_db(transport, topology, path, parameters)
    server = Endpoint(
        transport, db=db, credentials=_credentials(user, options), tls=_tls(parameters)
    )
    if transport is Transport.UNIX:
        # unix://redis.sock would name a host, not a path.
        if not path or hosts or "\0" in unquote(path):
            raise ConfigError("the Redis URL names no socket: write unix:///absolute/path")
        seeds = [dataclasses.replace(server, path=unquote(path))]
    else:
        seeds = [
            dataclasses.replace(server, host=host, port=port)
            for host, port in _addresses(hosts, topology)
        ]
    server = seeds[0]
    if topology is Topology.SENTINEL:
        user, password = (parameters.get(name) for name in _SENTINEL_PARAMETERS)
        credentials = _static(user, options.sentinel_password or password)
        seeds = [
            dataclasses.replace(seed, db=0, credentials=credentials, origin=_OF_SENTINELS)
            for seed in seeds
        ]
    shown = urlencode({name: parameters[name] for name in parameters if name not in _SECRET})
    url = f"{transport.value}{topology.value}://{hosts}{path}{shown and '?'}{shown}"
    return Deployment(url, topology, tuple(seeds), server, service)


def _split_scheme(url: str) -> tuple[Transport, Topology, str]:
    scheme, separator, rest = url.partition("://")
    name, plus, kind = scheme.lower().partition("+")
    name = _ALIASES.get(name, name)
    try:
        transport, topology = Transport(name if separator else ""), Topology(plus + kind)
    except ValueError:
        raise ConfigError(WRONG_SCHEME) from None
    if transport is Transport.UNIX and topology is not Topology.STANDALONE:
        raise ConfigError(WRONG_SCHEME)
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigError(f"the Redis URL contains white space: {_ESCAPE}")
    if "#" in url:
        raise ConfigError(f"the Redis URL contains a #: {_ESCAPE}")
    return transport, topology, rest


def _parameters(query: str, transport: Transport, topology: Topology) -> dict[str, str]:
    parameters: dict[str, str] = {}
    allowed = (
        *(("db",) if topology is Topology.STANDALONE else ()),
        *(_TLS_PARAMETERS if transport is Transport.TLS else ()),
        *(_SENTINEL_PARAMETERS if topology is Topology.SENTINEL else ()),
    )
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "db" and name not in allowed:
            raise ConfigError(
                "write the database after the name: redis+sentinel://HOST:PORT/NAME/DB"
            )
        if name not in allowed:
            # An unknown name may be a piece of a password: only known names are shown.
            shown = f" {name}" if name in _TLS_PARAMETERS else ""
            raise ConfigError(
                f"the Redis URL has an unknown parameter{shown}: it may have "
                + (", ".join(allowed) or "none")
                + (" (TLS needs rediss://)" if shown else "")
            )
        if name in parameters:
            raise ConfigError(f"the parameter {name} is in the Redis URL twice")
        parameters[name] = value
    return parameters


def _credentials(user: str, options: RedisOptions) -> Credentials | None:
    username, _, password = (unquote(part) or None for part in user.partition(":"))
    username = options.username if options.username is not None else username
    password = options.password if options.password is not None else password
    if options.credential_provider is not None:
        if user or options.username or options.password or options.password_file:
            raise ConfigError(
                "the credential provider names user and password: give neither besides it"
            )
        return options.credential_provider
    if options.password_file is not None and options.password is None:
        file = PasswordFile(username, options.password_file)
        try:
            file.get_credentials()
        except RedisAuthError as error:
            raise ConfigError(f"{error}: name another one") from None
        return file
    if username is not None and password is None:
        raise ConfigError("the Redis URL has a user but no password: set the password as well")
    return _static(username, password)


def _static(username: str | None, password: str | None) -> StaticPassword | None:
    return StaticPassword(username, password or "") if username or password else None


def _check_hosts(hosts: str, path: str, topology: Topology) -> None:
    """What is well-formed, and most likely means something else. Raises ConfigError."""
    if topology is Topology.STANDALONE and "," in hosts:
        raise ConfigError(
            "the Redis URL names several hosts: write redis+cluster:// for a Redis Cluster, "
            "redis+sentinel://HOST:PORT,HOST:PORT/NAME for Sentinels, or one host"
        )
    if "@" in path and hosts and (topology is not Topology.SENTINEL or hosts.startswith(":")):
        raise ConfigError(f"the Redis URL has a / before its @: {_ESCAPE}")


def _service_and_db(
    transport: Transport, topology: Topology, path: str, parameters: dict[str, str]
) -> tuple[str, int]:
    words = [unquote(word) for word in path.split("/") if word]
    if topology is Topology.CLUSTER:
        if words not in ([], ["0"]):
            raise ConfigError("a Redis Cluster has no databases: end the URL after the hosts")
        return "", 0
    if topology is Topology.SENTINEL:
        if not words:
            raise ConfigError(
                "name the master that Sentinel watches: redis+sentinel://HOST:PORT/NAME"
            )
        if len(words) > 2:
            raise ConfigError("write redis+sentinel://HOST:PORT/NAME or .../NAME/DB")
        return words[0], _database(words[1] if len(words) == 2 else "0")
    in_path = "" if transport is Transport.UNIX else path.strip("/")
    return "", _database(parameters.get("db") or in_path or "0")


def _database(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigError("the database in the Redis URL is not a number (redis://HOST:PORT/0)")
    return int(text)


def _addresses(hosts: str, topology: Topology) -> list[tuple[str, int]]:
    """Hosts and ports, at least one."""
    default_port = "26379" if topology is Topology.SENTINEL else "6379"
    texts = [hosts] if topology is Topology.STANDALONE else hosts.split(",")
    if topology is not Topology.STANDALONE and not all(texts):
        raise ConfigError("the Redis URL has an empty host: write HOST:PORT,HOST:PORT")
    found: list[tuple[str, int]] = []
    for text in texts:
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise ConfigError(f"the host in the Redis URL cannot be read: {_ESCAPE}")
        host, port = unquote(match[1] or match[2]).lower(), match[3] or default_port
        if not host:
            raise ConfigError("the Redis URL names no host: write redis://HOST:PORT")
        if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 1 << 16):
            raise ConfigError(f"the port in the Redis URL is not 1 to 65535 ({_ESCAPE})")
        try:
            host.encode("idna")
        except UnicodeError:
            raise ConfigError(f"the host in the Redis URL is not a host name: {_ESCAPE}") from None
        found.append((host, int(port)))
    return found


def _tls(parameters: dict[str, str]) -> tuple[tuple[str, str | bool], ...]:
    settings: dict[str, str | bool] = {k: v for k, v in parameters.items() if k in _TLS_PARAMETERS}
    for name in TLS_FILES:
        if name in settings and not os.path.exists(str(settings[name])):
            raise ConfigError(f"the file that {name} in the Redis URL names does not exist")
    if settings.get("ssl_cert_reqs", "required") not in ("required", "optional", "none"):
        raise ConfigError("ssl_cert_reqs in the Redis URL must be required, optional or none")
    if "ssl_check_hostname" in settings:
        text = str(settings["ssl_check_hostname"]).lower()
        if text not in ("true", "false", "1", "0", "yes", "no"):
            raise ConfigError("ssl_check_hostname in the Redis URL must be true or false")
        settings["ssl_check_hostname"] = text in ("true", "1", "yes")
    return tuple(sorted(settings.items()))

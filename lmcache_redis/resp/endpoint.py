"""Where a server is and how to be let in, read from a URL. Pure, strict, discreet.

    redis://[user[:password]@]host[:port][/db]      TCP, IPv4 or IPv6 ([::1])
    rediss://...                                    the same over TLS
    unix://[user[:password]@]/path/to/socket        unix socket

Parameters: db; protocol (2 or 3, the version of RESP); and for TLS those of redis-py:
ssl_ca_certs, ssl_ca_path, ssl_certfile, ssl_keyfile, ssl_password, ssl_cert_reqs (required,
optional, none), ssl_check_hostname.
User, password and path are percent-decoded. No message quotes anything but the scheme and
names of parameters: with a password wrongly escaped, any other part may be a piece of it.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from lmcache_redis.errors import ConfigError
from lmcache_redis.resp.options import RedisOptions

DEFAULT_PORT = 6379
WRONG_SCHEME = (
    "the Redis URL must begin with redis://, unix:// (socket path), redis+sentinel:// or "
    "redis+cluster://; for TLS with rediss://, rediss+sentinel:// or rediss+cluster://"
)
_ESCAPE = "characters like : / ? # @ in a user or password must be percent-encoded"
_TLS_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_TLS_PARAMETERS = (*_TLS_FILES, "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")

_SENTINEL_PORT = 26379
_SENTINEL_PARAMETERS = ("sentinel_username", "sentinel_password")
_PARTS = re.compile(r"(?:([^/?#]*)@)?([^/?#@]*)(/[^?#]*)?(?:\?([^#]*))?")


class Transport(enum.Enum):
    TCP = "redis"
    TLS = "rediss"
    UNIX = "unix"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server. host and port for TCP and TLS, path for a unix socket.

    protocol: the version of RESP. tls: TLS parameters by their redis-py names. Credentials are
    left out of repr and of `where`, which is what messages call the server.
    """

    transport: Transport
    host: str = ""
    port: int = 0
    path: str = ""
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: tuple[tuple[str, str | bool], ...] = field(default=(), repr=False)
    protocol: int = 2

    @property
    def where(self) -> str:
        """Human-readable address, e.g. "127.0.0.1:6379" or "unix:/run/redis.sock"."""
        if self.transport is Transport.UNIX:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return self.where


def parse_endpoint(options: RedisOptions) -> Endpoint:
    """The server that `options` names. Raises ConfigError; touches no network."""
    transport, parts = _split(options.url)
    parameters = _parameters(parts.query, transport)
    username = options.username if options.username is not None else _text(parts.username)
    password = options.password if options.password is not None else _text(parts.password)
    if username is not None and password is None:
        raise ConfigError("the Redis URL has a user but no password: set the password as well")
    if transport is Transport.UNIX:
        return Endpoint(
            transport,
            path=_socket_path(parts),
            db=_database(parameters.get("db", "0")),
            username=username,
            password=password,
            protocol=_protocol(parameters),
        )
    return Endpoint(
        transport,
        host=_host(parts),
        port=_port(parts),
        db=_database(parameters.get("db") or parts.path.strip("/") or "0"),
        username=username,
        password=password,
        tls=_tls(parameters),
        protocol=_protocol(parameters),
    )


def _split(url: str) -> tuple[Transport, SplitResult]:
    scheme, separator, _ = url.partition("://")
    try:
        transport = Transport(scheme.lower() if separator else "")
    except ValueError:
        raise ConfigError(WRONG_SCHEME) from None
    if any(character.isspace() or not character.isprintable() for character in url):
        raise ConfigError(f"the Redis URL contains white space: {_ESCAPE}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"the host in the Redis URL cannot be read: {_ESCAPE}") from None
    if parts.fragment or "#" in url:
        raise ConfigError(f"the Redis URL contains a #: {_ESCAPE}")
    return transport, parts


def _parameters(query: str, transport: Transport) -> dict[str, str]:
    parameters: dict[str, str] = {}
    allowed = ("db", "protocol", *(_TLS_PARAMETERS if transport is Transport.TLS else ()))
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in allowed:
            # An unknown name may be a piece of a password, so it is shown only if it is not.
            shown = f" {name}" if name in _TLS_PARAMETERS else ""
            raise ConfigError(
                f"the parameter{shown} of the Redis URL is not one of {', '.join(allowed)}"
                + (" (TLS needs rediss://)" if shown else "")
            )
        if name in parameters:
            raise ConfigError(f"the parameter {name} is in the Redis URL twice")
        parameters[name] = value
    return parameters


def _text(value: str | None) -> str | None:
    return unquote(value) if value else None


def _host(parts: SplitResult) -> str:
    host = unquote(parts.hostname or "")
    if not host:
        raise ConfigError("the Redis URL names no host: write redis://HOST:PORT")
    try:
        host.encode("idna")
    except UnicodeError:
        raise ConfigError(f"the host in the Redis URL is no host name: {_ESCAPE}") from None
    return host


def _port(parts: SplitResult) -> int:
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ConfigError(f"the port in the Redis URL is not 1 to 65535 ({_ESCAPE})")
    return DEFAULT_PORT if port is None else port


def _socket_path(parts: SplitResult) -> str:
    path = unquote(parts.path)
    # unix://redis.sock would name a host, not a path.
    if not path or parts.hostname or "\0" in path:
        raise ConfigError("the Redis URL names no socket: write unix:///absolute/path")
    return path


def _database(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ConfigError("the database in the Redis URL is not a number (redis://HOST:PORT/0)")
    return int(text)


def _protocol(parameters: dict[str, str]) -> int:
    text = parameters.get("protocol", "2")
    if text not in ("2", "3"):
        raise ConfigError("protocol in the Redis URL must be 2 or 3")
    return int(text)


def _tls(parameters: dict[str, str]) -> tuple[tuple[str, str | bool], ...]:
    settings: dict[str, str | bool] = {k: v for k, v in parameters.items() if k in _TLS_PARAMETERS}
    for name in _TLS_FILES:
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


# -------------------------------------------------- several servers at one URL


class Topology(enum.Enum):
    STANDALONE = "standalone"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Deployment:
    """Where to begin.

    seeds: the server itself, the Sentinels, or some nodes of the cluster. server: how data
    servers are let in; its address means something only for a single server.
    """

    topology: Topology
    seeds: tuple[Endpoint, ...]
    server: Endpoint
    service: str = ""

    def at(self, host: str, port: int) -> Endpoint:
        """The data server at an address."""
        return dataclasses.replace(self.server, host=host, port=port)

    @property
    def where(self) -> str:
        """What messages call it."""
        places = ",".join(seed.where for seed in self.seeds)
        if self.topology is Topology.STANDALONE:
            return places
        named = f" {self.service}" if self.service else ""
        return f"{self.topology.value}{named} at {places}"


def check_url(options: RedisOptions) -> None:
    """Raises ConfigError, saying what to change, unless the URL names servers."""
    parse_deployment(options)


def parse_deployment(options: RedisOptions) -> Deployment:
    """The servers that `options` names. Raises ConfigError; touches no network."""
    scheme, _, rest = options.url.partition("://")
    transport, plus, kind = scheme.lower().partition("+")
    if not plus:
        server = parse_endpoint(options)
        return Deployment(Topology.STANDALONE, (server,), server)
    if transport not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise ConfigError(WRONG_SCHEME)
    topology = Topology(kind)
    parts = _PARTS.fullmatch(rest)
    if parts is None:
        raise ConfigError(
            "the Redis URL cannot be read: characters like : / ? # @ in a user or password must "
            "be percent-encoded"
        )
    user, hosts, path, query = (part or "" for part in parts.groups())
    service, db = _service_and_db(topology, path)
    ours, sentinels = _split_query(topology, query)
    prefix = f"{transport}://{user}@" if user else f"{transport}://"

    def endpoint(host: str) -> Endpoint:
        return parse_endpoint(dataclasses.replace(options, url=f"{prefix}{host}/{db}{ours}"))

    default_port = _SENTINEL_PORT if topology is Topology.SENTINEL else DEFAULT_PORT
    seeds = tuple(endpoint(host) for host in _hosts(hosts, default_port))
    server = seeds[0]
    if topology is Topology.SENTINEL:
        seeds = tuple(
            dataclasses.replace(
                seed,
                db=0,
                username=sentinels.get("sentinel_username"),
                password=sentinels.get("sentinel_password"),
            )
            for seed in seeds
        )
    return Deployment(topology, seeds, server, service)


def _hosts(text: str, default_port: int) -> list[str]:
    hosts = text.split(",")
    if not all(hosts):
        raise ConfigError("the Redis URL has an empty host: write HOST:PORT,HOST:PORT")
    # A port follows the last colon outside the brackets of an IPv6 address.
    return [h if ":" in h.rpartition("]")[2] else f"{h}:{default_port}" for h in hosts]


def _service_and_db(topology: Topology, path: str) -> tuple[str, str]:
    words = [unquote(word) for word in path.split("/") if word]
    if topology is Topology.CLUSTER:
        if words not in ([], ["0"]):
            raise ConfigError("a Redis Cluster has no databases: end the URL after the hosts")
        return "", "0"
    if not words:
        raise ConfigError("name the master that Sentinel watches: redis+sentinel://HOST:PORT/NAME")
    if len(words) > 2:
        raise ConfigError("write redis+sentinel://HOST:PORT/NAME or .../NAME/DB")
    return words[0], words[1] if len(words) == 2 else "0"


def _split_query(topology: Topology, query: str) -> tuple[str, dict[str, str]]:
    """Parameters of data servers as a query again, and those of Sentinels."""
    given = parse_qsl(query, keep_blank_values=True)
    if any(name == "db" for name, _ in given):
        raise ConfigError("write the database after the name: redis+sentinel://HOST:PORT/NAME/DB")
    allowed = _SENTINEL_PARAMETERS if topology is Topology.SENTINEL else ()
    sentinels = {name: value for name, value in given if name in allowed}
    ours = [(name, value) for name, value in given if name not in allowed]
    return f"?{urlencode(ours)}" if ours else "", sentinels

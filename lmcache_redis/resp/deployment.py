"""Which servers a URL means, and how they are found: one, a Sentinel's master, a cluster's shards.

    redis://, rediss://, unix://                           one server (`endpoint`)
    redis+sentinel://[user[:password]@]HOST[:PORT],HOST[:PORT],.../SERVICE[/db]
    redis+cluster://[user[:password]@]HOST[:PORT],HOST[:PORT],...
    rediss+sentinel://, rediss+cluster://                  the same over TLS

User, password, database and TLS parameters are those of the data servers. Sentinels have
their own: sentinel_username and sentinel_password. Pure; quotes nothing that may be secret.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlencode

from lmcache_redis.errors import ConfigError
from lmcache_redis.resp.endpoint import Endpoint, parse_endpoint
from lmcache_redis.resp.options import RedisOptions

_SENTINEL_PORT = 26379
_REDIS_PORT = 6379
_SENTINEL_PARAMETERS = ("sentinel_username", "sentinel_password")
_PARTS = re.compile(r"(?:([^/?#]*)@)?([^/?#@]*)(/[^?#]*)?(?:\?([^#]*))?")


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
        raise ConfigError(
            "the Redis URL must begin with redis://, rediss:// (TLS), unix:// (socket path), "
            "redis+sentinel:// or redis+cluster:// (rediss+... for TLS)"
        )
    topology = Topology(kind)
    parts = _PARTS.fullmatch(rest)
    if parts is None:
        raise ConfigError(
            "the Redis URL cannot be read: characters like : / ? # @ in a user or password must "
            "be percent-encoded"
        )
    user, hosts, path, query = (part or "" for part in parts.groups())
    service, db = _service_and_db(topology, path)
    ours, sentinels = _parameters(topology, query)
    prefix = f"{transport}://{user}@" if user else f"{transport}://"

    def endpoint(host: str) -> Endpoint:
        return parse_endpoint(dataclasses.replace(options, url=f"{prefix}{host}/{db}{ours}"))

    default_port = _SENTINEL_PORT if topology is Topology.SENTINEL else _REDIS_PORT
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


def _parameters(topology: Topology, query: str) -> tuple[str, dict[str, str]]:
    """Parameters of data servers as a query again, and those of Sentinels."""
    given = parse_qsl(query, keep_blank_values=True)
    if any(name == "db" for name, _ in given):
        raise ConfigError("write the database after the name: redis+sentinel://HOST:PORT/NAME/DB")
    allowed = _SENTINEL_PARAMETERS if topology is Topology.SENTINEL else ()
    sentinels = {name: value for name, value in given if name in allowed}
    ours = [(name, value) for name, value in given if name not in allowed]
    return f"?{urlencode(ours)}" if ours else "", sentinels

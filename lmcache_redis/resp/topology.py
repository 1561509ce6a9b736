"""Finding the data servers behind Sentinels or in a cluster, again and again.

redis-py asks; here its answers become a `ServerMap`. A watcher's thread asks at the start,
every few seconds, soon after something hinted that the map is old (a redirection, a server
that went down, a master that turned out to be a replica), and every moment while it has no map
or a server is down. Each map is adopted; a question that fails changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from lmcache_redis.errors import ConfigError, RedisError, RedisUnavailable
from lmcache_redis.resp.connect import redis_client, translated
from lmcache_redis.resp.deployment import Deployment, Topology
from lmcache_redis.resp.endpoint import Endpoint
from lmcache_redis.resp.routes import SLOTS, ServerMap

logger = logging.getLogger(__name__)

# Hints come in crowds: a resharding redirects every key of a slot.
_LEAST_PAUSE_S = 0.1


def find_servers(
    deployment: Deployment,
    known: Iterable[Endpoint],
    timeout_s: float,
    wanted: Callable[[], bool] = lambda: True,
) -> ServerMap:
    """Ask once. Raises RedisError or ConfigError with a sentence that says what to change.

    known: servers of the last map, which know more than the seeds once a cluster has grown.
    wanted: asked before each server, of which any may take its time to fail.
    """
    if deployment.topology is Topology.SENTINEL:
        return _master(deployment, timeout_s, wanted)
    failure: RedisError | ConfigError = RedisUnavailable("the cluster has no nodes")
    for endpoint in dict.fromkeys((*known, *deployment.seeds)):
        if not wanted():
            break
        found = _shards(deployment, endpoint, timeout_s)
        if isinstance(found, ServerMap):
            return found
        failure = found
    raise failure


def _master(deployment: Deployment, timeout_s: float, wanted: Callable[[], bool]) -> ServerMap:
    failure: RedisError | ConfigError = RedisUnavailable("there is no Sentinel")
    for sentinel in deployment.seeds:
        if not wanted():
            break
        try:
            with redis_client(sentinel, timeout_s, timeout_s) as client:
                found = client.execute_command(
                    "SENTINEL", "GET-MASTER-ADDR-BY-NAME", deployment.service
                )
            if not found:
                failure = RedisUnavailable(
                    f"Sentinel at {sentinel.where} watches no master named {deployment.service}: "
                    "correct the name in the Redis URL"
                )
                continue
            master = deployment.at(_text(found[0]), int(found[1]))
        except Exception as error:
            failure = translated(error, sentinel)
            continue
        # An old Sentinel's word counts only if the server agrees.
        return ServerMap((master,) if _is_master(master, timeout_s) else ())
    raise failure


def _is_master(server: Endpoint, timeout_s: float) -> bool:
    """False only if it says otherwise: whether it answers is for others to find out."""
    from redis import exceptions

    with (
        contextlib.suppress(exceptions.RedisError, OSError),
        redis_client(server, timeout_s, timeout_s) as client,
    ):
        role = client.execute_command("ROLE")
        return bool(role) and _text(role[0]) == "master"
    return True


def _shards(
    deployment: Deployment, endpoint: Endpoint, timeout_s: float
) -> ServerMap | RedisError | ConfigError:
    """The map that one node has, or why there is none to be had from it."""
    try:
        with redis_client(endpoint, timeout_s, timeout_s) as client:
            rows: list[list[Any]] = client.execute_command("CLUSTER", "SLOTS")
    except Exception as error:
        if "cluster support disabled" in str(error):
            return ConfigError(
                f"Redis at {endpoint.where} is no cluster: write redis:// instead of "
                "redis+cluster://"
            )
        return translated(error, endpoint)
    try:
        return _read_slots(deployment, endpoint, rows)
    except (TypeError, ValueError, IndexError, AttributeError):
        return RedisUnavailable(f"the reply of {endpoint.where} to CLUSTER SLOTS cannot be read")
    except RedisError as error:
        return error


def _read_slots(deployment: Deployment, asked: Endpoint, rows: list[list[Any]]) -> ServerMap:
    """Rows are [first slot, last slot, [host, port, id, ...] of the master, replicas...]."""
    servers: dict[Endpoint, int] = {}
    ranges: list[tuple[int, int, int]] = []
    for first, last, master, *_ in rows:
        host = _text(master[0] or b"") or asked.host
        server = deployment.at(host, int(master[1]))
        number = servers.setdefault(server, len(servers))
        if not 0 <= first <= last < SLOTS:
            raise ValueError
        # A node that does not know a shard's address says so with a ? (or port 0).
        if host != "?" and 0 < server.port < 1 << 16:
            ranges.append((first, last, number))
    if not ranges:
        raise RedisUnavailable(f"the cluster at {asked.where} has no slots assigned yet")
    return ServerMap(tuple(servers), tuple(ranges))


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


class Watcher:
    """The thread that keeps the map. See the module.

    find, adopt, failed: called on its thread. urgent: whether to ask again soon.
    """

    def __init__(
        self,
        find: Callable[[], ServerMap],
        adopt: Callable[[ServerMap], None],
        failed: Callable[[RedisError | ConfigError], None],
        urgent: Callable[[], bool],
        *,
        retry_s: float,
        refresh_s: float,
    ) -> None:
        self._find = find
        self._adopt = adopt
        self._failed = failed
        self._urgent = urgent
        self._retry_s = max(retry_s, _LEAST_PAUSE_S)
        self._refresh_s = refresh_s
        self._closing = False
        self._hinted = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lmcr-topology", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hint(self) -> None:
        """The map may be old: ask soon."""
        with self._changed:
            self._hinted = True
            self._changed.notify()

    def close(self) -> None:
        """No more questions; one under way ends by its time-out."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing:
            self._hinted = False
            try:
                found = self._find()
                if not self._closing:
                    self._adopt(found)
            except (RedisError, ConfigError) as error:
                self._failed(error)
            except Exception:
                logger.exception("the servers could not be looked up")
            self._wait()

    def _wait(self) -> None:
        asked_at = time.monotonic()
        with self._changed:
            while not self._closing:
                pause_s = self._retry_s if self._urgent() else self._refresh_s
                if self._hinted:
                    pause_s = _LEAST_PAUSE_S
                left_s = asked_at + pause_s - time.monotonic()
                if left_s <= 0:
                    return
                # Not longer at once: what is urgent changes without a notice.
                self._changed.wait(min(left_s, 0.5))

"""Clusters and Sentinels for tests, on loopback, ended with the test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from lmcache_redis.resp.maps import SLOTS
from lmcache_redis.resp.routes import slot_of
from tests.servers import RedisServer, free_port, wait_until

# A cluster's nodes talk to each other on their port plus this.
_BUS = 10_000
_HIGHEST_PORT = (1 << 16) - 1


def cluster_node(directory: Path, name: str) -> RedisServer:
    """A node, not started yet, of a cluster that may lose shards."""
    folder = directory / name
    folder.mkdir()
    args = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]
    args += ["--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"]
    args += ["--cluster-announce-ip", "127.0.0.1", "--repl-diskless-sync-delay", "0"]
    server = RedisServer(folder, args=args, unix=False)
    while server.port + _BUS > _HIGHEST_PORT:
        server.port = free_port()
    return server


class Cluster:
    """Masters with equal shares of the slots. Nodes can be added; slots and their keys moved."""

    def __init__(self, directory: Path, stack: ExitStack, masters: int = 3) -> None:
        self._directory = directory
        self._stack = stack
        self.nodes: list[RedisServer] = []
        for _ in range(masters):
            self._start_node()
        share = -(-SLOTS // masters)
        for number, node in enumerate(self.nodes):
            slots = range(number * share, min((number + 1) * share, SLOTS))
            node.command("CLUSTER", "ADDSLOTS", *slots)
        self._meet()

    @property
    def url(self) -> str:
        """Names only the first node: the others are discovered."""
        return f"redis+cluster://127.0.0.1:{self.nodes[0].port}"

    def add_node(self) -> RedisServer:
        """One more master, without slots."""
        node = self._start_node()
        self._meet()
        return node

    def add_replica(self, master: RedisServer) -> RedisServer:
        """A replica in sync with its master."""
        node = self.add_node()
        node.command("CLUSTER", "REPLICATE", node_id(master))
        wait_until(lambda: info(node, "replication").get("master_link_status") == "up")
        return node

    def node_of(self, key: bytes) -> RedisServer:
        """The node that owns the key now."""
        slot = slot_of(key)
        for first, last, master, *_ in self.nodes[0].command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == int(master[1]))
        raise AssertionError(f"no node has slot {slot}")

    def begin_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """From here on the slot is migrating: missing keys are ASKed for at the target."""
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))

    def move_keys(self, slot: int, source: RedisServer, target: RedisServer, most: int) -> int:
        """Moves keys of a migrating slot; how many there were."""
        keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, most)
        if keys:
            source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """Assigns the slot to the target; the other nodes learn it by gossip."""
        for node in (target, source):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))

    def move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """A slot with its keys."""
        self.begin_move(slot, source, target)
        while self.move_keys(slot, source, target, 100):
            pass
        self.end_move(slot, source, target)

    def _start_node(self) -> RedisServer:
        node = cluster_node(self._directory, f"node-{len(self.nodes)}")
        self.nodes.append(self._stack.enter_context(node))
        return node

    def _meet(self) -> None:
        for node in self.nodes[1:]:
            self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port)
        wait_until(lambda: all(self._knows_all(node) for node in self.nodes))

    def _knows_all(self, node: RedisServer) -> bool:
        lines = node.command("CLUSTER", "NODES").decode().splitlines()
        ready = [
            line for line in lines if "handshake" not in line and line.split()[7] == "connected"
        ]
        state = node.command("CLUSTER", "INFO")
        return len(ready) == len(self.nodes) and b"cluster_state:ok" in state


@contextmanager
def running_cluster(directory: Path, masters: int = 3) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(directory, stack, masters)


class Watched:
    """A master named mymaster, a replica of it, and a Sentinel that watches both."""

    def __init__(self, directory: Path, stack: ExitStack, password: str | None = None) -> None:
        self.servers: list[RedisServer] = []
        for number in range(2):
            folder = directory / f"server-{number}"
            folder.mkdir()
            args: list[str] = ["--repl-diskless-sync-delay", "0"]
            if self.servers:
                args += ["--replicaof", "127.0.0.1", str(self.servers[0].port)]
            if password is not None:
                args += ["--masterauth", password]
            server = RedisServer(folder, args=args, unix=False, password=password)
            self.servers.append(stack.enter_context(server))
        wait_until(lambda: info(self.servers[1], "replication").get("master_link_status") == "up")
        self._directory = directory / "sentinel"
        self._directory.mkdir()
        self.port = free_port()
        self._executable = self.servers[0]._executable
        self._password = password
        self.start_sentinel()
        stack.callback(self.stop_sentinel)

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis+sentinel://{user}127.0.0.1:{self.port}/mymaster"

    def start_sentinel(self, of_master: bool = True) -> None:
        """It watches the first server. of_master: which is the master, with its replica."""
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._directory}",
            f"sentinel monitor mymaster 127.0.0.1 {self.servers[0].port} 1",
            "sentinel down-after-milliseconds mymaster 500",
            "sentinel failover-timeout mymaster 3000",
        ]
        if self._password is not None:
            lines.append(f'sentinel auth-pass mymaster "{self._password}"')
        config = self._directory / "sentinel.conf"
        config.write_text("\n".join(lines) + "\n")
        with (self._directory / "sentinel.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._executable, str(config), "--sentinel"], stdout=log, stderr=log
            )
        # It can elect a replica only once it has heard of one.
        question = "REPLICAS" if of_master else "MASTER"
        wait_until(lambda: self.sentinel("SENTINEL", question, "mymaster"))
        # Else it asks every ten seconds which server is a replica, and waits for two answers before
        # it makes one of a master that has come back. Redis 6.2 cannot be told.
        with suppress(redis.exceptions.ResponseError):
            self.sentinel("SENTINEL", "DEBUG", "INFO-PERIOD", 500, "PUBLISH-PERIOD", 500)

    def fail_over(self) -> None:
        """Requests a failover until Sentinel accepts the replica as the new master."""

        def accepted() -> bool:
            try:
                return bool(self.sentinel("SENTINEL", "FAILOVER", "mymaster"))
            except redis.exceptions.ResponseError as error:
                if "NOGOODSLAVE" not in str(error):
                    raise
                return False

        wait_until(accepted)

    def stop_sentinel(self) -> None:
        self._process.kill()
        self._process.wait()

    def sentinel(self, *words: Any) -> Any:
        """A command to the Sentinel; None while it does not answer."""
        try:
            with redis.Redis(port=self.port, socket_timeout=5.0) as client:
                return client.execute_command(*words)
        except redis.exceptions.ConnectionError:
            return None

    @property
    def master(self) -> RedisServer:
        """The one that the Sentinel names."""
        found = self.sentinel("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")
        assert found is not None
        port = int(found[1])
        return next(server for server in self.servers if server.port == port)


@contextmanager
def running_sentinel(directory: Path, password: str | None = None) -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(directory, stack, password)


def node_id(node: RedisServer) -> str:
    found: bytes = node.command("CLUSTER", "MYID")
    return found.decode()


def info(server: RedisServer, section: str) -> dict[str, str]:
    """INFO of a section; empty while the server does not answer."""
    try:
        with server.client() as client:
            found: dict[str, Any] = client.info(section)
    except redis.exceptions.RedisError:
        return {}
    return {name: str(value) for name, value in found.items()}


def keys_on(nodes: Sequence[RedisServer]) -> list[int]:
    return [int(node.command("DBSIZE")) for node in nodes]

# SPDX-License-Identifier: Apache-2.0
"""Clusters and Sentinels for tests, on loopback, ended with the test."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import redis

from lmcache_redis.resp.maps import SLOTS
from lmcache_redis.resp.routes import slot_of
from tests.servers import RedisServer, free_port, wait_until

# A cluster's nodes talk to each other on their port plus this.
_BUS = 10_000
# Of a packet between them: the id of the node that sent it.
_BUS_SENDER = slice(40, 80)
_HIGHEST_PORT = (1 << 16) - 1


def cluster_node(directory: Path, name: str) -> RedisServer:
    """A node, not started yet, of a cluster that may lose shards."""
    folder = directory / name
    folder.mkdir()
    args = ["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"]
    args += ["--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"]
    args += ["--cluster-announce-ip", "127.0.0.1", "--repl-diskless-sync-delay", "0"]
    server = RedisServer(folder, args=args, unix=False)
    server.port = free_node_port()
    return server


def free_node_port() -> int:
    while (port := free_port()) + _BUS > _HIGHEST_PORT:
        pass
    return port


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
        wait_until(lambda: all(self.knows_all(node) for node in self.nodes))

    def knows_all(self, node: RedisServer) -> bool:
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
                if not any(word in str(error) for word in ("NOGOODSLAVE", "INPROG")):
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


class BusProxy:
    """A port that leads to the bus of a cluster node. A context manager.

    cut: nodes whose packets do not get through any more, by their ids.
    """

    def __init__(self, node: RedisServer) -> None:
        self._node = node
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._cut: set[str] = set()
        self._links: list[tuple[str, socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []

    def cut(self, *senders: str) -> None:
        self._cut.update(senders)
        for sender, *ends in list(self._links):
            if sender in self._cut:
                _shut(*ends)

    def heal(self) -> None:
        self._cut.clear()

    def __enter__(self) -> BusProxy:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        _shut(self._listener)
        for _sender, *ends in list(self._links):
            _shut(*ends)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._spawn(self._link, self._listener.accept()[0])

    def _link(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            head = b""
            self._links.append(("", client, client))
            while len(head) < _BUS_SENDER.stop:
                if not (data := client.recv(1 << 16)):
                    return
                head += data
            sender = head[_BUS_SENDER].decode()
            with socket.create_connection(("127.0.0.1", self._node.port + _BUS)) as server:
                self._links.append((sender, client, server))
                if sender in self._cut:
                    return
                server.sendall(head)
                back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                back.start()
                _pump(client, server)
                back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    _shut(source, target)


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


class CuttableCluster(Cluster):
    """Nodes hear each other through proxies: one can be cut off, and clients still reach it."""

    def __init__(self, directory: Path, stack: ExitStack, masters: int = 3) -> None:
        self._buses: list[BusProxy] = []
        super().__init__(directory, stack, masters)

    def cut_off(self, node: RedisServer) -> None:
        ids = [node_id(each) for each in self.nodes]
        for each, bus in zip(self.nodes, self._buses, strict=True):
            bus.cut(*(ids if each is node else [node_id(node)]))

    def heal(self) -> None:
        for bus in self._buses:
            bus.heal()

    def _start_node(self) -> RedisServer:
        node = cluster_node(self._directory, f"node-{len(self.nodes)}")
        bus = self._stack.enter_context(BusProxy(node))
        node.add_arguments("--cluster-announce-bus-port", str(bus.port))
        self._buses.append(bus)
        self.nodes.append(self._stack.enter_context(node))
        return node

    def _meet(self) -> None:
        for node, bus in zip(self.nodes[1:], self._buses[1:], strict=True):
            self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port, bus.port)
        wait_until(lambda: all(self.knows_all(node) for node in self.nodes))


@contextmanager
def another_sentinel(watched: Watched, folder: Path, port: int, master: int) -> Iterator[None]:
    """One more Sentinel of the same master, which it takes to be at another port of loopback."""
    folder.mkdir()
    config = folder / "sentinel.conf"
    lines = [f"port {port}", "bind 127.0.0.1", f"dir {folder}"]
    lines += [f"sentinel monitor mymaster 127.0.0.1 {master} 2"]
    lines += ["sentinel down-after-milliseconds mymaster 500"]
    lines += ["sentinel failover-timeout mymaster 3000"]
    config.write_text("\n".join(lines) + "\n")
    words = [watched.servers[0]._executable, str(config), "--sentinel"]
    with (folder / "sentinel.log").open("ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        with redis.Redis(port=port, socket_timeout=5.0) as client:
            wait_until(lambda: _answers(client))
        yield
    finally:
        process.kill()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.execute_command("SENTINEL", "MASTER", "mymaster"))
    except redis.exceptions.RedisError:
        return False

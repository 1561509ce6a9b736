# SPDX-License-Identifier: Apache-2.0
"""Servers that die, stop, fail over and move while a plane stores and loads: no byte is wrong.

Six nodes of a cluster, then a primary with its replica and three Sentinels. After each fault: how
long until everything is stored and loaded again. The tests strike once; by hand it runs for as long
as you like:

    .venv/bin/python -m tests.resp.soak --minutes 10
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis

from lmcache_redis.resp import RedisPlane
from lmcache_redis.tiers import ReadOutcome
from tests.resp.helpers import Chunk, read, running, wait_until, write
from tests.resp.traffic import Traffic
from tests.servers import RedisServer, free_port
from tests.topologies import CuttableCluster, Watched, another_sentinel, free_node_port, info

_PROBES = 24
_PROBE_BYTES = 40_000
_SLOT_BYTES = 4096
_LONGEST_S = 20.0
_BETWEEN_S = 0.5
_TRAFFIC_S = 0.02
# The product's own: the tests' are for busy machines.
_TIMEOUTS = {"connect_timeout_s": 1.0, "op_timeout_s": 1.0}
# Else a Sentinel asks every ten seconds which server is a replica.
_IN_A_HURRY = ("SENTINEL", "DEBUG", "INFO-PERIOD", 500, "PUBLISH-PERIOD", 500)


class Ground(ABC):
    """Servers, what can happen to them, and how to mend it. lost: what does not answer, or does not
    hear the others, by its port.
    """

    url: str

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self.lost: set[int] = set()
        self._stopped: list[RedisServer] = []

    @property
    def faults(self) -> dict[str, Callable[[], object]]:
        return {
            "primary killed": lambda: self._lose(RedisServer.kill),
            "primary stopped": lambda: self._stopped.append(self._lose(RedisServer.stop)),
            "clients killed": lambda: self._one().command(
                "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"
            ),
            "primary paused": lambda: self._one().command("CLIENT", "PAUSE", 1500, "ALL"),
        }

    def _lose(self, how: Callable[[RedisServer], None]) -> RedisServer:
        server = self._one()
        self.lost.add(server.port)
        how(server)
        return server

    def _revive(self, servers: Sequence[RedisServer]) -> None:
        for server in self._stopped:
            server.cont()
        self._stopped = []
        for server in servers:
            if not server.running:
                server.start()
        self.lost = set()

    @abstractmethod
    def _one(self) -> RedisServer:
        """A primary."""

    @abstractmethod
    def mend(self) -> None:
        """All servers live, and agree."""

    @abstractmethod
    def told(self) -> list[str]:
        """What each server that can be reached says of the others."""


class SixNodes(Ground):
    """Three primaries with a replica each; their bus can be cut."""

    def __init__(self, directory: Path, stack: ExitStack, source: random.Random) -> None:
        super().__init__(source)
        self._cluster = CuttableCluster(directory, stack)
        for primary in list(self._cluster.nodes):
            self._cluster.add_replica(primary)
        self.url = ",".join(
            [self._cluster.url, *(f"127.0.0.1:{node.port}" for node in self._cluster.nodes[3:])]
        )
        self._cut = False

    @property
    def faults(self) -> dict[str, Callable[[], object]]:
        return super().faults | {
            "primary cut off": self._cut_off,
            "planned failover": self._fail_over,
            "primary moved": self._move_node,
            "slots moved": self._move_slots,
        }

    def mend(self) -> None:
        self._revive(self._cluster.nodes)
        if self._cut:
            self._cluster.heal()
            self._cut = False
        wait_until(self._agrees, "the cluster agrees", 60.0)

    def told(self) -> list[str]:
        nodes = [node for node in self._cluster.nodes if node.port not in self.lost]
        return [f"{node.port}\n{node.command('CLUSTER', 'NODES').decode()}" for node in nodes]

    def _primaries(self) -> list[RedisServer]:
        nodes = self._cluster.nodes
        return [node for node in nodes if info(node, "replication").get("role") == "master"]

    def _one(self) -> RedisServer:
        return self._random.choice(self._primaries())

    def _agrees(self) -> bool:
        states = [info(node, "replication") for node in self._cluster.nodes]
        if sorted(state.get("role", "") for state in states) != ["master"] * 3 + ["slave"] * 3:
            return False
        links = {state["master_link_status"] for state in states if state["role"] == "slave"}
        return links == {"up"} and all(map(self._cluster.knows_all, self._cluster.nodes))

    def _cut_off(self) -> None:
        """Until it knows: before that it answers everybody as a primary."""
        self._cut = True
        node = self._lose(self._cluster.cut_off)
        wait_until(lambda: b"cluster_state:fail" in node.command("CLUSTER", "INFO"))

    def _fail_over(self) -> None:
        replicas = [n for n in self._cluster.nodes if n not in self._primaries()]
        replica = self._random.choice(replicas)
        replica.command("CLUSTER", "FAILOVER")
        wait_until(lambda: info(replica, "replication").get("role") == "master")

    def _move_node(self) -> None:
        node = self._one()
        node.kill()
        self.lost.add(node.port)
        node.port = free_node_port()
        node.start()

    def _move_slots(self) -> None:
        source, target = self._random.sample(self._primaries(), 2)
        slots = [
            slot
            for first, last, primary, *_ in source.command("CLUSTER", "SLOTS")
            if int(primary[1]) == source.port
            for slot in range(first, last + 1)
        ]
        for slot in self._random.sample(slots, 40):
            self._cluster.move(slot, source, target)


class ThreeSentinels(Ground):
    """A primary, its replica, and three that watch them."""

    def __init__(self, directory: Path, stack: ExitStack, source: random.Random) -> None:
        super().__init__(source)
        self._watched = Watched(directory, stack)
        self._ports = [free_port(), free_port()]
        for number, port in enumerate(self._ports):
            folder = directory / f"sentinel-{number}"
            primary = self._watched.servers[0].port
            stack.enter_context(another_sentinel(self._watched, folder, port, primary))
        ports = [self._watched.port, *self._ports]
        seeds = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.url = f"redis+sentinel://{seeds}/mymaster"
        self._sentinels = ports

    @property
    def faults(self) -> dict[str, Callable[[], object]]:
        return super().faults | {
            "planned failover": self._watched.fail_over,
            "Sentinel with its first configuration": self._forget,
            "Sentinel killed, then the primary": self._kill_both,
        }

    def mend(self) -> None:
        self._revive(self._watched.servers)
        if self._watched.sentinel("PING") is None:
            self._watched.start_sentinel(of_master=False)
        wait_until(self._agrees, "the Sentinels agree", 60.0)

    def told(self) -> list[str]:
        return [f"the Sentinels name {self._named()}, {sorted(self.lost)} are lost"]

    def _agrees(self) -> bool:
        states = [info(server, "replication") for server in self._watched.servers]
        if sorted(state.get("role", "") for state in states) != ["master", "slave"]:
            return False
        is_linked = any(state.get("master_link_status") == "up" for state in states)
        ready = [self._is_ready(port) for port in self._sentinels]
        return is_linked and all(ready) and set(self._named()) == {self._one().port}

    def _is_ready(self, port: int) -> bool:
        """It knows the others and a replica that it may elect."""
        with redis.Redis(port=port, socket_timeout=5.0) as client:
            try:
                client.execute_command(*_IN_A_HURRY)
                state = client.sentinel_master("mymaster")
                replicas = client.sentinel_slaves("mymaster")
            except redis.exceptions.RedisError:
                return False
        # A Sentinel that begins anew has another id: the others may remember the old one.
        return state["num-other-sentinels"] >= 2 and any(
            not each["is_sdown"] and each["flags"] == "slave" for each in replicas
        )

    def _named(self) -> list[int]:
        found = []
        for port in self._sentinels:
            client = redis.Redis(port=port, socket_timeout=5.0)
            with client, suppress(redis.exceptions.RedisError):
                found.append(int(client.sentinel_get_master_addr_by_name("mymaster")[1]))
        return found

    def _one(self) -> RedisServer:
        roles = [(info(s, "replication").get("role"), s) for s in self._watched.servers]
        return next(server for role, server in roles if role == "master")

    def _forget(self) -> None:
        self._watched.stop_sentinel()
        self._watched.start_sentinel(of_master=False)

    def _kill_both(self) -> None:
        self._watched.stop_sentinel()
        self._lose(RedisServer.kill)


GROUNDS: dict[str, Callable[[Path, ExitStack, random.Random], Ground]] = {
    "cluster": SixNodes,
    "sentinels": ThreeSentinels,
}


@dataclass
class Result:
    """struck: each fault, and the seconds until everything was stored and loaded again."""

    struck: list[tuple[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    answers: int = 0
    loaded: int = 0


@contextmanager
def _traffic(plane: RedisPlane, seed: int) -> Iterator[Traffic]:
    """Runs beside the faults."""
    traffic = Traffic(plane, seed)
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(_TRAFFIC_S):
            traffic.some()

    thread = threading.Thread(target=run, name="traffic")
    thread.start()
    try:
        yield traffic
    finally:
        ended.set()
        thread.join()
        wait_until(lambda: not traffic.pending, "calls were not answered")


def soak(ground: Ground, seconds: float, seed: int, faults: int | None = None) -> Result:
    """Until the time is over, or so many faults have struck."""
    source = random.Random(seed)
    result = Result()
    until = time.monotonic() + seconds
    chosen: list[str] = []
    with running(ground.url, **_TIMEOUTS) as plane, _traffic(plane, seed) as traffic:
        ground.mend()
        _wait_for_hits(ground, plane, result)
        while time.monotonic() < until and (faults is None or len(result.struck) < faults):
            if not chosen:
                chosen = source.sample(sorted(ground.faults), len(ground.faults))
            _strike(ground, plane, chosen.pop(), result)
            ground.mend()
            _wait_for_hits(ground, plane, result)
            time.sleep(_BETWEEN_S)
    result.problems += traffic.problems
    result.answers, result.loaded = traffic.answers, traffic.loaded
    return result


def _strike(ground: Ground, plane: RedisPlane, fault: str, result: Result) -> None:
    struck_at = time.monotonic()
    ground.faults[fault]()
    after_s = _wait_for_hits(ground, plane, result) - struck_at
    print(f"{fault}: everything is a hit after {after_s:.2f} s", flush=True)
    result.struck.append((fault, after_s))


def _wait_for_hits(ground: Ground, plane: RedisPlane, result: Result) -> float:
    """When everything was loaded. What is not there is stored again."""
    began = time.monotonic()
    stored = [Chunk(1000 + n, _PROBE_BYTES, _SLOT_BYTES, seed=n) for n in range(_PROBES)]
    while time.monotonic() < began + _LONGEST_S:
        loaded = [Chunk(each.number, _PROBE_BYTES, _SLOT_BYTES) for each in stored]
        outcomes = read(plane, *loaded, within_s=1.0)
        for outcome, was, found in zip(outcomes, stored, loaded, strict=True):
            if outcome is ReadOutcome.LOADED and was.content != found.content:
                result.problems.append(f"chunk {was.number} has wrong bytes")
        if set(outcomes) == {ReadOutcome.LOADED}:
            return time.monotonic()
        lost = [s for s, o in zip(stored, outcomes, strict=True) if o is not ReadOutcome.LOADED]
        written = write(plane, *lost, within_s=1.0)
    answers = [(chunk.number, str(outcome)) for chunk, outcome in zip(lost, written, strict=True)]
    result.problems.append(f"no hits for {_LONGEST_S:.0f} s: {plane.state}, {answers}")
    result.problems += [*ground.told(), repr(plane._nodes.routes.map)]
    print(*result.problems, sep="\n", flush=True)
    return time.monotonic()


def report(name: str, result: Result) -> None:
    print(f"{name}: {result.answers} answers, {result.loaded} chunks loaded, ", end="")
    print(f"{len(result.struck)} faults, {len(result.problems)} problems")
    for fault in sorted({fault for fault, _ in result.struck}):
        took = [after_s for each, after_s in result.struck if each == fault]
        print(
            f"  {fault}: {len(took)} times, hits after {statistics.median(took):.2f} s"
            f" (at most {max(took):.2f})"
        )
    for problem in result.problems:
        print(f"  {problem}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for each of the two")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=sorted(GROUNDS))
    arguments = parser.parse_args()
    failed = False
    for name, ground in GROUNDS.items():
        if arguments.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            source = random.Random(arguments.seed)
            result = soak(
                ground(Path(directory), stack, source), arguments.minutes * 60, arguments.seed
            )
        report(name, result)
        failed = failed or bool(result.problems)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()

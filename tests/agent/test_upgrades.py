# SPDX-License-Identifier: Apache-2.0
"""Rolling upgrades: agents and engines of neighbouring versions of the protocol.

Another version is a process whose every message has the preamble of that version. It does not
understand this one, nor this one it, and neither is told from an older or a newer one: what counts
is that requests are answered all the same, and that hits are back as soon as both sides are of one
version.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lmcache_redis import messages as m
from tests.forks import Forked
from tests.harness import WAIT_S, AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

HASHES = block_hashes("prompt", 8)
# No request waits longer for its cache: of 1.5 s each, one silence and one lease.
MOST_S = 10.0


def of_version(version: int) -> dict[str, object]:
    """The constants of a process of that version."""
    preamble = m.MAGIC + version.to_bytes(2, "big")
    module = "lmcache_redis.messages"
    return {f"{module}.PROTOCOL_VERSION": version, f"{module}.PREAMBLE": preamble}


class OtherAgent(AgentServer):
    """An agent of another version of the protocol, at the same endpoint."""

    def __init__(self, version: int, directory: Path, url: str) -> None:
        super().__init__(directory, url, of_version(version))
        self.log_path = directory / "other.log"
        self.log_path.touch()

    def _answers(self) -> bool:
        return " serves " in self.log  # a client of this version gets no answer


def main(words: list[str]) -> int:
    """An engine in a process of its own: prints what it gets of an agent that refuses it."""
    with Engine(words[0], wait=False) as engine:
        link = engine.scheduler.link
        assert link.wait_for(lambda: link.refusal is not None, WAIT_S)
        began_s = time.monotonic()
        tokens = [engine.lookup(f"r{n}", HASHES) for n in range(3)]
        engine.store("s", HASHES, range(8))
        failed = engine.retrieve("r0", HASHES, range(8))
        took_s = time.monotonic() - began_s
        found = {"tokens": tokens, "failed": sorted(failed), "took_s": took_s}
        print(json.dumps(found | {"refusal": link.refusal}))
    return 0


class Requests:
    """Requests one after the other, as an engine runs them: looked up, loaded or computed, stored.

    outcomes: how many were hits and misses. slowest_s: the longest time that one took.
    """

    def __init__(self, engine: Engine) -> None:
        self.outcomes: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._engine = engine
        self._computed = {name: t[:8].clone() for name, t in engine.caches[0].items()}

    def run_one(self, name: str) -> None:
        began_s = time.monotonic()
        outcome = "miss"
        if self._engine.lookup(name, HASHES) == 128:
            failed = self._engine.retrieve(name, HASHES, range(16, 24))
            outcome = "lost load" if failed else "hit"
            for layer, tensor in self._engine.caches[0].items():
                assert failed or torch.equal(tensor[16:24], self._computed[layer])
        self._engine.store(f"{name} stored", HASHES, range(8))
        self._engine.scheduler.end_session(name)
        self.outcomes[outcome] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    @contextmanager
    def running(self) -> Iterator[None]:
        """On a thread. What goes wrong there is raised at the end."""
        stop, problems = threading.Event(), []

        def run() -> None:
            try:
                for number in iter(lambda: sum(self.outcomes.values()), None):
                    if stop.is_set():
                        return
                    self.run_one(f"r{number}")
                    time.sleep(0.002)  # a miss costs nothing here: not a million of them
            except BaseException as problem:
                problems.append(problem)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        for problem in problems:
            raise problem

    def more(self, outcome: str) -> None:
        """Waits for some more of these."""
        before = self.outcomes[outcome]
        wait_until(lambda: self.outcomes[outcome] > before + 5, f"a {outcome}", WAIT_S)


def test_agents_are_upgraded_while_requests_run(tmp_path: Path, redis_server: RedisServer) -> None:
    url, version = redis_server.unix_url, m.PROTOCOL_VERSION - 1
    agent = AgentServer(tmp_path / "agent", url)
    other = OtherAgent(version, tmp_path / "agent", url)
    with agent, Engine(agent.endpoint) as engine:
        engine.randomize(range(8))
        requests = Requests(engine)
        link = engine.scheduler.link
        with requests.running():
            requests.more("hit")
            agent.wait_idle()
            assert agent.terminate() == 0  # in the middle of a request
            with other:
                assert link.wait_for(lambda: link.refusal is not None, WAIT_S)
                requests.more("miss")
                assert str(version) in (link.refusal or "")
                assert other.terminate() == 0
            agent.start()  # as the engine is when it is upgraded too
            requests.more("hit")
        assert requests.slowest_s < MOST_S
        # The agent of this version drained: a hit that it had told was loaded.
        assert not requests.outcomes["lost load"]


def test_engines_are_upgraded_beside_others(
    agent: AgentServer, engine: Engine, tmp_path: Path
) -> None:
    """The agent refuses one in its own version, and goes on serving the other."""
    engine.randomize(range(8))
    engine.store("r1", HASHES, range(8))
    requests, said = Requests(engine), tmp_path / "other"
    with requests.running():
        newer = of_version(m.PROTOCOL_VERSION + 1)
        other = Forked([agent.endpoint], said, program=__name__, constants=newer)
        assert other.wait(2 * WAIT_S) == 0, said.read_text()
        requests.more("hit")
    assert set(requests.outcomes) == {"hit"}
    found = json.loads(said.read_text().splitlines()[-1])
    assert found["tokens"] == [0, 0, 0]
    assert found["failed"] == list(range(8)), "vLLM computes what was not loaded"
    assert found["took_s"] < MOST_S
    assert f"protocol version {m.PROTOCOL_VERSION}," in found["refusal"]
    assert "install the same lmcache-redis" in found["refusal"]
    assert agent.counter("wire_errors") > 0

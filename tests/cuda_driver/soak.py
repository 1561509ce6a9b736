# SPDX-License-Identifier: Apache-2.0
"""Players and an agent over the driver of the tests, while everything happens to them.

    python -m tests.cuda_driver.soak --minutes 10 --seed 7

Each player checks every byte of its KV cache, see `player`. Meanwhile, at random: players and the
agent are killed or stopped for a while, GPUs are lost, hang or refuse a call, and pages go by
copies or by kernels. It ends with status 1 if a player sees a wrong byte or ends, or if an agent
ends as it should not.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lmcache_redis.agent.main import EXIT_GPU_LOST
from tests import cuda_driver
from tests.cuda_driver.played import PlayerProcess
from tests.harness import WAIT_S, AgentServer
from tests.servers import RedisServer

_PLAYERS = (
    {"memory": "allocations", "gpu": 0},
    {"memory": "pieces", "gpu": 0},
    {"memory": "segment", "gpu": 0, "world_size": 2},
)
_REFUSING = ("cuMemcpyBatchAsync", "cuLaunchKernel", "cuIpcOpenMemHandle_v2", "cuMemAlloc_v2")
_LONGEST_PAUSE_S = 2.0
# An agent whose lease on blocks ends while it is stopped may be silent for so long.
_LONGEST_STOP_S = 4.0


class Soak:
    """events: how often each thing happened."""

    def __init__(self, directory: Path, redis_url: str, seed: int) -> None:
        self.events: Counter[str] = Counter()
        self.done: Counter[str] = Counter()  # by players that are no more
        self.random = random.Random(seed)
        self._directory = directory
        self._redis_url = redis_url
        self._environment = cuda_driver.environment(devices=2, delay_us=500, seed=seed)
        self._seed = seed
        os.environ.update(self._environment)
        self.agent = self._new_agent()
        self.players: list[PlayerProcess] = []

    def run(self, seconds: float) -> None:
        """Raises AssertionError."""
        self.agent.start()
        self.players = [self._new_player(number) for number in range(len(_PLAYERS))]
        until_s = time.monotonic() + seconds
        happenings = (
            self.kill_agent, self.stop_agent, self.lose_gpu, self.hang_gpu, self.refuse,
            self.kill_player, self.stop_player, self.drain_agent, self.end_player,
        )  # fmt: skip
        while time.monotonic() < until_s:
            time.sleep(self.random.uniform(0.1, _LONGEST_PAUSE_S))
            happening = self.random.choice(happenings)
            self.events[happening.__name__] += 1
            happening()
            for player in self.players:
                player.check()
        # When nothing happens any more, all is well. A registration that was refused is made again
        # with the next agent.
        self.drain_agent()
        for player in self.players:
            player.wait_for("loaded", 8)
            self.done += player.finish()
        assert self.agent.terminate() == 0
        log = self.agent.log
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]

    def kill_agent(self) -> None:
        self.agent.kill()
        self._start_agent()

    def drain_agent(self) -> None:
        status = self.agent.terminate()
        assert status == 0, f"the agent ended with {status}"
        self._start_agent()

    def stop_agent(self) -> None:
        self.agent.stop()
        time.sleep(self.random.uniform(0.0, _LONGEST_STOP_S))
        self.agent.cont()

    def lose_gpu(self) -> None:
        cuda_driver.set("lose", self.random.choice((700, 719, 214)), self._environment)
        status = self.agent.process.wait(WAIT_S)
        assert status == EXIT_GPU_LOST, f"the agent ended with {status}"
        self._start_agent()

    def hang_gpu(self) -> None:
        cuda_driver.set("hang_gpu", self.random.choice((1, 2)), self._environment)
        time.sleep(self.random.uniform(0.0, _LONGEST_STOP_S))
        if self.random.random() < 0.3:
            self.events["kill_agent whose GPU hangs"] += 1
            self.agent.kill()
            cuda_driver.set("hang_gpu", 0, self._environment)
            self._start_agent()
        cuda_driver.set("hang_gpu", 0, self._environment)

    def refuse(self) -> None:
        name, times = self.random.choice(_REFUSING), self.random.randint(1, 3)
        cuda_driver.fail(name, 2, times=times, environment=self._environment)

    def kill_player(self) -> None:
        number = self._any_player()
        self.done += self.players[number].counts
        self.players[number].kill()
        self.players[number] = self._new_player(number)

    def end_player(self) -> None:
        number = self._any_player()
        self.done += self.players[number].finish()
        self.players[number] = self._new_player(number)

    def stop_player(self) -> None:
        pid = self.players[self._any_player()].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.0, _LONGEST_STOP_S))
        os.kill(pid, signal.SIGCONT)

    def close(self) -> None:
        for player in self.players:
            player.kill()
        self.agent.end()

    def _any_player(self) -> int:
        return self.random.randrange(len(self.players))

    def _new_player(self, number: int) -> PlayerProcess:
        self._seed += 1
        options = {**_PLAYERS[number], "delay_us": self.random.choice((0, 300, 3000))}
        return PlayerProcess(self.agent.endpoint, self._seed, self._directory, **options)

    def _start_agent(self) -> None:
        """As a supervisor would; the settings may be others."""
        for name in _REFUSING:
            cuda_driver.fail(name, 0, environment=self._environment)
        self.agent = self._new_agent().start()

    def _new_agent(self) -> AgentServer:
        settings = {
            "canary_every": 0,
            "pool_bytes": self.random.choice((4, 8, 64)) << 20,
            "direct_copy_bytes": self.random.choice((4096, 1 << 20)),
        }
        return AgentServer(self._directory / "agent", self._redis_url, **settings)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_driver.soak")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    options = parser.parse_args(words)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name, RedisServer(Path(name)) as server:
        soak = Soak(Path(name), server.unix_url, options.seed)
        try:
            soak.run(60 * options.minutes)
        except AssertionError as error:
            print(f"seed {options.seed}, after {dict(soak.events)}: {error}", file=sys.stderr)
            print(soak.agent.log[-3000:], file=sys.stderr)
            return 1
        finally:
            soak.close()
    print(f"what happened: {dict(soak.events)}")
    print(f"what players did: {dict(soak.done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

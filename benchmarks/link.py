# SPDX-License-Identifier: Apache-2.0
"""A network of its own for a server, behind a link whose rate is limited: for Linux, as root.

Two virtual interfaces join this machine's network and a namespace; a token bucket on each end
limits what goes out there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.processes import end_process

PORT = 6379
_END_S = 10.0
_MTU_BYTES = 1500


class LinkFailed(LMCacheRedisError):
    """The link could not be made: what is missing."""


class LimitedLink:
    """A context manager: a link with no limit, and a redis-server at the other end.

    number: links of one machine have different ones.
    """

    def __init__(self, directory: Path, number: int | None = None) -> None:
        number = os.getpid() if number is None else number
        self._name = f"lmcr{number}"
        self._ends = f"lmcr{number}a"[-15:], f"lmcr{number}b"[-15:]
        third, fourth = divmod(number % 16384, 64)
        self._here, self._there = (f"10.217.{third}.{4 * fourth + end}" for end in (1, 2))
        self._directory = directory
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the server, for an agent."""
        return f"redis://{self._there}:{PORT}"

    def limit(self, mbit_per_s: float | None) -> None:
        """Limits both directions; None: no limit."""
        for place, end in zip(([], ["-n", self._name]), self._ends, strict=True):
            _run("tc", *place, "qdisc", "del", "dev", end, "root", may_fail=True)
            if mbit_per_s is not None:
                rate = round(mbit_per_s * 1e6)
                # The bucket has ten milliseconds' worth, and a queue of 50 ms drops the rest.
                burst = max(32 << 10, rate // 800)
                _run(
                    "tc", *place, "qdisc", "add", "dev", end, "root", "tbf",
                    "rate", f"{rate}bit", "burst", str(burst), "latency", "50ms",
                )  # fmt: skip

    def __enter__(self) -> LimitedLink:
        for program in ("ip", "tc", "redis-server"):
            if shutil.which(program) is None:
                raise LinkFailed(f"a limited link needs {program}: install iproute2 and redis")
        if os.geteuid():
            raise LinkFailed("a limited link needs a network namespace: run this as root")
        here, there = self._ends
        try:
            _run("ip", "netns", "add", self._name)
            _run("ip", "link", "add", here, "type", "veth", "peer", there, "netns", self._name)
            _run("ip", "addr", "add", f"{self._here}/30", "dev", here)
            _run("ip", "link", "set", here, "up")
            _run("ip", "-n", self._name, "addr", "add", f"{self._there}/30", "dev", there)
            _run("ip", "-n", self._name, "link", "set", there, "up")
            with (self._directory / "redis.log").open("ab") as log:
                self._server = subprocess.Popen(
                    [
                        "ip", "netns", "exec", self._name, "redis-server", "--port", str(PORT),
                        "--bind", self._there, "--protected-mode", "no", "--save", "",
                        "--dir", str(self._directory),
                    ],
                    stdout=log, stderr=log,
                )  # fmt: skip
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and removes the network."""
        if self._server is not None:
            end_process(self._server, _END_S)
        _run("ip", "link", "del", self._ends[0], may_fail=True)
        _run("ip", "netns", "del", self._name, may_fail=True)


def _run(*words: str, may_fail: bool = False) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_END_S)
    if done.returncode and not may_fail:
        raise LinkFailed(f"{' '.join(words)}: {done.stderr.strip()}")

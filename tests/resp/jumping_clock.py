# SPDX-License-Identifier: Apache-2.0
"""A process whose wall clock jumps by hours with every look: stores, loads, waits.

`python -m tests.resp.jumping_clock URL` prints one JSON object. The clock is bent before
anything of ours is imported, so that no module has kept the straight one.
"""

from __future__ import annotations

import datetime
import json
import random
import sys
import time
from types import SimpleNamespace

from tests.resp.helpers import chunk_key

_straight = time.time
_source = random.Random(1)
_HOURS = 1000.0
LOOKS = SimpleNamespace(count=0)


def _bent() -> float:
    LOOKS.count += 1
    return _straight() + _source.uniform(-_HOURS, _HOURS) * 3600.0


class _Bent(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Bent:
        return cls.fromtimestamp(_bent(), tz)

    @classmethod
    def utcnow(cls) -> _Bent:
        return cls.fromtimestamp(_bent(), datetime.timezone.utc).replace(tzinfo=None)


def main(url: str) -> dict[str, object]:
    time.time = _bent
    time.time_ns = lambda: int(_bent() * 1e9)
    datetime.datetime = _Bent  # type: ignore[misc]

    from lmcache_redis.tiers import ReadOutcome, WriteOutcome
    from tests.resp.helpers import Chunk, read, running, scan, write

    outcomes: set[str] = set()
    wrong = 0
    with running(url, op_timeout_s=1.0, heartbeat_s=0.05, probe_interval_s=0.05) as plane:
        for number in range(100):
            chunk = Chunk(number, 40_000, 9_000, seed=number)
            outcomes |= {outcome.name for outcome in write(plane, chunk)}
            loaded = Chunk(number, 40_000, 9_000)
            outcomes |= {outcome.name for outcome in read(plane, loaded)}
            wrong += loaded.content != chunk.content
        found = scan(plane, [chunk_key(number) for number in range(100)]).prefix_length
        # A deadline that passes while nothing answers.
        sys.stdout.write("stop\n")
        sys.stdout.flush()
        sys.stdin.readline()
        started = time.monotonic()
        late = read(plane, Chunk(0, 40_000, 9_000), within_s=0.3)
        late_s = time.monotonic() - started
        sys.stdout.write("continue\n")
        sys.stdout.flush()
        sys.stdin.readline()
        deadline = time.monotonic() + 15.0
        while not plane.state.up and time.monotonic() < deadline:
            time.sleep(0.01)
        chunk = Chunk(0, 40_000, 9_000)
        works = write(plane, chunk) == [WriteOutcome.STORED]
        works = works and read(plane, chunk) == [ReadOutcome.LOADED]
    return {
        "outcomes": sorted(outcomes),
        "wrong": wrong,
        "found": found,
        "late": late[0].name,
        "late_s": late_s,
        "works": works,
        "looks": LOOKS.count,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

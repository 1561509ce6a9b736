# SPDX-License-Identifier: Apache-2.0
"""A simulated agent for many events.

    python -m tests.simulated --events 1000000 --seed 1

runs one seed after the other, each for as many events as `--each` says, and ends with the first
that fails. The same seed fails again, at the same event.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.simulated.cluster import Cluster


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--each", type=int, default=20_000, help="events of one seed")
    parser.add_argument("--seed", type=int, default=1, help="the first")
    asked = parser.parse_args()
    began_s, done, seed = time.perf_counter(), 0, asked.seed
    while done < asked.events:
        cluster = Cluster(seed)
        events = min(asked.each, asked.events - done)
        try:
            digest = cluster.run(events)
        except Exception:
            traceback.print_exc()
            print(f"seed {seed} fails at event {cluster.world.events}", flush=True)
            print(f"    python -m tests.simulated --seed {seed} --events {events} --each {events}")
            return 1
        done += cluster.world.events
        took_s = time.perf_counter() - began_s
        print(f"seed {seed}: {digest}, {done} events in {took_s:.0f} s", flush=True)
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

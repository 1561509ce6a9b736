"""Many clients at once: `python -m lmcache_redis.bench.lm.load PORT CLIENTS GETS BYTES KEYS`.

Each client is a thread with a connection of its own and asks for `GETS` of `KEYS` chunks of
`BYTES`, one after the other. Prints one line of JSON: seconds in all, and of every GET.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence

from lmcache_redis.bench.lm.client import LmClient, key_text

LOAD_NAME = "many"
_CONNECT_S = 60.0


def main(arguments: Sequence[str]) -> int:
    port, clients, gets, nbytes, keys = map(int, arguments)
    seconds: list[list[float]] = [[] for _ in range(clients)]
    begin = threading.Barrier(clients + 1, timeout=_CONNECT_S)

    def work(number: int) -> None:
        buffer = memoryview(bytearray(nbytes))
        with LmClient(port) as client:
            client.exists(key_text(LOAD_NAME, 0))
            begin.wait()
            for turn in range(gets):
                key = key_text(LOAD_NAME, (number + turn) % keys)
                started = time.perf_counter()
                client.get_into(key, buffer)
                seconds[number].append(time.perf_counter() - started)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(clients)]
    for thread in threads:
        thread.start()
    begin.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    flat = [each for of_one in seconds for each in of_one]
    if len(flat) < clients * gets:
        return 1
    print(json.dumps({"elapsed_s": elapsed, "gets_s": flat}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, in a process of its own, that checks every byte of its KV cache.

    python -m tests.cuda_driver.player ENDPOINT SEED [--world-size N] [...]

The KV of a chunk is a function of its name. So any engine can tell wrong bytes, whoever has stored
them. What a prompt hits is loaded into blocks that were zeroed, the rest is written ("computed")
and stored; several prompts are under way at a time, and blocks are used again at once. Now and then
every block that no load may be writing is compared with what it should hold.

It prints a line of counts in JSON each time it has done more, and ends with status 1 at the first
wrong byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from lmcache_redis.client.worker import RetrieveTransfer, StoreTransfer
from tests.cuda_driver.engine import GpuEngine, Host, gpus
from tests.harness import block_hashes

NUM_BLOCKS = 72
BLOCKS_PER_CHUNK = 4
PROMPTS = 40
_MOST_CHUNKS = 5
_AT_ONCE = 3
_EVERY = 25  # requests between two looks at all blocks


class WrongBytes(AssertionError):
    """A block holds what it should not."""


def kv_of(name: bytes, rank: int, layer: int, block: int, shape: Sequence[int]) -> torch.Tensor:
    """What a block of a chunk holds."""
    digest = hashlib.sha256(name + bytes((rank, layer, block))).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(tuple(shape), generator=generator)


class Player:
    """Plays requests until `stop`. counts: of what has been done.

    engine: with `NUM_BLOCKS` blocks of float32.
    """

    def __init__(self, engine: GpuEngine, host: Host, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.stop = False
        self._engine = engine
        self._host = host
        self._random = random.Random(seed)
        self._free = list(range(NUM_BLOCKS))
        # What each block holds: the name of its chunk and its number in it; None: zeros.
        self._holds: dict[int, tuple[bytes, int] | None] = dict.fromkeys(range(NUM_BLOCKS))
        self._loading: set[int] = set()

    def play(self) -> None:
        """Raises `WrongBytes`."""
        requests: list[Iterator[None]] = []
        printed = Counter[str]()
        while requests or not self.stop:
            has_room = len(requests) < _AT_ONCE and len(self._free) >= 4 * _MOST_CHUNKS
            if has_room and not self.stop:
                requests.append(self._request(self.counts["requests"]))
                self.counts["requests"] += 1
                if self.counts["requests"] % _EVERY == 0:
                    self.check_all()
            requests = [each for each in requests if next(each, "over") is None]
            if self.counts != printed:
                printed = self.counts.copy()
                print(json.dumps(printed), flush=True)
            time.sleep(0.001)
        self.check_all()

    def _request(self, number: int) -> Iterator[None]:
        """One prompt; each step waits for something."""
        engine, name = self._engine, f"{os.getpid()}-{number}"
        chunks = self._random.randint(1, _MOST_CHUNKS)
        hashes = block_hashes(
            f"prompt {self._random.randrange(PROMPTS)}", chunks * BLOCKS_PER_CHUNK
        )
        blocks = [self._free.pop() for _ in hashes]
        yield from self._load(name, hashes, blocks)
        for block, (chunk, index) in zip(blocks, self._places(hashes), strict=True):
            if self._holds[block] != (chunk, index):
                self._compute(block, chunk, index)
        stores = self._begin_stores(name, hashes, blocks)
        while not all(store.over for store in stores):
            yield
        self.counts["stored"] += min(store.result.stored for store in stores)
        engine.scheduler.end_session(name)
        # The next request overwrites them, whatever still reads them.
        self._free = blocks + self._free if number % 2 else self._free + blocks

    def _load(self, name: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> Iterator[None]:
        engine = self._engine
        engine.scheduler.ranks.reported({r: w.place for r, w in enumerate(engine.workers)})
        engine.scheduler.begin_lookup(name, engine.chunks(hashes))
        while (tokens := engine.scheduler.hit_tokens(name)) is None:
            yield
        engine.zero(blocks)
        self._holds.update(dict.fromkeys(blocks))
        hit = tokens // engine.block_size_tokens
        if not hit:
            return
        self.counts["hits"] += 1
        self._loading.update(blocks[:hit])
        loads = engine.begin_retrieves(name, hashes[:hit], blocks[:hit])
        while not all(load.over for load in loads):
            yield
        self._loading.difference_update(blocks[:hit])
        failed = self._failed(loads)
        places = [*self._places(hashes)]
        self._host.synchronize()
        for block, place in zip(blocks[:hit], places, strict=False):
            if block in failed:
                self.counts["failed"] += 1
                self._holds[block] = (b"undefined", 0)
            else:
                self.counts["loaded"] += 1
                self._holds[block] = place
                self._check(block)

    def _failed(self, loads: Sequence[RetrieveTransfer]) -> set[int]:
        return set().union(*(load.failed_blocks for load in loads))

    def _begin_stores(
        self, name: str, hashes: Sequence[bytes], blocks: Sequence[int]
    ) -> list[StoreTransfer]:
        op = self._engine.op(hashes, blocks)
        workers = self._engine.workers
        return [worker.begin_stores([name], [op], worker.signal())[0] for worker in workers]

    def _places(self, hashes: Sequence[bytes]) -> Iterator[tuple[bytes, int]]:
        """For each block, the name of its chunk and its number in it."""
        last = BLOCKS_PER_CHUNK - 1
        for number in range(len(hashes)):
            yield hashes[number | last], number & last

    def _compute(self, block: int, name: bytes, index: int) -> None:
        for rank, caches in enumerate(self._engine.caches):
            for layer, tensor in enumerate(caches.values()):
                values = kv_of(name, rank, layer, index, tensor.shape[1:])
                self._host.write(tensor[block], values)
        self._holds[block] = (name, index)

    def check_all(self) -> None:
        """Raises `WrongBytes`."""
        self._host.synchronize()
        for block in set(range(NUM_BLOCKS)) - self._loading:
            self._check(block)
        self.counts["checks"] += 1

    def _check(self, block: int) -> None:
        held = self._holds[block]
        if held is not None and held[0] == b"undefined":
            return
        for rank, caches in enumerate(self._engine.caches):
            for layer, tensor in enumerate(caches.values()):
                expected = torch.zeros(tensor.shape[1:])
                if held is not None:
                    expected = kv_of(held[0], rank, layer, held[1], tensor.shape[1:])
                if not torch.equal(tensor[block], expected):
                    wrong = int((tensor[block] != expected).sum())
                    held_name = "zeros" if held is None else f"{held[0].hex()[:16]}/{held[1]}"
                    raise WrongBytes(
                        f"rank {rank}, layer {layer}, block {block} of {held_name}: {wrong} of "
                        f"{expected.numel()} numbers are wrong, the first is "
                        f"{tensor[block].flatten()[:4].tolist()}"
                    )


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoint")
    parser.add_argument("seed", type=int)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--memory", default="allocations")
    parser.add_argument("--delay-us", type=int, default=300)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    with gpus(seed=options.seed, devices=2, delay_us=options.delay_us) as host:
        engine = GpuEngine(
            options.endpoint, host, gpus=[0, 1], memory=options.memory,
            num_blocks=NUM_BLOCKS, world_size=options.world_size, wait=False,
        )  # fmt: skip
        player = Player(engine, host, options.seed)

        def stop(*_: object) -> None:
            player.stop = True

        signal.signal(signal.SIGTERM, stop)
        try:
            player.play()
        except WrongBytes as error:
            print(f"seed {options.seed}: {error}", file=sys.stderr, flush=True)
            return 1
        finally:
            engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

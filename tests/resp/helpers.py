# SPDX-License-Identifier: Apache-2.0
"""What the tests of the plane share: chunks with guarded slots, collectors, waiting."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import key_stem, stripe_key
from lmcache_redis.config import DEFAULT_CONNECTIONS
from lmcache_redis.resp import RedisOptions, RedisPlane
from lmcache_redis.resp.finder import ServerFinder
from lmcache_redis.resp.maps import ServerMap
from lmcache_redis.resp.net.connection import Connector
from lmcache_redis.resp.options import Deployment
from lmcache_redis.tiers import ChunkIO, FramesResult, ReadOutcome, RemoveResult, WriteOutcome
from tests.acl import PASSWORD
from tests.servers import RedisServer
from tests.servers import wait_until as wait_until

FINGERPRINT = bytes(range(32))
NAMESPACE = FINGERPRINT[:16]
STEM = key_stem(NAMESPACE, "test/model", 0, 32)
# Generous: what these waits are for takes milliseconds unless something is broken.
PATIENCE_S = 15.0
# Longer than a busy machine takes for a handshake, and short enough to wait for.
SLOW_S = 5.0
GUARD = b"\xa5" * 64


def chunk_key(number: int) -> bytes:
    return STEM + hash_tag(number.to_bytes(32, "big"))


def first_key(number: int) -> bytes:
    return stripe_key(chunk_key(number), 0)


class Chunk:
    """One chunk's bytes in guarded slots of its own, and how to read or write it."""

    def __init__(
        self,
        number: int,
        chunk_bytes: int,
        slot_bytes: int,
        *,
        seed: int | None = None,
        fingerprint: bytes = FINGERPRINT,
    ) -> None:
        self.number = number
        self._fingerprint, self._slot_bytes = fingerprint, slot_bytes
        self.key = chunk_key(number)
        metadata = RemoteMetadata(chunk_bytes, [(chunk_bytes,)], ["uint8"], MemoryFormat.PAGES)
        self.frame = ChunkFrame(
            fingerprint,
            number.to_bytes(32, "big"),
            chunk_bytes,
            stripe_payload_bytes(chunk_bytes, slot_bytes),
            metadata.serialize(),
        )
        self._guarded: list[bytearray] = []
        self.slots: list[memoryview] = []
        source = random.Random(seed if seed is not None else number)
        for first in range(0, chunk_bytes, self.frame.stripe_payload_bytes):
            size = min(self.frame.stripe_payload_bytes, chunk_bytes - first)
            filling = source.randbytes(size) if seed is not None else bytes(size)
            guarded = bytearray(GUARD + filling + GUARD)
            self._guarded.append(guarded)
            self.slots.append(memoryview(guarded)[len(GUARD) : len(GUARD) + size])

    @property
    def stripe_count(self) -> int:
        return self.frame.stripe_count

    @property
    def content(self) -> bytes:
        return b"".join(self.slots)

    def empty(self) -> Chunk:
        """To load it into."""
        nbytes = self.frame.chunk_bytes
        return Chunk(self.number, nbytes, self._slot_bytes, fingerprint=self._fingerprint)

    def stripe_keys(self) -> list[bytes]:
        return [stripe_key(self.key, index) for index in range(self.stripe_count)]

    def io(self, within_s: float = PATIENCE_S) -> ChunkIO:
        return ChunkIO(self.key, self.frame, self.slots, time.monotonic() + within_s, self)

    def check_guards(self) -> None:
        """Nobody wrote a byte beside a slot."""
        for guarded in self._guarded:
            assert guarded[: len(GUARD)] == GUARD
            assert guarded[-len(GUARD) :] == GUARD


class Answers:
    """Collects callbacks; fails for one that comes twice."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_asked: dict[Any, Any] = {}
        self._threads: set[str] = set()
        self.twice: list[Any] = []

    def __call__(self, asked: Any, outcome: Any) -> None:
        with self._changed:
            if asked in self._by_asked:
                self.twice.append(asked)
            self._by_asked[asked] = outcome
            self._threads.add(threading.current_thread().name)
            self._changed.notify_all()

    def callback(self, asked: Any) -> Callable[[Any], None]:
        return lambda outcome: self(asked, outcome)

    def wait(self, count: int, timeout_s: float = PATIENCE_S) -> list[Any]:
        """The outcomes so far, once there are `count` of them."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self._by_asked) >= count, timeout_s)
            assert came, f"{len(self._by_asked)} of {count} answers"
            assert not self.twice
            assert all(name.startswith("lmcr-") for name in self._threads), self._threads
            return list(self._by_asked.values())

    def of(self, asked: Sequence[Any]) -> list[Any]:
        """The outcomes of these, in their order, once all are there."""
        self.wait(len(asked))
        return [self._by_asked[each] for each in asked]

    def __len__(self) -> int:
        with self._changed:
            return len(self._by_asked)


# What a plane opens to one server with default options when there is much to do: its bulk
# connections and control. With little to do it has one of each.
CONNECTIONS = 2 * DEFAULT_CONNECTIONS + 1
LEAST_CONNECTIONS = 3


def open_streams(of: RedisPlane | Connector) -> int:
    """Connections that were greeted and not closed."""
    connectors = (
        [of] if isinstance(of, Connector) else [n.connector for n in of._nodes.routes.nodes]
    )
    connections = [each for connector in connectors for each in list(connector._connections)]
    return sum(each.is_open for each in connections)


def open_all(plane: RedisPlane) -> None:
    """Give the plane so much to do that it opens all its connections."""
    chunk = Chunk(9_999, 64 * 64, 64, seed=9)
    wait_until(
        lambda: (
            write(plane, chunk) == [WriteOutcome.STORED]
            and read(plane, chunk) == [ReadOutcome.LOADED]
            and open_streams(plane) == CONNECTIONS
        )
    )


@contextmanager
def running(url: str, **settings: Any) -> Iterator[RedisPlane]:
    """A plane that has asked its server once. Its timeouts suit a busy machine."""
    patient = {"connect_timeout_s": SLOW_S, "op_timeout_s": SLOW_S}
    plane = RedisPlane(RedisOptions(url, **(patient | settings)))
    plane.start()
    try:
        plane.wait_probed(PATIENCE_S)
        yield plane
    finally:
        assert plane.close(1.0)


@contextmanager
def running_as(server: RedisServer, *rights: str, **settings: Any) -> Iterator[RedisPlane]:
    """A plane whose user has these rights."""
    server.command("ACL", "SETUSER", "limited", "reset", "on", f">{PASSWORD}", "~*", *rights)
    with running(f"redis://limited:{PASSWORD}@127.0.0.1:{server.port}", **settings) as plane:
        yield plane
    server.command("ACL", "DELUSER", "limited")


def write(plane: RedisPlane, *chunks: Chunk, within_s: float = PATIENCE_S) -> list[WriteOutcome]:
    answers = Answers()
    transfers = [chunk.io(within_s) for chunk in chunks]
    plane.store_all(transfers, answers)
    return answers.of(transfers)


def read(plane: RedisPlane, *chunks: Chunk, within_s: float = PATIENCE_S) -> list[ReadOutcome]:
    answers = Answers()
    transfers = [chunk.io(within_s) for chunk in chunks]
    plane.load_all(transfers, answers)
    outcomes = answers.of(transfers)
    for chunk in chunks:
        chunk.check_guards()
    return outcomes


def check_stores(plane: RedisPlane, *chunks: Chunk) -> None:
    assert write(plane, *chunks) == [WriteOutcome.STORED] * len(chunks)


def check_loads(plane: RedisPlane, *chunks: Chunk) -> None:
    """They come back as they are in these slots."""
    loaded = [chunk.empty() for chunk in chunks]
    assert read(plane, *loaded) == [ReadOutcome.LOADED] * len(chunks)
    assert [chunk.content for chunk in loaded] == [chunk.content for chunk in chunks]


def check_moves(plane: RedisPlane, *chunks: Chunk) -> None:
    """Chunks can be stored, and loaded."""
    check_stores(plane, *chunks)
    check_loads(plane, *chunks)


def scan(plane: RedisPlane, keys: list[bytes], within_s: float = PATIENCE_S) -> Any:
    answers = Answers()
    plane.scan(keys, time.monotonic() + within_s, answers.callback("scan"))
    return answers.wait(1)[0]


def exists(plane: RedisPlane, keys: list[bytes], within_s: float = PATIENCE_S) -> Any:
    answers = Answers()
    plane.exists(keys, time.monotonic() + within_s, answers.callback("exists"))
    return answers.wait(1)[0]


def refresh(
    plane: RedisPlane, *chunks: Chunk, within_s: float = PATIENCE_S, claim_s: float = 0.0
) -> Any:
    answers = Answers()
    asked = [(chunk.key, chunk.stripe_count) for chunk in chunks]
    plane.refresh(asked, time.monotonic() + within_s, answers.callback("refresh"), claim_s)
    return answers.wait(1)[0]


def describe(plane: RedisPlane, keys: list[bytes], within_s: float = PATIENCE_S) -> FramesResult:
    """Also on the caller's own thread."""
    answers: SimpleQueue[FramesResult] = SimpleQueue()
    plane.describe(keys, time.monotonic() + within_s, answers.put)
    return answers.get(timeout=PATIENCE_S)


def remove(
    plane: RedisPlane,
    chunk: Chunk,
    within_s: float = PATIENCE_S,
    stripe_count: int = 0,
    newest_unix_ms: int | None = None,
) -> RemoveResult:
    answers, deadline = Answers(), time.monotonic() + within_s
    plane.remove(chunk.key, deadline, answers.callback("remove"), stripe_count, newest_unix_ms)
    result: RemoveResult = answers.wait(1)[0]
    return result


def clear(plane: RedisPlane, *prefixes: bytes, within_s: float = PATIENCE_S) -> Any:
    answers = Answers()
    plane.clear(prefixes, time.monotonic() + within_s, answers.callback("clear"))
    return answers.wait(1)[0]


def plane_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lmcr-")]


def our_connections(server: RedisServer) -> list[str]:
    """The names of our connections as the server sees them."""
    with server.client() as client:
        found = [str(each["name"]) for each in client.client_list()]
    return sorted(name for name in found if name.startswith("lmcache-redis:"))


def find_servers(deployment: Deployment, timeout_s: float) -> ServerMap:
    """Looks the servers up once."""
    with contextlib.closing(ServerFinder(deployment, timeout_s)) as finder:
        return finder.find()

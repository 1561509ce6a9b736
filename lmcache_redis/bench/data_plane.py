"""How fast chunks move between slots and Redis, and how fast keys are scanned.

Our plane beside redis-py with hiredis, on the same server, with values from the same memory,
interleaved over several rounds; medians are reported. `run` gives the rows, and
`python -m lmcache_redis.bench.data_plane` prints them.

    first-store  SETs of keys that do not exist: the server faults fresh memory in
    overwrite    SETs of keys that exist
    load         GETs into slots; checksums are verified where `checksum` says so
    scan-all, scan-none, scan-half   the length of the cached prefix of 1,000 keys
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import resource
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Protocol

from lmcache_redis.errors import ConfigError, RedisUnavailable
from lmcache_redis.keys import key_stem, stripe_key
from lmcache_redis.protocol import MemoryFormat, RemoteMetadata
from lmcache_redis.resp.options import (
    DEFAULT_GET_CONNECTIONS,
    DEFAULT_OUTSTANDING_SETS,
    DEFAULT_SET_CONNECTIONS,
    RedisOptions,
)
from lmcache_redis.resp.outcomes import CallOutcome, ChunkIO, ReadOutcome, ScanResult, WriteOutcome
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.stripe import ChunkFrame, stripe_payload_bytes

MIB = 1 << 20
# Header and payload together stay under 1 MiB, and slots are whole pages (docs/data-plane.md).
DEFAULT_SLOT_BYTES = MIB - 4096
DEFAULT_CHUNK_MIB = (2, 8, 16, 32)
DEFAULT_MOVED_BYTES = 256 * MIB
DEFAULT_ROUNDS = 5
SCAN_KEYS = 1000
_SCANS_A_ROUND = 20
_PAGE_BYTES = 4096
_DEADLINE_S = 60.0
_START_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: medians over its rounds.

    value_bytes: payload of one chunk (a key, for scans). items: chunks or keys in a round.
    stripe_bytes: payload of one Redis value. gb_per_s: payload, 1e9 bytes. cpu_s_per_gb:
    user and system time of this process. outstanding: SETs sent and not acknowledged.
    """

    client: str
    op: str
    value_bytes: int
    items: int
    connections: int
    checksum: bool
    stripe_bytes: int
    outstanding: int
    gb_per_s: float | None
    ms: float | None
    cpu_s_per_gb: float | None
    rounds: int


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run our client."""

    slot_bytes: int = DEFAULT_SLOT_BYTES
    get_connections: int = DEFAULT_GET_CONNECTIONS
    set_connections: int = DEFAULT_SET_CONNECTIONS
    outstanding: int = DEFAULT_OUTSTANDING_SETS


class Chunks:
    """Chunks of one size whose slots lie in memory that is faulted in already."""

    def __init__(
        self, memory: memoryview, chunk_bytes: int, slot_bytes: int, name: str = "bench"
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.stripe_bytes = stripe_payload_bytes(chunk_bytes, slot_bytes)
        # Sizes do not share keys: what one wrote the other would refuse.
        fingerprint = b"bench" + chunk_bytes.to_bytes(8, "big") + slot_bytes.to_bytes(19, "big")
        metadata = RemoteMetadata(chunk_bytes, [(chunk_bytes,)], ["uint8"], MemoryFormat.PAGES)
        serialized = metadata.serialize()
        stem = key_stem(fingerprint[:16], f"{name}-{slot_bytes}", 0, 32)
        self.chunks: list[tuple[bytes, ChunkFrame, list[memoryview]]] = []
        self.whole: list[tuple[bytes, memoryview]] = []
        start = 0
        while True:
            chunk_hash = len(self.chunks).to_bytes(32, "big")
            frame = ChunkFrame(fingerprint, chunk_hash, chunk_bytes, self.stripe_bytes, serialized)
            slots = []
            at = start
            for index in range(frame.stripe_count):
                nbytes = frame.payload_bytes(index)
                slots.append(memory[at : at + nbytes])
                at += -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
            if at > memory.nbytes:
                break
            self.chunks.append((stem + chunk_hash, frame, slots))
            self.whole.append((b"whole:" + stem + chunk_hash, memory[start : start + chunk_bytes]))
            start = at

    @property
    def gigabytes(self) -> float:
        return len(self.chunks) * self.chunk_bytes / 1e9

    def release(self) -> None:
        for _, _, slots in self.chunks:
            for slot in slots:
                slot.release()
        for _, value in self.whole:
            value.release()


class Client(Protocol):
    """What is compared."""

    name: str
    checksum: bool

    def store(self, chunks: Chunks) -> None: ...
    def load(self, chunks: Chunks) -> None: ...
    def scan(self, keys: Sequence[bytes]) -> int: ...
    def close(self) -> None: ...


class OurClient:
    """The plane, used as the agent uses it: one submission a chunk, callbacks."""

    name = "ours"
    checksum = True

    def __init__(self, url: str, setting: Setting) -> None:
        self._plane = RedisPlane(
            RedisOptions(
                url,
                get_connections=setting.get_connections,
                set_connections=setting.set_connections,
                max_outstanding_sets=setting.outstanding,
                op_timeout_s=10.0,
            )
        )
        self._plane.start()
        state = self._plane.wait_probed(_START_S)
        if not state.up:
            self.close()
            raise RedisUnavailable(state.reason)

    def close(self) -> None:
        self._plane.close(1.0)

    def store(self, chunks: Chunks) -> None:
        self._move(chunks, self._plane.write, WriteOutcome.STORED)

    def load(self, chunks: Chunks) -> None:
        self._move(chunks, self._plane.read, ReadOutcome.LOADED)

    def scan(self, keys: Sequence[bytes]) -> int:
        finished = threading.Event()
        results: list[ScanResult] = []

        def done(result: ScanResult) -> None:
            results.append(result)
            finished.set()

        self._plane.scan(keys, time.monotonic() + _DEADLINE_S, done)
        finished.wait()
        if results[0].outcome is not CallOutcome.DONE:
            raise RedisUnavailable(f"a scan failed: {results[0].outcome.value}")
        return results[0].prefix_length

    @staticmethod
    def _move(chunks: Chunks, submit: Callable[..., None], good: object) -> None:
        finished = threading.Event()
        outcomes: list[object] = []

        def done(_: ChunkIO, outcome: object) -> None:
            outcomes.append(outcome)
            if len(outcomes) == len(chunks.chunks):
                finished.set()

        deadline = time.monotonic() + _DEADLINE_S
        for key, frame, slots in chunks.chunks:
            submit(ChunkIO(key, frame, slots, deadline), done)
        finished.wait()
        bad = [outcome for outcome in outcomes if outcome is not good]
        if bad:
            raise RedisUnavailable(f"{len(bad)} of {len(outcomes)} chunks failed: {bad[0]}")


class RedisPyClient:
    """redis-py with hiredis: whole chunks as values on one connection, SETs pipelined."""

    name = "redis-py"
    checksum = False

    def __init__(self, url: str) -> None:
        import redis

        self._client = redis.Redis.from_url(url, protocol=2)

    def close(self) -> None:
        self._client.close()

    def store(self, chunks: Chunks) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, value in chunks.whole:
            pipeline.set(key, value)
        pipeline.execute()

    def load(self, chunks: Chunks) -> None:
        # Not pipelined: that would hold every reply at once.
        for key, value in chunks.whole:
            value[:] = self._client.get(key)

    def scan(self, keys: Sequence[bytes]) -> int:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        found: list[int] = pipeline.execute()
        return found.index(0) if 0 in found else len(found)


@contextlib.contextmanager
def own_server(maxmemory_bytes: int) -> Iterator[str]:
    """A redis-server of our own on a free loopback port, ended on exit; gives its URL."""
    executable = shutil.which("redis-server") or shutil.which("valkey-server")
    if executable is None:
        raise ConfigError("no redis-server on the PATH: install one, or name a server by its URL")
    with tempfile.TemporaryDirectory() as directory, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = [executable, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--appendonly", "no", "--dir", directory]
        command += ["--maxmemory", str(maxmemory_bytes), "--maxmemory-policy", "allkeys-lru"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def run(
    url: str | None = None,
    *,
    chunk_mib: Sequence[int] = DEFAULT_CHUNK_MIB,
    settings: Sequence[Setting] = (Setting(),),
    moved_bytes: int = DEFAULT_MOVED_BYTES,
    rounds: int = DEFAULT_ROUNDS,
    peers: bool = True,
    scans: bool = True,
) -> list[Row]:
    """Measure and give medians, one row for each client, operation, size and setting.

    url: a server to use (it is FLUSHed); None starts one. chunk_mib: chunk sizes in MiB.
    moved_bytes: payload moved in one measurement. Raises ConfigError where there is no
    server, RedisUnavailable where it fails.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            url = stack.enter_context(own_server(4 * moved_bytes + 256 * MIB))
        backing = mmap.mmap(-1, moved_bytes)
        stack.callback(backing.close)
        memory = memoryview(backing)
        stack.callback(memory.release)
        for start in range(0, moved_bytes, _PAGE_BYTES):
            memory[start : start + 8] = start.to_bytes(8, "little")
        samples = _Samples()
        ours = [(setting, OurClient(url, setting)) for setting in settings]
        for _, client in ours:
            stack.callback(client.close)
        peer = RedisPyClient(url) if peers else None
        if peer is not None:
            stack.callback(peer.close)
        for mib in chunk_mib:
            _measure_size(url, memory, mib * MIB, ours, peer, rounds, samples)
        if scans:
            _measure_scans(url, [ours[0]], peer, rounds, samples)
        return samples.rows()


def load_gb_per_s(url: str, chunk_bytes: int, moved_bytes: int, rounds: int) -> float:
    """How fast we load from a server as it is: nothing is flushed, each round stores new chunks."""
    rates = []
    with (
        contextlib.closing(OurClient(url, Setting())) as client,
        mmap.mmap(-1, moved_bytes) as backing,
        memoryview(backing) as memory,
    ):
        for start in range(0, moved_bytes, _PAGE_BYTES):
            memory[start : start + 8] = start.to_bytes(8, "little")
        for number in range(rounds):
            chunks = Chunks(memory, chunk_bytes, DEFAULT_SLOT_BYTES, f"round-{number}")
            client.store(chunks)
            started = time.perf_counter()
            client.load(chunks)
            rates.append(chunks.gigabytes / (time.perf_counter() - started))
            chunks.release()
    return statistics.median(rates)


class _Samples:
    """Measurements by what they measure, in the order they first came."""

    def __init__(self) -> None:
        self._by_case: dict[tuple[Any, ...], list[tuple[float, float]]] = {}

    def time(self, case: tuple[Any, ...], action: Callable[[], object]) -> object:
        cpu_before = _cpu_s()
        started = time.perf_counter()
        result = action()
        elapsed_s = time.perf_counter() - started
        self._by_case.setdefault(case, []).append((elapsed_s, _cpu_s() - cpu_before))
        return result

    def rows(self) -> list[Row]:
        rows = []
        for case, samples in self._by_case.items():
            client, op, value_bytes, items, connections, checksum, stripe, outstanding = case
            elapsed_s = statistics.median(sample[0] for sample in samples)
            cpu_s = statistics.median(sample[1] for sample in samples)
            is_scan = op.startswith("scan")
            gigabytes = value_bytes * items / 1e9
            rows.append(
                Row(
                    *(client, op, value_bytes, items, connections, checksum, stripe, outstanding),
                    gb_per_s=None if is_scan else round(gigabytes / elapsed_s, 3),
                    ms=round(elapsed_s * 1e3, 3) if is_scan else None,
                    cpu_s_per_gb=None if is_scan else round(cpu_s / gigabytes, 3),
                    rounds=len(samples),
                )
            )
        return rows


def _measure_size(
    url: str,
    memory: memoryview,
    chunk_bytes: int,
    ours: Sequence[tuple[Setting, OurClient]],
    peer: RedisPyClient | None,
    rounds: int,
    samples: _Samples,
) -> None:
    sets = {s.slot_bytes: Chunks(memory, chunk_bytes, s.slot_bytes) for s, _ in ours}
    for _ in range(rounds):
        for setting, client in ours:
            chunks = sets[setting.slot_bytes]
            striped = (True, chunks.stripe_bytes, setting.outstanding)
            connections = (setting.set_connections, setting.get_connections)
            _measure_moves(url, client, chunks, connections, striped, samples)
        if peer is not None:
            chunks = next(iter(sets.values()))
            _measure_moves(url, peer, chunks, (1, 1), (False, chunk_bytes, 0), samples)
    for chunks in sets.values():
        chunks.release()


def _measure_moves(
    url: str,
    client: Client,
    chunks: Chunks,
    connections: tuple[int, int],
    how: tuple[bool, int, int],
    samples: _Samples,
) -> None:
    """One round of a client: connections of SETs and of GETs; how: checksum, stripe, window."""
    shape = (chunks.chunk_bytes, len(chunks.chunks))
    _flush(url)
    for op, count, action in (
        ("first-store", connections[0], client.store),
        ("overwrite", connections[0], client.store),
        ("load", connections[1], client.load),
    ):
        samples.time((client.name, op, *shape, count, *how), partial(action, chunks))


def _measure_scans(
    url: str,
    ours: Sequence[tuple[Setting, OurClient]],
    peer: RedisPyClient | None,
    rounds: int,
    samples: _Samples,
) -> None:
    stem = key_stem(bytes(16), "bench-scan", 0, 32)
    keys = [stripe_key(stem + n.to_bytes(32, "big"), 0) for n in range(SCAN_KEYS)]
    clients: list[Client] = [client for _, client in ours]
    if peer is not None:
        clients.append(peer)
    for op, present in (("none", 0), ("half", SCAN_KEYS // 2), ("all", SCAN_KEYS)):
        _flush(url, keys[:present])
        for _ in range(rounds * _SCANS_A_ROUND):
            for client in clients:
                case = (len(keys[0]), SCAN_KEYS, 1, False, 0, 0)
                found = samples.time((client.name, f"scan-{op}", *case), partial(client.scan, keys))
                if found != present:
                    raise RedisUnavailable(f"a scan found {found} of {present} keys")


def _flush(url: str, keys: Sequence[bytes] = ()) -> None:
    """Empty the server, its memory given back, and put small values under `keys`."""
    import redis

    with redis.Redis.from_url(url, protocol=2) as client:
        client.flushall()
        if keys:
            client.mset(dict.fromkeys(keys, b"x"))


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while not _listens(port):
        if time.monotonic() > deadline:
            raise RedisUnavailable("the redis-server did not start")
        time.sleep(0.01)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the Redis data plane.")
    parser.add_argument("--redis-url", help="a server to use; it is emptied (default: start one)")
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=DEFAULT_CHUNK_MIB)
    parser.add_argument("--slot-kib", type=int, nargs="+", default=[DEFAULT_SLOT_BYTES >> 10])
    parser.add_argument("--gets", type=int, nargs="+", default=[DEFAULT_GET_CONNECTIONS])
    parser.add_argument("--sets", type=int, nargs="+", default=[DEFAULT_SET_CONNECTIONS])
    parser.add_argument("--outstanding", type=int, nargs="+", default=[DEFAULT_OUTSTANDING_SETS])
    parser.add_argument("--moved-mib", type=int, default=DEFAULT_MOVED_BYTES // MIB)
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--no-scans", action="store_true")
    parser.add_argument("--json", help="write the rows to this file")
    given = parser.parse_args(arguments)
    rows = run(
        given.redis_url,
        chunk_mib=given.chunk_mib,
        settings=[
            Setting(slot_kib << 10, gets, sets, outstanding)
            for slot_kib in given.slot_kib
            for gets in given.gets
            for sets in given.sets
            for outstanding in given.outstanding
        ],
        moved_bytes=given.moved_mib * MIB,
        rounds=given.rounds,
        peers=not given.no_peers,
        scans=not given.no_scans,
    )
    names = [field.name for field in fields(Row)]
    print("  ".join(f"{name:>12}" for name in names))
    for row in rows:
        print("  ".join(f"{getattr(row, name)!s:>12}" for name in names))
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()

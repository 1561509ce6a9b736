# SPDX-License-Identifier: Apache-2.0
"""Redis: servers that fail, and puts that nobody waits for. `tests/resp` has all the rest."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.errors import ConfigError, NotListed
from lmcache_redis.objects import ChunkBackend, in_redis
from lmcache_redis.resp import RedisOptions
from tests.objects.redis_tiers import SLOT, stripes_in, tier, wait_until
from tests.objects.samples import get_raw, key_of, same, tensor_of
from tests.servers import RedisServer, server_binaries

BIG = 10 * SLOT


def test_tiers_with_different_prefixes_do_not_meet(server: RedisServer) -> None:
    prefixes = (b"", b"a*", b"[ab]?\\", b"a")
    for number, prefix in enumerate(prefixes):
        with tier(RedisOptions(server.url, key_prefix=prefix)) as backend:
            assert not backend.contains(key_of(0))
            assert backend.put(key_of(0), tensor_of(number, (9,)))
            assert backend.put(key_of(number), tensor_of(number, (9,)))
    for number, prefix in enumerate(prefixes):
        with tier(RedisOptions(server.url, key_prefix=prefix)) as backend:
            assert set(backend.stored_keys()) == {key_of(0), key_of(number)}
            assert same(backend.get(key_of(0)), tensor_of(number, (9,)))


# ------------------------------------------------------------------ servers that fail


def works_again(backend: ChunkBackend, key: ObjectKey, chunk: torch.Tensor) -> None:
    """The plane may still remove a failed put's partial write, and with it one more put."""
    wait_until(lambda: backend.put(key, chunk) and same(backend.get(key), chunk))


def listing_fails(backend: ChunkBackend) -> bool:
    """What cannot be listed is told, and not said to be empty."""
    with pytest.raises(NotListed, match=r"cannot be used|not answered"):
        backend.stored_keys()
    return True


def answers_in_time(backend: ChunkBackend, within_s: float) -> None:
    """Gets are misses, puts are not stored, and no call waits."""
    chunk = tensor_of(1, (BIG,))
    for call, expected in (
        (lambda: backend.put(key_of(1), chunk), False),
        (lambda: backend.get(key_of(1)), None),
        (lambda: backend.contains(key_of(1)), False),
        (lambda: backend.remove(key_of(1)), False),
        (lambda: listing_fails(backend), True),
        (lambda: backend.flush(1), True),
    ):
        started = time.monotonic()
        assert call() == expected
        assert time.monotonic() - started < within_s


def test_no_server_at_all(caplog: pytest.LogCaptureFixture) -> None:
    with tier("redis://127.0.0.1:1") as backend:
        answers_in_time(backend, 2.0)
        assert not backend.put(key_of(1), tensor_of(1, (9,)), blocking=False)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert listing_fails(backend)
        assert len([r for r in caplog.records if r.name.startswith("lmcache_redis")]) == 1


def test_stopped_past_the_deadline_then_continued(own_server: RedisServer) -> None:
    chunk = tensor_of(1, (BIG,))
    with tier(own_server.url, deadline_s=0.6) as backend:
        assert backend.put(key_of(1), chunk)
        assert same(backend.get(key_of(1)), chunk)
        own_server.stop()
        answers_in_time(backend, 0.9)
        backend.put(key_of(2), chunk, blocking=False)
        assert backend.flush(2)
        own_server.cont()
        works_again(backend, key_of(1), chunk)


def test_killed_in_the_middle_of_calls(own_server: RedisServer) -> None:
    """Threads call while the server is killed and restarted, twice: never a wrong byte."""
    chunks = {n: tensor_of(n, (BIG + n,)) for n in range(6)}
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(backend: ChunkBackend, seed: int) -> None:
        number = seed
        try:
            while not stop.is_set():
                number = (number + 1) % 6
                started = time.monotonic()
                backend.put(key_of(number), chunks[number], blocking=seed % 2 == 0)
                several = [key_of(n) for n in range(6)]
                found = [backend.get(several[number]), *backend.batched_get(several)]
                for each, n in zip(found, (number, *range(6)), strict=True):
                    assert each is None or same(each, chunks[n])
                backend.contains(key_of(number))
                if not number:
                    with contextlib.suppress(NotListed):
                        backend.stored_keys()
                    backend.remove(key_of(number))
                assert time.monotonic() - started < 12 * 2.5
        except BaseException as error:
            failures.append(error)
            raise

    with tier(own_server.url, deadline_s=2.0) as backend:
        threads = [threading.Thread(target=work, args=(backend, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):
            time.sleep(0.15)
            own_server.kill()
            time.sleep(0.15)
            own_server.start()
        time.sleep(0.2)
        stop.set()
        for thread in threads:
            thread.join(30)
        assert not failures
        assert backend.flush(5)
        works_again(backend, key_of(1), chunks[1])


class Interrupted(BaseException):
    """Like KeyboardInterrupt, it may be raised at any point."""


def test_calls_that_are_interrupted(own_server: RedisServer) -> None:
    """No call gets the reply of an interrupted call, and no memory is lost."""
    chunks = {n: tensor_of(n, (BIG,)) for n in range(3)}

    armed = threading.Event()

    def interrupt(_number: int, _frame: object) -> None:
        if armed.is_set():
            armed.clear()
            raise Interrupted

    def was_interrupted(call: Callable[[], object]) -> bool:
        armed.set()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            call()
        except Interrupted:
            return True
        armed.clear()
        return False

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with tier(own_server.url) as backend:
            for number, chunk in chunks.items():
                assert backend.put(key_of(number), chunk)
            interrupted = 0
            for call in (
                lambda: backend.get(key_of(1)),
                lambda: backend.put(key_of(1), chunks[1]),
                lambda: backend.remove(key_of(2)),
                lambda: backend.stored_keys(),
                lambda: backend.contains(key_of(1)),
            ):
                own_server.stop()
                # The server may still answer until it has stopped.
                interrupted += was_interrupted(call)
                own_server.cont()
                works_again(backend, key_of(1), chunks[1])
                assert same(backend.get(key_of(0)), chunks[0])
                assert key_of(0) in backend.stored_keys()
            assert interrupted
            wait_until(lambda: backend._objects.cache.pool.pinned == 0, "no memory is lost")
    finally:
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------ puts that nobody waits for


def test_an_accepted_put_is_tried_until_its_deadline(own_server: RedisServer) -> None:
    chunk = tensor_of(1, (1000,))
    with tier(own_server.url, deadline_s=0.5) as backend:
        assert backend.put(key_of(0), chunk)
        own_server.stop()
        for seed in range(20):
            backend.put(key_of(1), tensor_of(seed, (1000,)), blocking=False)
        assert backend.flush(5)  # of ten, if each waited for the one before it
        own_server.cont()


@pytest.mark.servers
def test_a_put_is_stored_when_the_process_ends(server: RedisServer) -> None:
    program = f"""
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.objects import ChunkBackend, in_redis

backend = ChunkBackend([in_redis({server.url!r})])
metadata = RemoteMetadata(1 << 20, [(1 << 20,)], ["uint8"], MemoryFormat.UNDEFINED)
for number in range(20):
    key = ObjectKey(number.to_bytes(8, "big"), "org/model", 0x0100_0100)
    payload = [memoryview(bytes([number]) * (1 << 20))]
    assert backend.put_bytes(key, metadata, payload, blocking=False)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    with tier(server.url) as backend:
        for number in range(20):
            assert get_raw(backend, key_of(number)) == bytes([number]) * (1 << 20)


def test_what_is_stored_after_a_removal_stays(server: RedisServer) -> None:
    """The put that the removal dropped was in flight: its sent stripes are removed."""
    large, chunk = tensor_of(1, (200 * SLOT,)), tensor_of(2, (2 * SLOT,))
    with tier(server.url) as backend:
        for _ in range(150):
            assert backend.put(key_of(1), large, blocking=False)
            backend.remove(key_of(1))
            assert backend.put(key_of(1), chunk)
            assert same(backend.get(key_of(1)), chunk)


# ------------------------------------------------------------------ other servers


@pytest.mark.servers
@pytest.mark.parametrize("kind", [*server_binaries()])
def test_every_kind_of_server(tmp_path: Path, kind: str) -> None:
    executable = server_binaries()[kind]
    if executable is None:
        pytest.skip(f"needs {kind}")
    with RedisServer(tmp_path, executable=executable, password="s3cret") as server:
        options = RedisOptions(server.unix_url, password="s3cret", ttl_s=60, ttl_refresh=True)
        with tier(options) as backend:
            chunk = tensor_of(1, (4, 5, 6), "bfloat16")
            assert backend.put(key_of(1), chunk)
            assert backend.contains(key_of(1))
            assert same(backend.get(key_of(1)), chunk)
            assert backend.stored_keys() == [key_of(1)]
            assert 0 < server.command("TTL", *stripes_in(server)) <= 60
            assert backend.remove(key_of(1))
            assert backend.stored_keys() == []


# ------------------------------------------------------------------ settings


def test_settings_that_make_no_sense() -> None:
    for wrong in ({"deadline_s": 0}, {"slot_bytes": 0}):
        with pytest.raises(ConfigError):
            in_redis("redis://127.0.0.1:1", **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        ChunkBackend([in_redis("http://127.0.0.1")])

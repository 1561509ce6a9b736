# SPDX-License-Identifier: Apache-2.0
"""`ChunkBackend` over each kind of storage, and over several: the same promises."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.errors import FormatError
from lmcache_redis.objects import ChunkBackend, in_memory, in_redis, on_disk
from tests.objects.redis_tiers import SLOT, wait_until
from tests.objects.samples import (
    FLUSH_S,
    Buffers,
    key_of,
    metadata_of,
    raw_of,
    same,
    tensor_of,
)
from tests.servers import RedisServer

# ------------------------------------------------------------------ against a model

DTYPES = ("uint8", "bfloat16", "float16", "float32", "int64", "bool", "float8_e4m3fn")
KEYS = [key_of(number) for number in range(5)] + [key_of(0, "../\0/ü")]
keys = st.sampled_from(KEYS)
tensors = st.builds(
    tensor_of,
    seed=st.integers(0, 1 << 30),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
)


class TierMachine(RuleBasedStateMachine):
    """A backend and, for every key, what a get may return: one tensor, or several until a flush."""

    def __init__(self, backend: ChunkBackend) -> None:
        super().__init__()
        self.backend = backend
        self.may: dict[ObjectKey, list[torch.Tensor | None]] = {}
        self.waiting: dict[ObjectKey, torch.Tensor] = {}

    @initialize()
    def begin_empty(self) -> None:
        assert self.backend.flush(FLUSH_S)
        for key in self.backend.stored_keys():
            self.backend.remove(key)
        self.may = {key: [None] for key in KEYS}

    def _wrote(self, key: ObjectKey, tensor: torch.Tensor, blocking: bool, stored: bool) -> None:
        assert stored, "the contract's tier has room for all of this"
        if blocking:
            self.may[key] = [tensor]
            self.waiting.pop(key, None)
        else:
            self.may[key] = [*self.may[key], tensor, None]
            self.waiting[key] = tensor

    def _holds(self, key: ObjectKey) -> bool | None:
        """None: unknown until a flush."""
        missing = [tensor is None for tensor in self.may[key]]
        return None if any(missing) and not all(missing) else not any(missing)

    @rule(key=keys, tensor=tensors, blocking=st.booleans())
    def put(self, key: ObjectKey, tensor: torch.Tensor, blocking: bool) -> None:
        self._wrote(key, tensor, blocking, self.backend.put(key, tensor, blocking))

    @rule(pairs=st.lists(st.tuples(keys, tensors), max_size=4), blocking=st.booleans())
    def batched_put(self, pairs: list[tuple[ObjectKey, torch.Tensor]], blocking: bool) -> None:
        stored = self.backend.batched_put(iter(pairs), blocking)
        assert stored == len(pairs)
        for key, tensor in pairs:
            self._wrote(key, tensor, blocking, True)

    @rule(key=keys)
    def get(self, key: ObjectKey) -> None:
        found = self.backend.get(key)
        assert any(same(found, tensor) for tensor in self.may[key])

    @rule(wanted=st.lists(keys, max_size=6))
    def batched_get(self, wanted: list[ObjectKey]) -> None:
        found = list(self.backend.batched_get(iter(wanted)))
        assert len(found) == len(wanted)
        for key, each in zip(wanted, found, strict=True):
            assert any(same(each, tensor) for tensor in self.may[key])

    @rule(key=keys, cut=st.integers(0, 1 << 16))
    def get_bytes(self, key: ObjectKey, cut: int) -> None:
        if self._holds(key) is not True or len(self.may[key]) != 1:
            return
        (expected,) = self.may[key]
        assert expected is not None
        raw = raw_of(expected)
        buffers = Buffers(cut % len(raw), len(raw) - cut % len(raw))
        metadata = self.backend.get_bytes(key, buffers)
        assert metadata is not None
        assert metadata.shapes == (tuple(expected.shape),)
        assert metadata.dtypes == (expected.dtype,)
        assert buffers.calls == [metadata]
        assert buffers.threads == [threading.get_ident()]
        assert buffers.data == raw

    @rule(key=keys)
    def contains(self, key: ObjectKey) -> None:
        assert self._holds(key) in (None, self.backend.contains(key))

    @rule(key=keys)
    def remove(self, key: ObjectKey) -> None:
        assert self._holds(key) in (None, self.backend.remove(key))
        self.may[key] = [None]
        self.waiting.pop(key, None)

    @rule()
    def list(self) -> None:
        found = self.backend.stored_keys()
        assert len(found) == len(set(found))
        for key in KEYS:
            assert self._holds(key) in (None, key in found)
        assert set(found) <= set(KEYS)

    @rule()
    def flush(self) -> None:
        assert self.backend.flush(FLUSH_S)
        for key, tensor in self.waiting.items():
            self.may[key] = [tensor]
        self.waiting.clear()

    def teardown(self) -> None:
        if self.may:
            self.flush()
            for key in KEYS:
                self.get(key)


# ------------------------------------------------------------------ the tests


KINDS = ("memory", "disk", "redis", "evicting", "layered")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def kind() -> str:
    return "layered"


@pytest.fixture
def backend(kind: str, server: RedisServer, tmp_path: Path) -> Iterator[ChunkBackend]:
    """Empty, with room for all chunks of a test, in memory alone where that is all."""
    disk, redis = on_disk(tmp_path, 256 << 20), in_redis(server.url, slot_bytes=SLOT)
    backend = ChunkBackend(
        {
            "memory": [in_memory(64 << 20)],
            "disk": [disk],
            "redis": [redis],
            "evicting": [in_memory(3000), redis],
            "layered": [in_memory(100_000), disk, redis],
        }[kind]
    )
    yield backend
    backend.close()


@every_kind
def test_behaves_as_the_model(backend: ChunkBackend) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: TierMachine(backend),
        settings=settings(
            max_examples=15,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -------------------------------------------------------------- one chunk


@every_kind
def test_every_size(backend: ChunkBackend) -> None:
    for length in (1, 511, 4096, 4097, (3 << 20) + 13):
        for blocking in (True, False):
            tensor = tensor_of(length + blocking, (length,))
            assert backend.put(key_of(1), tensor, blocking)
            assert backend.flush(FLUSH_S)
            assert same(backend.get(key_of(1)), tensor)


def test_a_tensor_that_is_not_contiguous(backend: ChunkBackend) -> None:
    tensor = tensor_of(1, (8, 6), "float32").t()[1::2]
    assert backend.put(key_of(1), tensor)
    assert same(backend.get(key_of(1)), tensor.contiguous())


def test_metadata_and_groups_of_bytes_come_back(backend: ChunkBackend) -> None:
    """Several buffers in, several others out. It is not one tensor, so `get` misses it."""
    metadata = RemoteMetadata(26, [(2, 3), (5,)], ["bfloat16", "uint8"], MemoryFormat.BINARY_BUFFER)
    raw = bytes(range(26))
    parts = [memoryview(part) for part in (raw[:3], b"", raw[3:20], raw[20:])]
    assert backend.put_bytes(key_of(1), metadata, parts)
    buffers = Buffers(1, 0, 24, 1)
    assert backend.get_bytes(key_of(1), buffers) == metadata
    assert buffers.data == raw
    assert buffers.calls == [metadata]
    assert backend.get(key_of(1)) is None
    assert backend.contains(key_of(1))


def test_buffers_of_elements_larger_than_a_byte(backend: ChunkBackend) -> None:
    tensor = tensor_of(1, (4, 5), "int64")
    metadata = RemoteMetadata(160, [(4, 5)], ["int64"], MemoryFormat.KV_2TD)
    assert backend.put_bytes(key_of(1), metadata, [memoryview(tensor.numpy())])
    target = torch.zeros(4, 5, dtype=torch.int64)
    found = backend.get_bytes(key_of(1), lambda _: [memoryview(target.numpy())])
    assert found == metadata
    assert same(target, tensor)


@every_kind
def test_keys_that_look_alike(backend: ChunkBackend) -> None:
    names = ("m", "M", "..", "/", "a/b", "a\0b", "ü" * 512, "m" * 1024)
    hashes = (b"\0", b"\0\0", b"/", b"\xff" * 63, b"{x}", b"*", b"?[a]\\")
    alike = [ObjectKey(b"\1", "m", rank) for rank in (0, 1, 0xFFFF_FFFF)]
    alike += [ObjectKey(b"\1", name, 0) for name in names[1:]]
    alike += [ObjectKey(chunk_hash, "m", 0) for chunk_hash in hashes]
    for number, key in enumerate(alike):
        assert not backend.contains(key)
        assert backend.put(key, tensor_of(number, (number + 1,)))
    assert sorted(backend.stored_keys()) == sorted(alike)
    for number, key in enumerate(alike):
        assert same(backend.get(key), tensor_of(number, (number + 1,)))
    for key in alike[::2]:
        assert backend.remove(key)
    assert sorted(backend.stored_keys()) == sorted(alike[1::2])


# -------------------------------------------------------------- wrong use


def test_what_has_no_encoding(backend: ChunkBackend) -> None:
    for tensor in (
        torch.zeros(()),
        torch.zeros(3, 0),
        torch.zeros((1,) * 9),
        torch.zeros(2, dtype=torch.complex64),
    ):
        for blocking in (True, False):
            with pytest.raises(FormatError):
                backend.put(key_of(1), tensor, blocking)
    assert backend.stored_keys() == []


@pytest.mark.parametrize("blocking", [True, False])
def test_a_payload_that_does_not_add_up(backend: ChunkBackend, blocking: bool) -> None:
    kept = tensor_of(1, (8,))
    assert backend.put(key_of(1), kept)
    for parts in ([b"1234567"], [b"12345678", b"9"], []):
        views = [memoryview(part) for part in parts]
        with pytest.raises(FormatError):
            backend.put_bytes(key_of(1), metadata_of(8), views, blocking)
    with pytest.raises(FormatError):
        backend.put_bytes(key_of(1), metadata_of(0), [memoryview(b"")], blocking)
    with pytest.raises(FormatError):
        backend.put_bytes(key_of(1), metadata_of(8), [memoryview(bytes(16))[::2]], blocking)
    assert backend.flush(FLUSH_S)
    assert same(backend.get(key_of(1)), kept)


def test_what_is_no_key_and_no_chunk_is_told(backend: ChunkBackend) -> None:
    wrong: Any = "key"
    for call in (backend.get, backend.contains, backend.remove):
        with pytest.raises(FormatError, match="a key is an ObjectKey, not str"):
            call(wrong)
    with pytest.raises(FormatError, match="a key is an ObjectKey"):
        backend.put(wrong, tensor_of(1, (8,)))
    with pytest.raises(FormatError, match="a key is an ObjectKey"):
        list(backend.batched_get([wrong]))
    wrong = [1, 2]
    with pytest.raises(FormatError, match="one dense tensor, not a list"):
        backend.put(key_of(1), wrong)


@pytest.mark.parametrize(
    ("buffers", "error", "why"),
    [
        ([bytearray(7)], ValueError, "bytes"),
        ([bytearray(9)], ValueError, "bytes"),
        ([bytearray(4), bytearray(5)], ValueError, "bytes"),
        ([], ValueError, "bytes"),
        ([bytes(8)], ValueError, "read-only"),
        (LookupError("of the caller"), LookupError, "of the caller"),
        (None, None, ""),  # no room, which is a miss
    ],
)
def test_buffers_that_a_caller_cannot_give(
    backend: ChunkBackend, buffers: Any, error: type[Exception] | None, why: str
) -> None:
    """The chunk stays, and is not pinned. For a miss no buffer is asked for."""
    asked: list[RemoteMetadata] = []

    def allocate(metadata: RemoteMetadata) -> list[memoryview] | None:
        asked.append(metadata)
        if isinstance(buffers, Exception):
            raise buffers
        return None if buffers is None else [*map(memoryview, buffers)]

    assert backend.get_bytes(key_of(1), allocate) is None
    assert asked == []
    tensor = tensor_of(1, (8,))
    assert backend.put(key_of(1), tensor)
    with contextlib.nullcontext() if error is None else pytest.raises(error, match=why):
        assert backend.get_bytes(key_of(1), allocate) is None
    assert len(asked) == 1
    wait_until(lambda: backend._objects.cache.pool.pinned == 0)
    assert same(backend.get(key_of(1)), tensor)


# -------------------------------------------------------------- whose memory


def test_what_a_get_gave_is_the_callers_own(backend: ChunkBackend) -> None:
    expected = tensor_of(1, (5000,))
    assert backend.put(key_of(1), expected)
    first, second = backend.get(key_of(1)), backend.get(key_of(1))
    assert first is not None
    first.zero_()
    assert same(second, expected)
    assert same(backend.get(key_of(1)), expected)
    assert backend.put(key_of(1), tensor_of(2, (5000,)))
    assert backend.remove(key_of(1))
    assert same(second, expected)


# -------------------------------------------------------------- threads


@every_kind
def test_threads_find_no_wrong_byte(backend: ChunkBackend) -> None:
    """Every element of a chunk has the number of its key; sizes differ widely."""
    stop_at = time.monotonic() + 0.7
    give_up_at = stop_at + 20.0
    failures: list[BaseException] = []
    hits = [0]

    def check(number: int, found: torch.Tensor | None) -> None:
        if found is not None:
            hits[0] += 1
            first = int(found.view(-1)[0])
            assert first >> 32 == number
            assert bool((found == first).all())
            assert found.numel() == _elements(first)

    def hammer(seed: int) -> None:
        choose = random.Random(seed)
        try:
            while not failures and time.monotonic() < (stop_at if hits[0] > 20 else give_up_at):
                number = choose.randrange(12)
                key, action = key_of(number), choose.randrange(21)
                if action < 7:
                    value = number << 32 | choose.randrange(1 << 31)
                    chunk = torch.full((_elements(value),), value, dtype=torch.int64)
                    backend.put(key, chunk, blocking=action < 4)
                    chunk.fill_(-1)
                elif action < 14:
                    check(number, backend.get(key))
                elif action < 16:
                    several = [choose.randrange(12) for _ in range(4)]
                    found = backend.batched_get(key_of(each) for each in several)
                    for each, tensor in zip(several, found, strict=True):
                        check(each, tensor)
                elif action < 18:
                    backend.remove(key)
                elif action < 19:
                    backend.contains(key)
                elif action < 20:
                    values = [choose.randrange(12) << 32 | choose.randrange(99) for _ in "abc"]
                    backend.batched_put(
                        (
                            key_of(value >> 32),
                            torch.full((_elements(value),), value, dtype=torch.int64),
                        )
                        for value in values
                    )
                else:
                    assert {each.model_name for each in backend.stored_keys()} <= {"org/model"}
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert hits[0] > 20
    assert backend.flush(FLUSH_S)
    for number in range(12):
        check(number, backend.get(key_of(number)))


def _elements(value: int) -> int:
    return (1, 7, 600, 5_000, 20_000)[value % 5]


# -------------------------------------------------------------- the end


def test_every_call_after_close_raises(backend: ChunkBackend) -> None:
    tensor = tensor_of(1, (8,))
    assert backend.put(key_of(1), tensor)
    late = backend.batched_get([key_of(1)])
    backend.close()
    calls: list[Callable[[], Any]] = [
        lambda: backend.put(key_of(1), tensor),
        lambda: backend.put(key_of(1), tensor, blocking=False),
        lambda: backend.put_bytes(key_of(1), metadata_of(1), [memoryview(b"1")]),
        lambda: backend.get(key_of(1)),
        lambda: backend.get_bytes(key_of(1), Buffers()),
        lambda: backend.contains(key_of(1)),
        lambda: backend.remove(key_of(1)),
        lambda: backend.stored_keys(),
        lambda: backend.flush(1),
        lambda: backend.batched_put([(key_of(1), tensor)]),
        lambda: list(backend.batched_get([key_of(1)])),
        lambda: next(late),
    ]
    for call in calls:
        with pytest.raises(RuntimeError):
            call()
    backend.close()


@every_kind
def test_close_ends_threads_also_with_puts_that_wait(backend: ChunkBackend) -> None:
    for number in range(8):
        backend.put(key_of(number), tensor_of(number, (1 << 20,)), blocking=False)
    backend.close()
    backend.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("lmcr-")]


def test_close_while_others_call(backend: ChunkBackend) -> None:
    """Each call returns or raises RuntimeError."""
    tensor = tensor_of(1, (10_000,))
    ended: list[str] = []

    def call(blocking: bool) -> None:
        try:
            while True:
                backend.put(key_of(1), tensor, blocking)
                found = backend.get(key_of(1))
                assert found is None or same(found, tensor)
        except RuntimeError:
            ended.append("closed")

    threads = [threading.Thread(target=call, args=(blocking,)) for blocking in (True, False)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    backend.close()
    for thread in threads:
        thread.join(30)
    assert ended == ["closed", "closed"]

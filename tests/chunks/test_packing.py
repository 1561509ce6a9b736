# SPDX-License-Identifier: Apache-2.0
"""Packed payloads: every implementation makes the same bytes and brings them back, or says no."""

from __future__ import annotations

import random
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_redis import native
from lmcache_redis.chunks import packing
from lmcache_redis.chunks.metadata import itemsize
from tests.fuzz.packed import FORMS

GUARD = 64
SIZES = (1, 2, 4)
DTYPES = [*packing.ELEMENT_BYTES]
TORCH_TYPES = [name for name in DTYPES if "8" not in name or hasattr(torch, name)]


class Packer(NamedTuple):
    """One implementation, with checks of what lies around its buffers."""

    pack_into: Callable[[bytes, int, bytearray], int]
    unpack_into: Callable[[bytes, int, bytearray], bool]

    def pack(self, plain: bytes, element_bytes: int, room: int | None = None) -> bytes:
        room = len(plain) if room is None else room
        out = bytearray(b"\xa5" * (room + 2 * GUARD))
        with memoryview(out) as view:
            used = self.pack_into(plain, element_bytes, view[GUARD : GUARD + room])
        assert used <= room
        assert out[:GUARD] == out[GUARD + room :] == b"\xa5" * GUARD, "nothing around it is written"
        return bytes(out[GUARD : GUARD + used])

    def unpack(self, stored: bytes, element_bytes: int, nbytes: int) -> bytes | None:
        out = bytearray(b"\x5a" * (nbytes + 2 * GUARD))
        with memoryview(out) as view:
            is_good = self.unpack_into(stored, element_bytes, view[GUARD : GUARD + nbytes])
        assert out[:GUARD] == out[GUARD + nbytes :] == b"\x5a" * GUARD, "nor around this"
        return bytes(out[GUARD : GUARD + nbytes]) if is_good else None


REFERENCE = Packer(packing.pack_in_numpy, packing.unpack_in_numpy)


@pytest.fixture(params=["numpy", "plain", "avx2", "avx512"])
def packer(request: pytest.FixtureRequest) -> Iterator[Packer]:
    if request.param == "numpy":
        yield REFERENCE
        return
    if native.packing is None:
        pytest.skip(native.why_not)
    if not native.packing.use_vectors(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield Packer(native.packing.pack, native.packing.unpack)
    assert any(native.packing.use_vectors(each) for each in ("avx512", "avx2", "plain"))


many_examples = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)


def normal(dtype: str, nbytes: int, seed: int = 1, scale: float = 1.0) -> bytes:
    """Numbers like those of a KV cache, and the bytes of a part of one at the end."""
    count = nbytes // itemsize(dtype) + 1
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()[:nbytes]


def check(packer: Packer, plain: bytes, element_bytes: int) -> bytes:
    """What is stored, if packing pays: as the reference has it, and brought back bit for bit."""
    stored = packer.pack(plain, element_bytes)
    assert stored == REFERENCE.pack(plain, element_bytes)
    if stored:
        assert len(stored) <= len(plain) - len(plain) // 32
        assert packer.unpack(stored, element_bytes, len(plain)) == plain
    return stored


# ------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_numbers_come_back_and_are_shorter(packer: Packer, dtype: str) -> None:
    least = {"float32": 1.14, "bfloat16": 1.38, "float16": 1.1, "float8_e5m2": 1.2}.get(dtype, 1.08)
    plain = normal(dtype, 1 << 18)
    assert len(plain) / len(check(packer, plain, itemsize(dtype))) > least


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32"])
def test_every_length(packer: Packer, dtype: str) -> None:
    tile, block = packing.TILE * itemsize(dtype), packing.BLOCK_BYTES
    lengths = {0, 1, 2, 3, tile - 1, tile, tile + 1, 2 * tile, block - 1, block, block + 1}
    lengths |= {block + tile, 2 * block + 3 * tile + 7, 3 * block}
    plain = normal(dtype, max(lengths))
    for length in sorted(lengths):
        stored = check(packer, plain[:length], itemsize(dtype))
        assert bool(stored) == (length >= tile), length


@st.composite
def payloads(draw: st.DrawFn) -> tuple[bytes, int]:
    """Runs of elements of one kind each: what a sample sees need not be what is there."""
    element_bytes = draw(st.sampled_from(SIZES))
    bits = 8 * element_bytes
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds = st.sampled_from(["zeros", "ones", "noise", "same", "ramp", "near", "turns", "special"])
    runs = []
    for kind, count in draw(st.lists(st.tuples(kinds, st.integers(1, 40_000)), max_size=6)):
        top = 1 << bits
        exponent = int(generator.integers(0, 256))
        made = {
            "zeros": lambda n: np.zeros(n, np.uint64),
            "ones": lambda n, top=top: np.full(n, top - 1, np.uint64),
            "noise": lambda n, top=top: generator.integers(0, top, n, np.uint64),
            "same": lambda n, top=top: np.full(n, generator.integers(0, top, dtype=np.uint64)),
            # All exponents, one after the other.
            "ramp": lambda n: np.arange(n, dtype=np.uint64) << (bits - 9 if bits > 8 else 0),
            "near": lambda n, exponent=exponent: _near(generator, n, bits, exponent),
            "turns": lambda n, top=top: np.where(np.arange(n) % 2, top - 1, 0).astype(np.uint64),
            # Infinities, NaN, subnormals and both zeros of bf16 and fp32.
            "special": lambda n: generator.choice(_special(bits), n),
        }[kind](count)
        runs.append((made % top).astype(f"<u{element_bytes}").tobytes())
    tail = draw(st.binary(max_size=5))
    return b"".join(runs) + tail, element_bytes


def _near(
    generator: np.random.Generator, count: int, bits: int, exponent: int
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Exponents around one, as of numbers, also over the end of their range."""
    exponents = (exponent - generator.geometric(0.4, count)) % 256
    noise = generator.integers(0, 1 << bits, count, np.uint64)
    at = max(bits - 9, 0)
    return noise & ~np.uint64(0xFF << at) | exponents.astype(np.uint64) << np.uint64(at)


def _special(bits: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    upper = [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x0001, 0x8001, 0x0000, 0x8000, 0x7F7F, 0x3F80]
    return np.array([each << max(bits - 16, 0) for each in upper], np.uint64)


@many_examples
@given(payloads())
def test_whatever_is_packed_comes_back(packer: Packer, payload: tuple[bytes, int]) -> None:
    check(packer, *payload)


@many_examples
@given(st.binary(max_size=3000), st.sampled_from(SIZES))
def test_any_bytes(packer: Packer, plain: bytes, element_bytes: int) -> None:
    check(packer, plain, element_bytes)


def test_a_sample_that_misleads(packer: Packer) -> None:
    """Only lines that are looked at are alike. Blocks stay as they are, and then the payload."""
    block = bytearray(random.Random(1).randbytes(packing.BLOCK_BYTES))
    lines = len(block) // 64
    for number in range(16):
        at = (number * 40503 % 65536 * lines >> 16) * 64
        block[at : at + 64] = bytes(64)
    assert check(packer, bytes(block), 2) == b""
    good = normal("bfloat16", 3 * packing.BLOCK_BYTES)
    stored = check(packer, good + bytes(block), 2)
    assert stored[12:16] == bytes(4), "the block is raw"
    assert stored.endswith(block)


def test_noise_is_refused(packer: Packer) -> None:
    for element_bytes in SIZES:
        assert packer.pack(random.Random(1).randbytes(1 << 18), element_bytes) == b""


def test_what_has_no_room_is_refused(packer: Packer) -> None:
    plain = normal("bfloat16", 100_001)
    nbytes = len(packer.pack(plain, 2))
    for room in range(nbytes):
        if room < 30 or room > nbytes - 30 or room % 997 == 0:
            assert packer.pack(plain, 2, room) == b"", room
    assert len(packer.pack(plain, 2, nbytes)) == nbytes


# ------------------------------------------------------------- stored form


def unpack_by_the_book(stored: bytes, element_bytes: int, nbytes: int) -> bytes:
    """As the docstring of `packing` says it, bit by bit."""
    tile = 512 * element_bytes
    body = nbytes // tile * tile
    blocks = -(-body // 32768)
    plain, at = [], 4 * blocks
    for block in range(blocks):
        base, width, count = struct.unpack_from("<BBH", stored, 4 * block)
        here = min(32768, body - 32768 * block)
        if width == 0:
            plain.append(stored[at : at + here])
            at += here
            continue
        tile_bytes = 512 * (element_bytes - 1) + 64 * width
        tiles = here // tile
        escapes = iter(stored[at + tiles * tile_bytes :][:count])
        for start in range(at, at + tiles * tile_bytes, tile_bytes):
            planes = start + 512 * (element_bytes - 1)
            for i in range(512):
                code, shift, plane = 0, 0, planes
                for bits in (4, 2, 1):
                    if width & bits:
                        part = 64 * bits
                        byte = stored[plane + i % part]
                        code |= (byte >> i // part * bits & (1 << bits) - 1) << shift
                        shift += bits
                        plane += part
                is_escape = code == (1 << width) - 1
                high = next(escapes) if is_escape else (base + code) % 256
                low = {
                    1: b"",
                    2: stored[start + i : start + i + 1],
                    4: stored[start + 2 * i : start + 2 * i + 2]
                    + stored[start + 1024 + i : start + 1025 + i],
                }[element_bytes]
                rotated = int.from_bytes(low + bytes((high,)), "little")
                bits = 8 * element_bytes
                element = rotated >> 1 | (rotated & 1) << bits - 1
                plain.append(element.to_bytes(element_bytes, "little"))
        assert next(escapes, None) is None
        at += tiles * tile_bytes + count
    return b"".join(plain) + stored[at:]


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32"]
)
def test_the_stored_form(packer: Packer, dtype: str) -> None:
    plain = normal(dtype, packing.BLOCK_BYTES + 1000 * itemsize(dtype))
    stored = packer.pack(plain, itemsize(dtype))
    assert stored
    assert unpack_by_the_book(stored, itemsize(dtype), len(plain)) == plain


def test_the_documented_example(packer: Packer) -> None:
    numbers = torch.tensor([1.0, -2.0] * 256 + [1.0], dtype=torch.bfloat16)
    numbers[7] = 0.0
    plain = numbers.view(torch.uint8).numpy().tobytes()
    assert packing.__doc__ is not None
    lines = re.findall(r"^ +\d{3}: (\w+)(?: x (\d+))?", packing.__doc__, re.MULTILINE)
    assert check(packer, plain, 2) == bytes.fromhex(
        "".join(digits * int(times or 1) for digits, times in lines)
    )


def test_every_width(packer: Packer) -> None:
    for element_bytes, width, plain, stored in FORMS:
        assert stored[1] == width
        assert check(packer, plain, element_bytes) == stored
        assert unpack_by_the_book(stored, element_bytes, len(plain)) == plain


def test_other_encoders_may_choose_otherwise(packer: Packer) -> None:
    """Any base, over the end of the range of bytes too, and escapes that need not be."""
    element_bytes, width, plain, stored = FORMS[3]
    assert (element_bytes, width) == (2, 4)
    tile = 512 + 256
    codes = [random.Random(2).randrange(16) for _ in range(1024)]
    count = codes.count(15)
    planes = b"".join(
        stored[4 + tile * t : 4 + tile * t + 512]
        + bytes(codes[512 * t + i] | codes[512 * t + 256 + i] << 4 for i in range(256))
        for t in range(2)
    )
    made = struct.pack("<BBH", 250, 4, count) + planes + bytes(range(count)) + b"tail"
    assert packer.unpack(made, 2, len(plain)) == unpack_by_the_book(made, 2, len(plain))


# ------------------------------------------------------------ wrong inputs


def test_wrong_directories(packer: Packer) -> None:
    for element_bytes, width, plain, stored in FORMS[:-1]:
        count = struct.unpack_from("<H", stored, 2)[0]
        for other in range(256):
            if other != width:
                made = stored[:1] + bytes((other,)) + stored[2:]
                assert packer.unpack(made, element_bytes, len(plain)) is None, other
        for wrong in (0, count - 1, count + 1, 0xFFFF):
            made = stored[:2] + struct.pack("<H", wrong) + stored[4:]
            assert packer.unpack(made, element_bytes, len(plain)) is None, wrong
        # One more, and a byte more: the codes do not have it.
        made = stored[:2] + struct.pack("<H", count + 1) + stored[4:] + b"\0"
        assert packer.unpack(made, element_bytes, len(plain)) is None
        # One less, and a byte less.
        made = stored[:2] + struct.pack("<H", count - 1) + stored[4:-1]
        assert packer.unpack(made, element_bytes, len(plain)) is None


def test_wrong_lengths(packer: Packer) -> None:
    for element_bytes, _, plain, stored in FORMS:
        for wrong in (b"", stored[:3], stored[:4], stored[:-1], stored + b"\0", stored * 2):
            assert packer.unpack(wrong, element_bytes, len(plain)) is None
        for nbytes in (0, 1, len(plain) // 2, len(plain) - 1, len(plain) + 1, len(plain) * 40):
            assert packer.unpack(stored, element_bytes, nbytes) is None


def test_raw_blocks_say_nothing_else(packer: Packer) -> None:
    plain = bytes(range(256)) * 4
    for entry, is_good in (
        (b"\0\0\0\0", True),
        (b"\1\0\0\0", False),
        (b"\0\0\1\0", False),
        (b"\0\0\0\1", False),
    ):
        found = packer.unpack(entry + plain, 2, len(plain))
        assert found == (plain if is_good else None)


@many_examples
@given(st.integers(0, 2**32))
def test_spoiled_bytes(packer: Packer, seed: int) -> None:
    """All implementations agree on what is no payload, and what a wrong one is."""
    generator = random.Random(seed)
    element_bytes, _, plain, stored = generator.choice(FORMS)
    spoiled = bytearray(stored)
    for _ in range(generator.randrange(1, 4)):
        at = generator.randrange(4 if generator.random() < 0.5 else len(spoiled))
        spoiled[at] = generator.randrange(256)
    found = packer.unpack(bytes(spoiled), element_bytes, len(plain))
    assert found == REFERENCE.unpack(bytes(spoiled), element_bytes, len(plain))


def test_what_it_does_not_take(packer: Packer) -> None:
    memory = bytearray(4096)
    for element_bytes in (-1, 0, 3, 8, 1 << 40):
        with pytest.raises(ValueError, match="1, 2 and 4"):
            packer.pack_into(bytes(2048), element_bytes, bytearray(2048))
        with pytest.raises(ValueError, match="1, 2 and 4"):
            packer.unpack_into(bytes(2048), element_bytes, bytearray(2048))
    with memoryview(memory) as view:
        with pytest.raises(ValueError, match="overlap"):
            packer.pack_into(view[:2048], 2, view[2047:])
        with pytest.raises(ValueError, match="overlap"):
            packer.unpack_into(view[2047:], 2, view[:2048])
    for into in (bytes(2048), None, "text"):
        with pytest.raises((TypeError, BufferError, ValueError)):
            packer.pack_into(normal("bfloat16", 2048), 2, into)
    memory.clear()  # raises BufferError while anything exports it


# -------------------------------------------------------------------- rest


def test_the_interface_uses_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = normal("bfloat16", 50_000)
    stored = REFERENCE.pack(plain, 2)
    for module in {native.packing, None}:
        monkeypatch.setattr(native, "packing", module)
        packer = Packer(packing.pack, packing.unpack)
        assert packer.pack(plain, 2) == stored
        assert packer.unpack(stored, 2, len(plain)) == plain
        assert packer.unpack(stored[:-1], 2, len(plain)) is None


def test_others_run_meanwhile(packer: Packer) -> None:
    """The GIL is free while the extension works: nobody takes it from a thread that keeps it."""
    if packer is REFERENCE:
        pytest.skip("numpy keeps it")
    plain, out, back = normal("bfloat16", 32 << 20), bytearray(32 << 20), bytearray(32 << 20)
    turns, free = [0], {"pack": False, "unpack": False}

    def work() -> None:
        deadline = time.monotonic() + 60
        while not all(free.values()) and time.monotonic() < deadline:
            before = turns[0]
            used = packer.pack_into(plain, 2, out)
            between = turns[0]
            packer.unpack_into(memoryview(out)[:used], 2, back)
            free["pack"] |= between > before
            free["unpack"] |= turns[0] > between

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            turns[0] += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert all(free.values()), free

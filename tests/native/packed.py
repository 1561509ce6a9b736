# SPDX-License-Identifier: Apache-2.0
"""Programs in C of this folder; what is fed to `packed.c`, and what it must say."""

from __future__ import annotations

import functools
import os
import random
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from lmcache_redis.chunks import packing
from tests.fuzz.mutation import Mutator
from tests.fuzz.packed import FORMS, PACKED, elements_with

MUTATED = 1500
NATIVE = Path(__file__).parent.parent.parent / "lmcache_redis" / "native"


def compiled(folder: Path, compiler: Sequence[str], name: str, *others: str) -> str:
    """A program of this folder, with sources of the package, and where it is.

    compiler: with flags.
    """
    sources = [Path(__file__).with_name(f"{name}.c"), *(NATIVE / f"{other}.c" for other in others)]
    words = [*compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}"]
    words += [*map(str, sources), "-o", str(folder / name)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return str(folder / name)


@functools.cache
def inputs() -> list[tuple[bool, int, int, bytes]]:
    return [*_inputs()]


def _inputs() -> Iterator[tuple[bool, int, int, bytes]]:
    """(unpack, element bytes, room, bytes): good ones, and what could be taken for them."""
    for element_bytes, _, plain, stored in FORMS:
        for room in (0, 3, len(stored) - 1, len(stored), len(plain)):
            yield False, element_bytes, room, plain
        for nbytes in (0, 1, len(plain) - 1, len(plain), len(plain) + 1, 20 * len(plain)):
            yield True, element_bytes, nbytes, stored
    mutator = Mutator(1, [form.stored for form in FORMS], PACKED.tokens)
    for _ in range(MUTATED):
        element_bytes, _, plain, _ = FORMS[mutator.below(len(FORMS))]
        yield True, element_bytes, len(plain), mutator.next()
    # High bytes of narrow and of wide ranges: up to as many escapes as there can be.
    for element_bytes in packing.WIDTHS:
        for spread in (1, 4, 16, 64, 192):
            highs = random.Random(spread).choices(range(spread), k=70_000 // element_bytes)
            plain = elements_with(highs, element_bytes)
            yield False, element_bytes, len(plain), plain


def sum_of(data: bytes) -> int:
    """As `packed.c` has it: each byte times a power of 31, modulo 2**64."""
    factors = np.full(len(data), 31, np.uint64)
    factors[:1] = 1
    return int((np.frombuffer(data, np.uint8) * np.cumprod(factors)[::-1]).sum())


def check(words: list[str], vectors: str) -> None:
    """The program says of all inputs what numpy says."""
    given = inputs()
    fed = b"".join(
        struct.pack("<4Q", unpack, element_bytes, room, len(data)) + data
        for unpack, element_bytes, room, data in given
    )
    # A sanitizer wants to be loaded first.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([*words, vectors], input=fed, env=env, capture_output=True, timeout=280)
    if done.returncode == 3:
        pytest.skip(f"this processor has no {vectors}")
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert len(lines) == len(given)
    accepted = 0
    for (unpack, element_bytes, room, data), line in zip(given, lines, strict=True):
        out = bytearray(room)
        if not unpack:
            used = packing.pack_in_numpy(data, element_bytes, out)
            expected = f"{used} {sum_of(out[:used])}"
        elif packing.unpack_in_numpy(data, element_bytes, out):
            accepted += 1
            expected = f"{room} {sum_of(out)}"
        else:
            expected = "-"
        assert line == expected
    assert MUTATED // 100 < accepted < len(given) - MUTATED // 4

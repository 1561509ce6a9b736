# SPDX-License-Identifier: Apache-2.0
"""Checksums and packing on aarch64, which the wheel is built for: cross-compiled, run by qemu-user.

Needs a compiler for aarch64 (gcc's, or zig, which `pip install ziglang` brings) and qemu-aarch64
(Debian: qemu-user-static).
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from xxhash import xxh3_64_hexdigest

from tests.native.packed import check, compiled

pytestmark = pytest.mark.servers


def cross_compiler() -> list[str]:
    if found := shutil.which("aarch64-linux-gnu-gcc"):
        return [found]
    target = ["cc", "-target", "aarch64-linux-musl"]
    if found := shutil.which("zig"):
        return [found, *target]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", *target]
    pytest.skip("no compiler for aarch64: install gcc-aarch64-linux-gnu, or ziglang by pip")


def built(folder: Path, name: str, *others: str) -> list[str]:
    """The words that run a program of this folder."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if os.uname().machine != "aarch64" and emulator is None:
        pytest.skip("no qemu-aarch64 on the PATH: install qemu-user-static")
    program = compiled(folder, [*cross_compiler(), "-static", "-O3"], name, *others)
    return [program] if emulator is None else [emulator, program]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words that run `digests.c`."""
    return built(tmp_path_factory.mktemp("aarch64"), "digests", "xxh3")


@pytest.mark.parametrize("vectors", ["neon", "plain"])
def test_the_checksum_on_aarch64_is_xxh3(program: list[str], vectors: str) -> None:
    generator = random.Random(1)
    lengths = [*range(241, 2600), *generator.sample(range(2600, 70_000), 300)]
    lengths += [65_536, 1 << 20, (1 << 20) + 1]
    steps = (0, 1, 63, 64, 1000, 1024, 1025, 4096)
    inputs, expected = [], []
    for number, nbytes in enumerate(lengths):
        data = generator.randbytes(nbytes)
        inputs += [struct.pack("<QQ", nbytes, steps[number % len(steps)]), data]
        expected.append(xxh3_64_hexdigest(data))
    # Only ones: every sum carries.
    for nbytes in (241, 1024, 5000):
        data = b"\xff" * nbytes
        inputs += [struct.pack("<QQ", nbytes, 0), data]
        expected.append(xxh3_64_hexdigest(data))
    done = subprocess.run([*program, vectors], input=b"".join(inputs), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().split() == expected


def test_no_vectors_of_another_processor(program: list[str]) -> None:
    assert subprocess.run([*program, "avx2"], input=b"").returncode == 3


def test_payloads_are_packed_alike(tmp_path: Path) -> None:
    check(built(tmp_path, "packed", "packing", "tiles"), "plain")

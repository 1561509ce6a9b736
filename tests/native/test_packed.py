# SPDX-License-Identifier: Apache-2.0
"""Packing in C under AddressSanitizer and UBSan: no byte outside of a buffer is read or written."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.packed import check

pytestmark = pytest.mark.servers

NATIVE = Path(__file__).parent.parent.parent / "lmcache_redis" / "native"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`packed.c`, with sanitizers if the compiler has them."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("packed")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    empty = [compiler, *SANITIZED, folder / "empty.c", "-o", folder / "empty"]
    if subprocess.run(empty, capture_output=True).returncode:
        pytest.skip("gcc has no sanitizers here")
    sources = [Path(__file__).with_name("packed.c"), NATIVE / "packing.c", NATIVE / "tiles.c"]
    words = [compiler, *SANITIZED, "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    words += [f"-I{NATIVE}", *map(str, sources), "-o", str(folder / "packed")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder / "packed"


@pytest.mark.parametrize("vectors", ["plain", "avx2", "avx512"])
def test_it_stays_in_its_buffers(program: Path, vectors: str) -> None:
    check([str(program)], vectors)

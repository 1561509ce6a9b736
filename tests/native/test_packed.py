# SPDX-License-Identifier: Apache-2.0
"""Packing in C under AddressSanitizer and UBSan: no byte outside of a buffer is read or written."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.native.packed import check, compiled

pytestmark = pytest.mark.servers

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`packed.c`, with sanitizers if the compiler has them."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("packed")
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    empty = [compiler, *SANITIZED, folder / "empty.c", "-o", folder / "empty"]
    if subprocess.run(empty, capture_output=True).returncode:
        pytest.skip("gcc has no sanitizers here")
    return compiled(folder, [compiler, *SANITIZED, "-O1", "-g"], "packed", "packing", "tiles")


@pytest.mark.parametrize("vectors", ["plain", "avx2", "avx512"])
def test_it_stays_in_its_buffers(program: str, vectors: str) -> None:
    check([program], vectors)

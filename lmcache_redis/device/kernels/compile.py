# SPDX-License-Identifier: Apache-2.0
"""Makes the PTX files from `source`, by Triton: ``python compile.py DIRECTORY``. Run by setup.py.

Run as a program, because builds have Triton and nothing of this package. It needs no GPU, no torch
and no C compiler. A file begins with the digest of what made it, and is left alone if that is the
same. The text depends on nothing else: it has no path, no time and no debug information.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import sys
import tempfile
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

WIDTHS = (16, 8, 4, 2, 1)
# The oldest GPUs that vLLM's attention kernels take, and PTX of CUDA 12.0. Drivers compile it for
# their GPUs, newer ones too.
TARGET = 80
PTX_VERSION = 80
HERE = Path(__file__).parent


def first_line() -> str:
    """Names what the text depends on."""
    sources = b"".join((HERE / name).read_bytes() for name in ("source.py", "compile.py"))
    return f"// Triton {version('triton')}, source {hashlib.sha256(sources).hexdigest()}\n"


def is_current(file: Path, line: str) -> bool:
    return file.is_file() and file.read_text().startswith(line)


def make(directory: Path) -> None:
    """Make those of the files that are missing or older than their source."""
    line = first_line()
    wanted = {
        f"{'scatter' if scatter else 'gather'}_{width}": (width, scatter)
        for scatter in (False, True)
        for width in WIDTHS
    }
    for name, (width, scatter) in wanted.items():
        file = directory / f"{name}.ptx"
        if not is_current(file, line):
            text = line + ptx_of(name, width, scatter)
            with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as written:
                written.write(text)
            os.chmod(written.name, 0o644)
            os.replace(written.name, file)


def ptx_of(name: str, width: int, scatter: bool) -> str:
    source = importlib.import_module("source")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"UNITS": source.UNITS_PER_TILE, "WIDTH": width, "SCATTER": scatter}
    signature = {**source.PARAMETERS, **dict.fromkeys(constants, "constexpr")}
    # What the addresses of a launch are aligned to.
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(3)}
    compiled: Any = compile(
        ASTSource(source.move_tile, signature, constants, aligned),
        target=GPUTarget("cuda", TARGET, 32),
        options={"num_warps": source.WARPS, "ptx_version": PTX_VERSION},
    )
    return _with_own_parameters(compiled.asm["ptx"], len(source.PARAMETERS)).replace(
        source.move_tile.__name__, name
    )


def _with_own_parameters(text: str, count: int) -> str:
    """Without comments, and without the parameters for scratch memory, which differ by Triton's
    version and which these kernels do not use."""
    text = re.sub(r"[ \t]*//.*", "", text)
    text = re.sub(r"\n\s*\n+", "\n", text).lstrip()
    head, body = text.split("\n{", 1)
    declared = re.findall(r"\s*\.param [^,)]*", head)
    for parameter in declared[count:]:
        unused = parameter.split()[-1]
        if unused in body:
            raise RuntimeError(f"Triton uses {unused}: a launch passes {count} parameters")
        head = head.replace(f",{parameter.rstrip()}", "")
    return f"{head}\n{{{body}"


def main(directory: str) -> None:
    with tempfile.TemporaryDirectory() as cache:
        # Read when Triton is imported.
        os.environ.update(
            TRITON_CACHE_DIR=cache, TRITON_DISABLE_LINE_INFO="1", TRITON_INTERPRET="0"
        )
        warnings.simplefilter("ignore")
        try:
            make(Path(directory))
        except PackageNotFoundError:
            sys.exit("Triton is not installed")


if __name__ == "__main__":
    main(*sys.argv[1:])

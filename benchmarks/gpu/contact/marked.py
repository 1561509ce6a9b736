# SPDX-License-Identifier: Apache-2.0
"""`pytest -m cuda`: each failure when it is there, and how many passed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.contact.figures import Figure, at_least, failed

_ROOT = Path(__file__).parents[3]
_DRIVER = "tests/device/test_cuda_on_a_gpu.py"
_KERNELS = "tests/device/test_kernels.py"  # imports torch
_EACH_WITHIN_S = 60
_OPTIONS = (
    "-m", "cuda", "-v", "-W", "default", "-p", "no:cacheprovider", f"--timeout={_EACH_WITHIN_S}",
    "--color=no",
)  # fmt: skip
_ENDED = re.compile(r"(\S+::.*\S) (PASSED|FAILED|SKIPPED|ERROR)\b")

QUICK: dict[str, Any] = {"files": (_DRIVER,)}


def measure(files: Sequence[str] = (_DRIVER, _KERNELS)) -> Iterator[Figure]:
    """A test that hangs ends the others of its file after a minute, with stacks in the log."""
    found: Counter[str] = Counter()
    statuses = []
    for file in files:
        words = [sys.executable, "-m", "pytest", *_OPTIONS, file]
        process = subprocess.Popen(
            words, cwd=_ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if ended := _ENDED.match(line):
                found[ended[2]] += 1
                if ended[2] in ("FAILED", "ERROR"):
                    yield failed("marked", ended[1], ended[2].lower(), "passes")
        statuses.append(process.wait())
    yield at_least("marked", "passed", found["PASSED"], 1, "tests")
    yield Figure("marked", "skipped", found["SKIPPED"])
    good = not any(statuses)
    yield Figure("marked", "exit status", " and ".join(map(str, statuses)), "0", good)

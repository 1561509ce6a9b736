# SPDX-License-Identifier: Apache-2.0
"""The process of one part: `python -m benchmarks.gpu.contact.child NAME [--quick]`.

A part is a module with `measure`, which gives figures one after the other, and ``QUICK``, its
arguments for a rehearsal. Each figure is printed when it is there. A part that fails ends with a
figure that says so, and with the traceback in its log. At its limit it prints all threads' stacks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence

from benchmarks.gpu.contact.figures import Figure, failed, line_of

# A variable: when its limit is over, of `time.monotonic`, which all processes have in common.
UNTIL_S = "FIRST_CONTACT_UNTIL_S"
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> None:
    name, *options = arguments
    run(name, _figures(name, quick="--quick" in options))


def _figures(name: str, *, quick: bool) -> Iterable[Figure]:
    module = importlib.import_module(f"benchmarks.gpu.contact.{name}")
    yield from module.measure(**(module.QUICK if quick else {}))


def run(name: str, figures: Iterable[Figure]) -> None:
    """Prints figures as they come. This is all that the process does."""
    # Whatever ends the process that reads the figures ends this one too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    # By a thread of its own: a signal would wake a call that hangs.
    left_s = float(os.environ[UNTIL_S]) - time.monotonic()
    faulthandler.dump_traceback_later(max(left_s, 0.001))
    try:
        for figure in figures:
            print(line_of(figure), flush=True)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        print(line_of(failed(name, "failed", text, "runs")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    # What the driver or torch do at an interpreter's end is no part of the question.
    os._exit(0)

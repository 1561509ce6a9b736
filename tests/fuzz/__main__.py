# SPDX-License-Identifier: Apache-2.0
"""`scripts/fuzz`: throws spoiled bytes at every decoder; see `targets`."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.runner import fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    names = [target.name for target in TARGETS]
    parser.add_argument("--targets", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    found = 0
    for target in TARGETS:
        if target.name in options.targets:
            report = fuzz(target, options.inputs, options.seed)
            print(report, flush=True)
            if report.finding is not None:
                print(report.finding, file=sys.stderr, flush=True)
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

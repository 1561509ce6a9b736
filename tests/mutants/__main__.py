# SPDX-License-Identifier: Apache-2.0
"""Spoils modules of the package, one small fault at a time, and counts those that no test sees.

Each mutant is the module with one fault (`mutation` lists the kinds), judged in a copy of the tree
by the tests that run its lines, in their own process or in one that they start: the fastest of
them, for some seconds together. They are looked for in the module's folder, those that mirror its
name or import it first, and then elsewhere in those that import it, for a third of the time. It is
killed if a test fails, or if one or all take three times as long as without it and some seconds
more. One that survives is a gap of the tests, or no fault at all: read its diff, then write the
test or let it be. Modules of one folder are best judged in one run: what its tests run is learned
once.

  scripts/mutate --modules chunks.keys cache.pool --minutes 5
  scripts/mutate --modules resp.maps --minutes 2 --seed 7

The seed decides which mutants come first: a sample of some minutes can be repeated, and another
one be had. Servers and processes are started as the tests start them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.mutants.runner import ROOT, Tree, judge, path_of

# Where a fault costs most: what is named, framed, held, sent and answered.
CORE = (
    "chunks.names", "chunks.keys", "chunks.frame", "chunks.metadata", "cache.pool", "cache.parts",
    "cache.lookup", "cache.writebehind", "device.table", "device.layout", "resp.control",
    "resp.transfers", "resp.node", "resp.maps", "resp.sources", "resp.net.wire", "client.link",
    "agent.peers", "agent.service", "agent.handlers", "agent.lookups", "agent.jobs",
    "agent.sessions", "seal.__init__",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--modules", nargs="+", default=CORE, metavar="MODULE", help=f"of {', '.join(CORE)}, or any"
    )
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="for each module, its tests included (default 2)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order (default 1)")
    options = parser.parse_args()
    unknown = [name for name in options.modules if not (ROOT / path_of(name)).is_file()]
    if unknown:
        parser.error(f"there is no module {unknown[0]}: write chunks.keys for chunks/keys.py")
    print(f"{'module':<24}{'killed':>8}{'judged':>8}{'of':>8}   tests", flush=True)
    totals = [0, 0]
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as name,
        Tree(Path(name), options.modules) as tree,
    ):
        for module in options.modules:
            said: list[str] = []
            found = judge(tree, module, options.minutes, options.seed, said.append)
            counts = f"{found.killed:>8}{found.judged:>8}{found.mutants:>8}"
            untried = f" ({found.untried} were not tried)" if found.untried else ""
            print(f"{module:<24}{counts}   {' '.join(found.tests)}{untried}")
            print("".join(f"{each}\n" for each in said), end="", flush=True)
            totals = [totals[0] + found.killed, totals[1] + found.judged]
    print(f"{'all':<24}{totals[0]:>8}{totals[1]:>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""First contact from the folder that `scripts/bench gpu --pack` has made: `python3 first-contact`.

It needs the Python that the folder was made for, with torch for the GPU: no index, no compiler and
no installation. Wheels are unpacked into the folder. Options are those of `scripts/bench gpu
--first-contact`.
"""

import os
import sys
import zipfile
from pathlib import Path


def main() -> None:
    here = Path(__file__).resolve().parent
    wanted = (here / "python-version").read_text().strip()
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if found != wanted:
        sys.exit(
            f"this folder is for Python {wanted}, and this is {found}: --pack with --python {found}"
        )
    packages = here / "packages"
    if not packages.exists():
        unfinished = here / "packages.part"
        unfinished.mkdir(exist_ok=True)
        for wheel in sorted((here / "wheels").glob("*.whl")):
            with zipfile.ZipFile(wheel) as files:
                files.extractall(unfinished)
        unfinished.rename(packages)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(packages)])
    words = ["-m", "benchmarks", "gpu", "--first-contact", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, *words])


if __name__ == "__main__":
    main()

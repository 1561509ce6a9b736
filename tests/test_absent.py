# SPDX-License-Identifier: Apache-2.0
"""What a test of a small environment does without a library of the large one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFTEST = """\
from tests import absent
absent.LARGE = ("nowhere",)
from tests.absent import pytest_fixture_setup, pytest_pycollect_makemodule, pytest_pyfunc_call
"""
FILES = {
    "conftest.py": CONFTEST,
    "test_a.py": "VALUE = 1\nimport nowhere.inner\n",
    "test_b.py": "from test_a import VALUE\n",
    "test_c.py": (
        "import pytest\n"
        "def test_inside(): import nowhere\n"
        "def test_reworded():\n"
        "    try: import nowhere\n"
        "    except ImportError as error: raise ImportError('install it') from error\n"
        "@pytest.fixture\n"
        "def made(): import nowhere\n"
        "def test_of_a_fixture(made): pass\n"
        "def test_that_passes(): pass\n"
    ),
    "test_d.py": "def test_of_another(): import elsewhere\n",
    "test_e.py": "import elsewhere\n",
}


@pytest.mark.long
@pytest.mark.servers
def test_only_what_is_absent_is_skipped(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    words = ["-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-rA"]
    done = subprocess.run(
        [sys.executable, *words, "--rootdir", tmp_path, "-c", os.devnull, tmp_path],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = done.stdout
    assert re.search(r"\b1 failed, 1 passed, 5 skipped, 1 error\b", said), said
    assert "FAILED test_d.py::test_of_another" in said
    assert "ERROR test_e.py" in said
    assert "needs nowhere, which scripts/setup installs without --small" in said

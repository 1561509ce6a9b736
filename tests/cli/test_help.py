# SPDX-License-Identifier: Apache-2.0
"""What `--help` shows on a terminal of 80 columns, and what the command line says of mistakes."""

from __future__ import annotations

import itertools
import json
import re
import sys
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from lmcache_redis import __version__
from lmcache_redis.cli import app as commands
from lmcache_redis.cli.app import app

GROUP: Any = typer.main.get_command(app)


def help_of(*words: str) -> str:
    result = CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    return result.output


def test_no_help_cuts_a_name_or_a_line() -> None:
    for command in sorted(GROUP.commands):
        check_help(command, help_of(command))


def check_help(command: str, shown: str) -> None:
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "…" not in shown
    assert not re.search("^  --.*<", shown, re.M), "options say what they take in words"
    for param in GROUP.commands[command].params:
        # An argument is shown by its metavar alone.
        options = (each for each in (*param.opts, *param.secondary_opts) if each.startswith("-"))
        for name in (*options, *([param.metavar] if param.metavar else [])):
            assert re.search(rf"(^|\W){re.escape(name)}(\W|$)", shown), name
    # Each example stays one line, and all begin in the same column.
    text = GROUP.commands[command].help
    if "Examples:" in text:
        examples = [line.strip() for line in text.split("Examples:")[1].split("\n") if line.strip()]
        assert [line for line in shown.splitlines() if line[4:] in examples] == [
            f"    {example}" for example in examples
        ]


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_the_version_is_asked_in_both_ways(words: list[str]) -> None:
    assert CliRunner().invoke(app, words).output == f"{__version__}\n"


def said(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[str, Any]:
    """What a wrong command line prints on stderr, and its exit status."""
    monkeypatch.setattr(sys, "argv", ["lmcache-redis", *words])
    with pytest.raises(SystemExit) as ended:
        commands.run()
    out, err = capsys.readouterr()
    assert out == ""
    return err, ended.value.code


NUMBERS = [
    (command, param.opts[0])
    for command in sorted(GROUP.commands)
    for param in GROUP.commands[command].params
    if param.metavar in ("N", "NUMBER", "SECONDS")
]


def test_every_number_is_refused_in_one_voice(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for (command, option), value in zip(NUMBERS, itertools.cycle(("soon", "nan", "-1"))):
        words = [command, *(["model"] if command == "size" else []), option, value]
        if command in ("agent", "gateway"):
            words += ["--check", "--redis-url", "redis://127.0.0.1:1"]
        text, status = said(words, monkeypatch, capsys)
        told = "is not a( whole)? number" if value == "soon" else "(is not a|is -?[0-9.a-z]+: set)"
        assert re.match(rf"lmcache-redis: {option}:? .*{told}", text), text
        assert (text.count("\n"), status) == (1, 2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["statsu"], "no such command 'statsu'"),
        (["agent", "--ttl-sx", "3"], "no such option: --ttl-sx (Possible options: "),
        (["agent", "--ttl-s"], "option '--ttl-s' requires an argument"),
        (["agent", "more"], "got unexpected extra argument"),
        (["agent", "--ttl-s", "soon"], "--ttl-s: 'soon' is not a whole number"),
        (["top", "--interval-s", "99"], "--interval-s is 99.0: set it to between 0.1 and 60"),
        (["doctor", "--tp", "1.5"], "--tp: '1.5' is not a whole number"),
        (["doctor", "--prefill-tokens-per-s", "abc"], "--prefill-tokens-per-s: 'abc' is not a num"),
        (["doctor", "--fail-on", "x"], "--fail-on is 'x': choose one of critical, warning, hint"),
        (["size", "model", "--memory", "64"], "--memory: '64' is 64 bytes: write it as 64GiB"),
        (["agent", "--get-connections", "2"], "--get-connections is no option any more: set"),
        (["gateway", "--threads=2"], "--threads is no option any more: leave it out"),
        (["inspect", "--threads", "2"], "no such option: --threads"),
        (["settings", "--of", "x"], "--of is 'x': choose one of agent, gateway, engine"),
    ],
)
def test_mistakes_have_one_voice(
    words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text, status = said(words, monkeypatch, capsys)
    assert text.startswith(f"lmcache-redis: {sentence}")
    assert text.count("\n") == 1
    assert "Input should be" not in text  # as typer has it from pydantic
    assert status == 2


def test_errors_of_json_are_json(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text, status = said(["agent", "--batch-copies", "no", "--json"], monkeypatch, capsys)
    error = "--batch-copies is 'no': choose one of auto, off"
    assert json.loads(text) == {"error": error, "exit_status": 2}
    assert status == 2


def test_without_a_command_the_help_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["lmcache-redis"])
    with pytest.raises(SystemExit):
        commands.run()
    assert "Commands:" in "".join(capsys.readouterr())

# SPDX-License-Identifier: Apache-2.0
"""The documents name what exists: links, headings, options, files, modules and counters.

Lists have tests beside what they describe: the settings (`test_config`), LMCache's names
(`compat/test_names`), hex dumps (`chunks/test_frame`), faults (`resp/test_survival_table`).
The changelog is history: of it only links are checked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from benchmarks.__main__ import app as benchmarks
from lmcache_redis.cli.app import app as commands
from lmcache_redis.metrics import COUNTERS
from tests import speed_up
from tests.browser import Browser

ROOT = Path(__file__).parent.parent
OF_PROJECT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*OF_PROJECT, *sorted((ROOT / "docs").rglob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CHANGELOG.md"]
# Options of other programs: vLLM, Docker, pytest, and scripts with parsers of their own.
FOREIGN_OPTIONS = {
    *("--additional-config", "--calculate-kv-scales"),
    *("--disable-sliding-window", "--enable-prefix-caching", "--enable-return-routed-experts"),
    *("--enable-prompt-tokens-details", "--enable-sleep-mode"),
    *("--hf-overrides", "--load-format", "--mm-processor-cache-gb", "--no-enable-prefix-caching"),
    *("--kv-cache-dtype", "--kv-events-config", "--kv-transfer-config"),
    *("--mamba-cache-mode", "--max-model-len", "--model-impl"),
    *("--enable-lora", "--lora-modules", "--lora-paths", "--max-cpu-loras"),
    *("--dtype", "--otlp-traces-endpoint"),
    *("--gpus", "--ipc", "--no-deps", "--pid", "--shm-size", "--user"),
    "--help",
    *("--long", "--matrix", "--pythons"),  # of scripts/test
}
# Commands whose options are ours, and where their parsers are.
PARSERS = {
    "lmcache-redis": typer.main.get_command(commands),
    "scripts/bench": typer.main.get_command(benchmarks),
}


def test_tables_are_whole() -> None:
    """An empty line ends a table: what follows is a paragraph with bars."""
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n)+", prose(page.read_text()), re.M):
            rows = table.splitlines()
            assert len(rows) > 2, (page, rows)
            assert re.fullmatch(r"[|:\- ]+", rows[1]), (page, rows[0])


def prose(text: str) -> str:
    """What stands between the fences."""
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def blocks(text: str) -> str:
    """The code between fences, with continued lines joined."""
    return "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)).replace("\\\n", " ")


def spans(text: str) -> list[str]:
    """What stands between backticks in running text."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def anchor(heading: str) -> str:
    """The id that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {anchor(each) for each in re.findall(r"^#+ (.*)$", prose(page.read_text()), re.M)}


def options_of(program: str, command: str) -> set[str]:
    parser = PARSERS[program].commands[command]  # type: ignore[attr-defined]
    names = [[*parameter.opts, *parameter.secondary_opts] for parameter in parser.params]
    return {option for each in names for option in each} | {"--help"}


def invocations(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """(program, command, options) of every command line of ours."""
    for line in [*blocks(text).splitlines(), *spans(text)]:
        found = re.match(r"(?:\$ |\./)?(lmcache-redis|scripts/bench) ([a-z-]+)(?= |$)(.*)", line)
        if found:
            # What follows a # explains.
            rest = found[3].partition(" # ")[0]
            yield found[1], found[2], set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", rest))


def test_links_lead_to_files_and_headings() -> None:
    for page in ALL_PAGES:
        for target, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            file = page.parent / target if target else page
            if "://" not in target:
                assert file.exists(), f"{page} links to {target}"
                assert not heading or heading in anchors(file), f"{page}: no #{heading} in {file}"


def test_commands_and_their_options_exist() -> None:
    for page in PAGES:
        for program, command, options in invocations(page.read_text()):
            names = PARSERS[program].commands  # type: ignore[attr-defined]
            assert command in names, f"{page}: {program} has no command {command}"
            unknown = options - options_of(program, command)
            assert not unknown, f"{page}: {program} {command} has no {sorted(unknown)}"


def test_every_option_in_the_text_is_of_a_command() -> None:
    known = set(FOREIGN_OPTIONS)
    for program, parser in PARSERS.items():
        for command in parser.commands:  # type: ignore[attr-defined]
            known |= options_of(program, command)
    for page in PAGES:
        for span in spans(page.read_text()):
            unknown = set(re.findall(r"(?<![^\s`])--[a-z][a-z0-9-]*", span)) - known
            assert not unknown, f"{page} names {sorted(unknown)} in `{span}`"


def test_files_exist() -> None:
    folders = ("lmcache_redis", "tests", "benchmarks", "scripts", "docs", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    known = {f"/{path.relative_to(ROOT).as_posix()}" for path in files}
    for page in PAGES:
        for span in spans(page.read_text()):
            name = span.split()[0].removeprefix("./").rstrip("/")
            if name.endswith(".py") or (name.partition("/")[0] in folders and "/" in name):
                assert any(path.endswith(f"/{name}") for path in known), f"{page} names {name}"


def test_modules_and_their_names_exist() -> None:
    for page in PAGES:
        for name in set(re.findall(r"\blmcache_redis(?:\.\w+)+", page.read_text())):
            path = ROOT / name.replace(".", "/")
            if name.endswith(".py") or path.is_dir() or path.with_suffix(".py").exists():
                continue
            parent = path.parent / "__init__.py" if path.parent.is_dir() else f"{path.parent}.py"
            assert Path(parent).exists(), f"{page} names {name}"
            found = re.search(rf"\b{path.name}\b", Path(parent).read_text())
            assert found, f"{page} names {name}"


def test_counters_exist() -> None:
    for page in PAGES:
        named = set(re.findall(r"`((?:miss|drop|hit_chunks)_[a-z_]+)`", page.read_text()))
        assert named <= COUNTERS.keys(), f"{page} names {named - COUNTERS.keys()}"


def test_a_command_is_one_line_or_continued() -> None:
    """What stands below it is what it prints, which is not copied."""
    for page in PAGES:
        for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in re.findall(r"^\$ (.*)$", block, re.M):
                assert not re.search(r"(\b(do|then)|[({|])$", line), f"{page}: {line}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    return directory


@pytest.mark.servers
def test_the_site_builds_without_warnings(site: Path) -> None:
    """Links, headings, the navigation, and the pages that are made from the code."""
    commands = (site / "reference" / "cli.html").read_text()
    for name in PARSERS["lmcache-redis"].commands:  # type: ignore[attr-defined]
        assert f'<h2 id="{name}">' in commands
    assert "<td></td>" not in commands, "each option has a default"
    assert "default: " not in commands, "which its text does not repeat"
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img)[^>]* (?:src|href)="(https?://[^"]+)"', page.read_text()
        )
        assert not loaded, f"{page.name} loads {loaded}"


@pytest.mark.servers
def test_the_python_reference_has_constructors_and_parameters(site: Path) -> None:
    reference = (site / "reference" / "python.html").read_text()
    assert "load_all" in reference
    assert "See the module" not in reference
    for name, parameter in (
        ("kvstore.KVStore", "memory_bytes"),
        ("kvstore.AsyncKVStore", "namespace"),
        ("objects.backend.ChunkBackend", "dst_device"),
        ("resp.plane.RedisPlane", "options"),
    ):
        section = reference.partition(f'<h3 id="lmcache_redis.{name}"')[2].partition("<h4")[0]
        signature, _, table = section.partition("Parameters:")
        assert f'<span class="n">{parameter}</span>' in signature, name
        assert f"<code>{parameter}</code>" in table, name


@pytest.mark.servers
def test_commands_are_copied_without_their_prompt(site: Path, tmp_path: Path) -> None:
    """As the theme copies: the text of an element that it marks meanwhile."""
    browser = Browser.find(tmp_path)
    copied = site / "guides" / "copied.html"
    probe = """<script>
        const code = document.querySelector(".gp").closest("code");
        code.setAttribute("data-md-copying", "");
        document.body.innerHTML = "<pre id=copied>" + code.innerText + "</pre>";
        </script></body>"""
    text = (site / "guides" / "tools.html").read_text().replace("</body>", probe)
    copied.write_text(re.sub(r"<script src=.*?</script>", "", text))
    (found,) = re.findall(r'<pre id="copied">(.*?)</pre>', browser.dom(copied.as_uri()), re.S)
    assert found.strip() == "lmcache-redis doctor"


@pytest.mark.parametrize(("path", "words"), [("docs", 22_500), ("CHANGELOG.md", 1_500)])
def test_the_documents_are_short(path: str, words: int) -> None:
    """What is new is said in few words, and what it replaces goes."""
    pages = [*(ROOT / path).rglob("*.md")] or [ROOT / path]
    assert sum(len(page.read_text().split()) for page in pages) <= words


def test_the_page_has_the_table_of_gains() -> None:
    assert speed_up.page() == speed_up.PAGE.read_text(), "run: python -m tests.speed_up"

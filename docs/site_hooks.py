# SPDX-License-Identifier: Apache-2.0
"""mkdocs calls these: the page of commands is made from the parsers when the site is built."""

from __future__ import annotations

import inspect
import re
from typing import Any

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return markdown.replace(MARK, commands()) if MARK in markdown else markdown


def commands() -> str:
    """A section for each command: its help, and a table of its options."""
    import typer.main

    from lmcache_redis.cli.app import app

    parser: Any = typer.main.get_command(app)
    return "\n\n".join(section(name, each) for name, each in parser.commands.items())


def section(name: str, command: Any) -> str:
    rows = [row(each) for each in command.params if not getattr(each, "hidden", False)]
    table = ["| option | default | meaning |", "| --- | --- | --- |", *rows] if rows else []
    text = inspect.cleandoc(command.help or "")
    prose, _, examples = text.partition("Examples:")
    parts = [f"## {name}", plain(prose)]
    if examples:
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        parts.append("```\n" + "\n".join(lines) + "\n```")
    return "\n\n".join([*parts, "\n".join(table)]).rstrip()


def row(parameter: Any) -> str:
    names = " ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    text = getattr(parameter, "help", None) or ""
    # That of a setting ends in [env: NAME; default: VALUE].
    found = re.search(r"[;\[] ?default: (.*)\]$", text)
    if found:
        text = f"{text[: found.start()].rstrip()}{']' if found[0][0] == ';' else ''}"
    return f"| {names} | {cell(found[1] if found else shown(parameter))} | {cell(text)} |"


def shown(parameter: Any) -> str:
    default = getattr(parameter, "show_default", None)
    if not isinstance(default, str):
        default = getattr(parameter.default, "value", parameter.default)
    if isinstance(default, bool):
        return "off"
    if isinstance(default, (int, float, str)) and default != "":
        return str(default)
    return "required" if parameter.required else "none"


def cell(text: str) -> str:
    return plain(text).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def plain(text: str) -> str:
    """Without the marks of rich."""
    return re.sub(r"\[/?(?:bold|dim|italic|green|red|yellow|cyan)\]", "", text).strip()

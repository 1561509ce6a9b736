# SPDX-License-Identifier: Apache-2.0
"""What one declaration of a setting gives.

A setting is a field of a dataclass, made by `setting`. Its option, its environment variable, its
name in a file, the help, the tables of the docs and the JSON schema come from it. An error begins
with the option. pydantic-settings and cyclopts were tried: they name neither the line of a file nor
what was meant there, write the bounds of sizes in bytes, and check nothing (cyclopts) or slow the
import (pydantic-settings) where an engine makes its config.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmcache_redis.errors import ConfigError

_LETTERS = "KMGTPE"
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate(_LETTERS, start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = "([0-9]+(?:[.][0-9]+)?) *((?:[KMGTPEkmgtpe](?:[Ii]?[Bb])?|[Bb])?)"
PREFIX = "LMCACHE_REDIS_"
# How a text is read, and what it has to be.
_KINDS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (int, "a whole number"),
    "float": (float, "a number"),
    "bool": ({"true": True, "false": False}.__getitem__, "true or false"),
    "bytes": (str.encode, ""),
    "str": (str, ""),
}


def parse_size(text: str, option: str) -> int:
    """Bytes of ``4GiB``, ``512MB``, ``1.5G`` (binary) or a plain number.

    Raises ``ConfigError``, which names the option, for anything else.
    """
    match = re.fullmatch(_SIZE, text.strip())
    if match is None:
        raise ConfigError(
            f"{option}: {text!r} is not a size: write it as 4GiB, 512MB or a number of bytes"
        )
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a size."""
    for power, letter in reversed([*enumerate(_LETTERS, start=1)]):
        if size_bytes >= 1024**power and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{letter}iB"
    return str(size_bytes)


def option_name(name: str) -> str:
    """The command-line option of a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A declared setting. kind: int, float, bool, str or bytes.

    between: the least and the greatest value. shown: the default as users read it. form: what the
    help shows for the value. secret: only its variable sets it. reloadable: SIGHUP may change it.
    repeatable: an option may be given again; a file and a variable have commas between the values.
    """

    name: str
    kind: str
    default: Any
    optional: bool
    help: str
    between: tuple[float, float] | None
    shown: str = ""
    form: str = ""
    choices: tuple[str, ...] = ()
    secret: bool = False
    reloadable: bool = False
    repeatable: bool = False

    @property
    def option(self) -> str:
        return option_name(self.name)

    @property
    def is_size(self) -> bool:
        """Whether it is in bytes, which users may write as 4GiB."""
        return self.kind == "int" and self.name.endswith(("_bytes", "_size"))

    @property
    def variable(self) -> str:
        """LMCACHE_REDIS_POOL_BYTES of ``pool_bytes``; LMCACHE_REDIS_URL of ``redis_url``."""
        return PREFIX + self.name.removeprefix("redis_").upper()

    @property
    def shown_default(self) -> str:
        return self.shown or self.write(self.default)

    @property
    def shown_form(self) -> str:
        if self.form or self.choices:
            return self.form or "|".join(self.choices)
        if self.is_size:
            return "SIZE"
        if self.name.endswith("_s"):
            return "SECONDS"
        return {"int": "N", "float": "NUMBER"}.get(self.kind, "TEXT")

    def write(self, value: Any) -> str:
        """A value as it can be written on a command line or in a file."""
        if value is None or value in ("", b""):
            return self.shown or "none"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, bytes):
            return value.decode(errors="backslashreplace")
        if self.is_size and type(value) is int:
            return format_size(value)
        return f"{value:.12g}" if isinstance(value, float) else str(value)

    def parse(self, text: str) -> Any:
        """The value of a text, bounds unchecked. Raises ``ConfigError``."""
        if self.is_size:
            return parse_size(text, self.option)
        read, what = _KINDS[self.kind]
        try:
            return read(text)
        except (KeyError, ValueError):
            raise ConfigError(f"{self.option}: {text!r} is not {what}") from None

    def check(self, value: Any) -> None:
        """Raises ``ConfigError``, which begins with the option, if the value is impossible."""
        if value is None and self.optional:
            return
        if self.between is not None:
            if self.kind == "int" and isinstance(value, float):
                raise ConfigError(f"{self.option} is {value!r}: set it to a whole number")
            check_between(self.name, value, *self.between)
        elif self.choices and value not in self.choices:
            raise ConfigError(
                f"{self.option} is {value!r}: choose one of {', '.join(self.choices)}"
            )
        elif type(value).__name__ != self.kind:
            what = _KINDS[self.kind][1] or "text"
            raise ConfigError(f"{self.option} is {value!r}: write {what}")

    def schema(self) -> dict[str, Any]:
        """The JSON schema of a value: draft 7."""
        names = {"int": "integer", "float": "number", "bool": "boolean"}
        found: dict[str, Any] = {"type": names.get(self.kind, "string")}
        if self.is_size:
            found = {"type": ["string", "integer"], "pattern": f"^{_SIZE}$"}
        if self.choices:
            found = {"enum": list(self.choices)}
        if self.repeatable:
            found = {"type": ["string", "array"], "items": {"type": "string"}}
        if self.between is not None:
            found |= dict(zip(("minimum", "maximum"), self.between, strict=True))
        if self.reloadable:
            found["x-reloadable"] = True  # by SIGHUP
        found["description"] = f"{self.help}; default: {self.shown_default}"
        return found


def check_between(name: str, value: Any, least: float, most: float) -> None:
    """Raises ``ConfigError`` unless a setting is a number within its bounds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        is_size = name.endswith(("_bytes", "_size"))
        given, low, high = (
            format_size(n) if is_size and type(n) is int else repr(n) for n in (value, least, most)
        )
        raise ConfigError(f"{option_name(name)} is {given}: set it to between {low} and {high}")


def setting(
    help_text: str,
    default: Any,
    between: tuple[float, float] | None = None,
    *,
    repr: bool = True,
    **more: Any,
) -> Any:
    """A dataclass field for a setting. default: the value, or what makes it. more: of `Setting`."""
    made = {"default_factory" if callable(default) else "default": default}
    return field(metadata={"help": help_text, "between": between, **more}, repr=repr, **made)


def settings_of(config: Any) -> dict[str, Setting]:
    """The settings of a config's class by their names, in the order of their declaration."""
    return {
        each.name: Setting(
            name=each.name,
            kind=str(each.type).removesuffix(" | None"),
            default=None if each.default is dataclasses.MISSING else each.default,
            optional=str(each.type).endswith(" | None"),
            **each.metadata,
        )
        for each in dataclasses.fields(config)
    }


def check_all(config: Any) -> None:
    """Raises ``ConfigError`` for the first impossible value."""
    for name, each in settings_of(config).items():
        each.check(getattr(config, name))


def json_schema(config: type[Any]) -> dict[str, Any]:
    """The JSON schema (draft 7) of an object with settings, named as in a file."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": config.__name__,
        "type": "object",
        "additionalProperties": False,
        "properties": {
            each.option[2:]: each.schema()
            for each in settings_of(config).values()
            if not each.secret
        },
    }


def markdown_list(config: type[Any], as_fields: bool = False) -> str:
    """A list of docs/reference/settings.md. as_fields: named as in Python, not as options."""
    lines = []
    for each in settings_of(config).values():
        name = each.name if as_fields else each.variable if each.secret else each.option
        default = each.shown_default.replace("none", "")
        others = ", ".join(choice for choice in each.choices if choice != default)
        told = ", or ".join(filter(None, (default, others)))
        lines.append(f"- `{name}`{f' ({told})' if told else ''}: {each.help}")
    return "\n".join(lines)

"""What one declaration of a setting gives, and where its value comes from.

A setting is a field of a dataclass, made by `setting`. Its option, its environment variable, its
name in a file, the help, the tables in docs/settings.md and the JSON schema come from it. A value
comes from the option, else the variable, else the file, else the default. An error begins with the
place that has to change. pydantic-settings and cyclopts name neither the line of a file nor what
was meant, write bounds of sizes in bytes, and would slow the import into every engine.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmcache_redis.errors import ConfigError

_Config = TypeVar("_Config")

_LETTERS = "KMGTPE"
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate(_LETTERS, start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}
_SIZE = "([0-9]+(?:[.][0-9]+)?) *((?:[KMGTPEkmgtpe](?:[Ii]?[Bb])?|[Bb])?)"
_COMMENT = re.compile(r"(^|\s)#.*")
# Named by Kubernetes after services, not by users: LMCACHE_REDIS_METRICS_PORT_9464_TCP.
_OF_A_SERVICE = re.compile(r"_(SERVICE_|PORT($|_))")
PREFIX = "LMCACHE_REDIS_"


def parse_size(text: str | int) -> int:
    """Bytes of ``4GiB``, ``512MB``, ``1.5G`` (binary) or a plain number.

    Raises ``ConfigError`` for anything else.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(_SIZE, text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is not a size: write it as 4GiB, 512MB or a number of bytes")
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


def setting(
    help_text: str,
    default: Any = dataclasses.MISSING,
    *,
    shown: str = "",
    form: str = "",
    size: bool = False,
    between: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
    reloadable: bool = False,
    **more: Any,
) -> Any:
    """A dataclass field for a setting: its help text and its default or the factory of that.

    shown: the default as users read it. form: what the help shows for the value. size: in bytes,
    which users may write as 4GiB. between: the least and the greatest value. secret: only its
    variable sets it. reloadable: SIGHUP may change it.
    """
    if callable(default):
        more["default_factory"] = default
    elif default is not dataclasses.MISSING:
        more["default"] = default
    meta = {
        "help": help_text, "shown": shown, "form": form, "is_size": size, "between": between,
        "choices": choices, "secret": secret, "reloadable": reloadable,
    }  # fmt: skip
    return field(metadata=meta, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A declared setting. kind: int, float, bool, str or bytes."""

    name: str
    kind: str
    default: Any
    optional: bool
    help: str
    shown: str
    form: str
    is_size: bool
    between: tuple[float, float] | None
    choices: tuple[str, ...]
    secret: bool
    reloadable: bool

    @property
    def option(self) -> str:
        return option_name(self.name)

    @property
    def variable(self) -> str:
        """LMCACHE_REDIS_POOL_BYTES of ``pool_bytes``; LMCACHE_REDIS_URL of ``redis_url``."""
        return PREFIX + self.name.removeprefix("redis_").upper()

    @property
    def shown_default(self) -> str:
        """The default as users read it."""
        if self.shown:
            return self.shown
        return "none" if self.default in (None, "", b"") else self.write(self.default)

    @property
    def shown_form(self) -> str:
        """What stands for the value in the help."""
        if self.form or self.choices:
            return self.form or "|".join(self.choices)
        if self.is_size:
            return "SIZE"
        if self.name.endswith("_s"):
            return "SECONDS"
        return {"int": "N", "float": "NUMBER"}.get(self.kind, "TEXT")

    @property
    def shown_values(self) -> str:
        """What a value may be: bounds, words, or its form."""
        if self.between is not None:
            low, high = (f"{n:g}" if type(n) is float else self.write(n) for n in self.between)
            return f"{low} to {high}"
        if self.kind == "bool":
            return "true, false"
        return ", ".join(self.choices) or self.shown_form.replace("TEXT", "text")

    def write(self, value: Any) -> str:
        """A value as it can be written on a command line or in a file."""
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
            try:
                return parse_size(text)
            except ConfigError as error:
                raise ConfigError(f"{self.option}: {error}") from error
        try:
            if self.kind == "bool":
                return {"true": True, "false": False}[text]
            return {"int": int, "float": float, "bytes": str.encode}.get(self.kind, str)(text)
        except (KeyError, ValueError):
            what = {"int": "a whole number", "float": "a number", "bool": "true or false"}
            raise ConfigError(f"{self.option}: {text!r} is not {what[self.kind]}") from None

    def check(self, value: Any) -> None:
        """Raises ``ConfigError``, which begins with the option, if the value is impossible."""
        if value is None and self.optional:
            return
        if self.between is not None:
            is_number = type(value) is int or (self.kind == "float" and isinstance(value, float))
            check_between(self.name, value if is_number else None, *self.between, given=value)
        elif self.choices and value not in self.choices:
            raise ConfigError(
                f"{self.option} is {value!r}: choose one of {', '.join(self.choices)}"
            )
        elif type(value).__name__ != self.kind:
            what = "true or false" if self.kind == "bool" else f"a {self.kind}"
            raise ConfigError(f"{self.option} is {value!r}: write {what}")

    def schema(self) -> dict[str, Any]:
        """The JSON schema of a value: draft 7."""
        names = {"int": "integer", "float": "number", "bool": "boolean"}
        found: dict[str, Any] = {"type": names.get(self.kind, "string")}
        if self.is_size:
            found = {"type": ["string", "integer"], "pattern": f"^{_SIZE}$"}
        if self.choices:
            found = {"enum": list(self.choices)}
        if self.between is not None:
            found |= dict(zip(("minimum", "maximum"), self.between, strict=True))
        if self.reloadable:
            found["x-reloadable"] = True  # by SIGHUP
        found["description"] = f"{self.help}; default: {self.shown_default}"
        return found


def check_between(name: str, value: Any, least: float, most: float, given: Any = None) -> None:
    """Raises ``ConfigError`` unless a setting is a number within its bounds.

    given: what is shown if it is not even a number.
    """
    if value is not None and least <= value <= most:
        return
    is_size = name.endswith(("_bytes", "_size"))
    wrong, low, high = (
        format_size(n) if is_size and type(n) is int else repr(n)
        for n in (given if value is None else value, least, most)
    )
    raise ConfigError(f"{option_name(name)} is {wrong}: set it to between {low} and {high}")


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


# ------------------------------------------------------- where a value comes from


@dataclass(frozen=True, slots=True)
class Given:
    """What was given. places: by name, how an error or a reader finds the value."""

    values: dict[str, Any]
    places: dict[str, str]

    def config(self, of: type[_Config]) -> _Config:
        """The config. Raises ``ConfigError``, which begins with the place that has to change."""
        try:
            return of(**self.values)
        except ConfigError as error:
            raise ConfigError(_at_its_place(str(error), self.places)) from None


def _at_its_place(said: str, places: Mapping[str, str]) -> str:
    for name, place in places.items():
        if re.match(rf"{option_name(name)}[ :]", said):
            return place + said.removeprefix(option_name(name))
    return said


def config_from(config: type[_Config], options: Mapping[str, Any]) -> _Config:
    """The config made from options, the environment and the file that ``config`` names.

    Reads the file each time. Raises ``ConfigError``.
    """
    return given(config, options).config(config)


def given(config: type[Any], options: Mapping[str, Any]) -> Given:
    """The values, parsed, of the highest source that has each. Raises ``ConfigError``."""
    known = settings_of(config)
    path = options.get("config")
    # From the lowest precedence to the highest.
    found = {} if path is None else {n: (t, p) for n, t, p in _lines(path, known)}
    for name, each in known.items():
        if text := os.environ.get(each.variable):
            found[name] = (text, each.variable)
        if options.get(name) is not None:
            found[name] = (options[name], each.option)
    values, places = {}, {name: place for name, (_, place) in found.items()}
    try:
        for name, (value, _) in found.items():
            values[name] = known[name].parse(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ConfigError(_at_its_place(str(error), places)) from None
    return Given(values, places)


def _lines(path: str, known: Mapping[str, Setting]) -> Iterator[tuple[str, str, str]]:
    """Name, text and place of the settings in a file. Raises ``ConfigError``.

    A line is ``name = value``, named as the option without its dashes. ``#`` begins a comment at
    the beginning of a line and behind a space::

        # /etc/lmcache-redis/agent.conf
        redis-url = redis://cache.example:6379
        pool-bytes = 16GiB  # of 64
        ttl-refresh = true
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read ({error.strerror}): name another file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path} cannot be read (it is not UTF-8): name another file"
        ) from error
    options = {each.option[2:]: each.name for each in known.values() if not each.secret}
    seen = set()
    for number, line in enumerate(lines, start=1):
        option, equals, text = (part.strip() for part in _COMMENT.sub("", line).partition("="))
        if not option and not equals:
            continue
        where = f"line {number} of {path}"
        if not equals:
            raise ConfigError(f"{where}: write NAME = VALUE")
        if option not in options:
            raise ConfigError(f"{where}: there is no setting {option!r}{meant(option, options)}")
        if option in seen:
            raise ConfigError(f"{where}: {option} is set twice")
        seen.add(option)
        yield options[option], text, f"{where}: {option}"


def meant(word: str, words: Iterable[str]) -> str:
    """``: did you mean x?``, if a word is close to one of the words."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""


def misspelt_variables(*configs: type[Any]) -> list[str]:
    """A sentence for each variable in the environment that looks like a setting's, and is none."""
    known = {each.variable for config in configs for each in settings_of(config).values()}
    words = {name.removeprefix(PREFIX): name for name in known}
    said = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known and not _OF_A_SERVICE.search(name):
            word = name.removeprefix(PREFIX).removeprefix("REDIS_")
            close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
            said += [f"{name} sets nothing: did you mean {words[each]}?" for each in close]
    return said


# --------------------------------------------------------------------- documents


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


def markdown_table(config: type[Any], as_fields: bool = False) -> str:
    """The table in docs/settings.md. as_fields: named as in Python, not as options."""
    rows = ["| setting | default | values | meaning |", "| --- | --- | --- | --- |"]
    for each in settings_of(config).values():
        name = each.name if as_fields else each.variable if each.secret else each.option
        rows.append(f"| `{name}` | {each.shown_default} | {each.shown_values} | {each.help} |")
    return "\n".join(rows)

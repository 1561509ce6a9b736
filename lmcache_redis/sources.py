# SPDX-License-Identifier: Apache-2.0
"""Where settings come from: the option precedes the variable, that the file, that the default."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import PREFIX, Setting, option_name, settings_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Config = TypeVar("_Config")

_COMMENT = re.compile(r"(^|\s)#.*")
# Named by Kubernetes after services, not by users: LMCACHE_REDIS_METRICS_PORT_9464_TCP.
_OF_A_SERVICE = re.compile(r"_(SERVICE_|PORT($|_))")
# Settings of earlier versions, and what to set instead; nothing where one became a constant.
_REMOVED = {
    **dict.fromkeys(("get_connections", "set_connections"), "connections"),
    **dict.fromkeys(("session_timeout_s", "heartbeat_timeout_s", "device", "record_size"), ""),
    **dict.fromkeys(("threads", "request_timeout_s"), ""),
    "max_payload_bytes": "buffer_bytes",
    "max_connections_per_peer": "max_connections",
}


@dataclass(frozen=True, slots=True)
class Given:
    """What was given. places: by name, how an error or a reader finds the value."""

    values: dict[str, Any] = field(repr=False)  # one may be a password
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
    """The config made from options, the environment and the file, read anew. Raises ConfigError."""
    return given(config, options).config(config)


def given(config: type[Any], options: Mapping[str, Any]) -> Given:
    """The values, parsed, of the highest source that has each. Raises ``ConfigError``."""
    known = settings_of(config)
    path = options.get("config")
    # From the lowest precedence to the highest.
    found = {} if path is None else {n: (t, p) for n, t, p in _file(path, known)}
    for name, each in known.items():
        # What a file was read into, as by Kubernetes, may end with a line's end.
        if text := os.environ.get(each.variable, "").rstrip("\r\n"):
            found[name] = (text, each.variable)
        if options.get(name) not in (None, []):
            option = options[name]
            found[name] = (",".join(option) if each.repeatable else option, each.option)
    values, places = {}, {name: place for name, (_, place) in found.items()}
    try:
        for name, (value, _) in found.items():
            values[name] = known[name].parse(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ConfigError(_at_its_place(str(error), places)) from None
    return Given(values, places)


def _file(path: str, known: Mapping[str, Setting]) -> Iterator[tuple[str, Any, str]]:
    """Name, value and place of the settings in a file. Raises ``ConfigError``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
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
    for option, value, where in (_toml if path.endswith(".toml") else _lines)(text, path):
        if option not in options:
            name = option.replace("-", "_")
            if do := removed(name, lambda other: option_name(other)[2:], "remove the line"):
                raise ConfigError(f"{where}: {option!r} is no setting any more: {do}")
            raise ConfigError(f"{where}: there is no setting {option!r}{meant(option, options)}")
        if option in seen:
            raise ConfigError(f"{where}: {option} is set twice")
        seen.add(option)
        name = options[option]
        if known[name].repeatable and isinstance(value, list):
            value = ",".join(map(str, value))  # as TOML has several
        yield name, value, f"{where}: {option}"


def _lines(text: str, path: str) -> Iterator[tuple[str, str, str]]:
    """Option, text and line.

    A line is ``name = value``, named as the option without its dashes. ``#`` begins a comment at
    the beginning of a line and behind a space::

        # /etc/lmcache-redis/agent.conf
        redis-url = redis://cache.example:6379
        pool-bytes = 16GiB  # of 64
        ttl-refresh = true
    """
    for number, line in enumerate(text.splitlines(), start=1):
        option, equals, value = (part.strip() for part in _COMMENT.sub("", line).partition("="))
        where = f"line {number} of {path}"
        if not equals and option:
            raise ConfigError(f"{where}: write NAME = VALUE")
        if equals:
            yield option, value, where


def _toml(text: str, path: str) -> Iterator[tuple[str, Any, str]]:
    """Option, value and line. A size is text or a number of bytes."""
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is no TOML: {error}") from None
    lines = [line.partition("=")[0].strip(" \t\"'[]") for line in text.splitlines()]
    for option, value in found.items():
        where = f"line {lines.index(option) + 1} of {path}" if option in lines else path
        yield option, value, where


def meant(word: str, words: Iterable[str]) -> str:
    """``: did you mean x?``, if a word is close to one of the words."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.7)
    return f": did you mean {close[0]}?" if close else ""


def removed(name: str, written: Callable[[str], str], remove: str) -> str:
    """What to do if an earlier version had this setting; empty: none had.

    written: how the place that sets it names another one. remove: what to do if there is none.
    """
    instead = _REMOVED.get(name)
    return f"set {written(instead)}" if instead else "" if instead is None else remove


def misspelt_variables(*configs: type[Any]) -> list[str]:
    """Warnings about unknown variables LMCACHE_REDIS_* of the environment."""
    known = {each.variable for config in configs for each in settings_of(config).values()}
    words = {name.removeprefix(PREFIX): name for name in known}
    said = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known and not _OF_A_SERVICE.search(name):
            word = name.removeprefix(PREFIX).removeprefix("REDIS_")
            if do := removed(word.lower(), lambda other: PREFIX + other.upper(), "unset it"):
                said.append(f"{name} sets nothing any more: {do}")
                continue
            close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
            said += [f"{name} sets nothing: did you mean {words[each]}?" for each in close]
    return said

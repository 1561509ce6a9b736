"""Where settings come from: the option precedes the variable, that the file, that the default."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import PREFIX, Setting, option_name, settings_of

_Config = TypeVar("_Config")

_COMMENT = re.compile(r"(^|\s)#.*")
# Named by Kubernetes after services, not by users: LMCACHE_REDIS_METRICS_PORT_9464_TCP.
_OF_A_SERVICE = re.compile(r"_(SERVICE_|PORT($|_))")


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
    found = {} if path is None else {n: (t, p) for n, t, p in _lines(path, known)}
    for name, each in known.items():
        # What a file was read into, as by Kubernetes, may end with a line's end.
        if text := os.environ.get(each.variable, "").rstrip("\r\n"):
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
    """Warnings about unknown variables LMCACHE_REDIS_* of the environment."""
    known = {each.variable for config in configs for each in settings_of(config).values()}
    words = {name.removeprefix(PREFIX): name for name in known}
    said = []
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in known and not _OF_A_SERVICE.search(name):
            word = name.removeprefix(PREFIX).removeprefix("REDIS_")
            close = difflib.get_close_matches(word, words, n=1, cutoff=0.75)
            said += [f"{name} sets nothing: did you mean {words[each]}?" for each in close]
    return said

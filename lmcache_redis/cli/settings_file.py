"""`--config FILE`: settings in a file, which the agent reads again at SIGHUP.

A line is ``name = value``, named as the option without its dashes; ``#`` begins a comment line::

    # /etc/lmcache-redis/agent.conf
    redis-url = redis://cache.example:6379
    pool-bytes = 16GiB
    ttl-refresh = true

Options and the environment take precedence over the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcache_redis.config import option_name
from lmcache_redis.errors import ConfigError

_BOOLEANS = {"true": True, "false": False}


def read_settings(path: str, settings: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """The values in a file, by the names of these settings. Raises ``ConfigError``."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read ({error}): name another file") from error
    known = {option_name(name).removeprefix("--"): field for name, field in settings.items()}
    found: dict[str, Any] = {}
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        where = f"line {number} of {path}"
        option, equals, text = (part.strip() for part in line.partition("="))
        if not equals:
            raise ConfigError(f"{where}: write NAME = VALUE")
        if option not in known:
            raise ConfigError(f"{where}: there is no setting {option!r}")
        field = known[option]
        if field.name in found:
            raise ConfigError(f"{where}: {option} is set twice")
        found[field.name] = _value(text, field, where)
    return found


def _value(text: str, field: dataclasses.Field[Any], where: str) -> Any:
    kind = str(field.type)
    try:
        if field.metadata["size"] or kind not in ("int", "float", "bool"):
            return text
        return _BOOLEANS[text] if kind == "bool" else {"int": int, "float": float}[kind](text)
    except (KeyError, ValueError):
        what = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ConfigError(f"{where}: {text!r} is not {what}") from None

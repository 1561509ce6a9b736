"""Reads the config.json of a model, and gives its fields."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_redis.errors import ConfigError

CONFIG_NAME = "config.json"
# Where models for images, sound and text keep the config of the text model.
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
UNKNOWN = (
    "start vLLM with it, and see the bytes of its chunks in `lmcache-redis inspect`, or tell "
    "doctor by --kv-bytes-per-token"
)


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a text model's config. where: names the file in errors."""

    given: Mapping[str, Any]
    where: str

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and not null; None if none is."""
        found = (self.given[name] for name in names if self.given.get(name) is not None)
        return next(found, None)

    def need(self, *names: str) -> Any:
        """As `get`. Raises ConfigError, which names the field, if none is there."""
        found = self.get(*names)
        if found is None:
            raise ConfigError(f"{self.where} does not say {names[0]}: {UNKNOWN}")
        return found

    def number(self, *names: str) -> int:
        """A positive whole number. Raises ConfigError."""
        found = self.need(*names)
        if type(found) is not int or found <= 0:
            raise ConfigError(f"{self.where}: {names[0]} is {found!r}, not a positive whole number")
        return found

    def merged(self, other: Mapping[str, Any]) -> Fields:
        """With the fields of another, which take precedence."""
        return Fields({**self.given, **other}, self.where)


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a model: a directory that holds one, or the file. Raises ConfigError."""
    path = Path(model)
    if os.path.isdir(path):  # Path.is_dir raises where this user may not look
        path /= CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{model} cannot be read ({error.strerror}): name the directory of a model, or its "
            "config.json. Nothing is downloaded"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}): name the config.json of a model"
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not the config of a model: it is no JSON object")
    return config


def text_fields(config: Mapping[str, Any], where: str) -> Fields:
    """The fields of the text model: of the config, or of the one inside it."""
    *outer, inner = _nested(config)
    # What the inner one leaves out, such as the dtype, holds for the whole model.
    dtypes = [each.get("dtype") or each.get("torch_dtype") for each in (*outer, inner)]
    return Fields({**inner, "dtype": next(filter(None, reversed(dtypes)), None)}, where)


def _nested(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for name in _TEXT_CONFIGS:
        if isinstance(config.get(name), Mapping):
            yield from _nested(config[name])
            return

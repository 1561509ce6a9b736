"""Options of `lmcache-redis agent` and `gateway`, made from the fields of their configs."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lmcache_redis.cli.starting import URL_VARIABLE
from lmcache_redis.config import AgentConfig, option_name, parse_size, shown_default
from lmcache_redis.errors import ConfigError

_ENVIRONMENT = {"redis_url": URL_VARIABLE}
_Config = TypeVar("_Config")


def takes_agent_options(command: Callable[..., None]) -> Callable[..., None]:
    """`takes_options_of` the agent."""
    return takes_options_of(AgentConfig)(command)


def takes_options_of(config: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option for each setting; None stands for the setting's default."""
    return lambda command: _with_options(command, config)


def _with_options(command: Callable[..., None], config: type[Any]) -> Callable[..., None]:
    parameters = []
    for setting in _settings(config):
        option = typer.Option(
            option_name(setting.name),
            help=_sentence(setting.metadata["help"]),
            show_default=shown_default(setting),
            envvar=_ENVIRONMENT.get(setting.name),
            metavar="SIZE" if setting.metadata.get("size") else None,
        )
        parameters.append(
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_type_of(setting) | None, option],
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def agent_config(options: Mapping[str, Any]) -> AgentConfig:
    """`config_from` for the agent."""
    return config_from(AgentConfig, options)


def config_from(config: type[_Config], options: Mapping[str, Any]) -> _Config:
    """The config that the options and the environment say. Raises ``ConfigError``."""
    given = {name: value for name, value in options.items() if value is not None}
    for setting in _fields(config):
        variable = setting.metadata.get("environment_only")
        if variable and (secret := _secret(variable)):
            given[setting.name] = secret
        if setting.name in given and setting.metadata.get("size"):
            given[setting.name] = _size(setting.name, given[setting.name])
    if "key_prefix" in given:
        given["key_prefix"] = str(given["key_prefix"]).encode()
    return config(**given)


def _secret(variable: str) -> str | None:
    """What a variable says, or the file that ``VARIABLE_FILE`` names (as containers do)."""
    path = os.environ.get(f"{variable}_FILE")
    if os.environ.get(variable) or not path:
        return os.environ.get(variable)
    try:
        return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the file {path} that {variable}_FILE names cannot be read ({error}): "
            f"name another one, or set {variable}"
        ) from error


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option_name(name)}: {error}") from error


def _fields(config: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(config)


def _settings(config: type[Any]) -> list[dataclasses.Field[Any]]:
    return [f for f in _fields(config) if not f.metadata.get("environment_only")]


def _type_of(setting: dataclasses.Field[Any]) -> type:
    if setting.metadata.get("size"):
        return str
    return {"int": int, "float": float, "bool": bool}.get(str(setting.type), str)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."

"""Command-line options: those made from the fields of a config, and those that commands share.

A setting comes from its option, else from its environment variable, else from `--config FILE`,
which the agent reads again at SIGHUP.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from lmcache_redis.cli.starting import URL_VARIABLE
from lmcache_redis.config import (
    SEAL_KEY_FILE_VARIABLE,
    AgentConfig,
    option_name,
    parse_size,
    shown_default,
)
from lmcache_redis.errors import ConfigError

if TYPE_CHECKING:
    from lmcache_redis.resp import RedisOptions

# Read for every command: those with few options have only these.
_ENVIRONMENT = {
    "redis_url": URL_VARIABLE,
    "redis_password_file": "LMCACHE_REDIS_PASSWORD_FILE",
    "redis_credential_provider": "LMCACHE_REDIS_CREDENTIAL_PROVIDER",
    "seal_key_file": SEAL_KEY_FILE_VARIABLE,
}
_TYPES = {"int": int, "float": float, "bool": bool}
_Config = TypeVar("_Config")
_Command = Callable[..., None]

_CONFIG_FILE = "config"  # the option that is no setting

# Options of the commands that use a server or an agent.
RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar=URL_VARIABLE,
        show_envvar=True,
        help="URL of the server, as for the agent. The password may come from "
        "LMCACHE_REDIS_PASSWORD, LMCACHE_REDIS_PASSWORD_FILE or LMCACHE_REDIS_CREDENTIAL_PROVIDER.",
    ),
]
RedisUsername = Annotated[
    str | None, typer.Option("--redis-username", help="ACL user, if not in the URL.")
]
SealKeyFile = Annotated[
    str | None,
    typer.Option(
        "--seal-key-file",
        envvar=SEAL_KEY_FILE_VARIABLE,
        show_envvar=True,
        help="The agents' file of seal keys.",
    ),
]
KeyPrefix = Annotated[str | None, typer.Option("--key-prefix", help="The agents' key prefix.")]
Endpoint = Annotated[
    str | None,
    typer.Option("--endpoint", help="The agent's endpoint.", show_default="the agent's default"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def takes_options_of(config: type[Any]) -> Callable[[_Command], _Command]:
    """Gives a command one option per setting; an option that is not given is None."""

    def with_options(command: _Command) -> _Command:
        parameters = [
            _parameter(setting)
            for setting in dataclasses.fields(config)
            if not setting.metadata["environment_only"]
        ]
        parameters.append(
            inspect.Parameter(
                _CONFIG_FILE,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    str | None,
                    typer.Option(
                        option_name(_CONFIG_FILE),
                        metavar="FILE",
                        help="File with settings, one NAME = VALUE a line, named as these options. "
                        "Options and the environment take precedence.",
                    ),
                ],
            )
        )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return with_options


def _parameter(setting: dataclasses.Field[Any]) -> inspect.Parameter:
    text, is_size = setting.metadata["help"], setting.metadata["size"]
    option = typer.Option(
        option_name(setting.name),
        help=f"{text[0].upper()}{text[1:]}.",
        show_default=shown_default(setting),
        envvar=_ENVIRONMENT.get(setting.name),
        metavar="SIZE" if is_size else None,
    )
    kind: Any = str if is_size else _TYPES.get(str(setting.type), str)
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def config_from(config: type[_Config], options: Mapping[str, Any]) -> _Config:
    """The config made from the options, the environment and the file that `--config` names.

    Reads the file each time. Raises ``ConfigError``.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, variable in _ENVIRONMENT.items():
        if os.environ.get(variable):
            given.setdefault(name, os.environ[variable])
    settings: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(config)  # type: ignore[arg-type]
    if (path := given.pop(_CONFIG_FILE, None)) is not None:
        named = {s.name: s for s in settings if not s.metadata["environment_only"]}
        given = _read_settings(path, named) | given
    for setting in settings:
        variable = setting.metadata["environment_only"]
        if variable and os.environ.get(variable):
            given[setting.name] = os.environ[variable]
        if setting.name in given and setting.metadata["size"]:
            given[setting.name] = size_of(option_name(setting.name), given[setting.name])
    if "key_prefix" in given:
        given["key_prefix"] = str(given["key_prefix"]).encode()
    return config(**given)


def _read_settings(path: str, settings: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """The values in a file, by the names of these settings. Raises ``ConfigError``.

    A line is ``name = value``, named as the option without its dashes; ``#`` begins a comment::

        # /etc/lmcache-redis/agent.conf
        redis-url = redis://cache.example:6379
        pool-bytes = 16GiB
        ttl-refresh = true
    """
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
    if field.metadata["size"] or kind not in _TYPES:
        return text
    try:
        return {"true": True, "false": False}[text] if kind == "bool" else _TYPES[kind](text)
    except (KeyError, ValueError):
        what = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ConfigError(f"{where}: {text!r} is not {what}") from None


def size_of(option: str, text: str | int) -> int:
    """The bytes that an option gives. Raises ``ConfigError``, which names the option."""
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def redis_options(**given: Any) -> RedisOptions:
    """The server named by these settings of an agent and by the environment.

    Raises ``ConfigError``, also if no server is named.
    """
    from lmcache_redis.resp import RedisOptions

    config = config_from(AgentConfig, given)
    if not config.redis_url:
        raise ConfigError(
            "no server is named, and no agent answers that knows one: give --redis-url or set "
            "LMCACHE_REDIS_URL, or --endpoint of an agent"
        )
    return RedisOptions.of_agent(config, config.redis_url)

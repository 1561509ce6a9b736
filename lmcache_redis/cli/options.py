# SPDX-License-Identifier: Apache-2.0
"""Command-line options: those made from the settings of a config, and those that commands share."""

from __future__ import annotations

import codecs
import contextlib
import enum
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

from lmcache_redis.config import ENDPOINT_VARIABLE, SEAL_KEY_FILE_VARIABLE, tools_endpoint
from lmcache_redis.errors import ConfigError, LMCacheRedisError
from lmcache_redis.settings import PREFIX, Setting, settings_of

if TYPE_CHECKING:
    from lmcache_redis.client.control import ControlClient
    from lmcache_redis.client.http import HttpAgent

_Command = Callable[..., None]
# Of what is printed, for a terminal or a file of another encoding.
_PLAIN = {"\u2588": "#", "\u2591": ".", "\u2026": "~"}
_Choices = TypeVar("_Choices", bound=enum.Enum)


class WrongOption(LMCacheRedisError):
    """A value that an option cannot have. No ValueError: typer would put it into its own words."""


def number(
    option: str,
    kind: type[int] | type[float],
    between: tuple[float, float],
    help_text: str,
    **more: Any,
) -> Any:
    """An option with a number, whose mistakes are told as those of settings are."""
    of = Setting(
        name=option[2:].replace("-", "_"),
        kind=kind.__name__,
        default=None,
        optional=False,
        help=help_text,
        between=between,
    )

    def read(given: Any) -> Any:
        try:
            value = of.parse(given) if isinstance(given, str) else given
            of.check(value)
        except ConfigError as error:
            raise WrongOption(str(error)) from None
        return value

    return typer.Option(option, help=help_text, metavar=of.shown_form, parser=read, **more)


def choice(option: str, of: type[_Choices], help_text: str) -> Any:
    """An option with one of the values of an enum."""
    values = [each.value for each in of]

    def read(given: Any) -> _Choices:
        try:
            return of(given)
        except ValueError:
            said = f"{option} is {given!r}: choose one of {', '.join(values)}"
            raise WrongOption(said) from None

    return typer.Option(option, help=help_text, metavar="|".join(values), parser=read)


# Options of the commands that use a server or an agent, named as their parameters are.
# `config_from` and `tools_endpoint` read the variables.
RedisUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="URL of the server, as for the agent. The password may come from "
        "LMCACHE_REDIS_PASSWORD, LMCACHE_REDIS_PASSWORD_FILE or LMCACHE_REDIS_CREDENTIAL_PROVIDER. "
        "[env: LMCACHE_REDIS_URL]",
    ),
]
RedisUsername = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="ACL user, if not in the URL. [env: LMCACHE_REDIS_USERNAME]"),
]
SealKeyFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        envvar=SEAL_KEY_FILE_VARIABLE,
        show_envvar=False,
        help=f"The agents' file of seal keys. [env: {SEAL_KEY_FILE_VARIABLE}]",
    ),
]
KeyPrefix = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help=f"The agents' key prefix. [env: {PREFIX}KEY_PREFIX]"),
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="ipc://PATH",
        help=f"The agent's endpoint. [env: {ENDPOINT_VARIABLE}; default: the agent's default]",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="http://HOST:PORT",
        help="Ask an agent over HTTP, at its --metrics address, instead of --endpoint.",
    ),
]
Timeout = Annotated[float, number("--timeout-s", float, (0.001, 3600), "Deadline for the answer.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and errors as JSON too.")]
_ConfigFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        envvar=f"{PREFIX}CONFIG",
        show_envvar=False,
        help="File with settings, one NAME = VALUE a line, named as these options; # begins a "
        "comment. Of a name that ends in .toml it is TOML. Options and the environment take "
        f"precedence. [env: {PREFIX}CONFIG]",
    ),
]
_Check = Annotated[
    bool,
    typer.Option(
        "--check",
        help="Check the settings and the files that they name, print what is set and where, and "
        "stop. Exit status: 0, or 2 if something must change. Connects to nothing.",
    ),
]
_Connect = Annotated[
    bool,
    typer.Option(
        "--connect", help="With --check: ask the server too. Exit status 1 if it cannot be used."
    ),
]


def takes_options_of(config: type[Any]) -> Callable[[_Command], _Command]:
    """Gives a command one option per setting; an option that is not given is None."""

    options: dict[str, tuple[Any, Any]] = {
        each.name: (_option_of(each), None)
        for each in settings_of(config).values()
        if not each.secret
    }
    options |= {"config": (_ConfigFile, None), "check": (_Check, False)}
    options |= {"connect": (_Connect, False), "as_json": (AsJson, False)}

    def with_options(command: _Command) -> _Command:
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=of)
            for name, (of, default) in options.items()
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {name: of for name, (of, _) in options.items()}
        return command

    return with_options


def _option_of(setting: Setting) -> Any:
    """Values stay text: `config_from` says what is wrong with them, wherever they come from."""
    is_flag = setting.kind == "bool"
    option = typer.Option(
        f"{setting.option}/--no-{setting.option[2:]}" if is_flag else setting.option,
        help=f"{setting.help[0].upper()}{setting.help[1:]}. "
        f"[env: {setting.variable}; default: {setting.shown_default}]",
        metavar=None if is_flag else setting.shown_form,
    )
    if setting.repeatable:
        return Annotated[list[str] | None, option]
    return Annotated[(bool if is_flag else str) | None, option]


def print_in_any_encoding() -> None:
    """What stdout cannot encode is printed plainly: bars in ASCII, letters as escapes."""

    def plain(error: UnicodeError) -> tuple[str | bytes, int]:
        if isinstance(error, UnicodeEncodeError) and (
            found := _PLAIN.get(error.object[error.start])
        ):
            return found, error.start + 1
        return codecs.backslashreplace_errors(error)

    codecs.register_error("lmcache_redis_plain", plain)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="lmcache_redis_plain")


def agent_at(endpoint: str | None, timeout_s: float) -> ControlClient:
    """What asks the agent at an endpoint, or at the default one."""
    from lmcache_redis.client.control import ControlClient

    return ControlClient(endpoint or tools_endpoint(), timeout_s)


def agent_anywhere(
    endpoint: str | None, url: str | None, timeout_s: float
) -> ControlClient | HttpAgent:
    """What asks an agent at a URL, else as `agent_at`. Raises ``ConfigError`` for both."""
    if url is None:
        return agent_at(endpoint, timeout_s)
    if endpoint is not None:
        raise ConfigError("--url and --endpoint both name an agent: give one of them")
    from lmcache_redis.client.http import HttpAgent

    return HttpAgent(url, timeout_s)


@contextlib.contextmanager
def reads_document(agent: ControlClient | HttpAgent) -> Iterator[None]:
    """Of an agent that was asked over HTTP: another version of it may lack fields."""
    from lmcache_redis.client.http import HttpAgent

    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError):
        if not isinstance(agent, HttpAgent):
            raise
        raise agent.other_version() from None


def print_found(as_json: bool, found: Any, lines: Iterable[str]) -> None:
    """What a command has found, as JSON or as lines of text."""
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))


def fail(said: str, status: int) -> NoReturn:
    """Ends the process with an error, which is JSON if the output is."""
    if "--json" in sys.argv[1:]:
        print(json.dumps({"error": said, "exit_status": status}), file=sys.stderr)
    else:
        print(f"lmcache-redis: {said}", file=sys.stderr)
    sys.exit(status)

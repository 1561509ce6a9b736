"""Where user and password come from. All are asked at each connect, so that a secret may change.

The interface is that of redis-py's `redis.credentials.CredentialProvider`, which is not imported
here: that takes 0.15 s.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lmcache_redis.errors import ConfigError, RedisAuthError


class Credentials(Protocol):
    """As redis-py's CredentialProvider. Called on any thread; what it raises fails the connect."""

    def get_credentials(self) -> tuple[str, ...]:
        """(password,) or (user, password)."""


@dataclass(frozen=True, slots=True)
class StaticPassword:
    """The credentials of a URL, or of options."""

    username: str | None
    password: str = field(repr=False)

    def get_credentials(self) -> tuple[str, ...]:
        return (self.password,) if self.username is None else (self.username, self.password)


@dataclass(frozen=True, slots=True)
class PasswordFile:
    """The password is the file's content, without line ends at its end."""

    username: str | None
    path: str

    def get_credentials(self) -> tuple[str, ...]:
        """Raises RedisAuthError if the file cannot be read or is empty."""
        try:
            password = Path(self.path).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise RedisAuthError(
                f"the password file {self.path} cannot be read ({error.strerror})"
            ) from None
        except UnicodeDecodeError:
            raise RedisAuthError(f"the password file {self.path} is not UTF-8") from None
        if not password:
            raise RedisAuthError(f"the password file {self.path} is empty")
        return StaticPassword(self.username, password).get_credentials()


def load_provider(path: str) -> Credentials:
    """What the factory at `package.module:factory` returns, called without arguments.

    Raises ConfigError if that fails, or returns something without `get_credentials`.
    """
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"the credential provider is {path!r}: write PACKAGE.MODULE:FACTORY")
    try:
        factory: Any = importlib.import_module(module)
        for attribute in name.split("."):
            factory = getattr(factory, attribute)
        provider = factory()
    except Exception as error:
        raise ConfigError(
            f"the credential provider {path} cannot be made: {_said(error)}"
        ) from None
    if not callable(getattr(provider, "get_credentials", None)):
        raise ConfigError(
            f"the credential provider {path} has no get_credentials(): name a factory that returns "
            "a redis.credentials.CredentialProvider"
        )
    return provider  # type: ignore[no-any-return]


def auth_command(credentials: Credentials | None) -> tuple[str, ...] | None:
    """The words of AUTH; None without credentials. Raises RedisAuthError if there are none now."""
    if credentials is None:
        return None
    try:
        words = credentials.get_credentials()
    except RedisAuthError:
        raise
    except Exception as error:
        raise RedisAuthError(f"the credential provider failed: {_said(error)}") from None
    if (
        not isinstance(words, (tuple, list))
        or not 1 <= len(words) <= 2
        or not all(isinstance(word, str) for word in words)
    ):
        raise RedisAuthError(
            "the credential provider returned neither (password,) nor (user, password)"
        )
    return ("AUTH", *words)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"

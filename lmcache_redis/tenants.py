# SPDX-License-Identifier: Apache-2.0
"""Whose request it is: the name of its tenant, as engines send it and as agents show it.

A request names its tenant, or has one by its ``cache_salt``, or has none. The tenant is no part of
a key: equal prompts of two tenants with the same salt, or without one, share their KV.

A salt is a secret, so engines send ``#`` and 16 bytes of a digest of it, in hex, and agents show
the first 8 digits of a digest of that. Agents with seal keys mix a secret into the second one: only
who has it can check a guess of the salt. Without seal keys anyone can who sees the 8 digits, but 32
bits never tell what was not guessed.
"""

from __future__ import annotations

import functools
import hashlib
import re
from typing import Any, Final

from lmcache_redis.errors import ConfigError
from lmcache_redis.settings import parse_size

MOST_LETTERS: Final = 64
NONE: Final = "none"  # of requests without a tenant
OTHER: Final = "other"  # those that have no row of their own
EVERY: Final = "*"  # a limit for each that has no other
_OF_A_SALT: Final = "#"
_RESERVED: Final = frozenset({"", NONE, OTHER, EVERY})
_ODD: Final = r"\x00-\x1f\x7f\ud800-\udfff,"
_FORM: Final = re.compile(f"(?! )[^{_ODD}{_OF_A_SALT}][^{_ODD}]{{0,{MOST_LETTERS - 1}}}(?<! )")
_DIGEST: Final = re.compile(f"{_OF_A_SALT}[0-9a-f]{{32}}")


def fault_of(name: Any) -> str:
    """Why a request may not name its tenant so; empty if it may."""
    if not isinstance(name, str):
        return "it is no string"
    if name in _RESERVED:
        return "it is reserved"
    if name.startswith(_OF_A_SALT):
        return f"it begins with {_OF_A_SALT}"
    if "," in name:
        return "it has a comma"
    if name != name.strip(" "):
        return "it has a blank at an end"
    if len(name) > MOST_LETTERS:
        return "it is too long"
    return "" if name.isprintable() else "it has characters that are not printable"


def is_name(name: Any) -> bool:
    return not fault_of(name)


def _has_form(text: str) -> bool:
    """True of each name. What is printable is left to engines: another Python may know more."""
    return text not in _RESERVED and _FORM.fullmatch(text) is not None


def parse_limits(text: str, option: str = "--tenant-bytes") -> dict[str, int]:
    """Bytes by name, of ``NAME=SIZE,NAME=SIZE``. Raises ``ConfigError``, which names the option."""
    limits: dict[str, int] = {}
    for each in text.split(","):
        name, equals, size = each.strip().rpartition("=")
        if not equals or not (name == EVERY or _has_form(name)):
            raise ConfigError(
                f"{option}: {each.strip()!r} is no limit: write NAME=SIZE, or *=SIZE for each "
                "other tenant"
            )
        if name in limits:
            raise ConfigError(f"{option}: {name} is set twice: write it once")
        limits[name] = parse_size(size, f"{option} {name}")
    return limits


def of_salt(salt: str) -> str:
    """The tenant of requests with this ``cache_salt``; empty without one."""
    if not salt:
        return ""
    data = salt.encode("utf-8", "surrogatepass")
    return _OF_A_SALT + hashlib.blake2b(data, digest_size=16, person=b"lmcr2.tenant").hexdigest()


def is_sent(tenant: str) -> bool:
    """Whether an engine sends such: nothing, a name, or the digest of a salt."""
    return not tenant or _has_form(tenant) or _DIGEST.fullmatch(tenant) is not None


@functools.lru_cache(maxsize=1024)
def shown(tenant: str, secret: bytes = b"") -> str:
    """The name of a tenant for people; tenant: as `is_sent`. secret: at most 64 bytes."""
    if tenant.startswith(_OF_A_SALT):
        return hashlib.blake2b(tenant.encode(), digest_size=4, key=secret).hexdigest()
    return tenant or NONE

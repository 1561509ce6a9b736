# SPDX-License-Identifier: Apache-2.0
"""The names of tenants: what a salt becomes, and what it does not tell."""

from __future__ import annotations

import re

import pytest

from lmcache_redis import tenants
from lmcache_redis.seal import SealKeys


@pytest.mark.parametrize("salt", ["a", "s3cret salt", "\ud800", "x" * 10_000])
def test_a_salt_is_never_shown(salt: str) -> None:
    sent = tenants.of_salt(salt)
    assert re.fullmatch("#[0-9a-f]{32}", sent)
    assert re.fullmatch("[0-9a-f]{8}", tenants.shown(sent))
    assert tenants.is_sent(sent)
    assert not tenants.is_name(sent), "no name stands for another's salt"


def test_agents_with_equal_seal_keys_show_one_name() -> None:
    sent = tenants.of_salt("user-17")
    here, there, others = (SealKeys([bytes([n]) * 32]).tenants for n in (1, 1, 2))
    assert tenants.shown(sent, here) == tenants.shown(sent, there)
    assert len({tenants.shown(sent, each) for each in (here, others, b"")}) == 3
    assert tenants.shown("team", here) == "team"


def test_without_a_tenant() -> None:
    assert tenants.of_salt("") == ""
    assert tenants.shown("") == tenants.NONE
    assert tenants.is_sent("")


@pytest.mark.parametrize("name", ["\u0378", "\U000e0fff", "a\u0378"])
def test_agents_take_what_the_python_of_engines_may_know(name: str) -> None:
    """Not assigned in this Unicode, perhaps in the next."""
    assert not tenants.is_name(name)
    assert tenants.is_sent(name)
    assert tenants.parse_limits(f"{name}=1") == {name: 1}


def test_what_is_a_name_and_what_is_sent() -> None:
    for name in ("a", "team a", "Käse=1", "0" * 64):
        assert tenants.is_name(name)
        assert tenants.is_sent(name)
        assert tenants.shown(name) == name
    for name in ("none", "other", "*", "#a", "#" + "0" * 33, " a", "a\t", "0" * 65):
        assert not tenants.is_name(name)
        assert not tenants.is_sent(name)
    assert not any(map(tenants.is_name, ("", "\u200b")))
    assert not any(map(tenants.is_sent, ("a ", "a,b", "\ud800")))

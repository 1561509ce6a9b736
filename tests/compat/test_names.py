# SPDX-License-Identifier: Apache-2.0
"""docs/reference/lmcache-names.md lists every name that differs, and what it says is true."""

from __future__ import annotations

import importlib

import pytest

from tests.compat.names import INTERFACES
from tests.compat.originals import PAGE, Interface, page


def test_the_page_is_up_to_date() -> None:
    """Write it with `python -m tests.compat.originals`."""
    assert PAGE.read_text() == page()


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda each: each.title)
def test_every_name_of_a_facade_is_one_of_the_originals(interface: Interface) -> None:
    listed = {each.name.partition(".")[0] for one in INTERFACES for each in one.names}
    assert set(importlib.import_module(interface.here).__all__) <= listed

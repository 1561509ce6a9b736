# SPDX-License-Identifier: Apache-2.0
"""docs/reference/lmcache-names.md lists every name that differs, and what it says is true."""

from __future__ import annotations

import importlib

from tests.compat.originals import PAGE, interfaces, page


def test_the_page_is_up_to_date() -> None:
    """Write it with `python -m tests.compat.originals`."""
    assert PAGE.read_text() == page()


def test_every_name_of_a_facade_is_one_of_the_originals() -> None:
    listed = {each.name.partition(".")[0] for one in interfaces() for each in one.names}
    for interface in interfaces():
        assert set(importlib.import_module(interface.here).__all__) <= listed, interface.title

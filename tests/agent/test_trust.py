# SPDX-License-Identifier: Apache-2.0
"""What is distrusted, by layout and epoch, and for how long."""

from __future__ import annotations

import pytest

from lmcache_redis.agent import peers
from lmcache_redis.agent.peers import CANARIES_AGAIN, LayoutTrust, epoch_of

LAYOUT, OTHER = b"l" * 32, b"o" * 32
EPOCH, ADAPTER, BLOCK = b"e" * 8, b"a" * 16, b"b" * 32


def test_the_epoch_of_a_name() -> None:
    assert epoch_of(BLOCK) == epoch_of(ADAPTER + BLOCK) == epoch_of(b"token hash") == b""
    assert epoch_of(EPOCH + BLOCK) == epoch_of(EPOCH + ADAPTER + BLOCK) == EPOCH


def test_a_layout_is_distrusted_in_one_epoch() -> None:
    trust = LayoutTrust()
    assert trust.differed(LAYOUT, EPOCH + BLOCK)
    assert not trust.differed(LAYOUT, EPOCH + ADAPTER + BLOCK)
    assert not trust.allows([OTHER, LAYOUT], EPOCH + BLOCK)
    assert trust.allows([OTHER], EPOCH + BLOCK)
    assert trust.allows([LAYOUT], BLOCK)
    assert trust.report() == [{"layout": LAYOUT.hex(), "epoch": EPOCH.hex(), "agreed": 0}]
    assert (trust.restore(), trust.restore(), trust.report()) == (1, 0, [])
    assert trust.allows([LAYOUT], EPOCH + BLOCK)


def test_canaries_in_a_row_bring_trust_back() -> None:
    trust = LayoutTrust()
    assert not trust.agreed(LAYOUT, BLOCK)
    trust.differed(LAYOUT, BLOCK)
    for _ in range(CANARIES_AGAIN - 1):
        assert not trust.agreed(LAYOUT, BLOCK)
        assert not trust.agreed(OTHER, BLOCK)
        assert not trust.agreed(LAYOUT, EPOCH + BLOCK)
    trust.differed(LAYOUT, BLOCK)
    found = [trust.agreed(LAYOUT, BLOCK) for _ in range(CANARIES_AGAIN)]
    assert found == [False] * (CANARIES_AGAIN - 1) + [True]
    assert trust.allows([LAYOUT], BLOCK)


def test_a_difference_under_a_clients_name_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_MOST_SAID", 2)
    trust = LayoutTrust()
    layouts = [LAYOUT, LAYOUT, OTHER, LAYOUT, b"t" * 32, b"t" * 32]
    assert [trust.differed_by_name(each) for each in layouts] == [
        True, False, True, False, False, False,
    ]  # fmt: skip
    assert trust.allows(layouts, BLOCK), "only the chunk goes"

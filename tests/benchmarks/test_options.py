# SPDX-License-Identifier: Apache-2.0
"""What the command line makes of its words, and the values that are moved."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.plane.cases import Plan
from benchmarks.plane.messages import MIB, Setting
from benchmarks.plane.peers import CEILING, GLIDE, LMCACHE, REDIS_PY, settings_of
from benchmarks.plane.run import settings_of_ours
from benchmarks.plane.values import PAGE_BYTES, Arena
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import ConfigError, RedisUnavailable


def test_defaults_come_before_one_to_eight_connections() -> None:
    first, *others = settings_of_ours((1, 2, 4, 8))
    assert first == Setting()
    expected = [(n, True) for n in (1, 2, 8)]
    expected += [(n, False) for n in (4, 1, 2, 8)]
    assert [(s.connections, s.checksums) for s in others] == expected


def test_what_is_given_is_combined() -> None:
    found = settings_of_ours((1,), own=[1, 2], threads=[1, 2])
    assert found == [Setting(g, threads=t) for g in (1, 2) for t in (1, 2)]
    assert settings_of_ours((1,), slot_bytes=[64 << 10]) == [Setting(slot_bytes=64 << 10)]


def test_each_setting_is_measured_with_sealed_values_too() -> None:
    assert settings_of_ours((1, 2), sealed=True) == [Setting(), Setting(sealed=True)]
    found = settings_of_ours((1,), threads=[1, 2], sealed=True)
    assert found == [Setting(threads=t, sealed=s) for t in (1, 2) for s in (False, True)]


def test_peers_are_tried_at_several_settings() -> None:
    for peer in (LMCACHE, GLIDE):
        assert settings_of(peer, (1, 2, 4, 8)) == [Setting(n) for n in (1, 2, 4, 8)]
    assert {setting.how for setting in settings_of(REDIS_PY, (1, 8))} == {"pipelined", "one by one"}
    assert {setting.how for setting in settings_of(CEILING, (1, 8))} == {"socket", "memcpy"}


@pytest.mark.parametrize("size", [0, -4096, 1049])
def test_sizes_are_whole_pages(size: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4 KiB"):
        Plan({}, sizes=[size])


@pytest.mark.parametrize(
    "words",
    [
        "data-plane --connections one",
        "data-plane --connections 0",
        "data-plane --chunk-mib big",
        "data-plane --rounds 0",
        "chunk-size --sizes big",
        "chunk-size --token-kib 3",
        "working-set --cases huge",
        "working-set --scenarios files",
        "working-set --documents 1",
    ],
)
def test_words_that_mean_nothing_are_refused(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert "Invalid value" in capsys.readouterr().err


# ------------------------------------------------------------------- values


@pytest.mark.parametrize("value_bytes", [PAGE_BYTES, 256 << 10, 2 * MIB, 3 * MIB + PAGE_BYTES])
@pytest.mark.parametrize("slot_bytes", [64 << 10, DEFAULT_SLOT_BYTES, 32 * MIB])
def test_slots_cover_a_value_and_begin_on_pages(value_bytes: int, slot_bytes: int) -> None:
    values = Arena(3 * value_bytes).values(value_bytes, 3, slot_bytes)
    assert [sum(slot.nbytes for slot in slots) for slots in values.slots] == [value_bytes] * 3
    assert values.gigabytes == 3 * value_bytes / 1e9
    places = [
        (np.frombuffer(s, np.uint8).ctypes.data, s.nbytes) for slots in values.slots for s in slots
    ]
    assert all(at % PAGE_BYTES == 0 and nbytes <= slot_bytes for at, nbytes in places)
    ends = [at + nbytes for at, nbytes in places]
    assert all(end <= at for end, (at, _) in zip(ends, places[1:], strict=False))


def test_a_page_that_did_not_arrive_is_found() -> None:
    values = Arena(4 * MIB).values(2 * MIB, 2, DEFAULT_SLOT_BYTES)
    values.check()
    values.slots[1][2][-64:] = bytes(64)  # no stamp lies there
    values.check()
    values.slots[1][0][PAGE_BYTES : PAGE_BYTES + 8] = bytes(8)
    with pytest.raises(RedisUnavailable, match="slot 3"):
        values.check()
    values.stamp()
    values.check()
    values.wipe()
    with pytest.raises(RedisUnavailable, match="slot 0"):
        values.check()


def test_memory_cut_otherwise_is_stamped_again() -> None:
    arena = Arena(4 * MIB)
    first = arena.values(2 * MIB, 2, DEFAULT_SLOT_BYTES)
    assert arena.values(2 * MIB, 2, DEFAULT_SLOT_BYTES) is first
    arena.values(4 * MIB, 1, 4 * MIB).check()
    arena.values(2 * MIB, 2, DEFAULT_SLOT_BYTES).check()

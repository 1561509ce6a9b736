# SPDX-License-Identifier: Apache-2.0
"""What the command line makes of its words."""

from __future__ import annotations

import pytest

from benchmarks.__main__ import main
from benchmarks.plane.cases import Plan
from benchmarks.plane.messages import Setting
from benchmarks.plane.peers import CEILING, GLIDE, LMCACHE, REDIS_PY, settings_of
from benchmarks.plane.run import settings_of_ours
from lmcache_redis.errors import ConfigError


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

"""What the command line makes of its words."""

from __future__ import annotations

import pytest

from lmcache_redis.bench.__main__ import main
from lmcache_redis.bench.plane.messages import Setting
from lmcache_redis.bench.plane.peers import CEILING, GLIDE, LMCACHE, REDIS_PY, settings_of
from lmcache_redis.bench.plane.run import Options, settings_of_ours
from lmcache_redis.errors import ConfigError


def test_without_anything_defaults_come_first_and_then_one_to_eight_connections() -> None:
    first, *others = settings_of_ours()
    assert first == Setting()
    # The defaults are four both ways.
    expected = [(n, n, True) for n in (1, 2, 8)]
    expected += [(n, n, False) for n in (4, 1, 2, 8)]
    assert [(s.get_connections, s.set_connections, s.checksums) for s in others] == expected


def test_what_is_given_is_combined() -> None:
    found = settings_of_ours(gets=[1, 2], threads=[1, 2])
    assert found == [Setting(g, threads=t) for g in (1, 2) for t in (1, 2)]
    assert settings_of_ours(slot_bytes=[64 << 10]) == [Setting(slot_bytes=64 << 10)]


def test_peers_are_tried_at_several_settings() -> None:
    for peer in (LMCACHE, GLIDE):
        assert settings_of(peer, (1, 2, 4, 8)) == [Setting(n, n) for n in (1, 2, 4, 8)]
    assert {setting.how for setting in settings_of(REDIS_PY, (1, 8))} == {
        "pipelined",
        "one by one",
    }
    assert {setting.how for setting in settings_of(CEILING, (1, 8))} == {"socket", "memcpy"}


@pytest.mark.parametrize("mib", [0.0, -1.0, 0.001])
def test_sizes_are_whole_pages(mib: float) -> None:
    with pytest.raises(ConfigError, match="multiple of 4 KiB"):
        Options(ours=[Setting()], sizes_mib=[mib])


@pytest.mark.parametrize(
    "words",
    [["--gets", "one"], ["--sets", "0"], ["--chunk-mib", "big"], ["--rounds", "0"]],
)
def test_words_that_mean_nothing_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data-plane", *words]) == 2
    assert "Invalid value" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""The last hour as bars by minute, in inline SVG without script. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lmcache_redis.agent.reports import words
from lmcache_redis.agent.reports.history import MINUTES, Minute
from lmcache_redis.tier_kinds import KINDS
from lmcache_redis.units import shown_bytes

_HEIGHT: Final = 100.0
_PITCH: Final = 10
_BAR: Final = 8


def charts(hour: Sequence[Minute]) -> str:
    """Hit rate, bytes and savings, for a `grid`. hour: of `History.minutes`."""
    whole = Minute.sum(hour)
    shares = {
        kind.name: [_share(each.hits[number], each) for each in hour]
        for number, kind in enumerate(KINDS)
    }
    hits = [sum(these) for these in zip(*shares.values(), strict=True)]
    shares["computed"] = [
        max(0.0, 1.0 - hit) if each.asked_chunks else 0.0
        for hit, each in zip(hits, hour, strict=True)
    ]
    rate = words.rate_of(sum(whole.hits), whole.asked_chunks)
    to_engines = [each.to_engines_bytes for each in hour]
    from_engines = [each.from_engines_bytes for each in hour]
    seconds = words.shown_seconds(whole.saved_prefill_s)
    return (
        _chart("Hit rate", f"{words.percent(rate)} of {whole.asked_chunks:,.0f} chunks", shares, 1)
        + _chart(
            "Bytes",
            f"{_key('host')}{shown_bytes(whole.to_engines_bytes)} to, "
            f"{_key('redis')}{shown_bytes(whole.from_engines_bytes)} from engines",
            {"host": to_engines, "redis": from_engines},
            max(map(sum, zip(to_engines, from_engines, strict=True))),
        )
        + _chart(
            "Tokens not computed",
            f"{whole.saved_tokens:,.0f} tokens, {seconds} of prefill",
            {"host": [each.saved_tokens for each in hour]},
            max(each.saved_tokens for each in hour),
        )
    )


def _share(hits: float, minute: Minute) -> float:
    return hits / minute.asked_chunks if minute.asked_chunks else 0.0


def _key(name: str) -> str:
    return f'<svg class="key"><rect class="{name}" width="10" height="10"/></svg>'


def _chart(title: str, said: str, series: Mapping[str, Sequence[float]], top: float) -> str:
    """series: by class, the lowest first. top: what a bar of the whole height stands for."""
    bottoms, paths = [_HEIGHT] * MINUTES, ""
    for name, values in series.items():
        path = ""
        for number, value in enumerate(values):
            height = _HEIGHT * min(1.0, value / top) if top > 0 and value > 0 else 0.0
            if height:
                bottom, bottoms[number] = bottoms[number], bottoms[number] - height
                path += f"M{number * _PITCH} {bottom:.1f}v{-height:.1f}h{_BAR}v{height:.1f}z"
        paths += f'<path class="{name}" d="{path}"/>' if path else ""
    return (
        f'<figure><figcaption>{title} <span class="soft">{said}</span></figcaption>'
        f'<svg class="chart" viewBox="0 0 {MINUTES * _PITCH} {_HEIGHT:.0f}" role="img" '
        f'preserveAspectRatio="none" aria-label="{title} by minute">{paths}</svg>'
        '<p class="soft ends"><span>1 hour ago</span><span>now</span></p></figure>'
    )

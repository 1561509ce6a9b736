# SPDX-License-Identifier: Apache-2.0
"""What a STATUS document says, in words: for `status`, `top` and the page of `--metrics`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_redis.tier_kinds import KINDS, REDIS, TierKind
from lmcache_redis.units import shown_age, shown_bytes

_LAYOUT_DIGITS = 16
_MOST_PAIRS = 4


def percent(share: float | None) -> str:
    """share: from 0 to 1; None: of nothing."""
    return "-" if share is None else f"{100 * share:.0f} %"


def rate_of(count: float, of: float) -> float | None:
    return count / of if of else None


def hit_rate(report: Mapping[str, Any]) -> float | None:
    """Of all tiers together; None before the first lookup."""
    shares = [share for share in report["hit_rate"].values() if share is not None]
    return min(1.0, sum(shares)) if shares else None


def uptime(report: Mapping[str, Any]) -> str:
    return shown_age(report["uptime_s"])


def shown_seconds(seconds: float) -> str:
    """A time of computing: 0.42 s, 12.3 s, 4,321 s."""
    digits = 2 if abs(seconds) < 10 else 1 if abs(seconds) < 100 else 0
    return f"{seconds:,.{digits}f} s"


def saved(report: Mapping[str, Any]) -> str:
    """The tokens, and the seconds of prefill as far as they are known."""
    tokens, untimed = report["tokens_saved"], report["tokens_saved_untimed"]
    seconds = report["prefill_s_saved"]
    if not tokens:
        return "nothing yet: no hit has been loaded"
    text = f"{tokens:,} tokens not computed"
    if seconds is None:
        return f"{text}, seconds unknown: no engine has measured its prefill yet"
    text += f", {shown_seconds(seconds)} of prefill"
    return f"{text} (unknown for {untimed:,} of the tokens)" if untimed else text


def packed(counters: Mapping[str, float], kind: TierKind = REDIS) -> tuple[float, float] | None:
    """Bytes written to a tier as they lie there, and what they were; None: they were not packed.

    counters: of a document, or what they have grown by.
    """
    # An earlier agent does not say what they were.
    stored, plain = (counters.get(kind.counter(w), 0) for w in ("stored_bytes", "plain_bytes"))
    return (stored, plain) if stored < plain else None


def saved_of_redis(counters: Mapping[str, float]) -> str:
    """Empty if nothing was packed."""
    if (found := packed(counters)) is None:
        return ""
    stored, plain = map(shown_bytes, found)
    return f"saved {percent(1 - found[0] / found[1])} of Redis: {stored} stored of {plain}"


def not_compared(every: int, counters: Mapping[str, float]) -> str:
    """Why no canary has compared anything although there were hits; empty if one has.

    every: of how many hits one is to be a canary; 0: of none.
    """
    hits, local = counters.get("loaded_hits", 0), counters.get("local_hits", 0)
    if not (every and hits) or counters["compared_chunks"]:
        return ""
    which = "all of them" if hits == local else f"{local:,} of them"
    return (
        f"none was compared: {hits:,} hits, {which} behind a prefix that vLLM had itself, where "
        "nothing can be compared"
    )


def used(tier: Mapping[str, Any]) -> str:
    """How full a tier is, or where it is if it does not know. tier: of ``tiers``."""
    if tier["limit_bytes"] is None:
        return str(tier["where"])
    return f"{shown_bytes(tier['used_bytes'])} of {shown_bytes(tier['limit_bytes'])}"


def tiers_of(report: Mapping[str, Any]) -> Iterator[tuple[TierKind, Mapping[str, Any]]]:
    """Those behind the host pool, in the order they are asked, with their part of the document."""
    kinds = {kind.name: kind for kind in KINDS}
    return ((kinds[name], tier) for name, tier in report["tiers"].items() if name in kinds)


def load_rate(tier: Mapping[str, Any]) -> str:
    """tier: of ``loads.tiers``."""
    rate = tier["bytes_per_s"]
    text = f"{rate / 1e6:,.0f} MB/s" if rate else "not measured yet"
    return f"{text} (slower than computing)" if tier["is_slow"] else text


def failing(tier: Mapping[str, Any]) -> str:
    """What operations of a tier that is up fail with, how often and when; or why some will.

    Empty if they work.

    tier: of ``tiers``.
    """
    error = tier.get("last_error")
    if not tier["up"]:
        return ""
    if error is None:
        return str(tier["reason"])
    times = f"{error['count']:,} times, last " if error["count"] > 1 else ""
    return f"{error['text']} ({times}{shown_age(error['seconds_ago'])} ago)"


def sharing(engines: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> str:
    """With whom engines share. engines: of ``sharing``; known: all of it."""
    layout, count = engines["layouts"][0], len(engines["engines"])
    text = f"{engines['model']}, layout {layout[:_LAYOUT_DIGITS]}"
    if (others := len(engines["layouts"]) - 1) > 0:
        text += f" and {others} more"
    if engines["shares"] > 1:
        text += f", in {engines['shares']} shares"
    first = next(each for each in known if each["model"] == engines["model"])
    if first is not engines:
        from_whom = first["layouts"][0][:_LAYOUT_DIGITS]
        what = ", ".join(engines["apart"][:_MOST_PAIRS]) or "their groups of layers"
        more = ", ..." if len(engines["apart"]) > _MOST_PAIRS else ""
        text += f": does not share with {from_whom} ({what}{more})"
    return f"{text}; {count} engines share" if count > 1 else text


def troubles(report: Mapping[str, Any]) -> list[str]:
    """What is wrong beside tiers that are down or fail."""
    found = [
        f"other KV was cached than is computed: layout {each['layout'][:16]}"
        + (f" in epoch {each['epoch']}" if each["epoch"] else "")
        + f" is not loaded, {each['agreed']} agreed since"
        for each in report["canaries"]["distrusted"]
    ]
    if removals := report["queues"]["removals"]:
        found.append(f"{removals:,} wrong chunks could not be removed yet")
    if why := report["pool"]["lock_failure"]:
        found.append(f"not all of the host pool is locked for GPUs: {why}")
    return found


def reasons(report: Mapping[str, Any], kind: str) -> dict[str, int]:
    found = {
        name.removeprefix(kind): n
        for name, n in report["counters"].items()
        if name.startswith(kind) and n
    }
    return dict(sorted(found.items(), key=lambda each: -each[1]))

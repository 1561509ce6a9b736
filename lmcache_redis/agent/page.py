"""The page at `/` of `--metrics`: one look at an agent, in HTML. Pure.

It needs no script: it is made anew at each request, and the browser asks again every few seconds.
All text is escaped, since names of models and requests are anyone's. The headers let the page load
nothing from anywhere.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from typing import Any, Final

from lmcache_redis.admin.names import shown_age, shown_bytes
from lmcache_redis.agent import words
from lmcache_redis.agent.page_style import STYLE
from lmcache_redis.agent.sessions import PastRequest
from lmcache_redis.metrics import COUNTERS

REFRESH_S: Final = 5
_STYLE_HASH = b64encode(sha256(STYLE.encode()).digest()).decode()
HEADERS: Final = (
    ("Content-Type", "text/html; charset=utf-8"),
    (
        "Content-Security-Policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_TIER_NAMES: Final = {"host": "host pool", "disk": "disk", "redis": "Redis"}
_OF_NUMBERS: Final = frozenset(
    ("chunks", "chunks hit", "hit rate", "lookups", "prefill saved", "read", "tokens not computed",
     "written")
)  # fmt: skip
_MOST_ROWS = 20
_LAYOUT_DIGITS = 16


class Html(str):
    """A string that is HTML. Any other in a table is text, which is escaped."""

    __slots__ = ()


def page(report: Mapping[str, Any], misses: Sequence[PastRequest], now_s: float) -> str:
    """report: a STATUS document. misses: the last ones, the newest first. now_s: `time.time()`."""
    at = time.strftime("%H:%M:%S", time.gmtime(now_s))
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{REFRESH_S}">
<link rel="icon" href="data:,">
<title>lmcache-redis {words.percent(words.hit_rate(report))}</title>
<style>{STYLE}</style>
</head>
<body>
<header><h1>lmcache-redis</h1>{"".join(_pills(report))}
<p class="soft about">version {escape(report["version"])}, process {report["pid"]}, up for
{words.uptime(report)}, at {_code(report["endpoint"])}.
As of {at} UTC; it reloads every {REFRESH_S} seconds.</p></header>
<div class="grid">{"".join(_cards(report))}</div>
<section><h2>Where chunks came from</h2>{_sources(report)}</section>
<section><h2>Tiers</h2>{_tiers(report)}</section>
<section><h2>Engines</h2>{_engines(report)}</section>
<section><h2>Models</h2>{_models(report)}</section>
<div class="grid wide">
<section><h2>Chunks not loaded</h2>{_reasons(report, "miss_")}</section>
<section><h2>Chunks not stored</h2>{_reasons(report, "drop_")}</section>
</div>
<section><h2>Last misses</h2>{_misses(misses, now_s)}</section>
<footer>Counted since the start of this agent. <a href="/metrics">/metrics</a> for Prometheus,
<a href="/healthz">/healthz</a> for probes.</footer>
</body>
</html>
"""


def _code(text: str, css: str = "") -> Html:
    return Html(f'<code class="{css}">{escape(text)}</code>')


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> str:
    """empty: what is said without rows."""
    found = [*rows]
    if not found:
        return f'<p class="soft">{escape(empty)}</p>'
    css = ["n" if title in _OF_NUMBERS else "" for title in titles]

    def row(tag: str, cells: Sequence[str]) -> str:
        texts = (each if isinstance(each, Html) else escape(each) for each in cells)
        made = (f'<{tag} class="{c}">{text}</{tag}>' for c, text in zip(css, texts, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row("td", cells) for cells in found[:_MOST_ROWS])
    left = len(found) - _MOST_ROWS
    more = f'<p class="soft">and {left} more</p>' if left > 0 else ""
    return f"<table><thead>{row('th', titles)}</thead><tbody>{body}</tbody></table>{more}"


def _bar(css: str, parts: Iterable[tuple[str, float]], label: str) -> str:
    """Parts of a whole: the class and the share of each, from 0 to 1."""
    rects, begin = '<rect class="computed" width="1" height="1"/>', 0.0
    for name, share in parts:
        rects += f'<rect class="{name}" x="{begin:.4f}" width="{share:.4f}" height="1"/>'
        begin += share
    return (
        f'<svg class="bar {css}" viewBox="0 0 1 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{rects}</svg>'
    )


def _pills(report: Mapping[str, Any]) -> Iterator[str]:
    redis, disk, distrusted = report["redis"], report["disk"], report["canaries"]["distrusted"]
    bad = []
    if redis["up"]:
        yield '<span class="pill good">Redis is up</span>'
    else:
        bad.append(f"Redis is down: {redis['reason']}")
    if disk and not disk["up"]:
        bad.append(f"disk is down: {disk['reason']}")
    if distrusted:
        count = len(distrusted)
        bad.append(f"other KV was cached than is computed: {count} layouts are not loaded")
    for text in bad:
        yield f'<span class="pill bad">{escape(text)}</span>'


def _cards(report: Mapping[str, Any]) -> Iterator[str]:
    counters, seconds = report["counters"], report["prefill_s_saved"]
    ready = sum(each["ready"] for each in report["engines"])
    less = "of computing, less the wait for loads"
    if seconds is None:
        less = "no engine has measured its prefill yet"
    elif untimed := report["tokens_saved_untimed"]:
        less += f"; unknown for {untimed:,} tokens"
    for name, value, about in (
        (
            "Hit rate", words.percent(words.hit_rate(report)),
            f"of {counters['lookup_chunks']:,} chunks asked for",
        ),
        ("Tokens not computed", f"{report['tokens_saved']:,}", "loaded from the cache instead"),
        ("Prefill saved", "unknown" if seconds is None else words.shown_seconds(seconds), less),
        (
            "Workers ready", f"{ready} of {len(report['engines'])}",
            f"lookups so far: {counters['lookups']:,}",
        ),
    ):  # fmt: skip
        yield f'<section><p class="soft">{name}</p><p class="number">{value}</p>'
        yield f'<p class="soft">{about}</p></section>'


def _sources(report: Mapping[str, Any]) -> str:
    """A bar of the tiers, and its legend."""
    if not report["counters"]["lookup_chunks"]:
        return '<p class="soft">no engine has asked for a prompt yet</p>'
    here = [tier for tier in words.TIERS if tier != "disk" or report["disk"]]
    shares = [(tier, float(report["hit_rate"][tier])) for tier in here]
    missed = max(0.0, 1.0 - sum(share for _, share in shares))
    names = {**_TIER_NAMES, "computed": "not cached, or faster to compute"}
    legend = [(n, names[n], words.percent(s)) for n, s in (*shares, ("computed", missed))]
    items = "".join(
        f'<li><svg class="key" viewBox="0 0 1 1"><rect class="{css}" width="1" height="1"/></svg>'
        f"{name} <b>{share}</b></li>"
        for css, name, share in legend
    )
    bar = _bar("", shares, ", ".join(f"{name} {share}" for _, name, share in legend))
    return f'{bar}<ul class="legend">{items}</ul>'


def _tiers(report: Mapping[str, Any]) -> str:
    pool, disk, counters = report["pool"], report["disk"], report["counters"]
    size = pool["slot_bytes"]
    speeds = {tier: words.load_rate(loads) for tier, loads in report["loads"]["tiers"].items()}
    used = _used("host", pool["used_slots"] * size, pool["slots"] * size)
    tiers = [("host", used, "gathered_bytes", "retrieved_bytes")]
    if disk:
        used = _used("disk", disk["used_bytes"], disk["limit_bytes"])
        tiers.append(("disk", used, "disk_stored_bytes", "disk_loaded_bytes"))
    tiers.append(("redis", _code(report["redis"]["server"]), "stored_bytes", "loaded_bytes"))
    rows = (
        (
            _TIER_NAMES[tier],
            used,
            speeds.get(tier, "memory"),
            f"{counters[f'hit_chunks_{tier}']:,}",
            shown_bytes(counters[written]),
            shown_bytes(counters[read]),
        )
        for tier, used, written, read in tiers
    )
    return _table(("tier", "used", "speed of loads", "chunks hit", "written", "read"), rows, "")


def _used(tier: str, used: int, whole: int) -> Html:
    text = f"{shown_bytes(used)} of {shown_bytes(whole)}"
    bar = _bar("small", [(tier, min(1.0, used / whole))], text)
    return Html(f"<div>{text}{bar}</div>")


def _engines(report: Mapping[str, Any]) -> str:
    ready = Html('<span class="good">ready</span>')
    rows = (
        (
            each["model"],
            f"{each['worker_id']} of {each['world_size']}",
            each["device"],
            f"{each['chunk_tokens']:,} tokens, {shown_bytes(each['chunk_bytes'])}",
            _code(each["layout"][:_LAYOUT_DIGITS]),
            ready if each["ready"] else "waits for its scheduler or other ranks",
        )
        for each in report["engines"]
    )
    none = (
        "none is connected. Start vLLM with --kv-transfer-config "
        '\'{"kv_connector":"LMCacheRedisConnector","kv_role":"kv_both"}\' on this node.'
    )
    return _table(("model", "worker", "device", "chunk", "layout", "state"), rows, none)


def _models(report: Mapping[str, Any]) -> str:
    rows = (
        (
            name,
            words.percent(words.rate_of(use["hit_tokens"], use["lookup_tokens"])),
            f"{use['lookups']:,}",
            f"{use['saved_tokens']:,}",
            words.shown_seconds(use["saved_prefill_s"])
            if use["saved_tokens"] > use["saved_untimed_tokens"] or not use["saved_tokens"]
            else "unknown",
        )
        for name, use in sorted(
            report["models"].items(), key=lambda each: -each[1]["lookup_tokens"]
        )
    )
    titles = ("model", "hit rate", "lookups", "tokens not computed", "prefill saved")
    return _table(titles, rows, "none has asked for a prompt yet")


def _reasons(report: Mapping[str, Any], kind: str) -> str:
    rows = (
        (_code(name), f"{count:,}", COUNTERS.get(kind + name, ""))
        for name, count in words.reasons(report, kind).items()
    )
    return _table(("reason", "chunks", "what it means"), rows, "none")


def _misses(misses: Sequence[PastRequest], now_s: float) -> str:
    rows = (
        (
            f"{shown_age(max(0.0, now_s - past.at_s))} ago",
            _code(each.request_id, "long"),
            past.model,
            f"{past.found_chunks:,} of {past.asked_chunks:,}",
            COUNTERS.get(f"miss_{miss.reason}", ", ".join(miss.because) or miss.reason),
        )
        for each in misses
        if (past := each.lookup) is not None and (miss := past.first_miss) is not None
    )
    table = _table(("when", "request", "model", "chunks hit", "why"), rows, "none yet")
    hint = '<p class="soft hint"><code>lmcache-redis why REQUEST</code> says more of each.</p>'
    return table + hint if misses else table

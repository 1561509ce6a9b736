"""The page at `/` of `--metrics`: one look at an agent, in HTML. Pure.

It needs no script: it is made anew at each request, and the browser asks again every few seconds.
`html` escapes all text, since names of models and requests are anyone's. The headers let the page
load nothing from anywhere.
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
from lmcache_redis.agent.history import PastRequest
from lmcache_redis.agent.page_style import STYLE
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
_PAGE: Final = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="{refresh_s}">
<link rel="icon" href="data:,">
<title>lmcache-redis {hit_rate}</title>
<style>{style}</style>
</head>
<body>
<header><h1>lmcache-redis</h1>{pills}
<p class="soft about">version {version}, process {pid}, up for {uptime}, at <code>{endpoint}</code>.
As of {at} UTC; it reloads every {refresh_s} seconds.</p></header>
<div class="grid">{cards}</div>
<section><h2>Where chunks came from</h2>{sources}</section>
<section><h2>Tiers</h2>{tiers}</section>
<section><h2>Engines</h2>{engines}</section>
<section><h2>Models</h2>{models}</section>
<div class="grid wide">
<section><h2>Chunks not loaded</h2>{missed}</section>
<section><h2>Chunks not stored</h2>{dropped}</section>
</div>
<section><h2>Last misses</h2>{misses}</section>
<footer>Counted since the start of this agent. <a href="/metrics">/metrics</a> for Prometheus,
<a href="/healthz">/healthz</a> for probes.</footer>
</body>
</html>
"""
_TIER_NAMES: Final = {"host": "host pool", "disk": "disk", "redis": "Redis"}
_OF_NUMBERS: Final = frozenset(
    ("chunks", "chunks hit", "hit rate", "lookups", "prefill saved", "read", "tokens not computed",
     "written")
)  # fmt: skip
_MOST_ROWS = 20
_LAYOUT_DIGITS = 16


class Html(str):
    """A string that is HTML, made by `html`. Any other is text."""

    __slots__ = ()


def html(template: str, **values: object) -> Html:
    """The template with these values in its braces: HTML as it is, all else escaped."""
    escaped = {
        name: each if isinstance(each, Html) else escape(str(each)) for name, each in values.items()
    }
    return Html(template.format_map(escaped))


def _joined(parts: Iterable[Html]) -> Html:
    return Html("".join(parts))


def page(report: Mapping[str, Any], misses: Sequence[PastRequest], now_s: float) -> str:
    """report: a STATUS document. misses: the last ones, the newest first. now_s: `time.time()`."""
    return html(
        _PAGE,
        refresh_s=REFRESH_S,
        style=Html(STYLE),
        hit_rate=words.percent(words.hit_rate(report)),
        pills=_joined(_pills(report)),
        version=report["version"],
        pid=report["pid"],
        uptime=words.uptime(report),
        endpoint=report["endpoint"],
        at=time.strftime("%H:%M:%S", time.gmtime(now_s)),
        cards=_joined(_cards(report)),
        sources=_joined(_sources(report)),
        tiers=_tiers(report),
        engines=_engines(report),
        models=_models(report),
        missed=_reasons(report, "miss_"),
        dropped=_reasons(report, "drop_"),
        misses=_misses(misses, now_s),
    )


def _code(text: str, css: str = "") -> Html:
    return html('<code class="{css}">{text}</code>', css=css, text=text)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> Html:
    """empty: what is said without rows."""
    found = [*rows]
    if not found:
        return html('<p class="soft">{empty}</p>', empty=empty)
    css = ["n" if title in _OF_NUMBERS else "" for title in titles]

    def row(tag: str, cells: Sequence[str]) -> Html:
        cell = f'<{tag} class="{{css}}">{{text}}</{tag}>'
        made = (html(cell, css=each, text=text) for each, text in zip(css, cells, strict=True))
        return html("<tr>{cells}</tr>", cells=_joined(made))

    table = html(
        "<table><thead>{head}</thead><tbody>{body}</tbody></table>",
        head=row("th", titles),
        body=_joined(row("td", cells) for cells in found[:_MOST_ROWS]),
    )
    if (left := len(found) - _MOST_ROWS) > 0:
        table = html('{table}<p class="soft">and {left} more</p>', table=table, left=left)
    return table


def _bar(css: str, parts: Iterable[tuple[str, float]], label: str) -> Html:
    """Parts of a whole: the class and the share of each, from 0 to 1."""
    rects, begin = [html('<rect class="computed" width="1" height="1"/>')], 0.0
    for name, share in parts:
        rects.append(
            html(
                '<rect class="{name}" x="{x}" width="{width}" height="1"/>',
                name=name, x=f"{begin:.4f}", width=f"{share:.4f}",
            )
        )  # fmt: skip
        begin += share
    return html(
        '<svg class="bar {css}" viewBox="0 0 1 1" preserveAspectRatio="none" role="img" '
        'aria-label="{label}">{rects}</svg>',
        css=css, label=label, rects=_joined(rects),
    )  # fmt: skip


def _pills(report: Mapping[str, Any]) -> Iterator[Html]:
    redis, disk, distrusted = report["redis"], report["disk"], report["canaries"]["distrusted"]
    bad = '<span class="pill bad">{text}</span>'
    if redis["up"]:
        yield html('<span class="pill good">Redis is up</span>')
    else:
        yield html(bad, text=f"Redis is down: {redis['reason']}")
    if disk and not disk["up"]:
        yield html(bad, text=f"disk is down: {disk['reason']}")
    if distrusted:
        why = f"other KV was cached than is computed: {len(distrusted)} layouts are not loaded"
        yield html(bad, text=why)


def _cards(report: Mapping[str, Any]) -> Iterator[Html]:
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
        yield html(
            '<section><p class="soft">{name}</p><p class="number">{value}</p>'
            '<p class="soft">{about}</p></section>',
            name=name, value=value, about=about,
        )  # fmt: skip


def _sources(report: Mapping[str, Any]) -> Iterator[Html]:
    """A bar of the tiers, and its legend."""
    if not report["counters"]["lookup_chunks"]:
        yield html('<p class="soft">no engine has asked for a prompt yet</p>')
        return
    here = [tier for tier in words.TIERS if tier != "disk" or report["disk"]]
    shares = [(tier, float(report["hit_rate"][tier])) for tier in here]
    missed = max(0.0, 1.0 - sum(share for _, share in shares))
    names = {**_TIER_NAMES, "computed": "not cached, or faster to compute"}
    legend = [*shares, ("computed", missed)]
    yield _bar("", shares, ", ".join(f"{names[n]} {words.percent(s)}" for n, s in legend))
    items = (
        html(
            '<li><svg class="key" viewBox="0 0 1 1"><rect class="{css}" width="1" height="1"/>'
            "</svg>{name} <b>{share}</b></li>",
            css=name, name=names[name], share=words.percent(share),
        )
        for name, share in legend
    )  # fmt: skip
    yield html('<ul class="legend">{items}</ul>', items=_joined(items))


def _tiers(report: Mapping[str, Any]) -> Html:
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
    return html("<div>{text}{bar}</div>", text=text, bar=bar)


def _engines(report: Mapping[str, Any]) -> Html:
    ready = html('<span class="good">ready</span>')
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


def _models(report: Mapping[str, Any]) -> Html:
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


def _reasons(report: Mapping[str, Any], kind: str) -> Html:
    rows = (
        (_code(name), f"{count:,}", COUNTERS.get(kind + name, ""))
        for name, count in words.reasons(report, kind).items()
    )
    return _table(("reason", "chunks", "what it means"), rows, "none")


def _misses(misses: Sequence[PastRequest], now_s: float) -> Html:
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
    hint = (
        '{table}<p class="soft hint"><code>lmcache-redis why REQUEST</code> says more of each.</p>'
    )
    return html(hint, table=table) if misses else table

# SPDX-License-Identifier: Apache-2.0
"""The page at `/` of `--metrics`: one look at an agent, in HTML. Pure.

It needs no script: it is made anew at each request, and the browser asks again every few seconds.
All text is escaped, since names of models and requests are anyone's. The headers let the page load
nothing from anywhere.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from itertools import cycle
from typing import Any, Final

from lmcache_redis.agent.reports import words
from lmcache_redis.agent.reports.charts import charts
from lmcache_redis.agent.reports.history import Minute
from lmcache_redis.agent.sessions import PastRequest
from lmcache_redis.metrics import COUNTERS
from lmcache_redis.tenants import NONE, OTHER
from lmcache_redis.tier_kinds import HOST, KINDS, TierKind
from lmcache_redis.units import shown_age, shown_bytes

REFRESH_S: Final = 5
# For light and dark pages, in the order of `KINDS`; more kinds begin again.
_COLOURS: Final = (
    *(("#0f9d8a", "#25bfa9"), ("#d98a1f", "#eaa545"), ("#5b5bd6", "#8b8bf5")),
    *(("#b8467f", "#e583b4"), ("#3f7fc4", "#78b0ea"), ("#7c8a2b", "#b3c257")),
)
_COLOURED: Final = [*zip((kind.name for kind in KINDS), cycle(_COLOURS), strict=False)]
_LIGHT, _DARK = (
    " ".join(f"--{name}: {pair[number]};" for name, pair in _COLOURED) for number in (0, 1)
)
_FILLS: Final = " ".join(f".{name} {{ fill: var(--{name}); }}" for name, _ in _COLOURED)
_STYLE: Final = (
    """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #e3e6eb; --text: #1b2130; --soft: #626c80;
  @LIGHT@ --computed: #d5dae3;
  --good: #18794e; --good-back: #ddf3e4; --bad: #b3261e; --bad-back: #fbe4e2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #10131a; --card: #181c25; --line: #2a303c; --text: #e7eaf0; --soft: #97a1b4;
    @DARK@ --computed: #39404f;
    --good: #7ddba3; --good-back: #14301f; --bad: #ff9d94; --bad-back: #3d1815;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 24px 40px; max-width: 1120px; background: var(--page);
  color: var(--text); font: 14px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
header { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; }
h1 { font-size: 20px; margin: 0; }
h2 { font-size: 14px; margin: 0 0 10px; }
p { margin: 0; }
code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 12.5px; overflow-wrap: anywhere; }
code.word { white-space: nowrap; }
.soft { color: var(--soft); }
.pill { border-radius: 99px; padding: 2px 11px; font-weight: 600; font-size: 12.5px; }
.good { color: var(--good); } .pill.good { background: var(--good-back); }
.bad { color: var(--bad); } .pill.bad { background: var(--bad-back); }
.about { flex-basis: 100%; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px; margin-top: 16px; overflow-x: auto; }
.grid { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(230px, 100%), 1fr)); }
.wide { grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); }
.number { font-size: 30px; font-weight: 650; line-height: 1.25;
  font-variant-numeric: tabular-nums; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; } figcaption .soft { display: block; font-weight: 400; }
.chart { display: block; width: 100%; height: 84px; margin-top: 8px;
  border-bottom: 1px solid var(--line); }
.ends { display: flex; justify-content: space-between; font-size: 12.5px; }
.bar { display: block; width: 100%; height: 14px; border-radius: 7px; margin-bottom: 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; list-style: none; margin: 0; padding: 0; }
.key { width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
@FILLS@
.computed { fill: var(--computed); }
table { border-collapse: collapse; width: 100%; }
table + p { margin-top: 10px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 12.5px; }
th, td { padding: 6px 16px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; padding-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
@media (max-width: 700px) {
  body { padding: 20px 12px 32px; }
  thead { display: none; }
  tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  tr:last-child { border-bottom: 0; padding-bottom: 0; }
  td, td.n { display: grid; grid-template-columns: 104px minmax(0, 1fr); padding: 2px 0;
    border-bottom: 0; text-align: left; white-space: normal; }
  td::before { content: attr(data-title); color: var(--soft); font-size: 12.5px; }
}
footer { margin-top: 18px; color: var(--soft); font-size: 12.5px; }
""".replace("@LIGHT@", _LIGHT)
    .replace("@DARK@", _DARK)
    .replace("@FILLS@", _FILLS)
)
_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
# Of all that names what engines serve: no page of another origin may read it, nothing keeps it.
PRIVATE: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
HEADERS: Final = (
    ("Content-Type", "text/html; charset=utf-8"),
    (
        "Content-Security-Policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'",
    ),
    *PRIVATE,
)
_NONE_CONNECTED: Final = (
    "none is connected. Start vLLM with --kv-transfer-config "
    '\'{"kv_connector":"LMCacheRedisConnector","kv_role":"kv_both"}\' on this node.'
)
_LAYOUT_DIGITS = 16
_MOST_TENANTS = 20
_WHY: Final = "<code>lmcache-redis why REQUEST</code> says more of each."
_WHY_HIDDEN: Final = (
    "<code>lmcache-redis why --list</code> has their ids; this page too with "
    "<code>--expose-requests</code>."
)


class Html(str):
    """A string that is HTML. Any other in a table is text, which is escaped."""

    __slots__ = ()


def page(
    report: Mapping[str, Any],
    hour: Sequence[Minute],
    misses: Sequence[PastRequest],
    now_s: float,
    exposed: bool,
) -> str:
    """report: a STATUS document. hour: of `History.minutes`. misses: the last ones, newest first.

    now_s: `time.time()`. exposed: whether ids of requests are shown.
    """
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
<style>{_STYLE}</style>
</head>
<body>
<header><h1>lmcache-redis</h1>{"".join(_pills(report))}
<p class="soft about">version {escape(report["version"])}, process {report["pid"]}, up for
{words.uptime(report)}, at {_code(report["endpoint"])}.
As of {at} UTC; it reloads every {REFRESH_S} seconds.</p></header>
<div class="grid">{"".join(_cards(report))}</div>
<section><h2>The last hour</h2><div class="grid hour">{charts(hour)}</div></section>
<section><h2>Where chunks came from</h2>{_sources(report)}</section>
<section><h2>Tiers</h2>{_tiers(report)}</section>
<section><h2>Engines</h2>{_engines(report)}</section>
<section><h2>Models</h2>{_models(report)}</section>{_tenants(report)}
<div class="grid wide">
<section><h2>Chunks not loaded</h2>{_reasons(report, "miss_")}</section>
<section><h2>Chunks not stored</h2>{_reasons(report, "drop_")}</section>
</div>
<section><h2>Last misses</h2>{_misses(misses, now_s, exposed)}
<p class="soft">{_WHY if exposed else _WHY_HIDDEN}</p></section>
<footer>Counted since the start of this agent. <a href="/metrics">/metrics</a> for Prometheus,
<a href="/healthz">/healthz</a> for probes,
<a href="/status.json">/status.json</a> for programs.</footer>
</body>
</html>
"""


def _code(text: str) -> Html:
    return Html(f"<code>{escape(text)}</code>")


def _word(text: str) -> Html:
    """A name that is not broken."""
    return Html(f'<code class="word">{escape(text)}</code>')


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> str:
    """titles: those of columns of numbers end with a space. empty: what is said without rows."""
    found = [*rows]
    if not found:
        return f'<p class="soft">{escape(empty)}</p>'

    def row(tag: str, cells: Sequence[str]) -> str:
        made = "<tr>"
        for title, cell in zip(titles, cells, strict=True):
            text = cell if isinstance(cell, Html) else escape(cell)
            made += f"<{tag}"
            made += ' class="n"' if title.endswith(" ") else ""
            # Where there is no room for columns, each cell says what it is.
            made += f' data-title="{title.strip()}"' if tag == "td" else ""
            made += f"><span>{text}</span></{tag}>"
        return made + "</tr>"

    body = "".join(row("td", cells) for cells in found)
    return f"<table><thead>{row('th', titles)}</thead><tbody>{body}</tbody></table>"


def _pills(report: Mapping[str, Any]) -> Iterator[str]:
    distrusted = report["canaries"]["distrusted"]
    bad = []
    for kind, tier in words.tiers_of(report):
        if not tier["up"]:
            bad.append(f"{kind.title} is down: {tier['reason']}")
        elif failing := words.failing(tier):
            bad.append(f"{kind.title} is up, and fails: {failing}")
        else:
            yield f'<span class="pill good">{kind.title} is up</span>'
    if distrusted:
        count = len(distrusted)
        bad.append(f"other KV was cached than is computed: {count} layouts are not loaded")
    for text in bad:
        yield f'<span class="pill bad">{escape(text)}</span>'


def _cards(report: Mapping[str, Any]) -> Iterator[str]:
    counters, seconds = report["counters"], report["prefill_s_saved"]
    ready = sum(each["ready"] for each in report["engines"])
    saved, less = "unknown", "no engine has measured its prefill yet"
    if seconds is not None:
        saved, less = words.shown_seconds(seconds), "of computing, less the wait for loads"
        if untimed := report["tokens_saved_untimed"]:
            less += f"; unknown for {untimed:,} tokens"
    hit_rate = words.percent(words.hit_rate(report))
    for name, value, about in (
        ("Hit rate", hit_rate, f"of {counters['lookup_chunks']:,} chunks asked for"),
        ("Tokens not computed", f"{report['tokens_saved']:,}", "loaded from the cache instead"),
        ("Prefill saved", saved, less),
        (
            "Workers ready",
            f"{ready} of {len(report['engines'])}",
            f"lookups so far: {counters['lookups']:,}",
        ),
    ):
        yield f'<section><p class="soft">{name}</p><p class="number">{value}</p>'
        yield f'<p class="soft">{about}</p></section>'


def _sources(report: Mapping[str, Any]) -> str:
    if not report["counters"]["lookup_chunks"]:
        return '<p class="soft">no engine has asked for a prompt yet</p>'
    found = (HOST, *(kind for kind, _ in words.tiers_of(report)))
    names = {kind.name: kind.title for kind in found}
    names["computed"] = "not cached, or faster to compute"
    shares = {kind.name: float(report["hit_rate"][kind.name]) for kind in found}
    shares["computed"] = max(0.0, 1.0 - sum(shares.values()))
    rects = items = ""
    begin = 0.0
    for tier, share in shares.items():
        rects += f'<rect class="{tier}" x="{begin:.4f}" width="{share:.4f}" height="1"/>'
        items += f'<li><svg class="key"><rect class="{tier}" width="10" height="10"/></svg>'
        items += f"{names[tier]} <b>{words.percent(share)}</b></li>"
        begin += share
    bar = f'<svg class="bar" viewBox="0 0 1 1" preserveAspectRatio="none">{rects}</svg>'
    return f'{bar}<ul class="legend">{items}</ul>'


def _tiers(report: Mapping[str, Any]) -> str:
    pool, counters = report["pool"], report["counters"]
    size = pool["slot_bytes"]
    speeds = {tier: words.load_rate(loads) for tier, loads in report["loads"]["tiers"].items()}
    used = f"{shown_bytes(pool['used_slots'] * size)} of {shown_bytes(pool['slots'] * size)}"
    tiers: list[tuple[TierKind, str, str, str]]
    tiers = [(HOST, used, shown_bytes(counters["gathered_bytes"]), "retrieved_bytes")]
    for kind, tier in words.tiers_of(report):
        used = _code(words.used(tier)) if tier["limit_bytes"] is None else words.used(tier)
        written = shown_bytes(counters[kind.counter("stored_bytes")])
        if packed := words.packed(counters, kind):
            written += f" of {shown_bytes(packed[1])}"
        tiers.append((kind, used, written, kind.counter("loaded_bytes")))
    rows = (
        (
            kind.title,
            used,
            speeds.get(kind.name, "memory"),
            f"{counters[kind.hits]:,}",
            written,
            shown_bytes(counters[read]),
        )
        for kind, used, written, read in tiers
    )
    titles = ("tier", "used", "speed of loads", "chunks hit ", "written ", "read ")
    saved = words.saved_of_redis(counters)
    return _table(titles, rows, "") + (f'<p class="soft">{saved}.</p>' if saved else "")


def _engines(report: Mapping[str, Any]) -> str:
    ready = Html('<span class="good">ready</span>')
    rows = (
        (
            each["model"],
            f"{each['worker_id']} of {each['world_size']}",
            each["device"],
            f"{each['chunk_tokens']:,} tokens, {shown_bytes(each['chunk_bytes'])}",
            _word(each["layout"][:_LAYOUT_DIGITS]),
            ready if each["ready"] else "waits for its scheduler or other ranks",
        )
        for each in report["engines"]
    )
    titles = ("model", "worker", "device", "chunk", "layout", "state")
    return _table(titles, rows, _NONE_CONNECTED)


def _models(report: Mapping[str, Any]) -> str:
    models = sorted(report["models"].items(), key=lambda each: -each[1]["lookup_tokens"])
    rows = (
        (
            name,
            words.percent(words.rate_of(use["hit_tokens"], use["lookup_tokens"])),
            f"{use['lookups']:,}",
            f"{use['saved_tokens']:,}",
            _saved(use),
        )
        for name, use in models
    )
    titles = ("model", "hit rate ", "lookups ", "tokens not computed ", "prefill saved ")
    return _table(titles, rows, "none has asked for a prompt yet")


def _saved(use: Mapping[str, Any]) -> str:
    if use["saved_tokens"] > use["saved_untimed_tokens"] or not use["saved_tokens"]:
        return words.shown_seconds(use["saved_prefill_s"])
    return "unknown"


def _tenants(report: Mapping[str, Any]) -> str:
    """The largest, and all others in one row; nothing while no request had one."""
    tenants = dict(report.get("tenants", {}))
    if not tenants.keys() - {NONE}:
        return ""
    others = [each for each in tenants if each != OTHER][_MOST_TENANTS:]
    others += [OTHER] if OTHER in tenants else []
    sums: Counter[str] = Counter()
    for name in others:
        use = tenants.pop(name)
        sums.update({field: value or 0 for field, value in use.items()})
    if others:
        tenants[OTHER] = sums
    rows = (
        (
            name,
            words.percent(words.rate_of(use["hit_tokens"], use["lookup_tokens"])),
            f"{use['lookup_tokens']:,}",
            f"{use['saved_tokens']:,}",
            _saved(use),
            shown_bytes(use["retrieved_bytes"]),
            shown_bytes(use["stored_bytes"]),
        )
        for name, use in tenants.items()
    )
    titles = (
        "tenant", "hit rate ", "tokens asked for ", "not computed ", "prefill saved ", "loaded ",
        "written to Redis ",
    )  # fmt: skip
    return f"<section><h2>Tenants</h2>{_table(titles, rows, '')}</section>"


def _reasons(report: Mapping[str, Any], kind: str) -> str:
    rows = (
        (_word(name), f"{count:,}", COUNTERS.get(kind + name, ""))
        for name, count in words.reasons(report, kind).items()
    )
    return _table(("reason", "chunks ", "what it means"), rows, "none")


def _misses(misses: Sequence[PastRequest], now_s: float, exposed: bool) -> str:
    rows = (
        (
            f"{shown_age(max(0.0, now_s - past.at_s))} ago",
            *([_code(each.request_id)] if exposed else []),
            past.model,
            f"{past.found_chunks:,} of {past.asked_chunks:,}",
            COUNTERS.get(f"miss_{miss.reason}", ", ".join(miss.because) or miss.reason),
        )
        for each in misses
        if (past := each.lookup) is not None and (miss := past.first_miss) is not None
    )
    titles = ("when", *(["request"] if exposed else []), "model", "chunks hit ", "why")
    return _table(titles, rows, "none yet")

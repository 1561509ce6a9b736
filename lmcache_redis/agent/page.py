"""The page at `/` of `--metrics`: one look at an agent, in HTML. Pure.

It needs no script: it is made anew at each request, and the browser asks again every few seconds.
ElementTree escapes all text, since names of models and requests are anyone's. The headers let the
page load nothing from anywhere.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final
from xml.etree.ElementTree import Element, SubElement, tostring

from lmcache_redis.admin.names import shown_age, shown_bytes
from lmcache_redis.agent import words
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
_TIER_NAMES: Final = {"host": "host pool", "disk": "disk", "redis": "Redis"}
_MOST_ROWS = 20
_LAYOUT_DIGITS = 16

_Cell = str | Element


@dataclass(frozen=True)
class Miss:
    """A lookup that found less than it asked for. at_s: `time.time()`. reason: in words."""

    at_s: float
    request_id: str
    model: str
    asked_chunks: int
    hit_chunks: int
    reason: str


def page(report: Mapping[str, Any], misses: Sequence[Miss], now_s: float) -> str:
    """report: a STATUS document. misses: the last ones, the newest first. now_s: `time.time()`."""
    root = Element("html", lang="en")
    head = SubElement(root, "head")
    SubElement(head, "meta", charset="utf-8")
    SubElement(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    SubElement(head, "meta", {"http-equiv": "refresh", "content": str(REFRESH_S)})
    SubElement(head, "link", rel="icon", href="data:,")
    SubElement(head, "title").text = f"lmcache-redis {words.percent(words.hit_rate(report))}"
    SubElement(head, "style").text = STYLE
    body = SubElement(root, "body")
    body.extend(
        [
            _header(report, now_s),
            _numbers(report),
            _section("Where chunks came from", *_sources(report)),
            _section("Tiers", _tiers(report)),
            _section("Engines", _engines(report)),
            _section("Models", _models(report)),
            _element(
                "div", "grid wide",
                _section("Chunks not loaded", _reasons(report, "miss_")),
                _section("Chunks not stored", _reasons(report, "drop_")),
            ),
            _section("Last misses", _misses(misses, now_s), *_hint(misses)),
            _footer(),
        ]
    )  # fmt: skip
    return f"<!DOCTYPE html>\n{tostring(root, encoding='unicode', method='html')}\n"


def _element(tag: str, css: str = "", *children: _Cell, **attributes: str) -> Element:
    """Strings among the children are text."""
    found = Element(tag, ({"class": css} if css else {}) | attributes)
    for child in children:
        if isinstance(child, Element):
            found.append(child)
        elif len(found):
            found[-1].tail = (found[-1].tail or "") + child
        else:
            found.text = (found.text or "") + child
    return found


def _section(title: str, *children: Element) -> Element:
    return _element("section", "", _element("h2", "", title), *children)


def _table(titles: Mapping[str, bool], rows: Iterable[Sequence[_Cell]], empty: str) -> Element:
    """titles: of the columns, and whether they hold numbers. empty: what is said without rows."""
    found = [*rows]
    if not found:
        return _element("p", "soft", empty)
    css = ["n" if is_number else "" for is_number in titles.values()]
    heads = [_element("th", each, title) for title, each in zip(titles, css, strict=True)]
    table = _element("table", "", _element("thead", "", _element("tr", "", *heads)))
    body = SubElement(table, "tbody")
    for row in found[:_MOST_ROWS]:
        cells = [_element("td", each, cell) for cell, each in zip(row, css, strict=True)]
        body.append(_element("tr", "", *cells))
    if (left := len(found) - _MOST_ROWS) > 0:
        table = _element("div", "", table, _element("p", "soft", f"and {left} more"))
    return table


def _bar(css: str, parts: Iterable[tuple[str, float]], label: str) -> Element:
    """Parts of a whole: the class and the share of each, from 0 to 1."""
    svg = _element(
        "svg", f"bar {css}".strip(), viewBox="0 0 1 1", preserveAspectRatio="none", role="img",
        **{"aria-label": label},
    )  # fmt: skip
    svg.append(_element("rect", "computed", width="1", height="1"))
    begin = 0.0
    for name, share in parts:
        attributes = {"x": f"{begin:.4f}", "width": f"{share:.4f}", "height": "1"}
        svg.append(_element("rect", name, **attributes))
        begin += share
    return svg


def _header(report: Mapping[str, Any], now_s: float) -> Element:
    redis = report["redis"]
    up = "Redis is up" if redis["up"] else f"Redis is down: {redis['reason']}"
    pills = [_element("span", f"pill {'good' if redis['up'] else 'bad'}", up)]
    if report["disk"] and not report["disk"]["up"]:
        pills.append(_element("span", "pill bad", f"disk is down: {report['disk']['reason']}"))
    if distrusted := report["canaries"]["distrusted"]:
        why = f"other KV was cached than is computed: {len(distrusted)} layouts are not loaded"
        pills.append(_element("span", "pill bad", why))
    at = time.strftime("%H:%M:%S UTC", time.gmtime(now_s))
    return _element(
        "header", "",
        _element("h1", "", "lmcache-redis"), *pills,
        _element(
            "p", "soft about",
            f"version {report['version']}, process {report['pid']}, up for "
            f"{words.uptime(report)}, at ", _element("code", "", report["endpoint"]),
            f". As of {at}; it reloads every {REFRESH_S} seconds.",
        ),
    )  # fmt: skip


def _numbers(report: Mapping[str, Any]) -> Element:
    counters, tokens = report["counters"], report["tokens_saved"]
    seconds = report["prefill_s_saved"]
    ready = sum(each["ready"] for each in report["engines"])
    known = "unknown" if seconds is None else words.shown_seconds(seconds)
    untimed = report["tokens_saved_untimed"]
    less = "of computing, less the wait for loads"
    if seconds is None:
        less = "no engine has measured its prefill yet"
    elif untimed:
        less += f"; unknown for {untimed:,} tokens"
    cards = (
        (
            "Hit rate", words.percent(words.hit_rate(report)),
            f"of {counters['lookup_chunks']:,} chunks asked for",
        ),
        ("Tokens not computed", f"{tokens:,}", "loaded from the cache instead"),
        ("Prefill saved", known, less),
        (
            "Workers ready", f"{ready} of {len(report['engines'])}",
            f"lookups so far: {counters['lookups']:,}",
        ),
    )  # fmt: skip
    return _element(
        "div", "grid",
        *(
            _element(
                "section", "",
                _element("p", "soft", name), _element("p", "number", value),
                _element("p", "soft", about),
            )
            for name, value, about in cards
        ),
    )  # fmt: skip


def _sources(report: Mapping[str, Any]) -> Iterator[Element]:
    """A bar of the tiers, and its legend."""
    rates = report["hit_rate"]
    asked = report["counters"]["lookup_chunks"]
    if not asked:
        yield _element("p", "soft", "no engine has asked for a prompt yet")
        return
    here = [tier for tier in words.TIERS if tier != "disk" or report["disk"]]
    shares = [(tier, float(rates[tier])) for tier in here]
    missed = max(0.0, 1.0 - sum(share for _, share in shares))
    names = {**_TIER_NAMES, "computed": "not cached, or faster to compute"}
    legend = [*shares, ("computed", missed)]
    yield _bar("", shares, ", ".join(f"{names[n]} {words.percent(s)}" for n, s in legend))
    yield _element("ul", "legend", *(_legend(name, names[name], share) for name, share in legend))


def _legend(css: str, name: str, share: float) -> Element:
    key = _element("svg", "key", viewBox="0 0 1 1")
    key.append(_element("rect", css, width="1", height="1"))
    return _element("li", "", key, f"{name} ", _element("b", "", words.percent(share)))


def _tiers(report: Mapping[str, Any]) -> Element:
    pool, disk, counters = report["pool"], report["disk"], report["counters"]
    loads = report["loads"]["tiers"]
    size = pool["slot_bytes"]
    rows: list[Sequence[_Cell]] = [
        (
            "host pool",
            _used("host", pool["used_slots"] * size, pool["slots"] * size),
            "memory", f"{counters['hit_chunks_host']:,}",
            shown_bytes(counters["gathered_bytes"]), shown_bytes(counters["retrieved_bytes"]),
        )
    ]  # fmt: skip
    if disk:
        rows.append(
            (
                "disk", _used("disk", disk["used_bytes"], disk["limit_bytes"]),
                words.load_rate(loads["disk"]), f"{counters['hit_chunks_disk']:,}",
                shown_bytes(counters["disk_stored_bytes"]),
                shown_bytes(counters["disk_loaded_bytes"]),
            )
        )  # fmt: skip
    rows.append(
        (
            "Redis", _element("code", "", report["redis"]["server"]),
            words.load_rate(loads["redis"]), f"{counters['hit_chunks_redis']:,}",
            shown_bytes(counters["stored_bytes"]), shown_bytes(counters["loaded_bytes"]),
        )
    )  # fmt: skip
    columns = {
        "tier": False, "used": False, "speed of loads": False, "chunks hit": True, "written": True,
        "read": True,
    }  # fmt: skip
    return _table(columns, rows, "")


def _used(tier: str, used: int, whole: int) -> Element:
    text = f"{shown_bytes(used)} of {shown_bytes(whole)}"
    return _element("div", "", text, _bar("small", [(tier, min(1.0, used / whole))], text))


def _engines(report: Mapping[str, Any]) -> Element:
    columns = {
        "model": False, "worker": False, "device": False, "chunk": False, "layout": False,
        "state": False,
    }  # fmt: skip
    rows = [
        (
            each["model"],
            f"{each['worker_id']} of {each['world_size']}",
            each["device"],
            f"{each['chunk_tokens']:,} tokens, {shown_bytes(each['chunk_bytes'])}",
            _element("code", "", each["layout"][:_LAYOUT_DIGITS]),
            _element("span", "good", "ready")
            if each["ready"]
            else "waits for its scheduler or other ranks",
        )
        for each in report["engines"]
    ]
    none = (
        "none is connected. Start vLLM with --kv-transfer-config "
        '\'{"kv_connector":"LMCacheRedisConnector","kv_role":"kv_both"}\' on this node.'
    )
    return _table(columns, rows, none)


def _models(report: Mapping[str, Any]) -> Element:
    columns = {"model": False} | dict.fromkeys(
        ("hit rate", "lookups", "tokens not computed", "prefill saved"), True
    )
    used = sorted(report["models"].items(), key=lambda each: -each[1]["lookup_tokens"])
    rows = [
        (
            name,
            words.percent(words.rate_of(use["hit_tokens"], use["lookup_tokens"])),
            f"{use['lookups']:,}",
            f"{use['saved_tokens']:,}",
            words.shown_seconds(use["saved_prefill_s"])
            if use["saved_tokens"] > use["saved_untimed_tokens"] or not use["saved_tokens"]
            else "unknown",
        )
        for name, use in used
    ]
    return _table(columns, rows, "none has asked for a prompt yet")


def _reasons(report: Mapping[str, Any], kind: str) -> Element:
    rows = [
        (_element("code", "", name), f"{count:,}", COUNTERS.get(kind + name, ""))
        for name, count in words.reasons(report, kind).items()
    ]
    return _table({"reason": False, "chunks": True, "what it means": False}, rows, "none")


def _misses(misses: Sequence[Miss], now_s: float) -> Element:
    columns = {"when": False, "request": False, "model": False, "chunks hit": True, "why": False}
    rows = [
        (
            f"{shown_age(max(0.0, now_s - each.at_s))} ago",
            _element("code", "long", each.request_id),
            each.model,
            f"{each.hit_chunks:,} of {each.asked_chunks:,}",
            each.reason,
        )
        for each in misses
    ]
    return _table(columns, rows, "none yet")


def _hint(misses: Sequence[Miss]) -> Iterator[Element]:
    if misses:
        command = _element("code", "", "lmcache-redis why REQUEST")
        yield _element("p", "soft hint", command, " says more of each.")


def _footer() -> Element:
    return _element(
        "footer", "",
        "Counted since the start of this agent. ",
        _element("a", "", "/metrics", href="/metrics"), " for Prometheus, ",
        _element("a", "", "/healthz", href="/healthz"), " for probes.",
    )  # fmt: skip

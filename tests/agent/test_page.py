# SPDX-License-Identifier: Apache-2.0
"""The page at `/` of `--metrics`: of documents, and of a real agent in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.agent.reports.history import MINUTES, Minute
from lmcache_redis.agent.reports.page import HEADERS, page
from lmcache_redis.agent.sessions import FirstMiss, PastLookup, PastRequest
from lmcache_redis.agent.uses import TenantUse
from lmcache_redis.metrics import COUNTERS
from lmcache_redis.metrics.exporter import OwnerCollector, serve_metrics
from lmcache_redis.tenants import NONE, OTHER
from tests.agent.starts import Starts
from tests.browser import Browser
from tests.harness import block_hashes, wait_until
from tests.scraping import port_in

EVIL = '"><script>document.title="taken"</script><img src=x onerror=alert(1)>'
NOW_S = 1e9


def tier(where: str, reason: str = "", limit_bytes: int | None = None, **more: Any) -> Any:
    """Of a STATUS document: one that is up, unless there is a reason."""
    sizes = {"used_bytes": 0 if limit_bytes else None, "limit_bytes": limit_bytes}
    return {"where": where, "up": not reason, "reason": reason, "writes": 0, **sizes, **more}


STATUS: dict[str, Any] = {
    "version": "1.2", "pid": 7, "endpoint": "ipc:///run/a.sock", "uptime_s": 7300.0,
    "pool": {"slots": 4, "slot_bytes": 1 << 20, "used_slots": 3},
    "tiers": {"redis": tier("unix:///r.sock")},
    "loads": {"tiers": {"redis": {"bytes_per_s": 2e9, "is_slow": True}}},
    "canaries": {"distrusted": []},
    "sessions": 2,
    "engines": [],
    "models": {},
    "hit_rate": {"host": 0.25, "disk": 0.0, "redis": 0.5},
    "tokens_saved": 12_288, "tokens_saved_untimed": 0, "prefill_s_saved": 3.456,
    "counters": dict.fromkeys(COUNTERS, 0) | {"lookup_chunks": 64, "miss_absent": 9},
}  # fmt: skip
HOUR = [Minute()] * MINUTES


class Text(HTMLParser):
    """What a reader sees, and the tags around it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data.split()

    @property
    def text(self) -> str:
        return " ".join(self.words)


def shown(**changed: Any) -> str:
    return Text(page({**STATUS, **changed}, HOUR, [], NOW_S, False)).text


def tenant(tokens: int) -> dict[str, Any]:
    use = {each.name: tokens for each in fields(TenantUse)} | {"saved_untimed_tokens": 0}
    return use | {"saved_prefill_s": float(tokens), "limit_bytes": None, "used_bytes": None}


def test_the_largest_tenants_have_a_row_each_and_the_rest_one() -> None:
    tenants = {f"t{tokens}": tenant(tokens) for tokens in range(25, 0, -1)}
    assert "Tenants" not in shown(tenants={NONE: tenant(1)})
    assert OTHER not in shown(tenants=tenants).split("Tenants")[0]
    few = shown(tenants=dict([*tenants.items()][:20]))
    assert "t6 100 % 6 6 6.00 s 6 bytes 6 bytes" in few
    assert "other 100 %" not in few
    many = shown(tenants=tenants)
    assert "t6 100 % 6 6 6.00 s 6 bytes 6 bytes other 100 % 15 15 15.0 s 15 bytes 15 bytes" in many
    assert "t5 " not in many
    forgotten = shown(tenants={**tenants, OTHER: tenant(100)})
    assert (
        "t6 100 % 6 6 6.00 s 6 bytes 6 bytes other 100 % 115 115 115 s 115 bytes 115 bytes"
        in forgotten
    )
    assert "other 100 % 100" in shown(tenants={"t": tenant(1), OTHER: tenant(100)})


def test_it_says_what_the_cache_is_worth() -> None:
    text = shown()
    assert "Hit rate 75 % of 64 chunks" in text
    assert "host pool 25 % Redis 50 % not cached, or faster to compute 25 %" in text
    assert "Tokens not computed 12,288" in text
    assert "Prefill saved 3.46 s" in text
    assert "up for 2.0 h" in text
    assert "2,000 MB/s (slower than computing)" in text
    assert f"absent 9 {COUNTERS['miss_absent']}" in text
    assert "Chunks not stored none" in text
    assert "As of 01:46:40 UTC" in text


def test_it_says_what_packing_has_saved() -> None:
    assert "of Redis" not in shown()
    counters = STATUS["counters"] | {"stored_bytes": 1 << 40, "plain_bytes": 1 << 40}
    assert "1 TiB 0 bytes" in (text := shown(counters=counters))
    assert "of Redis" not in text
    text = shown(counters=counters | {"stored_bytes": 3 << 38})
    assert "768 GiB of 1 TiB 0 bytes" in text
    assert "saved 25 % of Redis: 768 GiB stored of 1 TiB." in text


def test_what_is_not_known_is_not_invented() -> None:
    unknown = shown(prefill_s_saved=None, tokens_saved_untimed=12_288)
    assert "Prefill saved unknown no engine has measured its prefill yet" in unknown
    assert "unknown for 288 tokens" in shown(tokens_saved_untimed=288)
    new = shown(
        hit_rate=dict.fromkeys(("host", "disk", "redis")), counters=dict.fromkeys(COUNTERS, 0)
    )
    assert "Hit rate - of 0 chunks" in new
    assert "no engine has asked for a prompt yet" in new
    assert '"kv_connector":"LMCacheRedisConnector"' in new


def test_trouble_is_in_the_header() -> None:
    text = shown(
        tiers={"disk": tier("/d", "no space", 1), "redis": tier("h:1", "Connection refused")},
        loads={"tiers": dict.fromkeys(("disk", "redis"), STATUS["loads"]["tiers"]["redis"])},
        canaries={"distrusted": [{}]},
    )
    assert "Redis is down: Connection refused" in text
    assert "disk is down: no space" in text
    assert "other KV was cached than is computed: 1 layouts" in text
    fails = {"text": "Redis says: CROSSSLOT", "count": 1_200, "seconds_ago": 3.0}
    text = shown(tiers={"redis": tier("h:1", last_error=fails)})
    assert "Redis is up, and fails: Redis says: CROSSSLOT (1,200 times, last 3 s ago)" in text
    assert "Redis is up " not in text


def test_names_of_others_are_text() -> None:
    status = deepcopy(STATUS)
    status["models"] = {
        f"{EVIL} {n}": {
            "lookups": 1, "lookup_tokens": n, "hit_tokens": 1, "saved_tokens": 2,
            "saved_untimed_tokens": 2, "saved_prefill_s": 0.0,
        }
        for n in range(20)
    }  # fmt: skip
    status |= {"endpoint": EVIL, "version": EVIL}
    status["tiers"] = {"disk": tier(EVIL, EVIL, 1), "redis": tier(EVIL, EVIL)}
    status["loads"]["tiers"]["disk"] = status["loads"]["tiers"]["redis"]
    status["engines"] = [{
        "model": EVIL, "worker_id": 0, "world_size": 1, "device": EVIL, "chunk_tokens": 1,
        "chunk_bytes": 1, "layout": EVIL, "ready": False,
    }]  # fmt: skip
    miss = PastLookup(
        at_s=NOW_S - 90, model=EVIL, first_chunk=0, asked_chunks=4, chunk_tokens=64, found_chunks=1,
        first_miss=FirstMiss(1, 64, EVIL, (), ""),
    )  # fmt: skip
    html = page(status, HOUR, [PastRequest(EVIL, "engine", NOW_S, 1, miss)], NOW_S, True)
    found = Text(html)
    assert not {"script", "img"} & {*found.tags}
    assert found.text.count(" ".join(EVIL.split())) == 30
    assert "90 s ago" in found.text
    assert "1 of 4" in found.text
    assert "lmcache-redis why REQUEST says more of each." in found.text
    hidden = Text(
        page(STATUS, HOUR, [PastRequest("an-id", "engine", NOW_S, 1, miss)], NOW_S, False)
    ).text
    assert "1 of 4" in hidden
    assert "an-id" not in hidden
    assert "this page too with --expose-requests" in hidden


# Appended to the page; the agent's own has no script, and its headers allow none.
MEASURE = """
<pre id="measured"></pre><script>
const wider = each => each.scrollWidth > each.clientWidth;
const named = each => (each.querySelector("h2") || each).textContent.slice(0, 40);
document.getElementById("measured").textContent = JSON.stringify({
  view: innerWidth,
  page: document.documentElement.scrollWidth,
  wide: [...document.querySelectorAll("section")].filter(wider).map(named),
  broken: [...document.querySelectorAll("code.word")]
    .filter(each => each.getClientRects().length > 1).map(each => each.textContent),
  words: document.querySelectorAll("code.word").length,
  server: document.querySelector("td[data-title=used] code").getClientRects().length,
  titles: getComputedStyle(document.querySelector("thead")).display,
})</script>
"""
SERVER = "rediss+cluster://cache.production.example.internal:6379"


@pytest.mark.servers
@pytest.mark.parametrize(
    ("width", "lines", "titles"), [(390, 3, "none"), (1280, 1, "table-header-group")]
)
def test_it_fits_a_phone_and_a_desk(tmp_path: Path, width: int, lines: int, titles: str) -> None:
    browser = Browser.find(tmp_path / "profile")
    misses = {name: n for n, name in enumerate(COUNTERS) if name.startswith(("miss_", "drop_"))}
    model = "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8"
    miss = FirstMiss(1, 64, "redis_error", (), "")
    lookup = PastLookup(
        model=model, first_chunk=0, asked_chunks=4, chunk_tokens=64, first_miss=miss
    )
    use = {
        "lookups": 1_234_567, "lookup_tokens": 9, "hit_tokens": 1, "saved_tokens": 12_345_678,
        "saved_untimed_tokens": 2, "saved_prefill_s": 98_765.4,
    }  # fmt: skip
    engine = {
        "model": model, "worker_id": 0, "world_size": 8, "device": "cuda", "chunk_tokens": 256,
        "chunk_bytes": 32 << 20, "layout": "0123456789abcdef" * 4, "ready": False,
    }  # fmt: skip
    status = deepcopy(STATUS) | {
        "counters": STATUS["counters"] | misses, "engines": [engine], "models": {model: use},
    }  # fmt: skip
    status["tiers"]["redis"]["where"] = SERVER
    _, *no_hits = Minute().hits
    hour = [Minute(asked_chunks=8, to_engines_bytes=n, saved_tokens=n, hits=(n % 5, *no_hits))
            for n in range(MINUTES)]  # fmt: skip
    past = [PastRequest(f"chatcmpl-{'9c1fd9d1-' * 5}0", "engine", NOW_S, 1, lookup)]
    html = page(status, hour, past, NOW_S, True).replace("</body>", f"{MEASURE}</body>")

    def answer(_: object, start: Callable[..., None]) -> list[bytes]:
        start("200 OK", [("Content-Type", "text/html; charset=utf-8")])
        return [html.encode()]

    owner = OwnerCollector(lambda action: action(), list)
    with serve_metrics(("127.0.0.1", 0), owner, owner, {"/": answer}) as port:
        dom = browser.dom(f"http://127.0.0.1:{port}/", (width, 844))
    found = re.search(r'id="measured">(\{.*?\})<', dom)
    assert found is not None
    measured = json.loads(found[1])
    assert measured["view"] == width
    assert measured["page"] <= width
    assert measured["wide"] == []
    assert measured["broken"] == []
    assert measured["words"] > 10
    assert measured["server"] <= lines
    assert measured["titles"] == titles


@pytest.mark.servers
def test_an_agent_has_one_in_a_browser(start: Starts, tmp_path: Path) -> None:
    browser = Browser.find(tmp_path / "profile")
    image = pytest.importorskip("PIL.Image")
    prompt = block_hashes("a prompt", 16)
    agent = start.agent(metrics="127.0.0.1:0", expose_requests=True)
    engine = start.engine(agent, model_name="org/model <b>")
    engine.store("first", prompt, range(16))
    assert engine.lookup("chatcmpl-hit", prompt, token_s=0.5) == 256
    assert not engine.retrieve("chatcmpl-hit", prompt, range(16))
    assert engine.lookup(EVIL, block_hashes("another", 16)) == 0
    url = f"http://127.0.0.1:{port_in(agent.log)}/"
    dom = browser.dom(url)
    found = Text(dom)
    assert "Hit rate 50 % of 8 chunks" in found.text
    assert "Tokens not computed 256" in found.text
    assert re.search(r"Prefill saved 12\d s", found.text)
    assert "org/model <b>" in found.text
    assert " ".join(EVIL.split()) in found.text
    assert "<title>lmcache-redis 50 %</title>" in dom
    assert "script" not in found.tags
    # The page's own style is allowed to it: the browser paints its two backgrounds.
    for scheme, colour in (("light", (0xF6, 0xF7, 0xF9)), ("dark", (0x10, 0x13, 0x1A))):
        path = tmp_path / f"{scheme}.png"
        browser.screenshot(url, path, scheme)
        with image.open(path) as picture:
            pixels = picture.convert("RGB")
            assert pixels.getpixel((2, 2)) == colour
            assert len(pixels.getcolors(1 << 24)) > 50


@pytest.mark.servers
def test_the_browser_asks_again_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, asked = Browser.find(tmp_path / "profile"), []
    monkeypatch.setattr("lmcache_redis.agent.reports.page.REFRESH_S", 1)

    def answer(_: object, start: Callable[..., None]) -> list[bytes]:
        asked.append(None)
        start("200 OK", [*HEADERS])
        return [page(STATUS, HOUR, [], NOW_S, False).encode()]

    owner = OwnerCollector(lambda action: action(), list)
    with (
        serve_metrics(("127.0.0.1", 0), owner, owner, {"/": answer}) as port,
        browser.open(f"http://127.0.0.1:{port}/"),
    ):
        wait_until(lambda: len(asked) >= 2, what="another request for the page")

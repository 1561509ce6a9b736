# SPDX-License-Identifier: Apache-2.0
"""Takes docs/images: the page and `top` of an agent, after minutes of a small load.

python -m tests.agent.picture [MINUTES]
"""

from __future__ import annotations

import io
import json
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from lmcache_redis import __version__
from lmcache_redis.cli.shown import frame
from tests.browser import Browser
from tests.harness import AgentServer, Engine, block_hashes
from tests.scraping import port_in
from tests.servers import RedisServer

PICTURE = Path(__file__).parent.parent.parent / "docs" / "images" / "page.png"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
_SIZE = (1120, 1780)
_NEW = 0.3  # of the prompts
_BLOCKS = range(64)
# A host pool that holds a part of the documents.
_POOL_BYTES = 12 << 20
_TOKEN_S = 1 / 4000
_TOP_S = 5.0
# With a font of the reader's machine.
_SVG = re.sub(r"@font-face {{.*?}}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", "DejaVu Sans Mono"
)


def main(minutes: float = 60.0) -> None:
    with tempfile.TemporaryDirectory(prefix="lmcache-redis-") as name:
        directory = Path(name)
        browser = Browser.find(directory / "profile")
        with (
            RedisServer(directory) as redis,
            AgentServer(
                directory / "agent", redis.unix_url, metrics="127.0.0.1:0",
                pool_bytes=_POOL_BYTES, canary_every=1000,
            ) as agent,
            Engine(agent.endpoint, model_name=MODEL, num_blocks=len(_BLOCKS) + 8) as engine,
        ):  # fmt: skip
            serve(engine, time.monotonic() + 60 * minutes)
            before = agent.status()
            serve(engine, time.monotonic() + _TOP_S)
            shown = Console(record=True, width=80, file=io.StringIO())
            shown.print(frame(*(_elsewhere(each, name) for each in (before, agent.status()))))
            PICTURE.with_name("top.svg").write_text(
                shown.export_svg(title="lmcache-redis top", code_format=_SVG)
            )
            agent.wait_idle()
            browser.screenshot(f"http://127.0.0.1:{port_in(agent.log)}/", PICTURE, size=_SIZE)
    with Image.open(PICTURE) as picture:
        picture.convert("RGB").quantize(64).save(PICTURE, optimize=True)


def _elsewhere(report: dict[str, Any], directory: str) -> dict[str, Any]:
    """As of an agent in its usual place; a release sets the version of no picture."""
    text = json.dumps(report | {"version": __version__.removesuffix(".dev0")})
    text = text.replace(f"{directory}/agent/", "/run/lmcache-redis/")
    return dict(json.loads(text.replace(directory, "/run/redis")))


def serve(engine: Engine, until_s: float) -> None:
    """Prompts about new documents and old ones, some of them more often; more in waves."""
    chosen = random.Random(0)
    number = 0
    while time.monotonic() < until_s:
        number += 1
        document = number if chosen.random() < _NEW else -int(chosen.expovariate(1 / 14))
        hashes = block_hashes(f"document {document}", len(_BLOCKS))
        request_id = f"chatcmpl-{chosen.getrandbits(64):016x}"
        tokens = engine.lookup(request_id, hashes, token_s=_TOKEN_S)
        chunks = tokens // 64
        if chunks:
            engine.retrieve(request_id, hashes[: 4 * chunks], _BLOCKS[: 4 * chunks])
        if 4 * chunks < len(hashes):
            engine.store(request_id, hashes, _BLOCKS)
        engine.scheduler.end_session(request_id)
        busy = 1 + time.monotonic() % 600 // 120
        time.sleep(chosen.expovariate(busy / 2))


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""`top`: an agent's status in a terminal, refreshed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from lmcache_redis.cli.options import (
    AsJson,
    Endpoint,
    Url,
    agent_anywhere,
    number,
    reads_document,
)
from lmcache_redis.errors import LMCacheRedisError


def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame, of one interval, and end.")
    ] = False,
    interval_s: Annotated[
        float, number("--interval-s", float, (0.1, 60), "Seconds between two frames.")
    ] = 1.0,
    endpoint: Endpoint = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Watch an agent: hit rate, savings, bytes a second, pool, Redis, models, drops.

    q ends it. An agent that is restarted is found again. Without a terminal, each frame is printed
    after the one before it, and with --json as one line.

    Examples:

      lmcache-redis top

      lmcache-redis top --once

      lmcache-redis top --json | jq .hit_rate
    """
    from rich.live import Live
    from rich.text import Text

    from lmcache_redis.cli.shown import change_document, console, frame

    agent, out = agent_anywhere(endpoint, url, 3.0), console()
    before = agent.status()  # where there is no agent, this says so
    if once or as_json or not (out.is_terminal and sys.stdin.isatty()):
        try:
            while True:
                time.sleep(interval_s)
                now = agent.status()
                with reads_document(agent):
                    if as_json:
                        print(json.dumps(change_document(before, now)), flush=True)
                    else:
                        out.print(frame(before, now), end="\n" * (not once))
                        sys.stdout.flush()
                if once:
                    return
                before = now
        except KeyboardInterrupt:
            return
        except BrokenPipeError:
            # Python would complain of what is still in the buffer.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
    with reads_document(agent):
        first = frame(None, before)
    with _keys() as pressed, Live(first, console=out, screen=True) as live:
        while not pressed(interval_s):
            try:
                now = agent.status()
                with reads_document(agent):
                    shown = frame(before, now)
            except LMCacheRedisError as error:  # it may be replaced just now
                live.update(Text(f"{error}\n\nq: quit"), refresh=True)
                continue
            live.update(shown, refresh=True)
            before = now


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits some seconds, or for a key, and returns whether q was pressed.

    Ctrl-C counts as q.
    """
    import termios
    import tty

    def waited(seconds: float) -> bool:
        try:
            pressed = select.select([sys.stdin], [], [], seconds)[0]
            return bool(pressed) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"\x04", b"")
        except KeyboardInterrupt:
            return True

    settings = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin.fileno())
        yield waited
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)

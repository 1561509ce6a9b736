# SPDX-License-Identifier: Apache-2.0
"""The users of docs/guides/redis.md, as the page writes them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.servers import RedisServer

PAGE = Path(__file__).parent.parent / "docs/guides/redis.md"
PASSWORD = "s3cret"


def documented(user: str) -> list[str]:
    """The rights of a user, without what comes before them."""
    (line,) = re.findall(rf"^ACL SETUSER {user} on >PASSWORD (.*)$", PAGE.read_text(), re.M)
    return line.split()


def documented_url(server: RedisServer, user: str = "agent", *more: str) -> str:
    """Makes the user as the page says, with more rules; the URL for it."""
    server.command("ACL", "SETUSER", user, "reset", "on", f">{PASSWORD}", *documented(user), *more)
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{server.port}"

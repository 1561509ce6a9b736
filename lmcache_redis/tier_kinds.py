# SPDX-License-Identifier: Apache-2.0
"""What tiers are called: in labels, JSON, messages, sentences and counters.

Whatever counts, shows or tells of tiers takes their names from here, so that another kind is one
line in `KINDS` (docs/guides/write-a-tier.md). The contract of a tier is in `tiers`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


class Medium(enum.Enum):
    """What routers are told that chunks lie on."""

    MEMORY = "memory"
    STORAGE = "storage"


@dataclass(frozen=True, eq=False)
class TierKind:
    """Compared and hashed by identity.

    name: in labels, JSON and counters. letter: in messages and recordings. title, place: in
    sentences: chunks are read from the title, and are in the place. is_shared: other agents store
    and find chunks there too, so that what it already had, refuses and keeps is counted and logged.

    prefix: of its counters; None: its name. misses, drops: counters by the name of a `ReadOutcome`
    and a `WriteOutcome`; of the other outcomes ``miss_NAME`` and ``drop_NAME``. silent: of misses
    because it has not answered. queue_full: of drops because its queue was full.
    """

    name: str
    letter: str
    title: str
    place: str
    medium: Medium
    is_shared: bool
    prefix: str | None = None
    misses: Mapping[str, str] = field(default_factory=dict)
    drops: Mapping[str, str] = field(default_factory=dict)
    silent: str = ""
    queue_full: str = ""

    @property
    def miss(self) -> str:
        """The counter of misses without a counter of their own."""
        return f"miss_{self.name}"

    @property
    def drop(self) -> str:
        return f"drop_{self.name}"

    @property
    def hits(self) -> str:
        return f"hit_chunks_{self.name}"

    @property
    def load_seconds(self) -> str:
        """A histogram, as `load_rate`."""
        return f"{self.name}_load_seconds"

    @property
    def load_rate(self) -> str:
        return f"{self.name}_load_rate"

    def counter(self, what: str) -> str:
        """what: loaded_chunks, loaded_bytes, stored_chunks, stored_bytes or plain_bytes."""
        return (f"{self.name}_" if self.prefix is None else self.prefix) + what


HOST: Final = TierKind("host", "h", "host pool", "in the host pool", Medium.MEMORY, False)
DISK: Final = TierKind("disk", "d", "disk", "on disk", Medium.STORAGE, False)
REDIS: Final = TierKind(
    "redis", "r", "Redis", "in Redis", Medium.STORAGE, True,
    prefix="",
    misses={
        "MISSING": "miss_absent",
        "INCOMPLETE": "miss_incomplete",
        "TORN": "miss_mixed_stores",
        "FOREIGN": "miss_foreign",
        "CORRUPT": "miss_corrupt",
        "NOT_OPENED": "miss_sealed",
        "TIMED_OUT": "miss_deadline",
        "UNAVAILABLE": "miss_redis_error",
    },
    drops={
        "FULL": "drop_redis_full",
        "REJECTED": "drop_redis_error",
        "NOT_KNOWN": "drop_redis_error",
        "TIMED_OUT": "drop_redis_error",
        "UNAVAILABLE": "drop_redis_error",
        "CANCELLED": "drop_shutdown",
    },
    silent="miss_redis_silent",
    queue_full="drop_queue_full",
)  # fmt: skip

# The host pool, then those behind it. A cache has some of them, in an order of its own.
KINDS: tuple[TierKind, ...] = (HOST, DISK, REDIS)

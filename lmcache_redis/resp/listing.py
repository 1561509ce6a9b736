# SPDX-License-Identifier: Apache-2.0
"""The names that scans of servers find: what is not asked for is dropped, and the rest is bounded.

A server that lies may name keys without end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

# Of all names together, counted with what each takes beside its bytes: some 1.5 million.
MOST_BYTES = 256 << 20
_OVERHEAD_BYTES = 100


class FoundNames:
    """Names that begin with `prefix` and end with `suffix`, without that. Thread-safe.

    names: each once. is_over: there are more than `limit`, or than fit in MOST_BYTES.
    """

    def __init__(self, prefix: bytes, suffix: bytes, limit: int = sys.maxsize) -> None:
        self.names: dict[bytes, None] = {}
        self.is_over = False
        self._prefix = prefix
        self._suffix = suffix
        self._limit = limit
        self._left_bytes = MOST_BYTES
        self._lock = threading.Lock()

    def add(self, some: Sequence[bytes]) -> bool:
        """Add those of `some` that are asked for; whether there is room for more."""
        with self._lock:
            for name in some:
                if not (name.startswith(self._prefix) and name.endswith(self._suffix)):
                    continue
                name = name[: len(name) - len(self._suffix)]
                if name in self.names or self.is_over:
                    continue
                self._left_bytes -= len(name) + _OVERHEAD_BYTES
                self.is_over = len(self.names) >= self._limit or self._left_bytes < 0
                if not self.is_over:
                    self.names[name] = None
            return not self.is_over

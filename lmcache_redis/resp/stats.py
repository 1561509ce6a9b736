"""Counts of what the plane did, by outcome."""

from __future__ import annotations

import threading

from lmcache_redis.resp.outcomes import CallOutcome, ReadOutcome, WriteOutcome


class Counts:
    """Sums since the start. Thread-safe: each method is one consistent change."""

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.keys_scanned = 0
        self.keys_removed = 0
        self.reads = dict.fromkeys(ReadOutcome, 0)
        self.writes = dict.fromkeys(WriteOutcome, 0)
        self.calls = dict.fromkeys(CallOutcome, 0)
        self.lock = threading.Lock()

    def read(self, outcome: ReadOutcome, chunks: int, nbytes: int) -> None:
        with self.lock:
            self.reads[outcome] += chunks
            if outcome is ReadOutcome.LOADED:
                self.bytes_in += nbytes

    def written(self, outcome: WriteOutcome, chunks: int, nbytes: int) -> None:
        with self.lock:
            self.writes[outcome] += chunks
            if outcome is WriteOutcome.STORED:
                self.bytes_out += nbytes

    def called(self, outcome: CallOutcome, keys_scanned: int = 0) -> None:
        with self.lock:
            self.calls[outcome] += 1
            self.keys_scanned += keys_scanned

    def removed(self, keys: int) -> None:
        with self.lock:
            self.keys_removed += keys

# SPDX-License-Identifier: Apache-2.0
"""`--record FILE`: lookups and stores as lines of JSON, for `lmcache-redis plan`.

The loop thread puts what happens into a queue of bounded length and goes on; a thread writes. What
finds the queue full is dropped and counted, and so is everything after the file could not be
written. The file is renamed to FILE.1, in place of the one before, when it has half of the maximum
size; each file can be read alone. What a line says: `plan.records`.

A layout is described before the first lookup that names it, and in each file. Stores are written
once a lookup has described their part.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.lookups import chunk_tokens, shared_rows
from lmcache_redis.agent.peers import Peer, Reply
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.errors import ConfigError
from lmcache_redis.plan import records
from lmcache_redis.processes import NamedThread

logger = logging.getLogger(__name__)

# Of requests with some thousand chunks.
_QUEUE_LINES = 4096
_CLOSE_S = 2.0
# Of FILE and FILE.1 together.
LIMIT_BYTES = 1 << 30
_encode = msgspec.json.Encoder().encode


class TraceRecorder:
    """Owned by the loop thread. Raises ``ConfigError`` if the file cannot be opened."""

    def __init__(self, agent: Agent, path: str) -> None:
        self._agent = agent
        # What belongs together: a lookup comes with its layout.
        self._queue: queue.Queue[Sequence[records.Line] | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0  # since the last line that was taken
        self._has_failed = False
        self._path = Path(path)
        self._file_bytes = LIMIT_BYTES // 2
        self._layouts: dict[str, records.LayoutRecord] = {}  # described in the file
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"--record {path} cannot be written ({error.strerror}): name another file"
            ) from error
        self._thread = NamedThread("lmcache-redis-record", self._run)
        self._thread.start()

    def close(self) -> None:
        """Writes what is queued, if that is soon done. Idempotent."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def looked_up(self, peer: Peer, question: m.Lookup, reply: Reply) -> Reply:
        """Replies, and then records the lookup."""
        asked_s = time.time()

        def answer(result: m.Answer) -> None:
            reply(result)
            ranks = self._agent.peers.ranks(peer)
            if not isinstance(result, m.LookupResult) or ranks is None:
                return
            forms, _ = shared_rows(ranks, len(question.hashes[0]))
            layout = self._layout(forms, len(question.hashes[0]), chunk_tokens(self._agent, ranks))
            line = records.LookupRecord(
                asked_s,
                request=_digest(question.request_id.encode()),
                layout=layout.name,
                chunks=_names(question.hashes),
                first_chunk=question.first_chunk,
                hits=result.tiers or "h" * result.hit_chunks,
                token_s=question.token_s,
            )
            self._put(layout, line)

        return answer

    def stored(self, question: m.Store, form: ChunkForm) -> None:
        if question.hashes:
            request = _digest(question.request_id.encode())
            part = _digest(form.stem(len(question.hashes[0])))
            chunks = _names(question.hashes)
            self._put(records.StoreRecord(time.time(), request=request, part=part, chunks=chunks))

    def _layout(
        self, forms: Sequence[ChunkForm], hash_bytes: int, chunk_tokens: int
    ) -> records.LayoutRecord:
        stems = [form.stem(hash_bytes) for form in forms]
        slot_bytes = self._agent.arena.slot_stride_bytes
        rows = [
            records.RowRecord(
                _digest(stem), form.chunk_bytes, self._agent.cache.units(form) * slot_bytes,
                form.reach.kind, form.reach.tokens,
            )
            for form, stem in zip(forms, stems, strict=True)
        ]  # fmt: skip
        return records.LayoutRecord(
            time.time(),
            name=_digest(b"".join(stems)),
            model=forms[0].model_name,
            chunk_tokens=chunk_tokens,
            rows=tuple(rows),
        )

    def _put(self, *lines: records.Line) -> None:
        try:
            if self._has_failed:
                raise queue.Full
            if self._dropped:
                lost = records.DroppedRecord(time.time(), lines=self._dropped)
                self._queue.put_nowait((lost,))
                self._dropped = 0
            self._queue.put_nowait(lines)
        except queue.Full:
            self._dropped += 1
            self._agent.cache.metrics.count("records_dropped")

    # What follows runs on the thread that writes.

    def _run(self) -> None:
        try:
            while (lines := self._queue.get()) is not None:
                self._write_all(lines)
            self._file.close()
        except OSError as error:
            self._has_failed = True
            logger.error(
                "nothing is recorded any more: %s cannot be written (%s)", self._path, error
            )

    def _write_all(self, lines: Sequence[records.Line]) -> None:
        try:
            for line in lines:
                self._write(line)
        except OSError:
            raise
        except Exception:
            logger.exception("what happened is not recorded")  # our own bug: only these lines
        if self._queue.empty():
            self._file.flush()

    def _open(self) -> BinaryIO:
        self._path.touch(mode=0o600)
        file = self._path.open("ab")
        for line in (records.StartRecord(time.time()), *self._layouts.values()):
            file.write(_encode(line) + b"\n")
        return file

    def _write(self, line: records.Line) -> None:
        if isinstance(line, records.LayoutRecord) and line.name in self._layouts:
            return
        if isinstance(line, records.StoreRecord) and not any(
            line.part == row.part for each in self._layouts.values() for row in each.rows
        ):
            return
        encoded = _encode(line) + b"\n"
        if self._file.tell() + len(encoded) > self._file_bytes:
            self._file.close()
            self._path.replace(f"{self._path}.1")
            self._file = self._open()
        self._file.write(encoded)
        if isinstance(line, records.LayoutRecord):
            self._layouts[line.name] = line


def _names(hashes: Sequence[bytes]) -> str:
    return "".join(map(_digest, hashes))


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)

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
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.lookups import chunk_tokens, shared_rows
from lmcache_redis.agent.peers import Peer, Reply
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.errors import ConfigError
from lmcache_redis.plan import records

logger = logging.getLogger(__name__)

# Of requests with some thousand chunks, whose hashes wait as they are.
_QUEUE_LINES = 4096
_CLOSE_S = 2.0
_encode = msgspec.json.Encoder().encode


class _Item(NamedTuple):
    """A line without the names of its chunks, their hashes, and the layout of a lookup."""

    line: records.Line
    hashes: Sequence[bytes] = ()
    layout: records.LayoutRecord | None = None


class TraceRecorder:
    """Owned by the loop thread. Raises ``ConfigError`` if the file cannot be opened."""

    def __init__(self, agent: Agent, path: str, limit_bytes: int) -> None:
        self._agent = agent
        self._queue: queue.Queue[_Item | None] = queue.Queue(_QUEUE_LINES)
        self._dropped = 0  # since the last line that was taken
        self._has_failed = False
        self._path = Path(path)
        self._file_bytes = limit_bytes // 2
        self._layouts: dict[str, records.LayoutRecord] = {}  # described in the file
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"--record {path} cannot be written ({error.strerror}): name another file"
            ) from error
        self._thread = threading.Thread(target=self._run, name="lmcache-redis-record", daemon=True)
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
                chunks="",
                first_chunk=question.first_chunk,
                hits=result.tiers or "h" * result.hit_chunks,
                token_s=question.token_s,
            )
            self._put(_Item(line, question.hashes, layout))

        return answer

    def stored(self, question: m.Store, form: ChunkForm) -> None:
        if question.hashes:
            request = _digest(question.request_id.encode())
            part = _digest(form.stem(len(question.hashes[0])))
            line = records.StoreRecord(time.time(), request=request, part=part, chunks="")
            self._put(_Item(line, question.hashes))

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

    def _put(self, item: _Item) -> None:
        try:
            if self._has_failed:
                raise queue.Full
            if self._dropped:
                lost = records.DroppedRecord(time.time(), lines=self._dropped)
                self._queue.put_nowait(_Item(lost))
                self._dropped = 0
            self._queue.put_nowait(item)
        except queue.Full:
            self._dropped += 1
            self._agent.cache.metrics.count("records_dropped")

    # What follows runs on the thread that writes.

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                self._write(item)
                if self._queue.empty():
                    self._file.flush()
            self._file.close()
        except OSError as error:
            self._has_failed = True
            logger.error(
                "nothing is recorded any more: %s cannot be written (%s)", self._path, error
            )

    def _open(self) -> BinaryIO:
        self._path.touch(mode=0o600)
        file = self._path.open("ab")
        for line in (records.StartRecord(time.time()), *self._layouts.values()):
            file.write(_encode(line) + b"\n")
        return file

    def _write(self, item: _Item) -> None:
        line, layout = item.line, item.layout
        if layout is not None and layout.name not in self._layouts:
            self._append(layout)
            self._layouts[layout.name] = layout
        if isinstance(line, records.StoreRecord) and not any(
            line.part == row.part for each in self._layouts.values() for row in each.rows
        ):
            return
        if isinstance(line, (records.LookupRecord, records.StoreRecord)):
            line = msgspec.structs.replace(line, chunks="".join(map(_digest, item.hashes)))
        self._append(line)

    def _append(self, line: records.Line) -> None:
        encoded = _encode(line) + b"\n"
        if self._file.tell() + len(encoded) > self._file_bytes:
            self._file.close()
            self._path.replace(f"{self._path}.1")
            self._file = self._open()
        self._file.write(encoded)


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)

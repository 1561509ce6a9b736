# SPDX-License-Identifier: Apache-2.0
"""Chunks as an agent writes them, put into a server without an agent."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from lmcache_redis.admin.names import ChunkName
from lmcache_redis.admin.purge import Plan, PurgeResult, Selection, choose, remove
from lmcache_redis.admin.server import PrimaryServers, open_server
from lmcache_redis.chunks.frame import HEADER_BYTES, ChunkFrame, add_checksums, mark_packed
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.resp import RedisOptions
from lmcache_redis.seal import SealKeys
from tests.servers import RedisServer

STORED_UNIX_MS = 1_700_000_000_000
PAYLOAD_BYTES = 4096


@dataclass(frozen=True)
class Cached:
    """A chunk of `stripe_count` stripes of 4 KiB, the last one of 100 bytes.

    packed_bytes: what those of 4 KiB are said to be packed in.
    """

    number: int = 0
    model: str = "org/model"
    layout: str = "first"
    rank: int = 0
    world: int = 2
    prefix: bytes = b""
    stripe_count: int = 3
    raw_namespace: bool = False
    sealed_with: SealKeys | None = None
    packed_bytes: int = 0
    tenant: bytes = bytes(8)
    store: int = 0
    stored_unix_ms: int = STORED_UNIX_MS

    @property
    def fingerprint(self) -> bytes:
        return hashlib.blake2b(self.layout.encode(), digest_size=32).digest()

    @property
    def name(self) -> ChunkName:
        rank = ObjectKey.ComputeKVRank(self.world, self.rank, self.world, self.rank)
        chunk_hash = self.number.to_bytes(32, "big")
        namespace = self.fingerprint.hex()[:16].encode()
        if self.raw_namespace:
            namespace = self.fingerprint[:16]
        return ChunkName(self.prefix, namespace, ObjectKey(chunk_hash, self.model, rank))

    @property
    def chunk_bytes(self) -> int:
        return (self.stripe_count - 1) * PAYLOAD_BYTES + 100

    @property
    def value_bytes(self) -> int:
        return self.chunk_bytes + self.stripe_count * HEADER_BYTES

    @property
    def keys(self) -> list[bytes]:
        return [self.name.stripe(index) for index in range(self.stripe_count)]

    def value(self, index: int) -> bytes:
        metadata = RemoteMetadata(
            self.chunk_bytes, [(self.chunk_bytes,)], ["uint8"], MemoryFormat.PAGES
        )
        frame = ChunkFrame(
            self.fingerprint,
            self.name.key.chunk_hash,
            self.chunk_bytes,
            PAYLOAD_BYTES,
            metadata.serialize(),
        )
        nbytes = min(PAYLOAD_BYTES, self.chunk_bytes - index * PAYLOAD_BYTES)
        payload = random.Random(self.number * 1000 + index).randbytes(nbytes)
        store_id = self.store.to_bytes(16, "big")
        if self.sealed_with is not None:
            return self._sealed(self.sealed_with, frame, index, store_id, payload)
        header = bytearray(frame.bare_header(index, store_id, self.stored_unix_ms))
        if 0 < self.packed_bytes < nbytes:
            payload = payload[: self.packed_bytes]
            mark_packed(header, 2, len(payload))
        header[200:208] = self.tenant
        add_checksums(header, xxh3_64_intdigest(payload))
        return bytes(header) + payload

    def _sealed(
        self, keys: SealKeys, frame: ChunkFrame, index: int, store_id: bytes, payload: bytes
    ) -> bytes:
        header = bytearray(frame.bare_header(index, store_id, self.stored_unix_ms, is_sealed=True))
        room = memoryview(bytearray(len(payload)))
        sealed = keys.seal(self.keys[index], header, memoryview(payload), room)
        add_checksums(header, xxh3_64_intdigest(sealed))
        return bytes(header) + bytes(sealed)

    def put(self, client: Any, *only: int) -> None:
        """Write all stripes, or only these."""
        for index in only or range(self.stripe_count):
            client.set(self.keys[index], self.value(index))


def age(client: Any, key: bytes, idle_s: int) -> None:
    """Make a key look unused for that long, as a move between servers would."""
    client.execute_command("RESTORE", key, 0, client.dump(key), "REPLACE", "IDLETIME", idle_s)


def everything(server: RedisServer) -> dict[bytes, bytes]:
    """All keys of the server and what they hold, of whatever type."""
    with server.client() as client:
        return {key: client.dump(key) for key in client.scan_iter(count=1000)}


def user_of(server: RedisServer, *rules: str) -> RedisOptions:
    """The options of a user who has these rights, on all keys."""
    server.command("ACL", "SETUSER", "some", "reset", "on", ">pw", "~*", *rules)
    return RedisOptions(server.url, username="some", password="pw")


def purge(server: PrimaryServers, selection: Selection, prefix: bytes = b"") -> PurgeResult:
    return carried_out(server, choose(server, prefix, selection))


def carried_out(server: PrimaryServers, plan: Plan) -> PurgeResult:
    """What comes of a plan, at full speed."""
    result = PurgeResult()
    remove(server, plan, 1e6, result)
    return result


def refused(
    options: RedisOptions, error: type[Exception] | tuple[type[Exception], ...], match: str = "."
) -> str:
    """What tools say where they cannot be let in."""
    with pytest.raises(error, match=match) as caught, open_server(options):
        pass
    return str(caught.value)

"""Which chunks a new agent should load, in which order, and which it could not use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmcache_redis.admin.names import read_layout
from lmcache_redis.admin.report import as_json, choice_lines
from lmcache_redis.admin.server import PrimaryServers, open_server
from lmcache_redis.admin.stripes import Use
from lmcache_redis.admin.survey import SeenChunk
from lmcache_redis.admin.warm import Candidate, Choice, choose, most_used_first
from lmcache_redis.chunks.frame import HEADER_BYTES, ChunkFrame, describe_header
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import opaque_pages
from lmcache_redis.errors import ConfigError, RedisAuthError
from lmcache_redis.resp import RedisOptions
from tests.admin.cache import PAYLOAD_BYTES, Cached, age
from tests.servers import RedisServer


def numbers(choice: Choice) -> list[int]:
    return [each.name.key.chunk_hash[-1] for each in choice.candidates]


def chosen(server: PrimaryServers, *models: str, **given: Any) -> Choice:
    return choose(server, given.pop("prefix", b""), PAYLOAD_BYTES, models, **given)


def idle(client: Any, chunk: Cached, seconds: int) -> None:
    chunk.put(client)
    for key in chunk.keys:
        age(client, key, seconds)


def test_the_least_idle_come_first(server: PrimaryServers, client: Any) -> None:
    for number, seconds in ((1, 500), (2, 100), (3, 9000), (4, 300)):
        idle(client, Cached(number), seconds)
    assert numbers(chosen(server)) == [2, 4, 1, 3]
    # Looking changes no order, but for the one chunk whose header is read before Redis 7.2.
    assert numbers(chosen(server)) == [2, 4, 1, 3]
    assert client.object("idletime", Cached(3).keys[0]) >= 9000


def test_the_most_frequent_come_first(own_server: RedisServer) -> None:
    own_server.config_set("maxmemory-policy", "allkeys-lfu")
    with own_server.client() as client, open_server(RedisOptions(own_server.unix_url)) as server:
        for number, uses in ((1, 20), (2, 200), (3, 1), (4, 90)):
            chunk = Cached(number)
            chunk.put(client)
            for key in chunk.keys:
                dumped = client.dump(key)
                client.execute_command("RESTORE", key, 0, dumped, "REPLACE", "FREQ", uses)
        assert numbers(chosen(server)) == [2, 4, 1, 3]


def test_the_order_of_use() -> None:
    chunks = [SeenChunk(Cached(number).name, 1) for number in range(5)]
    uses = [Use(idle_s=7), Use(), Use(idle_s=0), Use(frequency=0), Use(frequency=9)]
    # A cluster may have nodes of both kinds. What the server knows nothing of is gone.
    assert [chunks.index(each) for each in most_used_first(chunks, uses)] == [4, 2, 3, 0]


def test_a_candidate_has_what_its_name_and_size_follow_from(
    server: PrimaryServers, client: Any
) -> None:
    chunk = Cached(7, rank=1, prefix=b"ours:")
    chunk.put(client)
    Cached(8).put(client)
    (candidate,) = chosen(server, prefix=b"ours:").candidates
    assert candidate == Candidate(
        chunk.name,
        chunk.fingerprint,
        chunk.chunk_bytes,
        3,
        opaque_pages(chunk.chunk_bytes).serialize(),
    )


def test_models_and_layouts(server: PrimaryServers, client: Any) -> None:
    for number, model in enumerate(("a", "b", "c")):
        Cached(number, model=model).put(client)
    second = Cached(9, model="a", layout="second")
    second.put(client)
    assert sorted(numbers(chosen(server, "a", "c"))) == [0, 2, 9]
    layouts = read_layout(second.fingerprint.hex())
    assert numbers(chosen(server, namespaces=layouts)) == [9]
    with pytest.raises(ConfigError, match="has no chunks of the model x; it has chunks of a, b, c"):
        chosen(server, "b", "x")


def test_an_empty_server(server: PrimaryServers, client: Any) -> None:
    assert chosen(server) == Choice()
    with pytest.raises(ConfigError, match="it has chunks of no model"):
        chosen(server, "x")


def value_of(chunk: Cached, index: int, fmt: MemoryFormat) -> bytes:
    """A stripe of a chunk of another memory format."""
    metadata = RemoteMetadata(chunk.chunk_bytes, [(chunk.chunk_bytes,)], ["uint8"], fmt)
    header, frame = bytearray(HEADER_BYTES), chunk.value(index)
    whole = describe_header(frame)
    other = ChunkFrame(
        chunk.fingerprint,
        whole.chunk_hash,
        chunk.chunk_bytes,
        PAYLOAD_BYTES,
        metadata.serialize(),
    )
    header = other.header(index, whole.store_id, whole.checksum, 0)
    return bytes(header) + frame[HEADER_BYTES:]


def test_what_an_agent_would_not_find_is_left(server: PrimaryServers, client: Any) -> None:
    whole = Cached(1)
    whole.put(client)
    Cached(2).put(client, 0, 1)
    Cached(3).put(client, 1, 2)
    idle(client, Cached(4, stripe_count=4), 1000)  # cut otherwise than the first one
    Cached(5, layout="raw", raw_namespace=True).put(client)
    tensors = Cached(6, layout="tensors")
    for index, key in enumerate(tensors.keys):
        client.set(key, value_of(tensors, index, MemoryFormat.KV_2LTD))
    broken = Cached(7, layout="broken")
    client.set(broken.keys[0], b"no header")
    choice = chosen(server)
    assert numbers(choice) == [1]
    assert choice.unfit == {
        "incomplete, or cut for another --slot-bytes than the agent's": 3,
        "not stored by an agent": 2,
        "not a header that can be read": 1,
    }


def test_another_slot_size(server: PrimaryServers, client: Any) -> None:
    Cached(1).put(client)
    choice = choose(server, b"", 2 * PAYLOAD_BYTES)
    assert not choice.candidates
    (reason,) = choice.unfit
    assert "--slot-bytes" in reason


def test_a_user_who_may_not_see_idle_times(own_server: RedisServer) -> None:
    own_server.command("ACL", "SETUSER", "some", "on", ">pw", "~*", "+@read", "+ping", "-object")
    options = RedisOptions(own_server.unix_url, username="some", password="pw")
    with own_server.client() as client, open_server(options) as server:
        Cached(1).put(client)
        with pytest.raises(RedisAuthError, match=r"allow it \+object"):
            chosen(server)


def choice_of(*sizes: int) -> Choice:
    first = Candidate(Cached(0).name, bytes(32), 0, 1, b"")
    return Choice(tuple(replace(first, chunk_bytes=size, stripes=size // 10) for size in sizes))


@pytest.mark.parametrize(
    ("slots", "limit_bytes", "fits"),
    [(100, None, 4), (7, None, 3), (6, None, 3), (5, None, 2), (0, None, 0), (100, 30, 2)],
)
def test_what_fits_a_pool(slots: int, limit_bytes: int | None, fits: int) -> None:
    choice = choice_of(10, 20, 30, 40)
    assert choice.first(slots, limit_bytes).candidates == choice.candidates[:fits]


def test_the_report() -> None:
    choice = choice_of(10, 20, 30)
    choice.unfit["odd"] = 2
    fitting = choice.first(3, None)
    layout = Cached().name.layout
    groups = [{"model": "org/model", "layout": layout, "chunks": 2, "bytes": 30}]
    assert as_json(fitting) == {
        "chunks": 2, "chunk_bytes": 30, "groups": groups, "unfit": {"odd": 2}
    }  # fmt: skip
    assert [" ".join(line.split()) for line in choice_lines(fitting, choice, "here")] == [
        "to load from here: 2 chunks (30 bytes) of 3 (60 bytes), the most used ones",
        "model layout chunks size",
        f"org/model {layout} 2 30 bytes",
        "2 chunks cannot be loaded: odd",
    ]

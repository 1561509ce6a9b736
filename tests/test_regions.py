# SPDX-License-Identifier: Apache-2.0
"""The core of the doors, over a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.errors import ConfigError
from lmcache_redis.regions import Answer, DoorSettings, RegionChunk, RegionStore, form_of
from tests.fuzz.packed import elements_with
from tests.resp.test_node import cluster_url, shard
from tests.servers import WAIT_S, RedisServer, stripe_keys, wait_until

pytestmark = pytest.mark.servers

SIZE = 300_000
IDENTITY = {"weights": "v1"}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def settings(redis: RedisServer) -> DoorSettings:
    return DoorSettings.of({"url": redis.unix_url, "slot_bytes": 65536})


@pytest.fixture
def store(settings: DoorSettings) -> Iterator[RegionStore]:
    opened = RegionStore(settings)
    assert opened.wait_probed(WAIT_S)
    yield opened
    opened.close(1.0)


def metadata(dtype: str = "bfloat16") -> RemoteMetadata:
    return RemoteMetadata(SIZE, [(2, SIZE // 4)], [dtype], MemoryFormat.UNDEFINED)


def form(settings: DoorSettings, dtype: str = "bfloat16", views: int = 1, **more: str) -> ChunkForm:
    return form_of({**IDENTITY, **more}, "org/model", 0, metadata(dtype), settings, views)


def answer(call: Callable[[Answer], None]) -> list[bool]:
    told: list[list[bool]] = []
    ended = threading.Event()

    def done(result: list[bool]) -> None:
        told.append(result)
        ended.set()

    call(done)
    assert ended.wait(WAIT_S)
    return told[0]


def chunk(of: ChunkForm, key: bytes, content: bytes | None = None, views: int = 1) -> RegionChunk:
    memory = memoryview(bytearray(content or bytes(SIZE)))
    size = SIZE // views
    return RegionChunk(of, key, [memory[at : at + size] for at in range(0, SIZE, size)])


def content_of(some: RegionChunk) -> bytes:
    return b"".join(some.views)


def stored(store: RegionStore, *chunks: RegionChunk) -> list[bool]:
    return answer(lambda done: store.store(chunks, done))


def loaded(store: RegionStore, *chunks: RegionChunk) -> list[bool]:
    return answer(lambda done: store.load(chunks, done))


def there(store: RegionStore, *chunks: RegionChunk) -> list[bool]:
    return answer(lambda done: store.lookup(chunks, done))


@pytest.mark.parametrize("views", [1, 4])
def test_what_was_stored_is_loaded_byte_for_byte(
    store: RegionStore, settings: DoorSettings, views: int
) -> None:
    """Under a key of any length."""
    of = form(settings, views=views)
    content, key, other = bytes(range(250)) * (SIZE // 250), b"k" * 200, b"k" * 201
    assert stored(store, chunk(of, key, content, views)) == [True]
    assert there(store, chunk(of, key), chunk(of, other)) == [True, False]
    into = chunk(of, key, views=views)
    assert loaded(store, into, chunk(of, other, views=views)) == [True, False]
    assert content_of(into) == content


def test_a_door_packs_what_all_read(
    store: RegionStore, settings: DoorSettings, redis: RedisServer
) -> None:
    of = form(settings)
    content = elements_with([112 + n % 7 for n in range(SIZE // 2)], 2)
    packing = RegionStore(msgspec.structs.replace(settings, compress="lossless"))
    assert packing.wait_probed(WAIT_S)
    assert stored(packing, chunk(of, b"k", content)) == [True]
    with redis.client() as client:
        assert sum(map(client.strlen, stripe_keys(client))) < 0.8 * SIZE
    counters = packing.metrics.snapshot()
    packing.close(1.0)
    assert counters["plain_bytes"] == SIZE
    assert counters["stored_bytes"] < 0.8 * SIZE
    assert loaded(store, into := chunk(of, b"k")) == [True]
    assert content_of(into) == content


def test_other_weights_dtypes_or_pieces_are_misses(
    store: RegionStore, settings: DoorSettings
) -> None:
    stored(store, chunk(form(settings), b"k"))
    others = [
        form(settings, "float16"),
        form(settings, weights="v2"),
        form(settings, views=4),
        form_of(IDENTITY, "org/other", 0, metadata(), settings),
        form_of(IDENTITY, "org/model", 1, metadata(), settings),
    ]
    assert there(store, *[chunk(of, b"k") for of in others]) == [False] * len(others)


def test_a_present_chunk_is_not_written_again(
    store: RegionStore, settings: DoorSettings, redis: RedisServer
) -> None:
    of = form(settings)
    stored(store, chunk(of, b"k", b"x" * SIZE))
    present: list[bool] = []
    again = [chunk(of, b"k", b"y" * SIZE), chunk(of, b"new")]
    assert answer(lambda done: store.store(again, done, present.extend)) == [True, True]
    assert present == [True, False]
    into = chunk(of, b"k")
    loaded(store, into)
    assert content_of(into) == b"x" * SIZE
    counted = store.metrics.snapshot()
    assert (counted["stored_chunks"], counted["skipped_chunks"]) == (2, 1)


def test_a_damaged_chunk_is_a_miss_until_it_is_stored_again(
    store: RegionStore, settings: DoorSettings, redis: RedisServer
) -> None:
    of = form(settings)
    good = chunk(of, b"k", b"x" * SIZE)
    stored(store, good)
    with redis.client() as client:
        for key in stripe_keys(client):
            client.setrange(key, 5000, b"!")
    assert loaded(store, chunk(of, b"k")) == [False]
    assert there(store, chunk(of, b"k")) == [False]
    assert stored(store, good) == [True]
    into = chunk(of, b"k")
    assert loaded(store, into) == [True]
    assert content_of(into) == b"x" * SIZE


def test_a_removed_chunk_is_gone(
    store: RegionStore, settings: DoorSettings, redis: RedisServer
) -> None:
    of = form(settings)
    stored(store, chunk(of, b"k"))
    chunks = [chunk(of, b"k"), chunk(of, b"x")]
    assert answer(lambda done: store.remove(chunks, done)) == [True, True]
    with redis.client() as client:
        assert not stripe_keys(client)


def test_what_may_be_there_is_not_written(settings: DoorSettings) -> None:
    """The slot moves: the server sends whoever asks to another."""

    def answer_one(words: list[bytes]) -> bytes | None:
        return b"-ASK 1 127.0.0.1:1\r\n" if words[0] == b"EXISTS" else None

    with shard(answer_one) as server:
        moving = RegionStore(msgspec.structs.replace(settings, url=cluster_url(server)))
        assert moving.wait_probed(WAIT_S)
        some = chunk(form(settings), b"k", b"x" * SIZE)
        assert there(moving, some) == [False]
        assert stored(moving, some) == [False]
        assert moving.metrics.snapshot()["drop_redis_error"] == 1
        assert moving.close(1.0)
        assert b"SET" not in {words[0] for words in server.commands}


def test_a_lost_server_answers_misses_at_once(
    store: RegionStore, settings: DoorSettings, redis: RedisServer
) -> None:
    of = form(settings)
    stored(store, chunk(of, b"k"))
    redis.stop()
    wait_until(lambda: store.why_down, "a server that is down")
    assert there(store, chunk(of, b"k")) == [False]
    assert loaded(store, chunk(of, b"k")) == [False]
    assert stored(store, chunk(of, b"k")) == [False]
    assert answer(lambda done: store.remove([chunk(of, b"k")], done)) == [False]


def test_views_of_another_size_are_refused(store: RegionStore, settings: DoorSettings) -> None:
    short = RegionChunk(form(settings), b"k", [memoryview(bytearray(SIZE - 1))])
    with pytest.raises(ValueError, match="slot"):
        store.store([short], lambda answers: None)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "url"),
        ({"url": "redis://h", "host": "x"}, "host"),
        ({"url": 5}, "url"),
        ({"url": "redis://h", "timeout_s": 0}, "timeout_s"),
        ({"url": "redis://h", "slot_bytes": 1}, "slot_bytes"),
        ({"url": "redis://h", "compress": "zstd"}, "compress"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DoorSettings.of(given)


@pytest.mark.unit
def test_times_of_an_earlier_version_stop_no_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The time of a load is still what it was set to."""
    given = {"url": "redis://h", "load_timeout_s": 60.0, "lookup_timeout_s": 0}
    settings = DoorSettings.of(given)
    assert settings == DoorSettings(url="redis://h", timeout_s=60.0)
    assert caplog.messages == [
        "load_timeout_s is taken for timeout_s, its name now: rename it",
        "lookup_timeout_s is ignored, because timeout_s decides: remove it",
    ]
    times = (settings.lookup_timeout_s, settings.timeout_s, settings.store_timeout_s)
    assert times == (6.0, 60.0, 180.0)
    caplog.clear()
    assert DoorSettings.of(given | {"timeout_s": 20.0}).timeout_s == 20.0
    assert sorted(caplog.messages) == [
        f"{name} is ignored, because timeout_s decides: remove it"
        for name in ("load_timeout_s", "lookup_timeout_s")
    ]


@pytest.mark.unit
def test_settings_of_the_host_are_left_to_it() -> None:
    given = {"url": "redis://h", "interface_v1": 1}
    assert DoorSettings.of(given, ["interface_v1"]).url == "redis://h"


def settings_table() -> str:
    """The settings in docs/guides/doors.md, as a table of Markdown."""
    rows = [
        f"| `{field.name}` | {'required' if field.required else f'`{field.default!r}`'} |"
        for field in msgspec.structs.fields(DoorSettings)
    ]
    return "\n".join(["| setting | default |", "| --- | --- |", *rows])


@pytest.mark.unit
def test_the_page_of_doors_has_every_setting() -> None:
    page = Path(__file__).parent.parent / "docs" / "guides" / "doors.md"
    assert settings_table() in page.read_text(), (
        "print the table with: "
        "python -c 'from tests.test_regions import settings_table; print(settings_table())'"
    )

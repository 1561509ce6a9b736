# SPDX-License-Identifier: Apache-2.0
"""What is said about a key and about the cache, and that nothing changes by asking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from lmcache_redis.admin.inspect import ChunkReport, ChunkVerdict, explain, summarise
from lmcache_redis.admin.purge import Selection, choose
from lmcache_redis.admin.report import as_json, chunk_lines, summary_lines
from lmcache_redis.admin.server import PrimaryServers, open_server
from lmcache_redis.agent.registering import form_of
from lmcache_redis.chunks.frame import HEADER_BYTES, SEAL_AT, add_checksums, mark_packed
from lmcache_redis.chunks.packing import pack
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import ConfigError
from lmcache_redis.resp import RedisOptions
from lmcache_redis.seal import SealKeys
from lmcache_redis.units import printable
from tests.admin.cache import STORED_UNIX_MS, Cached, age, everything, user_of
from tests.fuzz.packed import elements_with
from tests.servers import RedisServer

CHUNK = Cached(3, rank=1)


def report_on(
    server: PrimaryServers, key: bytes, verify: bool = False, keys: SealKeys | None = None
) -> ChunkReport:
    return explain(server, key, b"", verify, keys)


@pytest.mark.parametrize("key", [CHUNK.name.chunk_key, *CHUNK.keys])
def test_a_chunk_by_any_of_its_keys(
    server: PrimaryServers, client: Any, redis_server: RedisServer, key: bytes
) -> None:
    CHUNK.put(client)
    Cached(4).put(client)
    before = everything(redis_server)
    report = report_on(server, key)
    assert everything(redis_server) == before
    assert report.name == CHUNK.name
    assert (report.verdict, report.stripe_count, report.present) == (ChunkVerdict.COMPLETE, 3, 3)
    assert report.headed is not None
    assert report.headed.header is not None
    assert report.headed.header.created_unix_ms == STORED_UNIX_MS
    text = "\n".join(chunk_lines(report))
    for said in (
        "org/model",
        "1 of 2",
        CHUNK.name.layout,
        "8.1 KiB as PAGES",
        "uint8 [",
        "2023-11-14",
    ):
        assert said in text


def remove(*indexes: int) -> Callable[[Any], None]:
    return lambda client: client.delete(*(CHUNK.keys[index] for index in indexes))


def put(index: int, value: bytes) -> Callable[[Any], None]:
    return lambda client: client.set(CHUNK.keys[index], value)


@pytest.mark.parametrize(
    ("change", "verdict", "said"),
    [
        (remove(1), ChunkVerdict.INCOMPLETE, "stripe 1: not there"),
        (remove(0), ChunkVerdict.INVISIBLE, "stripe 0: not there"),
        (remove(0, 1), ChunkVerdict.INVISIBLE, "1 of 3 present"),
        (remove(0, 1, 2), ChunkVerdict.ABSENT, "0 present"),
        (put(1, Cached(3, rank=1, store=9).value(1)), ChunkVerdict.TORN, "3 of 3 present"),
        (put(2, CHUNK.value(2)[:-1]), ChunkVerdict.BROKEN, "739 bytes where its header says 740"),
        (put(0, b"x"), ChunkVerdict.BROKEN, "stripe 0: the header of a stripe was expected"),
        (
            put(1, Cached(4).value(1)),
            ChunkVerdict.BROKEN,
            "stripe 1: its header is of the chunk 00",
        ),
    ],
    ids=["a hole", "no stripe 0", "the last alone", "gone", "torn", "short", "foreign", "other"],
)
def test_what_is_wrong_with_a_chunk(
    server: PrimaryServers,
    client: Any,
    change: Callable[[Any], None],
    verdict: ChunkVerdict,
    said: str,
) -> None:
    CHUNK.put(client)
    change(client)
    report = report_on(server, CHUNK.name.chunk_key)
    assert report.verdict is verdict
    assert said in "\n".join(chunk_lines(report))


def test_a_list_under_our_key_is_explained(
    server: PrimaryServers, client: Any, redis_server: RedisServer
) -> None:
    client.lpush(CHUNK.keys[0], "x")
    before = everything(redis_server)
    report = report_on(server, CHUNK.keys[0])
    assert report.verdict is ChunkVerdict.BROKEN
    assert "no string: no agent writes or removes it" in "\n".join(chunk_lines(report))
    assert everything(redis_server) == before


def test_a_user_who_may_not_read(own_server: RedisServer) -> None:
    options = user_of(own_server, "+exists", "+ping")
    with own_server.client() as client, open_server(options) as server:
        CHUNK.put(client)
        report = report_on(server, CHUNK.keys[0])
        assert report.verdict is ChunkVerdict.UNKNOWN
        assert "does not allow it to this user" in "\n".join(chunk_lines(report))


@pytest.mark.parametrize("keys", [None, SealKeys([b"k" * 32])], ids=["plain", "sealed"])
def test_verify_unpacks(server: PrimaryServers, client: Any, keys: SealKeys | None) -> None:
    chunk = Cached(3, sealed_with=keys)
    chunk.put(client)
    room = bytearray(4096)
    stored = room[: pack(elements_with([112] * 2048, 2), 2, room)]
    for good in (True, False):
        header = bytearray(chunk.value(1)[:HEADER_BYTES])
        payload = memoryview(stored if good else stored[:-1])
        mark_packed(header, 2, len(payload))
        header[56:64] = header[168:176] = bytes(8)
        header[SEAL_AT:] = bytes(HEADER_BYTES - SEAL_AT)
        if keys is not None:
            payload = keys.seal(chunk.keys[1], header, payload, memoryview(bytearray(4096)))
        add_checksums(header, xxh3_64_intdigest(payload))
        client.set(chunk.keys[1], bytes(header) + bytes(payload))
        assert report_on(server, chunk.keys[1]).verdict is ChunkVerdict.COMPLETE
        report = report_on(server, chunk.keys[1], verify=True, keys=keys)
        assert report.verdict is (ChunkVerdict.COMPLETE if good else ChunkVerdict.BROKEN)
        assert (
            "what is packed in it is not the payload" in "\n".join(chunk_lines(report))
        ) is not good


def test_a_sealed_chunk(server: PrimaryServers, client: Any) -> None:
    keys, others = SealKeys([b"k" * 32]), SealKeys([b"o" * 32])
    chunk = Cached(3, sealed_with=keys)
    chunk.put(client)
    key = chunk.keys[0]

    def said(verify: bool, given: SealKeys | None) -> tuple[ChunkVerdict, str]:
        report = report_on(server, key, verify, given)
        assert report.opened == (verify and given is not None)
        return report.verdict, "\n".join(chunk_lines(report))

    verdict, text = said(False, None)
    assert verdict is ChunkVerdict.COMPLETE
    assert f"sealed     with the key {keys.ids[0].hex()}" in text
    verdict, text = said(True, None)
    assert verdict is ChunkVerdict.COMPLETE
    assert "compared with their checksums, not opened (--seal-key-file)" in text
    verdict, text = said(True, keys)
    assert verdict is ChunkVerdict.COMPLETE
    assert "compared with their checksums and opened" in text
    verdict, text = said(True, others)
    assert verdict is ChunkVerdict.BROKEN
    assert f"sealed with another key, {keys.ids[0].hex()}" in text
    # Another chunk's bytes, with right checksums, deceive whoever has no key.
    forged = bytearray(Cached(3, sealed_with=keys, model="org/other").value(1))
    client.set(chunk.keys[1], bytes(forged))
    assert said(True, None)[0] is ChunkVerdict.COMPLETE
    verdict, text = said(True, keys)
    assert verdict is ChunkVerdict.BROKEN
    assert "not what was sealed" in text
    assert summarise(server, b"", everything=True, verify=True).groups[0].damaged == 0
    (group,) = summarise(server, b"", everything=True, verify=True, keys=keys).groups
    assert group.damaged == 1


def test_a_plain_chunk_where_keys_are_given(server: PrimaryServers, client: Any) -> None:
    CHUNK.put(client)
    report = report_on(server, CHUNK.keys[0], True, SealKeys([b"k" * 32]))
    assert report.verdict is ChunkVerdict.BROKEN
    assert "not sealed: agents with seal keys count a miss" in "\n".join(chunk_lines(report))


@pytest.mark.parametrize("key", [b"foo\x1b[2J", b"", b"lmcr2:", Cached(1, prefix=b"x:").keys[0]])
def test_a_key_that_names_no_chunk(server: PrimaryServers, key: bytes) -> None:
    with pytest.raises(ConfigError, match="neither a stripe nor a chunk") as caught:
        explain(server, key, b"", False)
    assert str(caught.value).isprintable()


def test_what_a_real_agent_would_write_is_ours(server: PrimaryServers, client: Any) -> None:
    segments = (Segment(storage=0, offset=0, page_bytes=1024, block_stride=1024),)
    layout = KVLayout((("model", "m"),), "float16", "cpu", 16, 8, segments)
    config = AgentConfig(chunk_size_tokens=64, slot_bytes=4096)
    form = form_of(layout, "org/real", Cached().name.key.kv_rank, 64, config)
    frame = form.frame(bytes(32))
    header = frame.header(0, bytes(16), 0, STORED_UNIX_MS)
    key = form.key(bytes(32))
    client.set(key + b"\0\0", bytes(header) + bytes(frame.chunk_bytes))
    report = report_on(server, key)
    assert (report.verdict, report.stripe_count) == (ChunkVerdict.COMPLETE, 1)
    assert report.name.layout == form.fingerprint.hex()[:16]


# ------------------------------------------------------------------- summary


def test_a_summary(server: PrimaryServers, client: Any, redis_server: RedisServer) -> None:
    for number in range(4):
        for rank in range(2):
            Cached(number, rank=rank).put(client)
    Cached(1, layout="second", stripe_count=1).put(client)
    client.delete(Cached(0).keys[0])
    client.delete(Cached(1).keys[1], Cached(1).keys[2])
    client.set("lmcr2:x", "y")
    before = everything(redis_server)
    age(client, Cached(2).keys[0], 5000)
    for everything_asked in (False, True):
        summary = summarise(server, b"", everything=everything_asked, verify=False)
        first, second = summary.groups
        assert (first.model, first.layout, len(first.workers)) == (
            "org/model", Cached().name.layout, 2
        )  # fmt: skip
        assert (first.chunks, first.stripes) == (8, 21)
        assert (first.incomplete, first.without_stripe_0) == (2, 1)
        lost = [Cached(0).value(0), Cached(1).value(1), Cached(1).value(2)]
        value_bytes = 8 * Cached().value_bytes - sum(map(len, lost))
        assert first.sizes == (value_bytes, value_bytes)
        assert max(first.idle_s) >= 5000
        assert (second.chunks, second.incomplete) == (1, 0)
        assert summary.survey.whole
    assert everything(redis_server) == before
    text = "\n".join(summary_lines(summary))
    assert '1 key named like ours but naming no chunk, such as "lmcr2:x"' in text


def test_a_summary_verified(server: PrimaryServers, client: Any) -> None:
    for number in range(3):
        Cached(number).put(client)
    client.setrange(Cached(1).keys[2], HEADER_BYTES, b"damaged")
    client.set(Cached(2).keys[1], "foreign")
    said: list[tuple[str, int, int]] = []
    summary = summarise(
        server, b"", everything=True, verify=True, progress=lambda *step: said.append(step)
    )
    assert [group.damaged for group in summary.groups] == [2]
    assert said[0] == ("keys scanned", 9, 9)
    assert said[-3:] == [("chunks verified", number, 3) for number in (1, 2, 3)]


def test_a_summary_of_packed_chunks(server: PrimaryServers, client: Any) -> None:
    """One chunk is taken for all, unless all are read: another one is not packed."""
    for number in range(4):
        Cached(number, packed_bytes=1000 if number else 0).put(client)
    for key in Cached(0).keys:
        age(client, key, 5000)
    plain, stored = Cached().value_bytes, Cached().value_bytes - 2 * 3096
    (group,) = (found := summarise(server, b"", everything=True, verify=False)).groups
    assert group.sizes.plain == 4 * plain
    assert group.sizes.stored == pytest.approx(4 * stored, abs=4)
    assert "about 15.7 KiB (plain 39.9 KiB)" in "\n".join(summary_lines(found))
    (group,) = (found := summarise(server, b"", everything=True, verify=True)).groups
    assert group.sizes == (3 * stored + plain, 4 * plain)
    assert " 21.8 KiB (plain 39.9 KiB)" in "\n".join(summary_lines(found))
    (shown,) = as_json(found)["groups"]
    assert (shown["value_bytes"], shown["plain_bytes"]) == (3 * stored + plain, 4 * plain)


def test_a_packed_chunk(server: PrimaryServers, client: Any) -> None:
    (chunk := Cached(3, packed_bytes=1000)).put(client)
    report = report_on(server, chunk.keys[0])
    sizes = (chunk.value_bytes - 2 * 3096, chunk.value_bytes)
    assert report.sizes == sizes
    text = "\n".join(chunk_lines(report))
    assert "size       8.1 KiB as PAGES; packed, in Redis 3.9 KiB (plain 10.0 KiB)" in text
    shown = as_json(report)
    assert (shown["value_bytes"], shown["plain_bytes"]) == sizes
    assert [each["payload_bytes"] for each in shown["stripes"]] == [4096, 4096, 100]


def test_who_stored_a_chunk_is_said(server: PrimaryServers, client: Any) -> None:
    for number, tenant in enumerate((bytes(8), b"\x01" * 8)):
        chunk = Cached(number, tenant=tenant)
        chunk.put(client)
        report = report_on(server, chunk.keys[1])
        assert report.verdict is ChunkVerdict.COMPLETE
        is_known = any(tenant)
        said = "tenant     0101010101010101, a digest of its name" in [*chunk_lines(report)]
        assert said is is_known
        assert as_json(report)["tenant"] == (tenant.hex() if is_known else None)


def test_under_lfu_no_idle_times_are_told(own_server: RedisServer) -> None:
    own_server.config_set("maxmemory-policy", "allkeys-lfu")
    with own_server.client() as client, open_server(RedisOptions(own_server.unix_url)) as server:
        CHUNK.put(client)
        (group,) = summarise(server, b"", everything=False, verify=False).groups
        assert group.idle_s == []
        text = "\n".join(chunk_lines(report_on(server, CHUNK.keys[0])))
        assert "unknown: the server does not say" in text
        with pytest.raises(ConfigError, match=r"counts uses.*: choose by --model"):
            choose(server, b"", Selection(idle_longer_than_s=1.0))
        assert len(client.keys("*")) == 3


def test_names_cannot_move_the_cursor() -> None:
    assert printable("org/mod\x1b[2Jel\n\u202e") == "org/mod\\x1b[2Jel\\n\\u202e"
    assert printable("ürg/模型") == "ürg/模型"


# The second: in the year 3000.
@pytest.mark.parametrize("stored_unix_ms", [2**64 - 1, 32_503_680_000_000])
def test_a_forged_time_is_said(server: PrimaryServers, client: Any, stored_unix_ms: int) -> None:
    chunk = Cached(1, stored_unix_ms=stored_unix_ms)
    chunk.put(client)
    report = explain(server, chunk.keys[0], b"", True)
    assert report.verdict is ChunkVerdict.COMPLETE
    (stored,) = [line for line in chunk_lines(report) if line.startswith("stored")]
    assert f"{stored_unix_ms:,} ms after 1970, which is to come" in stored
    assert as_json(report)["stored_unix_s"] == stored_unix_ms / 1000
    assert list(summary_lines(summarise(server, b"", everything=True, verify=True)))
    Cached(2).put(client)
    plan = choose(server, b"", Selection(stored_longer_than_s=1.0))
    assert [chunk.name.key.chunk_hash[-1] for chunk in plan.chunks] == [2]


# ---------------------------------------------------------------- for programs


def names(found: Any) -> str:
    return " ".join(as_json(found))


def test_the_fields_of_a_chunk_are_these(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(3, prefix=b"\xff:")
    chunk.put(client)
    report = explain(server, chunk.keys[1], chunk.prefix, False)
    assert names(report) == (
        "chunk_key_hex key_prefix model layout chunk_hash world_size rank local_world_size "
        "local_rank stripe_asked verdict verified opened sealed_with tenant stripe_count "
        "stripes_present chunk_bytes value_bytes plain_bytes fingerprint memory_format shapes "
        "dtypes stored_unix_s stripes"
    )
    stripe = as_json(report)["stripes"][0]
    assert names(stripe) == (
        "index state detail value_bytes payload_bytes store_id stored_unix_s idle_s expires_in_s"
    )


def test_values_as_programs_take_them(server: PrimaryServers, client: Any) -> None:
    chunk = Cached(3, rank=1, prefix=b"\xff:")
    chunk.put(client)
    client.delete(chunk.keys[2])
    report = as_json(explain(server, chunk.keys[0], chunk.prefix, False))
    assert report["key_prefix"] == r"\xff:"
    assert (report["world_size"], report["rank"]) == (2, 1)
    assert report["chunk_key_hex"] == chunk.name.chunk_key.hex()
    assert (report["verdict"], report["memory_format"]) == ("incomplete", "PAGES")
    assert (report["shapes"], report["dtypes"]) == ([[chunk.chunk_bytes]], ["uint8"])
    assert report["stored_unix_s"] == STORED_UNIX_MS / 1000
    assert [stripe["state"] for stripe in report["stripes"]] == ["whole", "whole", "missing"]
    gone = as_json(explain(server, Cached(9).keys[0], b"", False))
    assert (gone["chunk_bytes"], gone["fingerprint"], gone["stored_unix_s"]) == (None, None, None)
    group = as_json(summarise(server, chunk.prefix, everything=True, verify=False))["groups"][0]
    assert (group["workers"], group["damaged"]) == (1, None)
    assert names(group["idle_s"]) == "min median max"

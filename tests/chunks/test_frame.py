# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from lmcache_redis.chunks.cutting import allocated_bytes, stripe_payload_bytes
from lmcache_redis.chunks.frame import (
    HEADER_BYTES,
    ChunkFrame,
    HeaderCheck,
    Verdict,
    add_checksums,
    describe_header,
    is_expected,
    mark_packed,
)
from lmcache_redis.chunks.keys import ObjectKey, hash_chunks, hash_tag
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import key_stem, stripe_key
from lmcache_redis.chunks.packing import pack_in_numpy
from lmcache_redis.compat.custom_types import IPCCacheEngineKey
from lmcache_redis.errors import FormatError
from lmcache_redis.seal import SealKeys

FINGERPRINT = bytes(range(0xA0, 0xC0))
CHUNK_HASH = bytes(range(32))
STORE_ID = bytes.fromhex("00112233445566778899aabbccddeeff")
CREATED_UNIX_MS = 1_767_225_600_000
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "value-format.md"


def metadata_of(chunk_bytes: int) -> RemoteMetadata:
    return RemoteMetadata(chunk_bytes, [(chunk_bytes,)], ["uint8"], MemoryFormat.PAGES)


def frame_of(chunk_bytes: int = 150_000, stripe_bytes: int = 65_536, **fields: bytes) -> ChunkFrame:
    return ChunkFrame(
        fingerprint=fields.get("fingerprint", FINGERPRINT),
        chunk_hash=fields.get("chunk_hash", CHUNK_HASH),
        chunk_bytes=chunk_bytes,
        stripe_payload_bytes=stripe_bytes,
        metadata=fields.get("metadata", metadata_of(chunk_bytes).serialize()),
    )


def header_of(frame: ChunkFrame, index: int = 0, checksum: int = 0x1122334455667788) -> bytearray:
    header = frame.header(index, STORE_ID, checksum, CREATED_UNIX_MS)
    return header


def put(header: bytearray, offset: int, fmt: str, *values: object) -> bytearray:
    """A copy with a field changed and the header's own checksum made right again."""
    changed = bytearray(header)
    struct.pack_into(fmt, changed, offset, *values)
    return seal(changed)


def seal(header: bytearray) -> bytearray:
    struct.pack_into("<Q", header, 168, 0)
    struct.pack_into("<Q", header, 168, xxh3_64_intdigest(bytes(header[:HEADER_BYTES])))
    return header


class TestHeaderBytes:
    def test_every_field_lies_where_it_is_documented(self) -> None:
        metadata = metadata_of(150_000).serialize()
        expected = bytearray(HEADER_BYTES)
        for offset, fmt, value in [
            (0, "4s", b"LMCR"),
            (4, "<H", 2),
            (6, "<H", 640),
            (8, "16s", STORE_ID),
            (24, "<H", 2),
            (26, "<H", 3),
            (28, "<I", 0),
            (32, "<Q", 150_000 - 2 * 65_536),
            (40, "<Q", 2 * 65_536),
            (48, "<Q", 150_000),
            (56, "<Q", 0xFEDCBA9876543210),
            (64, "32s", FINGERPRINT),
            (96, "B", 32),
            (97, "63s", CHUNK_HASH),
            (160, "<Q", CREATED_UNIX_MS),
            (184, "<Q", 150_000 - 2 * 65_536),
            (208, "336s", metadata),
        ]:
            struct.pack_into(fmt, expected, offset, value)
        seal(expected)
        assert header_of(frame_of(), 2, 0xFEDCBA9876543210) == expected

    @pytest.mark.parametrize(
        ("index", "store_id", "created", "message"),
        [
            (3, STORE_ID, 0, "a chunk of 3 stripes has no stripe 3"),
            (-1, STORE_ID, 0, "a chunk of 3 stripes has no stripe -1"),
            (0, b"short", 0, "a store id has 16 bytes, not 5"),
            (0, STORE_ID, -1, "cannot be written"),
            (0, STORE_ID, 2**64, "cannot be written"),
        ],
    )
    def test_what_no_header_can_say_is_refused(
        self, index: int, store_id: bytes, created: int, message: str
    ) -> None:
        with pytest.raises(FormatError, match=message):
            frame_of().header(index, store_id, 0, created)


class TestChunkFrame:
    def test_stripes_cover_the_chunk(self) -> None:
        frame = frame_of(150_000, 65_536)
        assert frame.stripe_count == 3
        said = [describe_header(header_of(frame, i)) for i in range(3)]
        assert [each.payload_bytes for each in said] == [65_536, 65_536, 18_928]
        assert [each.payload_offset for each in said] == [0, 65_536, 131_072]

    @pytest.mark.parametrize(
        ("chunk_bytes", "stripe_bytes", "fields", "message"),
        [
            (100, 100, {"fingerprint": b"short"}, "a layout fingerprint has 32 bytes, not 5"),
            (100, 100, {"chunk_hash": b""}, "a chunk hash has 1 to 63 bytes, not 0"),
            (100, 100, {"chunk_hash": bytes(64)}, "a chunk hash has 1 to 63 bytes, not 64"),
            (100, 0, {}, "a stripe has 1 to .* bytes, not 0"),
            (100, -1, {}, "a stripe has 1 to .* bytes, not -1"),
            (0, 100, {}, "a chunk has 1 to .* bytes, not 0"),
            (65_536, 1, {}, "make stripe_bytes larger"),
            (100, 100, {"metadata": b""}, "metadata has 16 to 336 bytes"),
            (100, 100, {"metadata": bytes(337)}, "metadata has 16 to 336 bytes"),
            (
                100,
                100,
                {"metadata": metadata_of(99).serialize()},
                "metadata of 99 bytes for a chunk of 100",
            ),
        ],
    )
    def test_what_no_header_can_carry_is_refused(
        self, chunk_bytes: int, stripe_bytes: int, fields: dict[str, bytes], message: str
    ) -> None:
        with pytest.raises(FormatError, match=message):
            frame_of(chunk_bytes, stripe_bytes, **fields)

    def test_the_most_stripes_that_can_be_numbered(self) -> None:
        frame = frame_of(65_535, 1)
        assert frame.stripe_count == 65_535
        header = header_of(frame, 65_534)
        assert frame.check_header(header, 65_534).ok
        assert describe_header(header).stripe_index == 65_534


@pytest.mark.parametrize(
    ("first", "last", "taken"),
    [
        (17, 32, 32), (113, 128, 128), (129, 160, 160), (225, 256, 256), (257, 320, 320),
        (449, 512, 512), (513, 640, 640), (1793, 2048, 2048),
        ((1 << 20) + 1, 5 << 18, 5 << 18), (7 << 18 | 1, 2 << 20, 2 << 20),
    ],
)  # fmt: skip
def test_the_size_classes_of_jemalloc(first: int, last: int, taken: int) -> None:
    assert (allocated_bytes(first), allocated_bytes(last)) == (taken, taken)


class TestStripePayloadBytes:
    SLOT = (1 << 20) - 4096

    def test_examples(self) -> None:
        assert stripe_payload_bytes(32 << 20, 1 << 20) == 1 << 20
        assert stripe_payload_bytes(1 << 20, 2 << 20) == 1 << 20
        assert stripe_payload_bytes(3_000_000, 2_000_000) == 1_500_032
        # 896 KiB twice and 320, instead of 768 three times.
        assert stripe_payload_bytes(2 << 20, self.SLOT) == (896 << 10) - 704
        assert stripe_payload_bytes(1, 1 << 20) == 64
        assert stripe_payload_bytes(65, 33) == 33

    @given(st.integers(1, 2**40), st.integers(1, 2**30))
    def test_the_fewest_in_the_least_memory(self, chunk_bytes: int, slot_bytes: int) -> None:
        payload = stripe_payload_bytes(chunk_bytes, slot_bytes)
        count = -(-chunk_bytes // slot_bytes)
        assert payload <= slot_bytes
        assert -(-chunk_bytes // payload) == count
        assert payload % 64 == 0 or payload == slot_bytes
        equal = min(-(-chunk_bytes // (64 * count)) * 64, slot_bytes)
        assert self.memory(chunk_bytes, payload) <= self.memory(chunk_bytes, equal)
        if payload != equal:
            assert 4 * (chunk_bytes - (count - 1) * payload) >= payload

    @staticmethod
    def memory(chunk_bytes: int, payload: int) -> int:
        full, last = divmod(chunk_bytes - 1, payload)
        return full * allocated_bytes(payload + 650) + allocated_bytes(last + 1 + 650)

    @pytest.mark.parametrize(("chunk_bytes", "slot_bytes"), [(0, 1), (1, 0), (-1, 1), (1, 2**63)])
    def test_sizes_out_of_range_are_refused(self, chunk_bytes: int, slot_bytes: int) -> None:
        with pytest.raises(FormatError):
            stripe_payload_bytes(chunk_bytes, slot_bytes)


class TestCheckHeader:
    @given(st.data())
    def test_round_trip(self, data: st.DataObject) -> None:
        chunk_bytes = data.draw(st.integers(1, 10_000))
        frame = frame_of(
            chunk_bytes,
            data.draw(st.integers(1, 12_000)),
            fingerprint=data.draw(st.binary(min_size=32, max_size=32)),
            chunk_hash=data.draw(st.binary(min_size=1, max_size=63)),
        )
        index = data.draw(st.integers(0, frame.stripe_count - 1))
        store_id = data.draw(st.binary(min_size=16, max_size=16))
        checksum = data.draw(st.integers(0, 2**64 - 1))
        created = data.draw(st.integers(0, 2**64 - 1))
        header, size = frame.header(index, store_id, checksum, created), frame.stripe_payload_bytes
        assert frame.check_header(header, index) == HeaderCheck(
            Verdict.OK, store_id, checksum, min(size, chunk_bytes - index * size)
        )
        said = describe_header(header)
        assert (said.store_id, said.checksum, said.created_unix_ms) == (store_id, checksum, created)
        assert (said.stripe_index, said.stripe_count) == (index, frame.stripe_count)
        assert said.payload_bytes == min(size, chunk_bytes - index * size)
        assert said.payload_offset == index * frame.stripe_payload_bytes
        assert (said.fingerprint, said.chunk_hash) == (frame.fingerprint, frame.chunk_hash)
        assert (said.chunk_bytes, said.metadata) == (chunk_bytes, metadata_of(chunk_bytes))

    def test_any_buffer_will_do(self) -> None:
        frame, header = frame_of(), header_of(frame_of())
        whole = header + b"payload"
        strided = np.repeat(np.frombuffer(header, np.uint8), 2)[::2]
        for buffer in (header, bytes(header), memoryview(whole), bytearray(whole), strided.data):
            assert frame.check_header(buffer, 0).ok
            assert describe_header(buffer).stripe_index == 0
        assert frame.check_header(memoryview(header).cast("Q"), 0).ok

    def test_every_change_of_one_byte_is_noticed(self) -> None:
        frame = frame_of()
        header = header_of(frame, 1)
        verdicts = set()
        for position in range(HEADER_BYTES):
            original = header[position]
            for value in range(256):
                if value == original:
                    continue
                header[position] = value
                check = frame.check_header(header, 1)
                assert not check.ok
                assert check == HeaderCheck(check.verdict, b"", 0)
                verdicts.add(check.verdict)
                if value == original ^ 1:
                    with pytest.raises(FormatError):
                        describe_header(header)
            header[position] = original
        assert frame.check_header(header, 1).ok
        assert verdicts == {Verdict.BAD_MAGIC, Verdict.BAD_VERSION, Verdict.CORRUPT_HEADER}

    @pytest.mark.parametrize("length", [0, 1, 8, 176, 511, 639])
    def test_a_truncated_header_is_corrupt(self, length: int) -> None:
        frame = frame_of()
        header = header_of(frame)[:length]
        assert frame.check_header(header, 0).verdict is Verdict.CORRUPT_HEADER
        with pytest.raises(FormatError, match="a damaged header"):
            describe_header(header)

    @given(st.binary(max_size=700), st.integers(-1, 3))
    def test_random_bytes_are_a_verdict(self, data: bytes, index: int) -> None:
        assert not frame_of().check_header(data, index).ok
        with pytest.raises(FormatError):
            describe_header(data)

    @given(st.integers(0, HEADER_BYTES - 1), st.binary(min_size=1, max_size=16))
    def test_a_sealed_forgery_passes_only_an_ignorant_reader(
        self, position: int, patch: bytes
    ) -> None:
        frame, header = frame_of(), header_of(frame_of(), 1)
        patch = patch[: HEADER_BYTES - position]
        forged = bytearray(header)
        forged[position : position + len(patch)] = patch
        seal(forged)
        free = (range(8, 24), range(56, 64), range(160, 176), range(192, 208))
        differs = [at for at in range(HEADER_BYTES) if forged[at] != header[at]]
        unnoticed = all(any(at in span for span in free) for at in differs)
        assert frame.check_header(forged, 1).ok == unnoticed
        try:
            describe_header(forged)
        except FormatError:
            assert not unnoticed

    @pytest.mark.parametrize(
        ("offset", "fmt", "value", "verdict"),
        [
            (0, "4s", b"LMCQ", Verdict.BAD_MAGIC),
            (4, "<H", 1, Verdict.BAD_VERSION),
            (4, "<H", 3, Verdict.BAD_VERSION),
            (4, "<H", 0, Verdict.BAD_VERSION),
            (6, "<H", 576, Verdict.CORRUPT_HEADER),
            (28, "<I", 1, Verdict.SEALED),
            (28, "<I", 2, Verdict.BAD_VERSION),
            (24, "<H", 0, Verdict.FOREIGN),
            (95, "B", 0, Verdict.FOREIGN),
            (96, "B", 31, Verdict.FOREIGN),
            (176, "B", 1, Verdict.FOREIGN),
            (176, "B", 2, Verdict.BAD_VERSION),
            (184, "<Q", 65_535, Verdict.FOREIGN),
            (208, "<Q", 150_001, Verdict.FOREIGN),
            (639, "B", 1, Verdict.FOREIGN),
        ],
    )
    def test_each_verdict_has_its_field(
        self, offset: int, fmt: str, value: object, verdict: Verdict
    ) -> None:
        header = put(header_of(frame_of(), 1), offset, fmt, value)
        assert frame_of().check_header(header, 1) == HeaderCheck(verdict, b"", 0)

    @pytest.mark.parametrize(
        ("codec", "element_bytes", "zeros", "stored_bytes", "verdict"),
        [
            (1, 1, b"", 241, Verdict.OK),
            (1, 2, b"", 65_535, Verdict.OK),
            (1, 4, b"", 999, Verdict.OK),
            (1, 0, b"", 999, Verdict.FOREIGN),
            (1, 3, b"", 999, Verdict.FOREIGN),
            (1, 8, b"", 999, Verdict.FOREIGN),
            (1, 2, b"\1", 999, Verdict.FOREIGN),
            (1, 2, b"\0\0\0\0\0\1", 999, Verdict.FOREIGN),
            (1, 2, b"", 0, Verdict.FOREIGN),
            (1, 2, b"", 240, Verdict.FOREIGN),
            (1, 2, b"", 65_536, Verdict.FOREIGN),
            (1, 2, b"", 2**64 - 1, Verdict.FOREIGN),
            (0, 2, b"", 65_536, Verdict.FOREIGN),
            (2, 2, b"", 999, Verdict.BAD_VERSION),
            (255, 2, b"", 999, Verdict.BAD_VERSION),
        ],
    )
    def test_what_a_packed_value_may_be(
        self, codec: int, element_bytes: int, zeros: bytes, stored_bytes: int, verdict: Verdict
    ) -> None:
        values = (codec, element_bytes, zeros, stored_bytes)
        header = put(header_of(frame_of(), 1), 176, "<BB6sQ", *values)
        check = frame_of().check_header(header, 1)
        assert check.verdict is verdict
        if check.ok:
            assert check[3:] == (stored_bytes, element_bytes)
            assert describe_header(header).stored_bytes == stored_bytes
        else:
            with pytest.raises(FormatError):
                describe_header(header)

    def test_a_header_says_how_many_bytes_follow_it(self) -> None:
        header, bare = header_of(frame_of(), 1), frame_of().bare_header(1)
        assert is_expected(header, bare)
        assert [is_expected(header, bare, 65_536 + n) for n in (-1, 0, 1)] == [False, True, False]

    @pytest.mark.parametrize("index", [-1, 3, 70_000])
    def test_an_index_outside_the_chunk_is_a_verdict(self, index: int) -> None:
        assert frame_of().check_header(header_of(frame_of()), index).verdict is Verdict.FOREIGN


class TestDescribeHeader:
    @pytest.mark.parametrize(
        ("offset", "fmt", "values", "message"),
        [
            (0, "4s", (b"nope",), "found not a stripe"),
            (4, "<H", (9,), "found of an unknown version"),
            (28, "<I", (1 << 31,), "found of an unknown version"),
            (6, "<H", (511,), "found a damaged header"),
            (96, "B", (0,), "a chunk hash has"),
            (96, "B", (64,), "cannot be part"),
            (96, "B", (31,), "cannot be part"),
            (208, "<Q", (1,), "a chunk of 1 bytes whose shapes"),
            (48, "<Q", (150_001,), "metadata of 150000 bytes for a chunk of 150001"),
            (24, "<H", (3,), "cannot be part"),
            (24, "<H", (0,), "cannot be part"),
            (24, "<H", (2,), "cannot be part"),
            (26, "<H", (2,), "cannot be part"),
            (26, "<H", (0,), "cannot be part"),
            (26, "<H", (4,), "cannot be part"),
            (32, "<Q", (0,), "a stripe has 1 to .* bytes, not 0"),
            (32, "<Q", (65_537,), "cannot be part"),
            (32, "<Q", (2**64 - 1,), "cannot be part|a stripe has 1 to"),
            (40, "<Q", (0,), "cannot be part"),
            (40, "<Q", (2**64 - 1,), "cannot be part"),
        ],
    )
    def test_a_contradiction_is_refused(
        self, offset: int, fmt: str, values: tuple[object, ...], message: str
    ) -> None:
        header = put(header_of(frame_of(), 1), offset, fmt, *values)
        with pytest.raises(FormatError, match=message):
            describe_header(header)

    @pytest.mark.parametrize(
        ("offset", "value"), [(32, 18_927), (32, 18_929), (40, 131_071), (40, 0), (24, 1)]
    )
    def test_a_contradiction_in_the_last_stripe_is_refused(self, offset: int, value: int) -> None:
        header = put(header_of(frame_of(), 2), offset, "<H" if offset == 24 else "<Q", value)
        with pytest.raises(FormatError, match=r"cannot be part|a stripe has 1 to"):
            describe_header(header)


def documented(label: str) -> bytes:
    """The hex of the block in docs/reference/value-format.md that follows `<!-- label -->`."""
    block = re.search(rf"<!-- {label} -->\n+```text\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    assert block is not None, f"no block {label} in {DOCS.name}"
    lines = re.findall(r"^\d{3}: (\w+)(?: x (\d+))?", block[1], re.M)
    return bytes.fromhex("".join(digits * int(times or 1) for digits, times in lines))


class TestWorkedExample:
    """docs/reference/value-format.md shows one chunk in full, as we write it."""

    METADATA = metadata_of(131_072)

    def frame(self) -> ChunkFrame:
        payload = stripe_payload_bytes(131_072, 65_536)
        assert payload == 65_536
        return ChunkFrame(FINGERPRINT, CHUNK_HASH, 131_072, payload, self.METADATA.serialize())

    def test_key(self) -> None:
        kv_rank = ObjectKey.ComputeKVRank(2, 1, 2, 1)
        stem = key_stem(FINGERPRINT[:16], "org/model", kv_rank, 32)
        assert stripe_key(stem + hash_tag(CHUNK_HASH), 1) == documented("example key")

    def test_header(self) -> None:
        payload = bytes(i % 251 for i in range(65_536))
        header = header_of(self.frame(), 1, xxh3_64_intdigest(payload))
        assert header == documented("example header")
        said = describe_header(documented("example header"))
        assert said.checksum == xxh3_64_intdigest(payload)
        assert said.metadata == self.METADATA

    def test_seal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.urandom", lambda count: bytes(range(0x40, 0x40 + count)))
        payload = bytes(i % 251 for i in range(65_536))
        header = bytearray(self.frame().bare_header(1, STORE_ID, CREATED_UNIX_MS, is_sealed=True))
        room, key = memoryview(bytearray(len(payload))), documented("example key")
        sealed = SealKeys([bytes(range(32))]).seal(key, header, memoryview(payload), room)
        add_checksums(header, xxh3_64_intdigest(sealed))
        assert describe_header(header).sealed_with == documented("example seal")[-80:-72]
        value = bytes(header) + bytes(sealed)
        plain = header_of(self.frame(), 1, xxh3_64_intdigest(payload)) + payload
        shown = ((28, 32), (56, 64), (168, 176), (592, 672))
        assert b"".join(value[start:end] for start, end in shown) == documented("example seal")
        differ = [at for at in range(HEADER_BYTES) if value[at] != plain[at]]
        assert all(any(start <= at < end for start, end in shown) for at in differ)

    def test_packed(self) -> None:
        payload, room = b"\x80\x3f" * 32_768, bytearray(65_536)
        stored = room[: pack_in_numpy(payload, 2, room)]
        header = bytearray(self.frame().bare_header(1, STORE_ID, CREATED_UNIX_MS))
        mark_packed(header, 2, len(stored), xxh3_64_intdigest(payload))
        add_checksums(header, xxh3_64_intdigest(bytes(stored)))
        value = bytes(header) + bytes(stored)
        shown = ((56, 64), (168, 176), (176, 178), (184, 192), (192, 200), (640, 648))
        assert b"".join(value[start:end] for start, end in shown) == documented("example packed")
        said = describe_header(header)
        assert (said.payload_bytes, said.stored_bytes, said.element_bytes) == (65_536, 45_064, 2)

    def test_metadata(self) -> None:
        assert self.METADATA.serialize() == documented("example header")[208:264]

    def test_token_hashes(self) -> None:
        assert b"".join(hash_chunks([1, 2, 3, 4, 5], 2)) == documented("example token hashes")

    def test_engine_key(self) -> None:
        tokens = {"token_ids": (5, 300), "end": 2, "salt": b"salt"}
        key = IPCCacheEngineKey("org/model", 2, None, request_id="r1", **tokens)  # type: ignore[arg-type]
        fields = {  # a map of nine
            "model_name": "a96f72672f6d6f64656c",
            "world_size": "02",
            "worker_id": "c0",  # all
            "chunk_hash": "c0",
            "token_ids": "9205cd012c",
            "start": "00",
            "end": "02",
            "request_id": "a27231",
            "salt": "c40473616c74",
        }
        written = b"\x89"
        for name, value in fields.items():
            written += bytes([0xA0 + len(name)]) + name.encode() + bytes.fromhex(value)
        assert IPCCacheEngineKey.Serialize(key) == written


def test_there_is_no_stripe_after_the_last() -> None:
    """Whose place would fit in a chunk of whole stripes."""
    frame = frame_of(2 * 65_536)
    header = put(put(header_of(frame), 24, "<H", 2), 40, "<Q", 2 * 65_536)
    assert frame.check_header(header, 2).verdict is Verdict.FOREIGN
    with pytest.raises(FormatError, match="stripe 2 of 2"):
        describe_header(header)

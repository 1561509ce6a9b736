# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.chunks.keys import ObjectKey, bounded_hash, hash_in, hash_tag, share_rank
from lmcache_redis.chunks.names import ChunkNames, key_stem, parse_stripe_key, stripe_key
from lmcache_redis.errors import FormatError
from lmcache_redis.resp.routes import slot_of

HASHES = st.binary(min_size=1, max_size=63)
MODELS = st.text(min_size=1, max_size=200)
RANKS = st.integers(0, 2**32 - 1)
OBJECT_KEYS = st.builds(ObjectKey, HASHES, MODELS, RANKS)
NAMESPACES = st.binary(min_size=16, max_size=16)
NAMESPACE = bytes(range(16))


class TestObjectKey:
    def test_fixed_vectors(self) -> None:
        key = ObjectKey(bytes.fromhex("00ff10"), "org/möde", 0x02010201)
        assert key.to_bytes().hex() == "0201020100096f72672f6dc3b66465037b3030666631307d"
        assert ObjectKey.from_bytes(key.to_bytes()) == key

    @given(OBJECT_KEYS)
    def test_bytes_round_trip(self, key: ObjectKey) -> None:
        again = ObjectKey.from_bytes(key.to_bytes())
        assert again == key
        assert hash(again) == hash(key)
        assert ObjectKey.from_bytes(memoryview(key.to_bytes())) == key  # type: ignore[arg-type]

    @given(OBJECT_KEYS, st.data())
    def test_other_bytes_are_refused_or_another_key(
        self, key: ObjectKey, data: st.DataObject
    ) -> None:
        encoded = bytearray(key.to_bytes())
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] ^= data.draw(st.integers(1, 255))
        try:
            other = ObjectKey.from_bytes(bytes(encoded))
        except FormatError:
            return
        assert other != key
        assert other.to_bytes() == encoded

    @given(OBJECT_KEYS)
    def test_every_truncation_and_extension_is_refused(self, key: ObjectKey) -> None:
        encoded = key.to_bytes()
        for length in range(len(encoded)):
            with pytest.raises(FormatError):
                ObjectKey.from_bytes(encoded[:length])
        with pytest.raises(FormatError):
            ObjectKey.from_bytes(encoded + b"\0")

    @given(st.binary(max_size=80))
    def test_random_bytes_are_refused_or_exact(self, data: bytes) -> None:
        try:
            key = ObjectKey.from_bytes(data)
        except FormatError:
            return
        assert key.to_bytes() == data

    @pytest.mark.parametrize("chunk_hash", [b"", "text", None, 7, bytearray(b"x")])
    def test_what_is_no_hash_is_refused(self, chunk_hash: bytes) -> None:
        with pytest.raises(FormatError, match="a chunk hash is bytes, at least one"):
            ObjectKey(chunk_hash, "m", 0)

    def test_a_longer_hash_is_digested(self) -> None:
        """64 bytes are a SHA-512."""
        assert ObjectKey(b"x" * 63, "m", 0).chunk_hash == b"x" * 63
        keys = [ObjectKey(b"x" * nbytes, "m", 0) for nbytes in (64, 65, 4096)]
        assert {len(key.chunk_hash) for key in keys} == {32}
        assert len({*keys}) == 3
        for key in keys:
            assert ObjectKey.from_bytes(key.to_bytes()) == key
        # Stored chunks are found by it: it never changes.
        assert bounded_hash(bytes(64)).hex() == (
            "05391fea5bb939ee3e764720819d3e291dcf8cb553e7594c7c6f3e686ebdda40"
        )

    @pytest.mark.parametrize("name", ["", "x" * 1025, "é" * 513])
    def test_a_model_name_too_long_or_empty_is_refused(self, name: str) -> None:
        ObjectKey(b"h", "é" * 512, 0)
        with pytest.raises(FormatError, match="1 to 1024 bytes of UTF-8"):
            ObjectKey(b"h", name, 0)

    @pytest.mark.parametrize("name", [b"bytes", None, "\ud800"])
    def test_a_model_name_without_utf8_is_refused(self, name: str) -> None:
        with pytest.raises(FormatError, match="a model name is text"):
            ObjectKey(b"h", name, 0)

    @pytest.mark.parametrize("nbytes", [0, 64, 255])
    def test_a_key_with_a_hash_that_none_has_is_refused(self, nbytes: int) -> None:
        encoded = bytes.fromhex("000000000001") + b"m" + bytes([nbytes]) + hash_tag(bytes(nbytes))
        with pytest.raises(FormatError, match="the length of a chunk hash"):
            ObjectKey.from_bytes(encoded)

    def test_a_model_name_not_in_utf8_is_refused(self) -> None:
        with pytest.raises(FormatError, match="not UTF-8"):
            ObjectKey.from_bytes(bytes.fromhex("000000000001ff01") + b"{00}")

    @pytest.mark.parametrize("rank", [-1, 2**32])
    def test_a_rank_out_of_range_is_refused(self, rank: int) -> None:
        with pytest.raises(FormatError, match="kv_rank is"):
            ObjectKey(b"h", "m", rank)

    @pytest.mark.parametrize("rank", [None, 1.0, True])
    def test_a_rank_that_is_no_int_is_refused(self, rank: int) -> None:
        with pytest.raises(FormatError, match="kv_rank is an int"):
            ObjectKey(b"h", "m", rank)


class TestIntHashes:
    def test_fixed_vectors(self) -> None:
        assert ObjectKey.IntHash2Bytes(0x0102).hex() == "0000000000000102"
        assert ObjectKey.Bytes2IntHash(bytes.fromhex("ffffffffffffffff")) == 2**64 - 1

    @given(st.integers(0, 2**64 - 1))
    def test_ints_round_trip(self, value: int) -> None:
        encoded = ObjectKey.IntHash2Bytes(value)
        assert len(encoded) == 8
        assert ObjectKey.Bytes2IntHash(encoded) == value

    @given(st.binary(min_size=8, max_size=8))
    def test_bytes_round_trip(self, value: bytes) -> None:
        assert ObjectKey.IntHash2Bytes(ObjectKey.Bytes2IntHash(value)) == value

    @pytest.mark.parametrize("value", [-1, 2**64, 1.5])
    def test_other_ints_are_refused(self, value: int) -> None:
        with pytest.raises(FormatError, match="an integer chunk hash is"):
            ObjectKey.IntHash2Bytes(value)

    def test_of_fewer_bytes(self) -> None:
        assert ObjectKey.Bytes2IntHash(b"\x00\x01\x02\x03") == 0x010203
        assert ObjectKey.Bytes2IntHash(b"\x07") == 7

    @pytest.mark.parametrize("value", [b"", bytes(9), bytes(32), "abc", 5, None])
    def test_other_hashes_are_refused(self, value: Any) -> None:
        with pytest.raises(FormatError, match="an integer chunk hash has 1 to 8 bytes"):
            ObjectKey.Bytes2IntHash(value)


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """A worker of a world, and of the part of the world on its node."""
    world_size = draw(st.integers(1, 255))
    local_world_size = draw(st.integers(1, world_size))
    return (
        world_size,
        draw(st.integers(0, world_size - 1)),
        local_world_size,
        draw(st.integers(0, local_world_size - 1)),
    )


class TestKVRank:
    @given(placements())
    def test_eight_bits_each_from_the_top(self, ranks: tuple[int, int, int, int]) -> None:
        assert ObjectKey.ComputeKVRank(*ranks).to_bytes(4, "big") == bytes(ranks)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"world_size": 256}, "world_size is 256, outside 1 to 255"),
            ({"world_size": 0}, "world_size is 0, outside 1 to 255"),
            ({"global_rank": 16}, "global_rank is 16, outside 0 to 15"),
            ({"global_rank": -1}, "global_rank is -1, outside 0 to 15"),
            ({"local_world_size": 17}, "local_world_size is 17, outside 1 to 16"),
            ({"local_world_size": 0}, "local_world_size is 0, outside 1 to 16"),
            ({"world_size": 3, "global_rank": 2}, "local_world_size is 4, outside 1 to 3"),
            ({"local_rank": 4}, "local_rank is 4, outside 0 to 3"),
            ({"local_rank": -1}, "local_rank is -1, outside 0 to 3"),
            ({"local_rank": 1.0}, "local_rank is an int, not float"),
        ],
    )
    def test_a_worker_outside_its_world_is_refused(
        self, changes: dict[str, int], message: str
    ) -> None:
        ranks = {"world_size": 16, "global_rank": 5, "local_world_size": 4, "local_rank": 1}
        with pytest.raises(FormatError, match=message):
            ObjectKey.ComputeKVRank(**(ranks | changes))


class TestShareRank:
    @given(st.integers(0, 255), st.integers(0, 255))
    def test_repeats_its_half(self, shares: int, share: int) -> None:
        expected = bytes((shares, share, shares, share))
        assert share_rank(shares, share).to_bytes(4, "big") == expected

    @pytest.mark.parametrize("numbers", [(256, 0), (1, 256), (-1, 0), (1, -1), (1.0, 0)])
    def test_what_eight_bits_cannot_hold_is_refused(self, numbers: tuple[int, int]) -> None:
        with pytest.raises(FormatError, match="share"):
            share_rank(*numbers)


class TestHashTag:
    @given(HASHES, st.binary(max_size=40))
    def test_a_key_ends_with_it(self, chunk_hash: bytes, before: bytes) -> None:
        assert hash_in(before + hash_tag(chunk_hash), len(chunk_hash)) == chunk_hash

    @pytest.mark.parametrize(
        "key",
        [
            b"",
            b"{}",
            b"{0}",
            b"{00",
            b"00}",
            b"{0G}",
            b"{0A}",
            b"{000}",
            b"{0000}",
            b"(00)",
            b"{00}\n",
        ],
    )
    def test_another_end_is_refused(self, key: bytes) -> None:
        with pytest.raises(FormatError, match="ends with 1 bytes in hex"):
            hash_in(key, 1)

    def test_all_stripes_of_all_workers_lie_in_one_slot(self) -> None:
        """Whatever bytes hashes and namespaces of agents have."""
        for chunk_hash in (b"{}" * 16, b"}{" * 16, b"{x}" * 10, bytes(range(32))):
            slots = {
                slot_of(
                    stripe_key(names.chunk_key(ObjectKey(chunk_hash, "org/model", rank)), index)
                )
                for names in (ChunkNames(b"{}" * 16, b"mine:"), ChunkNames(None))
                for rank in (share_rank(2, 0), share_rank(2, 1), share_rank(8, 7))
                for index in (0, 1, 0x7B7D)
            }
            assert slots == {slot_of(chunk_hash.hex().encode())}


class TestRedisKeys:
    def test_fixed_vector(self) -> None:
        stem = key_stem(NAMESPACE, "m", 0x01000100, 2, b"app:")
        assert stem.hex() == (
            "6170703a6c6d6372323a000102030405060708090a0b0c0d0e0f0100010000016d02"
        )
        assert stripe_key(stem + hash_tag(b"\xaa\xbb"), 258) == stem + b"{aabb}\1\2"

    @given(NAMESPACES, OBJECT_KEYS, st.integers(0, 0xFFFF), st.binary(max_size=20))
    def test_round_trip(self, namespace: bytes, key: ObjectKey, index: int, prefix: bytes) -> None:
        stem = key_stem(namespace, key.model_name, key.kv_rank, len(key.chunk_hash), prefix)
        encoded = stripe_key(stem + hash_tag(key.chunk_hash), index)
        assert encoded == (
            prefix + b"lmcr2:" + namespace + key.to_bytes() + index.to_bytes(2, "big")
        )
        assert parse_stripe_key(encoded, prefix) == (namespace, key, index)

    @given(st.binary(max_size=60), st.booleans())
    def test_random_bytes_are_refused_or_exact(self, data: bytes, marked: bool) -> None:
        data = b"lmcr2:" + data if marked else data
        try:
            namespace, key, index = parse_stripe_key(data)
        except FormatError:
            return
        stem = key_stem(namespace, key.model_name, key.kv_rank, len(key.chunk_hash))
        assert stripe_key(stem + hash_tag(key.chunk_hash), index) == data

    @pytest.mark.parametrize(("kv_rank", "hash_bytes"), [(-1, 4), (2**32, 4), (1, 0), (1, 64)])
    def test_a_stem_of_a_field_out_of_range_is_refused(self, kv_rank: int, hash_bytes: int) -> None:
        with pytest.raises(FormatError, match=r"is .*, outside"):
            key_stem(NAMESPACE, "model", kv_rank, hash_bytes)

    def test_every_truncation_and_another_prefix_are_refused(self) -> None:
        encoded = stripe_key(key_stem(NAMESPACE, "model", 1, 4, b"p:") + hash_tag(b"hash"), 0)
        for length in range(len(encoded)):
            with pytest.raises(FormatError):
                parse_stripe_key(encoded[:length], b"p:")
        for prefix in (b"", b"p", b"q:", b"p:l"):
            with pytest.raises(FormatError, match="another prefix"):
                parse_stripe_key(encoded, prefix)

    @pytest.mark.parametrize("length", [0, 15, 17, 32])
    def test_a_namespace_of_another_length_is_refused(self, length: int) -> None:
        with pytest.raises(FormatError, match=f"a namespace has 16 bytes, not {length}"):
            key_stem(bytes(length), "m", 0, 32)

    @pytest.mark.parametrize("index", [-1, 2**16])
    def test_a_stripe_index_out_of_range_is_refused(self, index: int) -> None:
        with pytest.raises(FormatError, match="stripe_index is"):
            stripe_key(b"chunk", index)

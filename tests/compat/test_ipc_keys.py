# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import dataclasses
import pickle
from array import array
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat.custom_types import (
    IPCCacheEngineKey,
    get_customized_decoder,
    get_customized_encoder,
)
from lmcache_redis.compat.distributed_api import ipc_keys_to_object_keys
from lmcache_redis.errors import FormatError
from tests.chunks.test_keys import HASHES, MODELS

TOKENS = {"chunk_hash": None, "token_ids": (1, 2)}


@st.composite
def ipc_keys(draw: st.DrawFn) -> IPCCacheEngineKey:
    world_size = draw(st.integers(1, 255))
    chunk_hash = draw(st.none() | HASHES)
    token_ids = None
    start = end = 0
    if chunk_hash is None:
        token_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=20)))
        end = draw(st.integers(0, len(token_ids)))
        start = draw(st.integers(0, end))
    return IPCCacheEngineKey(
        model_name=draw(MODELS),
        world_size=world_size,
        worker_id=draw(st.none() | st.integers(0, world_size - 1)),
        chunk_hash=chunk_hash,
        token_ids=token_ids,
        start=start,
        end=end,
        request_id=draw(st.none() | st.text()),
        salt=b"" if token_ids is None else draw(st.binary(max_size=20)),
    )


def encoded(**changes: object) -> bytes:
    """The key of a chunk as a map, with other values."""
    fields = {"model_name": "m", "world_size": 1, "worker_id": 0, "chunk_hash": b"h"}
    return msgspec.msgpack.encode(fields | changes)


def test_keys_are_copied_and_pickled() -> None:
    key = IPCCacheEngineKey("m", 4, None, b"h", request_id="r")
    object_key = ObjectKey(b"h", "m", 1)
    for each in (key, object_key):
        assert pickle.loads(pickle.dumps(each)) == copy.deepcopy(each) == each
    assert dataclasses.replace(object_key, kv_rank=7) == ObjectKey(b"h", "m", 7)


class TestIPCCacheEngineKey:
    def test_fixed_vectors(self) -> None:
        by_hash = IPCCacheEngineKey("m", 2, 1, b"\x01\x02", request_id="r")
        assert IPCCacheEngineKey.Serialize(by_hash).hex() == (
            "89aa6d6f64656c5f6e616d65a16daa776f726c645f73697a6502a9776f726b65725f696401"
            "aa6368756e6b5f68617368c4020102a9746f6b656e5f696473c0a5737461727400a3656e6400"
            "aa726571756573745f6964a172a473616c74c400"
        )
        by_tokens = IPCCacheEngineKey("m", 2, None, token_ids=(5, 300), start=1, end=2)
        assert IPCCacheEngineKey.Serialize(by_tokens).hex() == (
            "89aa6d6f64656c5f6e616d65a16daa776f726c645f73697a6502a9776f726b65725f6964c0"
            "aa6368756e6b5f68617368c0a9746f6b656e5f6964739205cd012ca5737461727401a3656e6402"
            "aa726571756573745f6964c0a473616c74c400"
        )

    def test_lmcaches_bytes_are_read(self) -> None:
        """Of LMCache 0.3.13, and of 0.3.15 in both modes: maps with the fields that it has."""
        fields = {"model_name": "m", "world_size": 4, "worker_id": None}
        encode, read = msgspec.msgpack.encode, IPCCacheEngineKey.Deserialize
        assert read(encode({**fields, "chunk_hash": b"h"})) == IPCCacheEngineKey("m", 4, None, b"h")
        tokens = {**fields, "token_ids": [1, 2], "start": 0, "end": 2, "request_id": "r"}
        assert read(encode(tokens)) == IPCCacheEngineKey("m", 4, None, None, (1, 2), 0, 2)
        assert read(encode({**tokens, "chunk_hash": None})).request_id == "r"

    @given(ipc_keys())
    def test_alone_and_within_other_values_it_has_one_encoding(
        self, key: IPCCacheEngineKey
    ) -> None:
        alone = IPCCacheEngineKey.Serialize(key)
        assert get_customized_encoder(IPCCacheEngineKey).encode(key) == alone
        assert get_customized_decoder(IPCCacheEngineKey).decode(alone) == key
        encoded = get_customized_encoder(list[IPCCacheEngineKey]).encode([key, key])
        assert encoded == b"\x92" + alone * 2
        assert get_customized_decoder(list[IPCCacheEngineKey]).decode(encoded) == [key, key]

    @pytest.mark.parametrize("nbytes", [64, 65, 1000])
    def test_a_long_hash_stays_whole_until_it_is_stored(self, nbytes: int) -> None:
        key = IPCCacheEngineKey("m", 2, 1, b"x" * nbytes)
        assert IPCCacheEngineKey.Deserialize(IPCCacheEngineKey.Serialize(key)) == key
        assert key.chunk_hash == b"x" * nbytes
        (object_key,) = ipc_keys_to_object_keys([key])
        assert object_key == ObjectKey(b"x" * nbytes, "m", 0x02010201)
        assert len(object_key.chunk_hash) == 32

    def test_from_an_integer_and_from_token_ids(self) -> None:
        """As LMCache's own tests make them."""
        key = IPCCacheEngineKey.from_int_hash("m", 2, None, 0x1234, request_id="r")
        assert key == IPCCacheEngineKey("m", 2, None, bytes(6) + b"\x12\x34")
        assert key.request_id == "r"
        by_name = IPCCacheEngineKey.from_int_hash(
            model_name="m", world_size=2, worker_id=1, chunk_hash=(1 << 64) - 1
        )
        assert (by_name.chunk_hash, by_name.request_id) == (b"\xff" * 8, None)
        for wrong in (-1, 1 << 64):
            with pytest.raises(FormatError, match="an integer chunk hash is"):
                IPCCacheEngineKey.from_int_hash("m", 2, 1, wrong)
        tokens = IPCCacheEngineKey.from_token_ids("m", 2, 1, [5, 6, 7], 1, 3, "r")
        assert tokens == IPCCacheEngineKey("m", 2, 1, token_ids=(5, 6, 7), start=1, end=3)
        assert tokens.request_id == "r"
        assert IPCCacheEngineKey.from_token_ids("m", 2, 1, range(3)).end == 0

    @pytest.mark.parametrize(
        "token_ids",
        [torch.tensor([5, 6, 7]), np.array([5, 6, 7], np.uint32), array("q", [5, 6, 7])],
        ids=lambda each: type(each).__name__,
    )
    def test_token_ids_become_ints(self, token_ids: Iterable[int]) -> None:
        key = IPCCacheEngineKey("m", 2, 1, token_ids=(5, 6, 7))
        for made in (
            IPCCacheEngineKey.from_token_ids("m", 2, 1, token_ids),
            IPCCacheEngineKey("m", 2, 1, token_ids=tuple(token_ids)),
        ):
            assert made == key
            assert hash(made) == hash(key)
            assert {type(each) for each in made.token_ids or ()} == {int}
            assert IPCCacheEngineKey.Deserialize(IPCCacheEngineKey.Serialize(made)) == key
        with pytest.raises(FormatError, match="a token id is 0 to"):
            IPCCacheEngineKey.from_token_ids("m", 2, 1, [1.5])  # type: ignore[list-item]

    def test_request_id_is_outside_identity(self) -> None:
        one = IPCCacheEngineKey("m", 2, 1, b"h", request_id="a")
        two = IPCCacheEngineKey("m", 2, 1, b"h", request_id="b")
        assert one == two
        assert len({one, two}) == 1
        assert not one < two
        assert not one > two

    def test_every_other_field_is_inside_identity(self) -> None:
        keys = [
            IPCCacheEngineKey("m", 2, 1, b"h"),
            IPCCacheEngineKey("n", 2, 1, b"h"),
            IPCCacheEngineKey("m", 3, 1, b"h"),
            IPCCacheEngineKey("m", 2, 0, b"h"),
            IPCCacheEngineKey("m", 2, None, b"h"),
            IPCCacheEngineKey("m", 2, 1, b"i"),
            IPCCacheEngineKey("m", 2, 1, token_ids=(1, 2), start=0, end=1),
            IPCCacheEngineKey("m", 2, 1, token_ids=(1, 2), start=1, end=1),
            IPCCacheEngineKey("m", 2, 1, token_ids=(1, 2), start=0, end=2),
            IPCCacheEngineKey("m", 2, 1, token_ids=(1, 3), start=0, end=1),
            IPCCacheEngineKey("m", 2, 1, token_ids=(1, 3), start=0, end=1, salt=b"s"),
        ]
        assert len(set(keys)) == len(keys)

    @given(ipc_keys())
    def test_no_worker_id_version(self, key: IPCCacheEngineKey) -> None:
        everyone = key.no_worker_id_version()
        assert everyone.worker_id is None
        assert everyone.request_id == key.request_id
        assert dataclasses.replace(everyone, worker_id=key.worker_id) == key

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_name": ""}, "a model name has 1 to 1024"),
            ({"model_name": 5}, "a model name is text"),
            ({"world_size": 0}, "world_size is 0, outside 1 to 255"),
            ({"world_size": 256}, "world_size is 256, outside 1 to 255"),
            ({"world_size": "2"}, "world_size is an int, not str"),
            ({"worker_id": 2}, "worker_id is 2, outside 0 to 1"),
            ({"worker_id": -1}, "worker_id is -1, outside 0 to 1"),
            ({"chunk_hash": None}, "exactly one"),
            ({"token_ids": (1,)}, "exactly one"),
            ({"chunk_hash": b""}, "a chunk hash is bytes, at least one"),
            ({"end": 1}, "end is 1, outside 0 to 0"),
            ({"start": 1}, "start is 1, outside 0 to 0"),
            ({"salt": b"s"}, "a chunk_hash covers the salt"),
            ({"salt": "s"}, "a salt is at most 4096 bytes"),
            ({**TOKENS, "salt": bytes(4097)}, "a salt is at most 4096"),
            ({**TOKENS, "token_ids": [1, 2]}, "token_ids is a tuple"),
            ({**TOKENS, "token_ids": (1, -1)}, "a token id is 0 to"),
            ({**TOKENS, "token_ids": (1, 2**32)}, "a token id is 0 to"),
            ({**TOKENS, "token_ids": (1, "2")}, "a token id is 0 to"),
            ({**TOKENS, "end": 3}, "end is 3, outside 0 to 2"),
            ({**TOKENS, "start": 2, "end": 1}, "start is 2, outside 0 to 1"),
            ({**TOKENS, "start": -1, "end": 1}, "start is -1, outside 0 to 1"),
        ],
    )
    def test_a_field_out_of_range_is_refused(self, fields: dict[str, object], message: str) -> None:
        good = {"model_name": "m", "world_size": 2, "worker_id": 1, "chunk_hash": b"h"}
        with pytest.raises(FormatError, match=message):
            IPCCacheEngineKey(**(good | fields))  # type: ignore[arg-type]

    def test_a_request_id_without_utf8_cannot_be_serialized(self) -> None:
        key = IPCCacheEngineKey("m", 1, 0, b"h", request_id="\ud800")
        with pytest.raises(FormatError, match="cannot be encoded"):
            IPCCacheEngineKey.Serialize(key)

    @given(st.binary(max_size=60))
    @example(b"")
    @example(b"\x91" * 5000)
    @example(b"\x81\xa1a" * 5000)
    @example(bytes.fromhex("84"))
    @example(bytes.fromhex("df7fffffff"))
    @example(encoded(world_size=1.0))
    @example(encoded(world_size=2**60))
    @example(encoded(model_name=b"m"))
    @example(encoded(chunk_hash="h"))
    @example(encoded(chunk_hash=b""))
    @example(encoded()[:-1])
    @example(encoded() + b"\0")
    @example(encoded().replace(b"\xa1m", b"\xa1\xff"))
    @example(msgspec.msgpack.encode({"model_name": "m", "world_size": 1, "chunk_hash": b"h"}))
    @example(msgspec.msgpack.encode(["m", 1, 0, b"h", None, 0, 0, None, b""]))
    def test_malformed_bytes_are_refused(self, data: bytes) -> None:
        with pytest.raises(FormatError, match="not an encoded key"):
            IPCCacheEngineKey.Deserialize(data)

    @given(ipc_keys(), st.data())
    def test_a_changed_byte_is_refused_or_another_valid_key(
        self, key: IPCCacheEngineKey, data: st.DataObject
    ) -> None:
        encoded = bytearray(IPCCacheEngineKey.Serialize(key))
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] ^= data.draw(st.integers(1, 255))
        try:
            other = IPCCacheEngineKey.Deserialize(bytes(encoded))
        except FormatError:
            return
        assert IPCCacheEngineKey.Deserialize(IPCCacheEngineKey.Serialize(other)) == other

# SPDX-License-Identifier: Apache-2.0
"""Keys of LMCache and their ObjectKeys: one for each, and back."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat.cache_engine_key import (
    CacheEngineKey,
    LayerCacheEngineKey,
    engine_key_of,
    object_key_of,
)
from lmcache_redis.errors import FormatError

SHA = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


@dataclass(frozen=True)
class KeyFields:
    """Every field that a key of some version has. It is no class of ours."""

    fmt: str | None
    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: str | int | bytes
    dtype: torch.dtype | None = None
    layer_id: int | None = None


def key(**changes: Any) -> KeyFields:
    fields = {"fmt": "vllm", "model_name": "org/m", "world_size": 2, "worker_id": 1}
    return KeyFields(**({"chunk_hash": SHA} | fields | changes))


HASHES = st.one_of(
    st.binary(min_size=1, max_size=63),
    st.binary(min_size=1, max_size=63).map(bytes.hex),
    st.text(min_size=1, max_size=15),
    st.integers(-(1 << 128), 1 << 128),
    st.sampled_from(["ab", "AB", "abc", "171", "0", b"ab", b"\xab", 171, 0xAB, -1]),
)
ENGINE_KEYS = st.builds(
    KeyFields,
    fmt=st.sampled_from([None, "vllm", "huggingface"]),
    model_name=st.one_of(st.text(max_size=20), st.sampled_from(["a@b", "@@", "text@m", ""])),
    world_size=st.integers(0, 255),
    worker_id=st.integers(0, 255),
    chunk_hash=HASHES,
    dtype=st.sampled_from([None, torch.float16, torch.bfloat16]),
    layer_id=st.sampled_from([None, 0, 1, 79]),
)


@given(ENGINE_KEYS)
def test_a_key_comes_back_from_its_object_key(engine_key: KeyFields) -> None:
    """Or its ObjectKey, for one that LMCache's classes cannot be."""
    object_key = object_key_of(engine_key)
    assert ObjectKey.from_bytes(object_key.to_bytes()) == object_key
    found = engine_key_of(object_key)
    assert object_key_of(found) == object_key
    if isinstance(found, CacheEngineKey):
        assert {name: getattr(found, name) for name in vars(engine_key)} == vars(engine_key)


@given(st.lists(ENGINE_KEYS, min_size=2, max_size=6))
def test_unequal_keys_have_unequal_object_keys(engine_keys: list[KeyFields]) -> None:
    assert len({object_key_of(each) for each in engine_keys}) == len(set(engine_keys))


def test_every_field_tells_keys_apart() -> None:
    keys = [
        key(),
        key(fmt="huggingface"),
        key(fmt=None),
        key(model_name="org/n"),
        key(world_size=1),
        key(worker_id=0),
        key(chunk_hash=SHA[2:]),
        key(chunk_hash=SHA[2:].upper()),
        key(chunk_hash=bytes.fromhex(SHA)),
        key(dtype=torch.float16),
        key(layer_id=0),
        key(layer_id=1),
    ]
    assert len({object_key_of(each) for each in keys}) == len(keys)


def test_a_hex_hash_is_packed() -> None:
    found = object_key_of(key())
    assert found == ObjectKey(
        bytes.fromhex(SHA), "lmcache@vllm@@@hex@org/m", ObjectKey.ComputeKVRank(2, 1, 2, 1)
    )


LONG_HASHES: list[str | bytes | int] = [
    "x" * 64, SHA.upper(), SHA * 2, "\u00e9" * 32, b"x" * 64, b"x" * 300, 1 << 300, -(1 << 256),
]  # fmt: skip


@pytest.mark.parametrize("chunk_hash", LONG_HASHES, ids=lambda each: f"{each!r:.20}")
def test_a_longer_hash_is_digested(chunk_hash: str | bytes | int) -> None:
    found = object_key_of(key(chunk_hash=chunk_hash))
    assert len(found.chunk_hash) == 32
    others = [object_key_of(key(chunk_hash=each)) for each in LONG_HASHES if each != chunk_hash]
    assert found not in others
    # A list has a key that finds the same chunk.
    assert object_key_of(engine_key_of(found)) == found


def test_keys_of_a_list_have_lmcaches_classes() -> None:
    """Of objects that have the fields of one version, and no others."""
    fields = {"model_name": "m", "world_size": 1, "worker_id": 0}
    old = SimpleNamespace(fmt="vllm", chunk_hash=SHA, **fields)
    layer = SimpleNamespace(**vars(old), layer_id=3)
    later = SimpleNamespace(chunk_hash=-1234567890123456789, dtype=torch.bfloat16, **fields)
    assert [engine_key_of(object_key_of(each)) for each in (old, layer, later)] == [
        CacheEngineKey("vllm", "m", 1, 0, SHA),
        LayerCacheEngineKey("vllm", "m", 1, 0, SHA, layer_id=3),
        CacheEngineKey("m", 1, 0, -1234567890123456789, torch.bfloat16),
    ]


@pytest.mark.parametrize(
    "object_key",
    [
        ObjectKey(b"h", "org/model", 0x0100_0100),
        ObjectKey(b"h", "lmcache@vllm@@@hex", 0),
        ObjectKey(b"h", "lmcache@vllm@@@HEX@m", 0),
        ObjectKey(b"h", "lmcache@vllm@float12@@bytes@m", 0),
        ObjectKey(b"h", "lmcache@vllm@@00@bytes@m", 0),
        ObjectKey(b"h", "lmcache@vllm@@@int@m", 0),
        ObjectKey(b"00", "lmcache@vllm@@@int@m", 0),
        ObjectKey(b"\xff", "lmcache@vllm@@@text@m", 0),
        ObjectKey(b"ab", "lmcache@vllm@@@text@m", 0),
        ObjectKey(b"h", "lmcache@vllm@@@bytes@m", 0x0201_0001),
    ],
)
def test_an_object_key_stands_for_itself(object_key: ObjectKey) -> None:
    assert object_key_of(object_key) is object_key
    assert engine_key_of(object_key) is object_key


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ("a key text", "str has no model_name, world_size, worker_id, chunk_hash"),
        (SimpleNamespace(model_name="m", world_size=1, worker_id=0), "has no chunk_hash"),
        (key(fmt=""), "fmt is a name"),
        (key(fmt="vllm@"), "fmt is a name"),
        (key(fmt=3), "fmt is a name"),
        (key(model_name=None), "model_name is a str"),
        (key(model_name="m" * 1024), "a model name has 1 to 1024 bytes"),
        (key(world_size=256), "the number of shares is 256, outside 0 to 255"),
        (key(worker_id="0"), "the number of a share is an int"),
        (key(chunk_hash=None), "chunk_hash is a str, an int or bytes, not NoneType"),
        (key(chunk_hash=True), "chunk_hash is a str, an int or bytes, not bool"),
        (key(chunk_hash=""), "a chunk hash is bytes, at least one"),
        (key(chunk_hash="\ud800"), "UTF-8 cannot encode"),
        (key(dtype="float12"), "unknown dtype"),
        (key(layer_id=-1), "layer_id is -1"),
        (SimpleNamespace(**vars(key()), tags=(("user", "a"),)), "a key with tags"),
    ],
)
def test_what_is_no_key(wrong: Any, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        object_key_of(wrong)

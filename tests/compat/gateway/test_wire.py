# SPDX-License-Identifier: Apache-2.0
"""Key texts: what is one, and that nothing of it is lost in a tier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat.cache_engine_key import CacheEngineKey
from lmcache_redis.compat.gateway.wire import key_text_of, object_key_of
from lmcache_redis.errors import FormatError
from tests.compat.test_cache_engine_key import WORDS, keys

TEXTS = keys().map(CacheEngineKey.to_string)
SHORT = TEXTS.filter(lambda text: len(text.encode()) <= 150)


@given(SHORT)
def test_a_text_survives_a_tier(text: str) -> None:
    key = object_key_of(text)
    assert key_text_of(key) == text
    assert key_text_of(ObjectKey.from_bytes(key.to_bytes())) == text


@given(SHORT, SHORT)
def test_two_texts_have_two_keys(one: str, other: str) -> None:
    assert (object_key_of(one) == object_key_of(other)) is (one == other)


@given(st.text(max_size=60))
def test_anything_else_is_rejected(text: str) -> None:
    try:
        key = object_key_of(text)
    except FormatError:
        return
    assert key_text_of(key) == text


@given(
    st.binary(min_size=1, max_size=63),
    st.one_of(WORDS, TEXTS, st.from_regex(r"(vllm@)?m@1@0@~?@half(@[0-9])?", fullmatch=True)),
    st.one_of(st.integers(0, (1 << 32) - 1), st.just(0x01000100)),
)
def test_keys_of_others_have_no_text(chunk_hash: bytes, model_name: str, kv_rank: int) -> None:
    key = ObjectKey(chunk_hash, model_name, kv_rank)
    try:
        text = key_text_of(key)
    except FormatError:
        return
    assert object_key_of(text) == key


def test_the_fields() -> None:
    text = "org/model@8@3@-12af@bfloat16@17@user%a%b@lang%"
    rank = ObjectKey.ComputeKVRank(8, 3, 8, 3)
    name = "org/model@8@3@~@bfloat16@17@user%a%b@lang%"
    assert object_key_of(text) == ObjectKey(b"-12af", name, rank)
    text = "vllm@org/model@8@3@-12af@17@user%a"
    assert object_key_of(text) == ObjectKey(b"-12af", "vllm@org/model@8@3@~@17@user%a", rank)
    assert object_key_of("vllm@m@8@3@0012") == ObjectKey(b"\x00\x12", "vllm@m@8@3@", rank)
    assert object_key_of("vllm@8@3@12af@half").kv_rank == rank, "the model's name is vllm"
    name = "m@8@3@@half"
    assert object_key_of("m@8@3@0012@half") == ObjectKey(b"\x00\x12", name, rank)

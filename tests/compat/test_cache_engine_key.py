# SPDX-License-Identifier: Apache-2.0
"""Keys as LMCache writes them. `gateway/lmcache_client.py` compares them with its own.

`gateway/test_wire.py` gives the texts to the gateway.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.compat.cache_engine_key import (
    CacheEngineKey,
    LayerCacheEngineKey,
    parse_cache_key,
)
from lmcache_redis.errors import FormatError

WORDS = st.text(
    st.characters(blacklist_categories=("C", "Z"), blacklist_characters="@"),
    min_size=1,
    max_size=12,
)
TAGS = WORDS.filter(lambda word: "%" not in word).map("lmcache.tag.{}".format)
HASHES = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.binary(min_size=1, max_size=32),
    st.binary(min_size=32, max_size=32).map(bytes.hex),
    st.from_regex(r"-?[0-9a-f]{1,62}", fullmatch=True),
)
DTYPES = [torch.half, torch.bfloat16, torch.float32, torch.float8_e5m2, torch.bool]


@st.composite
def keys(draw: st.DrawFn) -> CacheEngineKey:
    fields: dict[str, Any] = {
        "fmt": draw(st.none() | WORDS),
        "model_name": draw(WORDS.filter(lambda word: not word.isdecimal())),
        "world_size": draw(st.integers(0, 255)),
        "worker_id": draw(st.integers(0, 255)),
        "chunk_hash": draw(HASHES),
        "request_configs": draw(st.none() | st.dictionaries(TAGS, WORDS, max_size=2)),
    }
    fields["dtype"] = draw(st.sampled_from([*DTYPES, None] if fields["fmt"] else DTYPES))
    if draw(st.booleans()):
        return LayerCacheEngineKey(**fields, layer_id=draw(st.integers(0, 200)))
    return CacheEngineKey(**fields)


@given(keys())
def test_a_key_survives_its_text(key: CacheEngineKey) -> None:
    again = parse_cache_key(key.to_string())
    assert again == key
    assert hash(again) == hash(key)
    assert again.to_string() == key.to_string()
    assert type(key).from_string(key.to_string()).tags == key.tags
    for name in ("fmt", "model_name", "world_size", "worker_id", "dtype", "layer_id"):
        assert getattr(again, name) == getattr(key, name)


class TestArguments:
    def test_of_earlier_versions(self) -> None:
        key = CacheEngineKey("vllm", "org/model", 8, 3, "00ff")
        assert key.to_string() == "vllm@org/model@8@3@00ff"
        assert (key.fmt, key.model_name, key.world_size) == ("vllm", "org/model", 8)
        assert (key.worker_id, key.chunk_hash, key.dtype, key.tags) == (3, "00ff", None, None)
        named = CacheEngineKey(
            fmt="vllm", model_name="org/model", world_size=8, worker_id=3, chunk_hash="00ff"
        )
        assert key == named
        assert key == CacheEngineKey(
            "vllm", model_name="org/model", world_size=8, worker_id=3, chunk_hash="00ff"
        )
        both = CacheEngineKey("vllm", "org/model", 8, 3, 255, torch.bfloat16)
        assert both.to_string() == "vllm@org/model@8@3@ff@bfloat16"

    def test_of_later_versions(self) -> None:
        tags = {"lmcache.tag.user": "a%b", "other": 1}
        key = CacheEngineKey("org/model", 8, 3, 255, torch.bfloat16, tags)
        assert key.to_string() == "org/model@8@3@ff@bfloat16@user%a%b"
        assert (key.fmt, key.model_name, key.chunk_hash) == (None, "org/model", 255)
        assert key.tags == (("user", "a%b"),)
        assert key == CacheEngineKey(
            model_name="org/model", world_size=8, worker_id=3, chunk_hash=255,
            dtype=torch.bfloat16, request_configs=tags,
        )  # fmt: skip
        assert key == CacheEngineKey(
            "org/model", 8, 3, chunk_hash=255, dtype=torch.bfloat16, request_configs=tags
        )

    def test_of_a_layer(self) -> None:
        key = LayerCacheEngineKey("m", 1, 0, 5, torch.half, layer_id=3)
        assert key.to_string() == "m@1@0@5@half@3"
        assert LayerCacheEngineKey("vllm", "m", 1, 0, "5").to_string() == "vllm@m@1@0@5@0"
        assert LayerCacheEngineKey("m", 1, 0, 5, torch.half, None, 3) == key
        assert LayerCacheEngineKey("vllm", "m", 1, 0, 5, None, None, 3).layer_id == 3
        assert isinstance(key, CacheEngineKey)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("m", 1, 0, 5), "does not give back the fields"),
            (("", 1, 0, 5, torch.half), "does not give back the fields"),
            (("a@b", 1, 0, 5, torch.half), "does not give back the fields"),
            (("vllm", "8", 1, 0, 5, torch.half), "does not give back the fields"),
            (("m", 1, 0, "", torch.half), "does not give back the fields"),
            (("m", 1, 0, "a@b", torch.half), "does not give back the fields"),
            (("vllm", "8", 1, 0, "half"), "does not give back the fields"),
            (("vllm", "m", 1, 0, 5, None, {"lmcache.tag.a@b": 1}), "does not give back the fields"),
            (("vllm", "m", 1, 0, 5, None, {"lmcache.tag.a": "@"}), "does not give back the fields"),
            (("m", 1, -1, 5, torch.half), "does not give back the fields"),
            (("m", True, 0, 5, torch.half), "does not give back the fields"),
            (("m", 1, 0, 5.0, torch.half), "does not give back the fields"),
            (("m", 1, 0, 5, torch.complex64), "no text for the dtype"),
            (("m", 1, 0, 5, ["half"]), "no text for the dtype"),
            ((None, None, 1, 0, 5, torch.half), "no text for the dtype"),
            ((7, "m", 1, 0, 5, torch.half), "does not give back the fields"),
        ],
    )
    def test_fields_without_a_text_are_refused(
        self, arguments: tuple[Any, ...], message: str
    ) -> None:
        with pytest.raises(FormatError, match=message):
            CacheEngineKey(*arguments)

    def test_the_layer_is_that_of_a_layers_key(self) -> None:
        with pytest.raises(FormatError, match="does not give back the fields"):
            CacheEngineKey("m", 1, 0, 5, torch.half, layer_id=1)
        for layer_id in (-1, None):
            with pytest.raises(FormatError, match="does not give back the fields"):
                LayerCacheEngineKey("m", 1, 0, 5, torch.half, layer_id=layer_id)

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [((), {}), (("m", 1, 0), {}), (("m", 1, 0, 5, torch.half), {"fmt2": 1}), ((1,) * 9, {})],
    )
    def test_missing_and_unknown_ones_raise_as_of_any_function(
        self, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        with pytest.raises(TypeError):
            CacheEngineKey(*arguments, **named)


class TestHashes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("0", 0),
            ("ff", 255),
            ("-12af", -0x12AF),
            ("00ff", b"\0\xff"),
            ("0ff", "0ff"),
            ("x", "x"),
        ],
    )
    def test_from_their_text(self, text: str, expected: object) -> None:
        key = CacheEngineKey.from_string(f"m@1@0@{text}@half")
        assert key.chunk_hash == expected
        assert key.chunk_hash_hex == text

    def test_keys_of_equal_text_are_equal(self) -> None:
        of_bytes, of_int, of_text = (
            CacheEngineKey("m", 1, 0, each, torch.half) for each in (b"\xff", 255, "ff")
        )
        assert of_bytes == of_int == of_text
        assert len({of_bytes, of_int, of_text}) == 1


class TestLayers:
    key = CacheEngineKey("vllm", "m", 2, 1, b"\0\1", torch.half, {"lmcache.tag.a": "b"})

    def test_split(self) -> None:
        layers = self.key.split_layers(3)
        texts = [f"vllm@m@2@1@0001@half@{layer}@a%b" for layer in range(3)]
        assert [layer.to_string() for layer in layers] == texts
        assert [layer.layer_id for layer in layers] == [0, 1, 2]
        assert layers[0] == self.key.get_first_layer()
        assert layers[0] != self.key
        assert layers[2].split_layers(3) == layers
        assert self.key.split_layers(0) == []

    def test_another_worker(self) -> None:
        assert self.key.with_new_worker_id(0).to_string() == "vllm@m@2@0@0001@half@a%b"
        layer = self.key.get_first_layer().with_new_worker_id(0)
        assert layer.to_string() == "vllm@m@2@0@0001@half@0@a%b"
        assert type(layer) is LayerCacheEngineKey

    def test_each_class_reads_its_own_texts(self) -> None:
        chunk, layer = self.key.to_string(), self.key.get_first_layer().to_string()
        assert CacheEngineKey.from_string(chunk) == self.key
        assert LayerCacheEngineKey.from_string(layer) == self.key.get_first_layer()
        with pytest.raises(FormatError, match="a LayerCacheEngineKey names no CacheEngineKey"):
            CacheEngineKey.from_string(layer)
        with pytest.raises(FormatError, match="a CacheEngineKey names no LayerCacheEngineKey"):
            LayerCacheEngineKey.from_string(chunk)


@pytest.mark.parametrize(
    "text",
    ["", "m", "m@1@0@5", "m@1@0@5@float16", "m@1@x@5@half", "m@01@0@5@half", "m@1@0@5@half@tag",
     "m@1@0@5@half@-1", "m@1@0@@half", "m@1@0@5@half@", " m@1@0@5@half\n@", None, b"m@1@0@5@half"],
)  # fmt: skip
def test_texts_that_are_no_keys(text: Any) -> None:
    with pytest.raises(FormatError):
        CacheEngineKey.from_string(text)


def test_is_immutable_and_shows_its_text() -> None:
    key = CacheEngineKey("m", 1, 0, 5, torch.half)
    with pytest.raises(AttributeError):
        key.worker_id = 1  # type: ignore[misc]
    assert repr(key) == "CacheEngineKey.from_string('m@1@0@5@half')"
    assert key != "m@1@0@5@half"

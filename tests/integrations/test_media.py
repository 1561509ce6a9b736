# SPDX-License-Identifier: Apache-2.0
"""Another image's KV is never a hit: a name that is not of the content is not shared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from PIL import Image
from vllm.config import CacheConfig, MultiModalConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from lmcache_redis.integrations.vllm.planning import BlockReferences
from lmcache_redis.integrations.vllm.requests import MediaNames
from tests.integrations.test_scheduler import (
    BLOCK,
    CHUNK,
    ScriptedAdapter,
    make_scheduler,
    run,
    step,
)

RED, BLUE = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))


def settings(*, prefix_caching: bool = True, processor_cache_gb: float = 4.0) -> Any:
    """Of an engine that takes images, as far as names of media depend on them."""
    media = MultiModalConfig(mm_processor_cache_gb=processor_cache_gb)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        cache_config=CacheConfig(enable_prefix_caching=prefix_caching),
    )


COUNTED = settings(prefix_caching=False, processor_cache_gb=0)


def named(
    engine: Any, image: Image.Image, uuid: str | None = None, **options: Any
) -> MultiModalFeatureSpec:
    """The first image of a process, as vLLM's renderer names it."""
    data: Any = {"image": [image]}
    items = MultiModalDataParser().parse_mm_data(data)
    renderer: Any = SimpleNamespace(
        model_config=engine.model_config,
        config=engine,
        _validate_mm_uuids=lambda *args: None,
    )
    uuids = BaseRenderer._process_mm_uuids(
        renderer, data, items, parse_mm_uuids({"image": [uuid]} if uuid else None), "renderer0-mm-1"
    )
    inputs = ProcessorInputs([], items, uuids, hf_processor_mm_kwargs=options)
    ((identifier,),) = inputs.get_mm_hashes("model", "sha256").values()
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(0, BLOCK))


def request_with(*features: MultiModalFeatureSpec, tokens: int = CHUNK + 1) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id="r",
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=list(features),
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def scheduler_of(engine: Any, adapter: ScriptedAdapter) -> Any:
    pool = BlockPool(num_gpu_blocks=32, enable_caching=True, hash_block_size=BLOCK)
    references = BlockReferences(pool, world_size=1)
    return make_scheduler(adapter, pool, references, media=MediaNames(engine))


def test_images_are_named_by_their_content() -> None:
    media = MediaNames(settings())
    red, blue = (request_with(named(settings(), image)) for image in (RED, BLUE))
    assert media.are_of_content(red)
    assert media.are_of_content(blue)
    assert red.block_hashes != blue.block_hashes
    assert media.are_of_content(request_with())
    # An engine that computes adapters into its embeddings puts their names before.
    of_adapter = named(settings(), RED)
    of_adapter.identifier = f"some:adapter:{of_adapter.identifier}"
    assert media.are_of_content(request_with(of_adapter))


@pytest.mark.parametrize("options", [{}, {"num_crops": 4}])  # with options, the name is hashed
def test_images_that_are_counted_are_not_cached(options: dict[str, Any]) -> None:
    red, blue = (request_with(named(COUNTED, image, **options)) for image in (RED, BLUE))
    assert red.block_hashes == blue.block_hashes
    media = MediaNames(COUNTED)
    assert not media.are_of_content(red)
    assert media.are_of_content(request_with())


@pytest.mark.parametrize("one", [{"prefix_caching": False}, {"processor_cache_gb": 0.0}])
def test_vllm_counts_only_where_it_caches_nothing(one: dict[str, Any]) -> None:
    engine = settings(**one)
    red, blue = (request_with(named(engine, image)) for image in (RED, BLUE))
    assert red.block_hashes != blue.block_hashes
    assert MediaNames(engine).are_of_content(red)


def test_a_name_that_a_client_gave_is_not_shared() -> None:
    media = MediaNames(settings())
    red, blue = (request_with(named(settings(), image, "logo")) for image in (RED, BLUE))
    assert red.block_hashes == blue.block_hashes
    assert not media.are_of_content(red)
    assert not media.are_of_content(request_with(named(settings(), RED), *red.mm_features))
    # One of another length than vLLM's own is no digest of vLLM's.
    for algorithm, digits in (("blake3", 128), ("sha256", 128), ("sha512", 64)):
        engine = settings()
        engine.model_config.multimodal_config.mm_hasher_algorithm = algorithm
        name = named(engine, RED, "0123456789abcdef" * (digits // 16))
        assert not MediaNames(engine).are_of_content(request_with(name))


def test_names_of_clients_say_nothing_about_a_layout() -> None:
    """A client's name of a digest's length cannot be told from vLLM's, nor can an image's EXIF."""
    adapter, tokens = ScriptedAdapter(), 4 * CHUNK + 1
    adapter.tokens, adapter.canary_every = 3 * CHUNK, 1
    block_ids = list(range(1, 18))
    for offset, expected in ((0, 3), (CHUNK - 1, 3), (CHUNK, 2), (3 * CHUNK, 0), (None, 0)):
        scheduler = scheduler_of(settings(), adapter)
        image = named(settings(), RED, "0123456789abcdef" * 4)
        image.mm_position = PlaceholderRange(offset or 0, BLOCK)
        features = [] if offset is None else [image]
        assert scheduler.matched_tokens(request_with(*features, tokens=tokens), 0) == 0
        metadata = run(scheduler, step(new=("r", block_ids, 0, tokens)))
        compared, stored = metadata.stores
        assert (compared.compare, stored.compare) == (True, False)
        ((op,), (other,)) = compared.ops, stored.ops
        assert (len(op.hashes), op.client_named, other.client_named) == (3, expected, 0), offset


def test_models_without_media_have_nothing_to_decide() -> None:
    text: Any = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))
    assert MediaNames(text).are_of_content(request_with())


@pytest.mark.parametrize("engine", [settings(), COUNTED], ids=["hashed", "counted"])
def test_what_is_not_named_is_neither_looked_up_nor_stored(engine: Any) -> None:
    adapter = ScriptedAdapter()
    adapter.tokens = CHUNK
    scheduler = scheduler_of(engine, adapter)
    request = request_with(named(engine, RED))
    hit = CHUNK if engine is not COUNTED else 0
    assert scheduler.matched_tokens(request, 0) == hit
    assert len(adapter.lookups) == (hit > 0)
    metadata = run(scheduler, step(new=("r", [1, 2, 3, 4, 5], 0, CHUNK + 1)))
    assert len(metadata.stores) == (hit > 0)

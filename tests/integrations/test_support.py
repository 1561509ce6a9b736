# SPDX-License-Identifier: Apache-2.0
"""What is not supported is said at start, in one sentence."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm.requests import CachePolicy, RequestOptions, TenantNames
from lmcache_redis.integrations.vllm.support import adapters_only, may_load, supported_groups


class FullAttentionSpec:
    block_size = 16


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    block_size = 16
    sliding_window = 128


class ChunkedLocalAttentionSpec:
    block_size = 16
    attention_chunk_size = 8192


class MambaSpec:
    block_size = 16

    def __init__(self, mode: str) -> None:
        self.mamba_cache_mode = mode


class SinkFullAttentionSpec(FullAttentionSpec):
    pass


class UniformTypeKVCacheSpecs:
    block_size = 16

    def __init__(self, *specs: object) -> None:
        self.kv_cache_specs = dict(enumerate(specs))


def engine(**changes: dict[str, Any]) -> Any:
    """Settings of an engine that is supported, but for ``changes`` (by config)."""
    settings: dict[str, dict[str, Any]] = {
        "model_config": {},
        "cache_config": {
            "block_size": 16,
            "prefix_caching_hash_algo": "sha256",
            "cache_dtype": "auto",
        },
        "parallel_config": {},
        "device_config": {"device_type": "cuda"},
    }
    for name, change in changes.items():
        settings[name] = settings.get(name, {}) | change
    return SimpleNamespace(**{name: SimpleNamespace(**each) for name, each in settings.items()})


def caches(*specs: object, transferred: bool = True) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, enable_kv_transfer=transferred) for spec in specs
        ]
    )


FULL = caches(FullAttentionSpec())


def unsupported(engine: Any, found: Any, *, takes_failed_loads: bool = True) -> str | None:
    """Why the engine cannot be cached, or None."""
    try:
        supported_groups(engine, found, takes_failed_loads=takes_failed_loads)
    except Unsupported as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(),
        MLAAttentionSpec(),
        UniformTypeKVCacheSpecs(FullAttentionSpec(), MLAAttentionSpec()),
    ],
)
def test_full_attention_is_supported_by_every_version(spec: object) -> None:
    assert unsupported(engine(), caches(spec)) is None
    assert unsupported(engine(device_config={"device_type": "cpu"}), caches(spec)) is None
    # As later versions have them, with their defaults.
    later = engine(
        cache_config={"hash_block_size": 16, "prefix_match_unit": None},
        parallel_config={"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1},
        model_config={"is_encoder_decoder": False, "is_prefix_caching_supported": True},
    )
    assert unsupported(later, caches(spec)) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cache_config": {"prefix_caching_hash_algo": "xxhash"}}, "xxhash"),
        ({"cache_config": {"prefix_caching_hash_algo": "xxhash_cbor"}}, "xxhash_cbor"),
        ({"cache_config": {"prefix_caching_hash_algo": "builtin"}}, "builtin"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "decode_context_parallel"),
        ({"parallel_config": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel"),
        (
            {
                "parallel_config": {
                    "distributed_executor_backend": "external_launcher",
                    "world_size": 2,
                }
            },
            "external_launcher",
        ),
        ({"cache_config": {"hash_block_size": 32}}, "covers 32"),
        ({"cache_config": {"prefix_match_unit": 12}}, "covers 12"),
        ({"cache_config": {"block_size": 0}}, "0 tokens"),
        ({"cache_config": {"block_size": None}}, "0 tokens"),
        ({"device_config": {"device_type": "tpu"}}, "tpu"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model_config": {"is_diffusion": True}}, "diffusion"),
        ({"model_config": {"is_prefix_caching_supported": False}}, "prefix caching"),
        (
            {"cache_config": {"cache_dtype": "fp8", "calculate_kv_scales": True}},
            "calculate-kv-scales",
        ),
    ],
)
def test_a_setting_that_does_not_go_is_named(changes: dict[str, Any], word: str) -> None:
    reason = unsupported(engine(**changes), FULL)
    assert reason is not None
    assert word in reason
    assert "\n" not in reason


def test_a_launcher_of_one_rank_is_as_any_other() -> None:
    alone = {"distributed_executor_backend": "external_launcher", "world_size": 1}
    assert unsupported(engine(parallel_config=alone), FULL) is None
    several = {"distributed_executor_backend": "mp", "world_size": 2}
    assert unsupported(engine(parallel_config=several), FULL) is None


def test_rocm_calls_itself_cuda_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported(engine(), FULL) is None
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    reason = unsupported(engine(), FULL)
    assert reason is not None
    assert "ROCm" in reason
    assert unsupported(engine(device_config={"device_type": "cpu"}), FULL) is None


@pytest.mark.parametrize("config", ["aux_output_config", "model_config"])  # since 0.31, before
def test_routed_experts_are_not_loaded(config: str) -> None:
    returns = engine(**{config: {"enable_return_routed_experts": True}})
    assert may_load(engine())
    assert may_load(engine(aux_output_config={"enable_return_routed_experts": False}))
    assert not may_load(returns)
    assert unsupported(returns, FULL) is None


def test_hashes_that_differ_in_every_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert unsupported(engine(), FULL) is None
    monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")  # as in older versions
    reason = unsupported(engine(), FULL)
    assert reason is not None
    assert "PYTHONHASHSEED" in reason
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert unsupported(engine(), FULL) is None


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (caches(), "no KV cache"),
        (caches(FullAttentionSpec(), MambaSpec("none")), "group 1 (MambaSpec): states are not"),
        (caches(MambaSpec("none")), "--mamba-cache-mode align"),
        (caches(SinkFullAttentionSpec()), "group 0 (SinkFullAttentionSpec): this version does not"),
        (
            caches(UniformTypeKVCacheSpecs(FullAttentionSpec(), MambaSpec("align"))),
            "group 0 (FullAttentionSpec and MambaSpec): its layers need different blocks",
        ),
        (
            caches(UniformTypeKVCacheSpecs(FullAttentionSpec(), MambaSpec("none"))),
            "states are not kept",
        ),
        (caches(FullAttentionSpec(), transferred=False), "vLLM does not let connectors load it"),
    ],
)
def test_a_cache_that_is_not_handled_is_refused_by_group(found: Any, word: str) -> None:
    reason = unsupported(engine(), found)
    assert reason is not None
    assert word in reason


@pytest.mark.parametrize(
    "specs",
    [
        [SlidingWindowSpec()],
        [SlidingWindowSpec(), FullAttentionSpec()],
        [FullAttentionSpec(), ChunkedLocalAttentionSpec()],
        [MambaSpec("align"), MambaSpec("all"), MLAAttentionSpec()],
        [UniformTypeKVCacheSpecs(SlidingWindowSpec(), SlidingWindowSpec())],
    ],
)
def test_groups_of_every_kind_are_handled(specs: list[object]) -> None:
    assert unsupported(engine(), caches(*specs)) is None


def test_several_groups_need_a_vllm_that_takes_failed_loads() -> None:
    for specs in ([FullAttentionSpec(), MLAAttentionSpec()], [SlidingWindowSpec()]):
        reason = unsupported(engine(), caches(*specs), takes_failed_loads=False)
        assert reason is not None
        assert "vLLM 0.30 or newer" in reason
    assert unsupported(engine(), FULL, takes_failed_loads=False) is None


def test_states_are_kept_where_steps_end() -> None:
    coarse = MambaSpec("align")
    coarse.block_size = 64
    reason = unsupported(engine(), caches(FullAttentionSpec(), coarse))
    assert reason is not None
    assert "keeps states every 64 tokens, and vLLM ends its steps every 16" in reason


def test_the_classes_of_this_vllm_are_those_that_are_meant() -> None:
    interface = pytest.importorskip("vllm.v1.kv_cache_interface")
    for name in (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        ChunkedLocalAttentionSpec,
        MambaSpec,
    ):
        real_class = getattr(interface, name.__name__)
        fields = {field.name for field in dataclasses.fields(real_class)}
        assert {each for each in vars(name) if not each.startswith("__")} <= fields
    assert {"mamba_cache_mode"} <= {each.name for each in dataclasses.fields(interface.MambaSpec)}
    assert hasattr(interface.UniformTypeKVCacheSpecs, "__dataclass_fields__")
    assert "kv_cache_specs" in interface.UniformTypeKVCacheSpecs.__dataclass_fields__
    from vllm.config import CacheConfig, ParallelConfig

    cache, parallel = CacheConfig(block_size=16), ParallelConfig()
    real: Any = SimpleNamespace(
        model_config=SimpleNamespace(), cache_config=cache, parallel_config=parallel
    )
    assert unsupported(real, FULL) is None
    parallel.decode_context_parallel_size = 2
    assert unsupported(real, FULL) is not None


@pytest.mark.parametrize(("has_hooks", "device", "is_fit"), [
    (False, "cuda", False), (False, "cpu", True), (True, "cuda", True),
])  # fmt: skip
def test_sleep_mode_needs_a_vllm_that_tells_connectors(
    monkeypatch: pytest.MonkeyPatch, has_hooks: bool, device: str, is_fit: bool
) -> None:
    """Before, vLLM unmaps memory that the agent has mapped, and maps other memory there."""
    monkeypatch.delattr(KVConnectorBase_V1, "unregister_kv_caches", raising=False)
    if has_hooks:
        hook = lambda self: None  # noqa: E731
        monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", hook, raising=False)
    settings = engine(
        model_config={"enable_sleep_mode": True}, device_config={"device_type": device}
    )
    if is_fit:
        assert len(supported_groups(settings, FULL, takes_failed_loads=True)) == 1
    else:
        with pytest.raises(Unsupported, match=r"it needs vLLM 0\.33 or newer"):
            supported_groups(settings, FULL, takes_failed_loads=True)


@pytest.mark.parametrize(
    ("device", "lora", "adds", "only"),
    [
        ("cpu", True, 1.0, True),  # vLLM 0.32: no adapter is the last one
        ("cpu", True, 0.0, False),  # vLLM 0.33
        ("cpu", False, 1.0, False),
        ("cuda", True, 1.0, False),  # another function computes there
    ],
)
def test_prompts_without_an_adapter_beside_some_with_one(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    lora: bool,
    adds: float,
    only: bool,
) -> None:
    def expand(x: Any, weights: Any, output: Any, indices: Any, add_inputs: bool) -> None:
        output += adds

    monkeypatch.setattr("vllm.lora.ops.torch_ops.bgmv_expand", expand)
    settings = engine(device_config={"device_type": device})
    settings.lora_config = object() if lora else None
    assert adapters_only(settings) is only
    assert ("prompts without an adapter are not cached" in caplog.text) is only
    monkeypatch.setattr("vllm.lora.ops.torch_ops.bgmv_expand", None)  # moved by another vLLM
    assert adapters_only(settings) is (lora and device == "cpu")


@pytest.mark.parametrize("adapter", [None, object()])
def test_where_adapters_only_are_cached(adapter: object) -> None:
    request: Any = SimpleNamespace(kv_transfer_params=None, lora_request=adapter)
    options = RequestOptions.of(request, CachePolicy(16, adapters_only=True), TenantNames())
    assert (options.load, options.store) == (adapter is not None,) * 2
    options = RequestOptions.of(request, CachePolicy(16), TenantNames())
    assert (options.load, options.store) == (True, True)

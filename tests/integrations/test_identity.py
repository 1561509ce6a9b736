# SPDX-License-Identifier: Apache-2.0
"""Engines share keys if and only if the same tokens have the same KV."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm.identity import engine_identity as settings
from lmcache_redis.integrations.vllm.identity.engine_identity import engine_identity
from tests.integrations.test_weights import write_safetensors

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}
PHI3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "original_max_position_embeddings": 4096,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    },
}


def write_model(directory: Path, config: dict[str, Any] = LLAMA) -> Path:
    """Its settings, and weights if there are none."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if not os.path.lexists(directory / "model.safetensors"):
        write_safetensors(directory / "model.safetensors", [1000])
    return directory


class Identity:
    """The identity of an engine of the model whose config.json is ``config``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, config: dict[str, Any] = LLAMA, **options: Any) -> dict[str, str]:
        weights_id = options.pop("weights_id", None)
        rank = options.pop("rank", 0)
        made = self.config(config, **options)
        return engine_identity(made, rank=rank, backend="CPU_ATTN", weights_id=weights_id)

    def config(self, config: dict[str, Any] = LLAMA, **options: Any) -> VllmConfig:
        directory = write_model(self._directory, config)
        arguments: dict[str, Any] = {
            "model": str(directory),
            "skip_tokenizer_init": True,
            **options,
        }
        return EngineArgs(**arguments).create_engine_config()


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identity:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return Identity(tmp_path / "model")


def differ(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def test_context_length_counts_with_rotary_factors(identity: Identity) -> None:
    long = identity(PHI3, max_model_len=8192)
    assert long["context"] == "8192"
    assert differ(long, identity(PHI3, max_model_len=4096)) == {"context"}
    assert differ(identity(max_model_len=2048), identity(max_model_len=8192)) == set()


@pytest.mark.parametrize(
    ("settings", "pair"),
    [
        ({"hf_overrides": {"rms_norm_eps": 0.125}}, None),
        ({"dtype": "float32"}, None),
        ({"load_format": "dummy"}, None),
        ({"kv_cache_dtype": "bfloat16"}, None),
        ({"weights_id": "mine"}, None),
        ({"model_impl": "transformers"}, None),
        ({"additional_config": {"a": 1}}, None),
        ({"rank": 1}, "rank"),
        ({"tensor_parallel_size": 2}, "tensor_parallel"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "block_hash"),
        ({"model_loader_extra_config": {"pattern": "a-{rank}.safetensors"}}, "loader"),
        ({"moe_backend": "emulation"}, "kernels"),
        ({"linear_backend": "marlin"}, "kernels"),
    ],
)
def test_a_setting_that_changes_keys_and_values_counts(
    identity: Identity, settings: dict[str, Any], pair: str | None
) -> None:
    """pair: the only one in which it does."""
    changed = differ(identity(), identity(**settings))
    assert changed == {pair} if pair else changed


def test_the_modules_that_an_adapter_applies_to_count(identity: Identity) -> None:
    every, one = (
        identity(enable_lora=True, lora_target_modules=modules) for modules in (None, ["q_proj"])
    )
    assert differ(every, one) == {"lora"}


def test_settings_that_do_not_are_left_out(identity: Identity) -> None:
    settings: dict[str, Any] = {
        "seed": 7,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 512,
        "enforce_eager": True,
        "served_model_name": "other",
        "num_gpu_blocks_override": 99,
        "enable_prefix_caching": False,
        "max_logprobs": 1,
    }
    assert differ(identity(), identity(**settings)) == set()


def test_switches_to_coarser_numbers_count(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = identity()
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    assert differ(plain, identity()) == {"environment"}
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")  # vLLM's own choice, said aloud
    assert differ(plain, identity()) == set()
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "0")
    assert differ(plain, identity()) == {"kernels"}


def test_code_and_processors_that_come_with_the_model_count(
    identity: Identity, tmp_path: Path
) -> None:
    plain = identity()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert differ(plain, identity()) == set()
    (tmp_path / "model" / "modeling_x.py").write_text("x = 1")
    with_code = identity()
    assert differ(plain, with_code) == {"weights"}
    (tmp_path / "model" / "preprocessor_config.json").write_text("{}")
    assert differ(with_code, identity()) == {"weights"}


def test_a_draft_model_counts_where_its_layers_are_in_the_cache(
    identity: Identity, tmp_path: Path
) -> None:
    plain = identity()
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert differ(plain, identity(speculative_config=ngram)) == set()
    draft = write_model(tmp_path / "draft")
    with_draft = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    first = identity(speculative_config=with_draft)
    assert differ(plain, first) == {"draft"}
    assert differ(first, identity(speculative_config=with_draft)) == set()
    write_safetensors(draft / "model.safetensors", [1000])  # other numbers
    assert differ(first, identity(speculative_config=with_draft)) == {"draft"}


def test_a_draft_of_another_revision_has_other_weights(identity: Identity, tmp_path: Path) -> None:
    identity()
    itself = {"method": "draft_model", "model": str(tmp_path / "model")}
    found = [
        identity(speculative_config={**itself, "num_speculative_tokens": 2, "revision": revision})
        for revision in (None, "other")
    ]
    assert differ(*found) == {"draft"}


def test_the_version_of_transformers_counts(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = identity()
    assert plain["transformers"] == importlib.metadata.version("transformers")
    monkeypatch.setattr(settings, "version", lambda name: f"another {name}")
    assert differ(plain, identity()) == {"transformers"}


def test_data_parallel_cores_have_ids_of_their_own() -> None:
    def id_of(instance_id: str, index: int) -> str:
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_index=index),
            kv_transfer_config=SimpleNamespace(engine_id="shared"),
            instance_id=instance_id,
        )
        return settings.engine_id(config)

    ids = [id_of(*of) for of in (("a", 0), ("a", 1), ("b", 0), ("b", 1))]
    assert len(set(ids)) == 4
    assert ids == [id_of(*of) for of in (("a", 0), ("a", 1), ("b", 0), ("b", 1))]


def install(directory: Path, name: str, version: str, module: str, group: str) -> None:
    """A package with a plugin of vLLM."""
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:register\n")
    (directory / f"{module.partition('.')[0]}.py").write_text("def register(): ...")


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_plugins_of_others_count(
    identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    plain = identity()
    assert plain["plugins"] == ""  # vLLM's own and this package's have no say
    found = {""}
    for version in ("1.0", "2.0"):
        install(tmp_path / version, "fancy", version, "fancy_plugin", group)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / version)
            found.add(" ".join(settings.foreign_plugins()))
            patch.setenv("VLLM_PLUGINS", "lmcache_redis")
            assert " ".join(settings.foreign_plugins()) == ""  # it is not loaded
    assert found == {"", "fancy (fancy==1.0)", "fancy (fancy==2.0)"}


@pytest.mark.parametrize("one", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_the_gpu_counts_where_numbers_are_quantized(
    identity: Identity, monkeypatch: pytest.MonkeyPatch, one: dict[str, Any]
) -> None:
    """By it vLLM chooses between kernels for 16 and for 8 bits."""

    def on(major: int, **options: Any) -> dict[str, str]:
        capability = DeviceCapability(major, 0)
        with monkeypatch.context() as patch:
            built = identity.config(**options)
            patch.setattr(current_platform, "get_device_capability", lambda *_: capability)
            return engine_identity(built, rank=0, backend="FLASH_ATTN")

    assert differ(on(8), on(9)) == set()
    assert differ(on(8, **one), on(9, **one)) == {"kernels"}


@pytest.mark.parametrize("role", ["ec_consumer", "ec_both"])
def test_images_that_another_instance_encodes_need_a_name(identity: Identity, role: str) -> None:
    config = identity.config()
    config.ec_transfer_config = SimpleNamespace(ec_role=role)
    with pytest.raises(Unsupported, match=r"another instance encodes images.*set weights_id"):
        engine_identity(config, rank=0, backend="")
    named = engine_identity(config, rank=0, backend="", weights_id="mine")
    config.ec_transfer_config.ec_role = "ec_producer"
    assert differ(named, engine_identity(config, rank=0, backend="")) == {"weights_id"}


def some_pass() -> None: ...


class Pass:
    def __init__(self, size: int) -> None:
        self.size = size

    def run(self) -> None: ...


def test_values_are_told_apart_by_what_they_are() -> None:
    """Functions, bytes and objects that only the Python API can give."""
    values = [
        b"one", b"other", bytearray(b"two"), some_pass, max, min, Pass, Pass(1), Pass(2),
        Pass(1).run, Pass(2).run, functools.partial(some_pass, 1), functools.partial(some_pass, 2),
        torch.ones(2), torch.zeros(2), torch.float16, torch.device("cpu"), {"a": b"x"}, {"a": b"y"},
        frozenset({b"a"}), frozenset({b"b"}),
    ]  # fmt: skip
    assert len({settings._digest(each) for each in values}) == len(values)
    assert settings._digest(Pass(1)) == settings._digest(Pass(1))
    assert settings._digest(b"one") == settings._digest(memoryview(b"one"))


@pytest.mark.parametrize("value", [lambda: None, [object()], {"a": iter([])}, threading.Lock()])
def test_a_value_without_a_name_keeps_the_cache_off(identity: Identity, value: Any) -> None:
    config = identity.config()
    config.additional_config = {"value": value}
    with pytest.raises(Unsupported, match="no name that it would have in another process"):
        engine_identity(config, rank=0, backend="")


def test_unexpected_settings_never_reach_the_engine() -> None:
    with pytest.raises(Unsupported, match="cannot be read"):
        engine_identity(SimpleNamespace(), rank=0, backend="")  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""The sizes of KV caches are those of vLLM: it builds each model without weights, and tells."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
import transformers
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from lmcache_redis.admin.sizes.families import FAMILIES
from lmcache_redis.admin.sizes.sizing import ModelSize, SizeOptions, size_model
from lmcache_redis.errors import ConfigError
from tests.admin.models import PUBLISHED, sizes

# On a CPU vLLM keeps states of float32 whatever is asked.
STATES = "float32"
SMALL = sizes(8, 1024, 16, 4)
MANY = sizes(8, 1024, 16, 16)
LATENT = sizes(4, 1024, 16, 16, first_k_dense_replace=4, kv_lora_rank=512, qk_rope_head_dim=64)
MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 2}
LFM2_LAYERS = ["conv", "full_attention"] * 4
LFM2_FF = {"block_ff_dim": 1024, "block_dim": 1024, "conv_dim": 1024}

# Every family: transformers' class, vLLM's architecture, and what differs from the class.
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaConfig", "LlamaForCausalLM", SMALL),
    ("MistralConfig", "MistralForCausalLM", {**SMALL, "sliding_window": 512}),
    ("MistralConfig", "MistralForCausalLM", {**SMALL, "sliding_window": None}),
    ("MixtralConfig", "MixtralForCausalLM", SMALL),
    ("Qwen2Config", "Qwen2ForCausalLM", SMALL),
    ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, "head_dim": 96}),
    ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SMALL, "head_dim": 128}),
    ("Phi3Config", "Phi3ForCausalLM", {**SMALL, "sliding_window": 2047}),
    ("GemmaConfig", "GemmaForCausalLM", SMALL),
    ("Gemma2Config", "Gemma2ForCausalLM", SMALL),
    ("Gemma3TextConfig", "Gemma3ForCausalLM", SMALL),
    ("Gemma4TextConfig", "Gemma4ForCausalLM", SMALL),
    ("Gemma4TextConfig", "Gemma4ForCausalLM",
     {**SMALL, "num_hidden_layers": 12, "attention_k_eq_v": True, "num_global_key_value_heads": 2}),
    ("GptOssConfig", "GptOssForCausalLM", SMALL),
    ("Olmo3Config", "Olmo3ForCausalLM", SMALL),
    ("Cohere2Config", "Cohere2ForCausalLM", SMALL),
    ("Exaone4Config", "Exaone4ForCausalLM", SMALL),
    ("Llama4TextConfig", "Llama4ForCausalLM", SMALL),
    ("GraniteConfig", "GraniteForCausalLM", SMALL),
    ("StableLmConfig", "StableLmForCausalLM", SMALL),
    ("CohereConfig", "CohereForCausalLM", SMALL),
    ("Starcoder2Config", "Starcoder2ForCausalLM", {**SMALL, "sliding_window": 512}),
    ("Ernie4_5Config", "Ernie4_5ForCausalLM", {**SMALL, "head_dim": 128}),
    ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", SMALL),
    ("Glm4Config", "Glm4ForCausalLM", {**SMALL, "head_dim": 128}),
    ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**SMALL, "head_dim": 128}),
    ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {**LATENT, "first_k_dense_replace": 1}),
    ("OlmoConfig", "OlmoForCausalLM", SMALL),
    ("Olmo2Config", "Olmo2ForCausalLM", SMALL),
    ("OlmoeConfig", "OlmoeForCausalLM", SMALL),
    ("GraniteMoeConfig", "GraniteMoeForCausalLM", SMALL),
    ("SmolLM3Config", "SmolLM3ForCausalLM", SMALL),
    ("NemotronConfig", "NemotronForCausalLM", {**SMALL, "head_dim": 64}),
    ("PhimoeConfig", "PhiMoEForCausalLM", {**SMALL, "sliding_window": 512}),
    ("ExaoneMoeConfig", "ExaoneMoEForCausalLM", SMALL),
    ("MiniMaxM2Config", "MiniMaxM2ForCausalLM",
     {**SMALL, "head_dim": 128, "rotary_dim": 64, "scoring_func": "sigmoid"}),
    ("SeedOssConfig", "SeedOssForCausalLM", {**SMALL, "head_dim": 128}),
    ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", SMALL),
    ("Ministral3Config", "Ministral3ForCausalLM", SMALL),
    ("Lfm2MoeConfig", "Lfm2MoeForCausalLM",
     {**SMALL, "layer_types": LFM2_LAYERS, "conv_dim": 1024}),
    ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT),
    ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    ("Qwen3NextConfig", "Qwen3NextForCausalLM", SMALL),
    ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
     {**SMALL, **MAMBA, "layer_types": ["linear_attention"] * 7 + ["full_attention"]}),
    ("FalconH1Config", "FalconH1ForCausalLM",
     {**SMALL, **MAMBA, "mamba_d_ssm": 2048}),
    ("NemotronHConfig", "NemotronHForCausalLM",
     {**SMALL, "mamba_num_heads": 32, "ssm_state_size": 64, "mlp_hidden_act": "silu",
      "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 2}),
    ("Lfm2Config", "Lfm2ForCausalLM", {**SMALL, **LFM2_FF, "layer_types": LFM2_LAYERS}),
]  # fmt: skip

# Built like others of these, where there is torchvision, or a GPU.
ALIKE = {
    "qwen2_vl": "Qwen2VLConfig",
    "qwen2_vl_text": "Qwen2VLTextConfig",
    "qwen2_5_vl": "Qwen2_5_VLConfig",
    "qwen2_5_vl_text": "Qwen2_5_VLTextConfig",
    "qwen3_vl_text": "Qwen3VLTextConfig",
    "qwen3_vl_moe_text": "Qwen3VLMoeTextConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "deepseek_v32": "DeepseekV32Config",
    "glm_moe_dsa": "GlmMoeDsaConfig",
    "kimi_k2": "DeepseekV3Config",
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What vLLM's layers ask for: a process group of one."""
    directory = tmp_path_factory.mktemp("mixtral")
    config = vllm_config(directory, "MixtralConfig", "MixtralForCausalLM", SMALL)
    with set_current_vllm_config(config):
        address = f"file://{directory}/group"
        parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def vllm_config(
    directory: Path,
    config_class: str,
    architecture: str,
    dimensions: dict[str, Any],
    **options: Any,
) -> VllmConfig:
    """Of a model whose config is written to the directory."""
    made = getattr(transformers, config_class)(**dimensions, dtype="bfloat16")
    made.architectures = [architecture]
    made.save_pretrained(directory)
    arguments = EngineArgs(
        str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        **options,
    )
    return arguments.create_engine_config()


def specs_of(config: VllmConfig) -> list[KVCacheSpec]:
    """What each layer of the model asks for; the model has no weights."""
    with set_current_vllm_config(config), torch.device("meta"):
        initialize_model(config)
        layers = config.compilation_config.static_forward_context.values()
        asked = [x.get_kv_cache_spec(config) for x in layers if isinstance(x, AttentionLayerBase)]
    return [spec for spec in asked if spec is not None]


def expected(specs: list[KVCacheSpec]) -> tuple[dict[tuple[str, int], int], int]:
    """Bytes of a token by kind and window, and bytes of the states, on one rank."""
    tokens: Counter[tuple[str, int]] = Counter()
    states = 0
    for spec in specs:
        if isinstance(spec, MambaSpec):
            states += spec.page_size_bytes
            continue
        window = getattr(spec, "sliding_window", None)
        local = getattr(spec, "attention_chunk_size", None)
        kind = ("window", window) if window else ("local", local) if local else ("all", 0)
        tokens[kind] += spec.page_size_bytes // spec.block_size
    return dict(tokens), states


def ours(size: ModelSize, ranks: int = 1) -> tuple[dict[tuple[str, int], int], int]:
    tokens = {
        (group.reach.kind, group.reach.tokens): group.engine_bytes_per_token // ranks
        for group in size.groups
        if not group.state_bytes
    }
    return tokens, size.state_bytes // ranks


def written(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


@pytest.mark.parametrize("number", range(len(MODELS)), ids=lambda n: f"{n}-{MODELS[n][0]}")
def test_sizes_are_those_of_vllm(tmp_path: Path, number: int) -> None:
    specs = specs_of(vllm_config(tmp_path, *MODELS[number]))
    config = written(tmp_path)
    size = size_model(config, "m", SizeOptions(state_dtype=STATES))
    assert ours(size) == expected(specs)
    assert expected(specs) != ({}, 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("config_class", ["LlamaConfig", "DeepseekV3Config", "Qwen3NextConfig"])
def test_ranks_share_heads_as_in_vllm(
    tmp_path: Path, config_class: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight ranks each of the four KV heads is twice there; a latent is in every rank."""
    (model,) = [each for each in MODELS if each[0] == config_class]
    config = vllm_config(tmp_path, *model)
    monkeypatch.setattr(parallel_state.get_tp_group(), "world_size", ranks)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", ranks)
    size = size_model(written(tmp_path), "m", SizeOptions(tp=ranks, state_dtype=STATES))
    assert ours(size, ranks) == expected(specs_of(config))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_share_groups_of_states_as_in_vllm(ranks: int) -> None:
    state = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
    config = {"model_type": "granitemoehybrid", **sizes(1, 4096, 32, 8), **state}
    config |= {"layer_types": ["mamba"], "mamba_expand": 2, "mamba_d_conv": 4}
    shapes = MambaStateShapeCalculator.mamba2_state_shape(ranks, 8192, 1, 128, 64, 128, 4)
    spec = MambaSpec(shapes=shapes, dtypes=(torch.bfloat16, torch.bfloat16), block_size=16)
    size = size_model(config, "m", SizeOptions(tp=ranks))
    assert size.state_bytes == ranks * spec.page_size_bytes


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "bfloat16"])
def test_eight_bits_are_half_as_in_vllm(tmp_path: Path, dtype: str) -> None:
    specs = specs_of(vllm_config(tmp_path, *MODELS[0], kv_cache_dtype=dtype))
    size = size_model(written(tmp_path), "m", SizeOptions(kv_cache_dtype=dtype))
    assert ours(size) == expected(specs)


def test_the_index_of_sparse_attention_is_counted() -> None:
    """vLLM builds such models on GPUs alone; the layer's own spec is asked."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    layer = DeepseekV32IndexerCache.__new__(DeepseekV32IndexerCache)
    torch.nn.Module.__init__(layer)
    layer.cache_config = type("", (), {"block_size": 64})()
    layer.head_dim, layer.dtype = 128 + 128 // 128 * 4, torch.uint8
    index_bytes = layer.get_kv_cache_spec(None).page_size_bytes // 64
    plain = {"model_type": "deepseek_v3", **LATENT}
    sparse = plain | {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
    difference = of(sparse).bytes_per_token - of(plain).bytes_per_token
    assert difference == 4 * index_bytes == 4 * 132
    every_second = sparse | {"index_topk_freq": 2}
    assert of(every_second).bytes_per_token < of(sparse).bytes_per_token


def of(config: dict[str, Any], **options: Any) -> ModelSize:
    return size_model(config, "m", SizeOptions(**options))


def test_every_type_is_compared() -> None:
    built = {getattr(transformers, config_class).model_type for config_class, _, _ in MODELS}
    assert set(FAMILIES) - built == set(ALIKE)


def test_qwen_3_5_is_as_qwen_3_next() -> None:
    """vLLM's class of it needs torchvision; its layers and states are those of the other."""
    shape = {**SMALL, "linear_num_key_heads": 8, "linear_num_value_heads": 24}
    newer = transformers.Qwen3_5Config(text_config=shape).to_dict()
    older = transformers.Qwen3NextConfig(**shape).to_dict()
    assert ours(of(newer)) == ours(of(older))
    wide = newer | {"text_config": newer["text_config"] | {"mamba_ssm_dtype": "float32"}}
    assert of(wide).state_bytes == of(older, state_dtype="float32").state_bytes


# What configs on the Hub, written by older versions, leave to the class.
OFTEN_LEFT_OUT = ("layer_types", "head_dim", "num_key_value_heads", "sliding_window",
                  "mamba_ssm_cache_dtype")  # fmt: skip


@pytest.mark.parametrize("left_out", OFTEN_LEFT_OUT)
def test_what_a_config_leaves_out_is_filled_as_by_its_class(left_out: str, tmp_path: Path) -> None:
    """Or it is an error: never another number."""
    filled, wrong = 0, []
    others = [(each, "", SMALL) for name, each in ALIKE.items() if name.endswith("_text")]
    for config_class, _, dimensions in [*MODELS, *others]:
        given = {name: value for name, value in dimensions.items() if name != left_out}
        whole = getattr(transformers, config_class)(**given, dtype="bfloat16").to_dict()
        if left_out not in whole:
            continue
        part = {name: value for name, value in whole.items() if name != left_out}
        with contextlib.suppress(ConfigError):
            if ours(of(part)) != ours(of(whole)):
                wrong.append(config_class)
            filled += 1
    assert filled
    assert not wrong


@pytest.mark.parametrize("equal", [True, False])
def test_the_older_form_of_gemma_4_is_read(equal: bool) -> None:
    given = {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": equal}
    whole = transformers.Gemma4TextConfig(**SMALL, **given, num_kv_shared_layers=3).to_dict()
    older = {name: value for name, value in whole.items() if name != "per_layer_config"}
    assert ours(of({**older, **given})) == ours(of(whole))


def test_the_short_form_of_gemma_3_is_read() -> None:
    """Its configs on the Hub leave out all that the class knows."""
    inner = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    short = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **inner}}
    whole = transformers.Gemma3TextConfig(**inner, dtype="bfloat16").to_dict()
    assert ours(of(short)) == ours(of(whole))


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_published_models_are_known(model: Any) -> None:
    size = of(model.config())
    assert size.bytes_per_token + size.state_bytes > 0

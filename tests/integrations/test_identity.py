"""Engines share keys if and only if the same tokens have the same KV."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
from vllm.engine.arg_utils import EngineArgs

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm.identity.engine_identity import engine_identity
from tests.engines import PATCH_VARIABLE, ForkedEngine
from tests.harness import AgentServer, wait_until
from tests.integrations.conftest import Prompts
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

Identity = Callable[..., dict[str, str]]


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Identity:
    """The identity of an engine of the model whose config.json is ``config``."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def build(config: dict[str, Any] = LLAMA, **settings: Any) -> dict[str, str]:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        if not os.path.lexists(directory / "model.safetensors"):
            write_safetensors(directory / "model.safetensors", [1000])
        arguments = {"model": str(directory), "skip_tokenizer_init": True, **settings}
        weights_id = arguments.pop("weights_id", None)
        rank = arguments.pop("rank", 0)
        vllm_config = EngineArgs(**arguments).create_engine_config()
        return engine_identity(vllm_config, rank=rank, backend="CPU_ATTN", weights_id=weights_id)

    return build


def differ(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def test_context_length_counts_with_rotary_factors(identity: Identity) -> None:
    long = identity(PHI3, max_model_len=8192)
    assert long["context"] == "8192"
    assert differ(long, identity(PHI3, max_model_len=4096)) == {"context"}
    assert differ(identity(max_model_len=2048), identity(max_model_len=8192)) == set()


@pytest.mark.parametrize(
    "settings",
    [
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}},
        {"hf_overrides": {"rms_norm_eps": 0.125}},
        {"dtype": "float32"},
        {"load_format": "dummy"},
        {"kv_cache_dtype": "bfloat16"},
        {"weights_id": "mine"},
        {"model_impl": "transformers"},
        {"enable_lora": True},
        {"additional_config": {"a": 1}},
    ],
)
def test_settings_that_change_keys_and_values_count(
    identity: Identity, settings: dict[str, Any]
) -> None:
    assert differ(identity(), identity(**settings))


@pytest.mark.parametrize(
    ("settings", "pair"),
    [
        ({"rank": 1}, "rank"),
        ({"tensor_parallel_size": 2}, "tensor_parallel"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, "block_hash"),
        ({"model_loader_extra_config": {"pattern": "a-{rank}.safetensors"}}, "loader"),
        ({"moe_backend": "emulation"}, "kernels"),
        ({"linear_backend": "marlin"}, "kernels"),
    ],
)
def test_a_setting_counts_in_its_pair(
    identity: Identity, settings: dict[str, Any], pair: str
) -> None:
    assert differ(identity(), identity(**settings)) == {pair}


def test_the_modules_that_an_adapter_applies_to_count(identity: Identity) -> None:
    every, one = (
        identity(enable_lora=True, lora_target_modules=modules) for modules in (None, ["q_proj"])
    )
    assert differ(every, one) == {"lora"}


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 7},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 512},
        {"enforce_eager": True},
        {"served_model_name": "other"},
        {"num_gpu_blocks_override": 99},
        {"enable_prefix_caching": False},
        {"max_logprobs": 1},
    ],
)
def test_settings_that_do_not_are_left_out(identity: Identity, settings: dict[str, Any]) -> None:
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


def test_an_unidentified_model_is_not_cached_without_a_name(
    identity: Identity, tmp_path: Path
) -> None:
    identity()
    weights = tmp_path / "model" / "model.safetensors"
    weights.unlink()
    weights.symlink_to("nowhere")
    with pytest.raises(Unsupported, match="weights_id"):
        identity()
    assert identity(weights_id="mine")["weights_id"] == "mine"


def test_a_draft_model_counts_where_its_layers_are_in_the_cache(
    identity: Identity, tmp_path: Path
) -> None:
    plain = identity()
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert differ(plain, identity(speculative_config=ngram)) == set()
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(LLAMA))
    write_safetensors(draft / "model.safetensors", [1000])
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


def test_unexpected_settings_never_reach_the_engine() -> None:
    with pytest.raises(Unsupported, match="cannot be read"):
        engine_identity(SimpleNamespace(), rank=0, backend="")  # type: ignore[arg-type]


# Two hosts on one machine: the instruction set of one is forced.

_WITHOUT_AMX = """
import vllm.v1.attention.backends.cpu_attn as backend

backend._get_attn_isa = lambda *args, **kwargs: "vec"
"""


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a CPU with AMX")
def test_another_instruction_set_is_not_asked_for_its_kernels(
    model_dir: Path, agent: AgentServer, tmp_path: Path, prompts: Prompts
) -> None:
    patch = tmp_path / "without_amx.py"
    patch.write_text(_WITHOUT_AMX)
    question = prompts.tokens(700)

    def hits(log: str, env: dict[str, str]) -> list[int]:
        """Cached tokens of one question, asked twice with vLLM's own cache emptied between."""
        engine = ForkedEngine(
            model_dir,
            connector_endpoint=agent.endpoint,
            log_path=tmp_path / log,
            options={"dtype": "bfloat16", "max_model_len": 2048, "block_size": 32},
            env={"VLLM_CPU_KVCACHE_SPACE": "1", **env},
        )
        with engine:
            wait_until(
                lambda: any(each["ready"] for each in agent.status()["engines"]),
                what="the engine at the agent",
            )
            cold = engine.generate([question], 8)
            agent.wait_idle()
            assert engine.reset_prefix_cache()
            warm = engine.generate([question], 8)
            assert warm.outputs == cold.outputs
        assert "cannot be probed" not in (tmp_path / log).read_text()
        return [each.details["cached_tokens"][0] for each in (cold, warm)]

    assert hits("amx.log", {}) == [0, 512]
    assert hits("vec.log", {PATCH_VARIABLE: str(patch)}) == [0, 512]

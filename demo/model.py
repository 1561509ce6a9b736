# SPDX-License-Identifier: Apache-2.0
"""A Llama with random weights, generated here: nothing is downloaded.

The weights spread widely (the logits of vLLM's ``load_format="dummy"`` are nearly flat), so that
greedy tokens differ from prompt to prompt and wrong KV shows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 4096
_HIDDEN = 1024
_HEAD_SIZE = 128
_INTERMEDIATE = 2048
_SPREAD = 0.08
_SEED = 20


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The number of layers and heads, and the element type that vLLM computes in."""

    layers: int
    dtype: str
    itemsize: int
    heads: int = 8

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token, all layers."""
        return self.layers * 2 * self.heads * _HEAD_SIZE * self.itemsize


# 64 KiB of KV a token each, as a model of two billion parameters or more.
CPU_SHAPE = ModelShape(layers=8, dtype="float32", itemsize=4)
CUDA_SHAPE = ModelShape(layers=16, dtype="bfloat16", itemsize=2)


def make_model(directory: Path, shape: ModelShape, max_tokens: int) -> bool:
    """Writes the model, for sequences of at most ``max_tokens``, unless it is already there.

    Returns whether it was written. A directory with another model is replaced.
    """
    config = _config(shape, max_tokens)
    if _read(directory / "config.json") == config:
        return False
    from safetensors.numpy import save_file

    # config.json is written last: it marks the weights as complete.
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    save_file(dict(_weights(shape)), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return True


def write_tokenizer(directory: Path) -> None:
    """A token for each byte of a text; tokens that are no byte are shown as numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<s>", "</s>", *letters]
    words += [f"\u0120{number}" for number in range(len(words), VOCABULARY)]  # a space before it
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": "{{ messages[0]['content'] }}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def make_prompts(count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random tokens, the same in every run."""
    rng = np.random.default_rng(_SEED)
    return [rng.integers(3, VOCABULARY, length).tolist() for _ in range(count)]


def _config(shape: ModelShape, max_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": shape.dtype,
        "eos_token_id": 2,
        "head_dim": _HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": max(8192, max_tokens),
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }


def _weights(shape: ModelShape) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(_SEED)

    def random(rows: int, columns: int) -> np.ndarray[Any, Any]:
        weight = rng.standard_normal((rows, columns), dtype=np.float32)
        weight *= _SPREAD
        return weight

    ones = np.ones(_HIDDEN, dtype=np.float32)
    width = shape.heads * _HEAD_SIZE
    yield "model.embed_tokens.weight", random(VOCABULARY, _HIDDEN)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{layer}.self_attn.{name}.weight", random(width, _HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", random(_HIDDEN, width)
        for name in ("gate_proj", "up_proj"):
            yield f"{layer}.mlp.{name}.weight", random(_INTERMEDIATE, _HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", random(_HIDDEN, _INTERMEDIATE)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", ones
    yield "model.norm.weight", ones
    yield "lm_head.weight", random(VOCABULARY, _HIDDEN)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None

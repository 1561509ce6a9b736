# SPDX-License-Identifier: Apache-2.0
"""Configs of models, as transformers' classes write them, with dimensions that were published.

The classes are named, not imported: transformers takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """A model: its name, transformers' class of its config, and what differs from the class."""

    name: str
    config_class: str
    dimensions: Mapping[str, Any] = field(default_factory=dict)
    # Of the text model inside.
    text_class: str = ""

    def config(self) -> dict[str, Any]:
        """What `save_pretrained` would write."""
        import transformers

        made = getattr(transformers, self.text_class or self.config_class)(
            **self.dimensions, dtype="bfloat16"
        )
        if self.text_class:
            made = getattr(transformers, self.config_class)(
                text_config=made.to_dict(), dtype="bfloat16"
            )
        found: dict[str, Any] = made.to_dict()
        return found


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_QWEN35 = {"linear_num_key_heads": 16, "head_dim": 256, "mamba_ssm_dtype": "float32"}
_GRANITE_LAYERS = [
    "full_attention" if at in (5, 15, 25, 35) else "linear_attention" for at in range(40)
]

PUBLISHED = [
    Published("Llama-3.1-8B", "LlamaConfig", sizes(32, 4096, 32, 8)),
    Published("Llama-3.3-70B", "LlamaConfig", sizes(80, 8192, 64, 8)),
    Published("Qwen3-8B", "Qwen3Config", sizes(36, 4096, 32, 8, head_dim=128)),
    Published("Qwen3-32B", "Qwen3Config", sizes(64, 5120, 64, 8, head_dim=128)),
    Published("Qwen3-30B-A3B", "Qwen3MoeConfig", sizes(48, 2048, 32, 4, head_dim=128)),
    Published("Mistral-Small-3.2-24B", "MistralConfig",
              sizes(40, 5120, 32, 8, head_dim=128, sliding_window=None)),
    Published("gpt-oss-20b", "GptOssConfig", sizes(24, 2880, 64, 8, head_dim=64)),
    Published("gpt-oss-120b", "GptOssConfig", sizes(36, 2880, 64, 8, head_dim=64)),
    Published("Gemma-3-27B", "Gemma3Config",
              sizes(62, 5376, 32, 16, head_dim=128, sliding_window=1024), "Gemma3TextConfig"),
    Published("Qwen3-Next-80B-A3B", "Qwen3NextConfig", sizes(48, 2048, 16, 2, head_dim=256)),
    Published("Qwen3.5-27B", "Qwen3_5Config",
              sizes(64, 5120, 24, 4, linear_num_value_heads=48, **_QWEN35), "Qwen3_5TextConfig"),
    Published("Granite-4.0-H-Small", "GraniteMoeHybridConfig",
              sizes(40, 4096, 32, 8, layer_types=_GRANITE_LAYERS, mamba_n_heads=128,
                    mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1)),
    Published("DeepSeek-V3", "DeepseekV3Config",
              sizes(61, 7168, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64)),
]  # fmt: skip

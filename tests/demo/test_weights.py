# SPDX-License-Identifier: Apache-2.0
"""The folders that the demo serves."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from demo.model import VOCABULARY, ModelShape
from demo.weights import random_model, smollm2

TINY = ModelShape(layers=1, dtype="float32", itemsize=4)


def test_kv_bytes_follow_from_the_configuration(tmp_path: Path) -> None:
    sizes = {"num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 30}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    model = smollm2(tmp_path)
    assert (model.dtype, model.kv_bytes_per_token) == ("bfloat16", 30 * 2 * 3 * 64 * 2)


def test_random_weights_read_any_text_and_answer_in_numbers(tmp_path: Path) -> None:
    model = random_model(tmp_path / "model", TINY)
    tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    text = "Who owns the café?\n"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([3000, VOCABULARY - 1]) == f" 3000 {VOCABULARY - 1}"
    assert model.kv_bytes_per_token == TINY.kv_bytes_per_token

# SPDX-License-Identifier: Apache-2.0
"""The models that the demo serves, its prompts, and its texts and questions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from demo.guide import make_guides, question_of
from demo.model import VOCABULARY, ModelShape, make_model, make_prompts
from demo.weights import random_model, smollm2

TINY = ModelShape(layers=1, dtype="float32", itemsize=4)


def test_kv_bytes_follow_from_the_config_that_is_written(tmp_path: Path) -> None:
    make_model(tmp_path / "model", TINY, max_tokens=100)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    width = config["num_key_value_heads"] * config["head_dim"]
    assert TINY.kv_bytes_per_token == config["num_hidden_layers"] * 2 * width * TINY.itemsize


def test_a_half_written_model_is_written_again(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"half")
    assert make_model(directory, TINY, max_tokens=100)
    assert len(load_file(directory / "model.safetensors")) == 12
    assert not make_model(directory, TINY, max_tokens=100)
    assert make_model(directory, TINY, max_tokens=100_000), "another model replaces it"


def test_the_weights_are_spread_and_the_same_everywhere(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_model(tmp_path / name, TINY, max_tokens=100)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        np.testing.assert_array_equal(weight, two[name])
        if weight.ndim == 2:
            assert 0.07 < weight.std() < 0.09, name


def test_prompts_differ_and_are_the_same_in_every_run() -> None:
    prompts = make_prompts(3, 50)
    assert prompts == make_prompts(3, 50)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert all(len(prompt) == 50 for prompt in prompts)
    assert all(0 <= token < VOCABULARY for prompt in prompts for token in prompt)


def test_kv_bytes_of_smollm2_follow_from_its_configuration(tmp_path: Path) -> None:
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


def words_of(text: str) -> int:
    return len(text.split())


def test_guides_are_as_long_as_asked_and_all_different() -> None:
    guides = make_guides(20, 500, words_of)
    assert all(500 <= words_of(guide) < 600 for guide in guides)
    assert len({guide[:200] for guide in guides}) == 20, "no chunk is shared"
    assert guides == make_guides(20, 500, words_of)


def test_the_text_has_what_is_asked_for() -> None:
    for guide in make_guides(8, 500, words_of):
        text, _, last = guide.rpartition("\n")
        assert question_of(guide) == last
        asked = re.fullmatch(r"In (\w+): .* number (\d+).*\?", last)
        assert asked is not None
        assert text.startswith(f"A guide to the town of {asked[1]}.\n")
        assert f"\nThe shop at number {asked[2]} " in text

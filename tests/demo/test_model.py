# SPDX-License-Identifier: Apache-2.0
"""The demo's model and prompts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from demo.model import (
    VOCABULARY,
    ModelShape,
    make_model,
    make_prompts,
)

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

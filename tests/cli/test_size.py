"""`size`: the figures that are known, what it says, and that it never guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin.sizes.families import read_config
from lmcache_redis.admin.sizes.sizing import SizeOptions, size_model
from lmcache_redis.cli.size import size
from lmcache_redis.errors import ConfigError
from tests.cli.test_admin import one_sentence, run

KIB = 1 << 10
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def write(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def as_json(path: str, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    size(path, as_json=True, **options)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_what_programs_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "Llama-3.1-8B", LLAMA)
    found = as_json(path, capsys, memory="64GiB", prefill_tokens_per_s=8000)
    assert (found["model"], found["bytes_per_token"]) == ("Llama-3.1-8B", 128 * KIB)
    (group,) = found["groups"]
    assert (group["kind"], group["layers"], group["parts_per_chunk"]) == ("attention", 32, 1)
    assert group["part"]["part_bytes"] == 256 * 128 * KIB
    assert found["prompt"]["payload_bytes"] == found["prompt"]["loaded_bytes"] == 1 << 30
    assert found["memory"]["tokens"] < (64 << 30) // (128 * KIB)
    assert found["memory"]["prompts"] == found["memory"]["tokens"] // 8192
    assert found["break_even"]["bytes_per_s"] == 128 * KIB * 8000
    assert as_json(f"{path}/config.json", capsys) == found


def test_windows_are_stored_and_loaded_in_part() -> None:
    """A window of 128 tokens is half of each chunk, and of a hit only the last one is loaded."""
    found = size_model(GPT_OSS, "gpt-oss-120b", SizeOptions())
    window, full = found.groups
    assert found.bytes_per_token == 72 * KIB
    assert (window.chunk_bytes, full.chunk_bytes) == (128 * 36 * KIB, 256 * 36 * KIB)
    assert found.loaded_bytes == 32 * full.chunk_bytes + window.chunk_bytes
    saved = 8192 * 36 * KIB - window.chunk_bytes
    assert found.saved_by_windows == saved
    assert found.payload_bytes == 32 * (window.chunk_bytes + full.chunk_bytes)


def test_states_are_kept_once_a_step() -> None:
    mamba = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
    mamba |= {"mamba_expand": 2, "mamba_d_conv": 4, "layer_types": ["mamba"] * 36 + ["attention"]}
    config = LLAMA | mamba | {"model_type": "granitemoehybrid", "num_hidden_layers": 37}
    found = size_model(config, "granite", SizeOptions(step_tokens=4096, prompt_tokens=65536))
    state, attention = found.groups
    assert (state.layers, attention.layers) == (36, 1)
    assert found.chunk_tokens > 256  # vLLM's blocks are as large as a state
    chunks = 65536 // found.chunk_tokens
    assert found.payload_bytes == 16 * found.state_bytes + chunks * attention.chunk_bytes
    assert found.loaded_bytes == found.state_bytes + chunks * attention.chunk_bytes
    assert found.saved_by_states > 0


def test_a_latent_is_stored_once_for_all_ranks() -> None:
    found = size_model(DEEPSEEK, "m", SizeOptions(tp=8))
    assert found.bytes_per_token == 61 * 576 * 2
    assert found.engine_bytes_per_token == 8 * found.bytes_per_token
    (group,) = found.groups
    assert (group.kind, group.shards, group.part.part_bytes) == ("MLA", 1, 256 * 61 * 576 * 2)


def test_ranks_that_share_a_head_store_it_once() -> None:
    found = size_model(LLAMA, "m", SizeOptions(tp=16))
    (group,) = found.groups
    assert (group.shards, group.chunk_bytes) == (8, 256 * 128 * KIB)
    assert found.engine_bytes_per_token == 2 * found.bytes_per_token


def test_a_packed_latent() -> None:
    packed = SizeOptions(kv_cache_dtype="fp8_ds_mla")
    assert size_model(DEEPSEEK, "m", packed).bytes_per_token == 61 * 656
    with pytest.raises(ConfigError, match="models with MLA"):
        size_model(LLAMA, "m", packed)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 64 * KIB),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, 64 * KIB),
        ({"quant_method": "fp8"}, 128 * KIB),
    ],
)
def test_a_quantized_checkpoint(scheme: dict[str, Any], expected: int) -> None:
    found = size_model(LLAMA | {"quantization_config": scheme}, "m", SizeOptions())
    assert found.bytes_per_token == expected


def test_the_text_model_inside() -> None:
    inner = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    outer = {"model_type": "llava", "torch_dtype": "float16", "text_config": inner}
    found = size_model(outer, "m", SizeOptions())
    assert (found.bytes_per_token, found.types.kv) == (128 * KIB, "float16")


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        ({"model_type": "brand_new"}, {}, "'brand_new' is not one whose KV cache"),
        ({}, {}, "the model type None"),
        (LLAMA | {"num_key_value_heads": None}, {}, "does not say num_key_value_heads"),
        (LLAMA | {"num_hidden_layers": "32"}, {}, "num_hidden_layers is '32'"),
        (LLAMA | {"layer_types": ["full_attention", "sparse"]}, {}, "unknown kind, 'sparse'"),
        (LLAMA | {"torch_dtype": "int8"}, {}, "the dtype 'int8'"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "-E"}, {}, "no layer that keeps"),
        (LLAMA, {"kv_cache_dtype": "fp7"}, "give one of auto, float32, bfloat16"),
        (LLAMA, {"tp": 3}, "--tp 3: vLLM cannot share 8 KV heads"),
        (LLAMA | {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, {}, "'NVFP4'"),
        (DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128}, {"kv_cache_dtype": "fp8"},
         "give fp8_ds_mla, or bfloat16"),
    ],
)  # fmt: skip
def test_nothing_is_guessed(config: dict[str, Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        size_model(config, "m", SizeOptions(**options))


def test_a_directory_that_this_user_may_not_look_into(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("is_dir", "read_text"):
        monkeypatch.setattr(Path, name, hidden)
    with pytest.raises(ConfigError, match=r"/root/m cannot be read \(Permission denied\)"):
        read_config("/root/m")


@pytest.mark.servers
def test_as_a_user_runs_it(tmp_path: Path) -> None:
    path = write(tmp_path / "m", GPT_OSS)
    done = run("size", path, "--memory", "10GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "m: gpt_oss, keys and values of bfloat16" in done.stdout
    assert "attention, window of 128 tokens  36 KiB" in done.stdout
    assert "windows save 284 MiB of loading, 49 %" in done.stdout
    assert "Nothing is downloaded" in one_sentence(run("size", "org/model"), 2)
    (tmp_path / "m" / "config.json").write_text("{")
    assert "is not the config of a model" in one_sentence(run("size", path), 2)
    short = write(tmp_path / "m", GPT_OSS)
    words = ("size", short, "--prompt-tokens", "100")
    assert "in chunks of 256 tokens" in one_sentence(run(*words), 2)
    assert "--memory: 'much'" in one_sentence(run("size", short, "--memory", "much"), 2)

# SPDX-License-Identifier: Apache-2.0
"""`size`: the figures that are known, what it says, and that it never guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin.sizes.configs import find_model
from lmcache_redis.admin.sizes.sizing import SizeOptions, size_model
from lmcache_redis.cli.size import Compress, size
from lmcache_redis.config import AgentConfig
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
    how = {"memory": "64GiB", "prefill_tokens_per_s": 8000}
    found = as_json(path, capsys, compress=Compress.off, **how)
    assert (found["model"], found["bytes_per_token"]) == ("Llama-3.1-8B", 128 * KIB)
    (group,) = found["groups"]
    assert (group["kind"], group["layers"], group["parts_per_chunk"]) == ("attention", 32, 1)
    assert group["part"]["part_bytes"] == 256 * 128 * KIB
    assert found["prompt"]["payload_bytes"] == found["prompt"]["loaded_bytes"] == 1 << 30
    assert found["memory"]["tokens"] < (64 << 30) // (128 * KIB)
    assert found["memory"]["prompts"] == found["memory"]["tokens"] // 8192
    assert found["break_even"]["bytes_per_s"] == 128 * KIB * 8000
    assert as_json(f"{path}/config.json", capsys, compress=Compress.off) == found
    packed = as_json(path, capsys)
    assert packed == as_json(path, capsys, compress=Compress(AgentConfig().compress)), "as agents"
    assert packed["memory"]["tokens"] > found["memory"]["tokens"]


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
    ("dtype", "sent", "memory"),
    [
        ("bfloat16", 1 / 1.40, 0.75),
        ("float32", 1 / 1.165, 0.875),
        ("fp8_e5m2", 1 / 1.27, 0.875),
        # The server rounds up what is stored in less: only the link gains.
        ("float16", 1 / 1.12, 1.0),
        ("fp8", 1 / 1.10, 1.0),
    ],
)
def test_what_is_expected_of_packing(dtype: str, sent: float, memory: float) -> None:
    plain, packed = (
        size_model(LLAMA, "m", SizeOptions(kv_cache_dtype=dtype, compress=compress))
        for compress in (False, True)
    )
    assert packed.payload_bytes == plain.payload_bytes == plain.packed_bytes
    assert packed.packed_bytes / plain.packed_bytes == pytest.approx(sent, rel=1e-3)
    assert packed.break_even_bytes_per_s / plain.break_even_bytes_per_s == pytest.approx(sent, 1e-3)
    assert packed.stored_bytes / plain.stored_bytes == pytest.approx(memory, abs=0.01)
    (group,) = packed.groups
    assert group.part.value_bytes == group.part.packed_bytes + 640 * group.part.stripes


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(DEEPSEEK, "fp8_ds_mla"), (DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128}, "auto")],
)
def test_nothing_is_expected_of_mixed_pages(config: dict[str, Any], dtype: str) -> None:
    options = SizeOptions(kv_cache_dtype=dtype, compress=True)
    found = size_model(config | {"model_type": "deepseek_v32"}, "m", options)
    assert found.packed_bytes == found.payload_bytes


def test_what_is_expected_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "m", LLAMA)
    plain, packed = (as_json(path, capsys, compress=each) for each in Compress)
    assert [each["groups"][0]["expected_ratio"] for each in (plain, packed)] == [1.0, 1.4]
    assert packed["prompt"]["packed_bytes"] < 0.72 * plain["prompt"]["packed_bytes"]
    size(path)
    said = capsys.readouterr().out
    assert "1 GiB, packed 731 MiB, and" in said
    assert "packed      1.40 times smaller: expected of bfloat16, not measured" in said
    size(path, compress=Compress.off)
    assert "packed" not in capsys.readouterr().out


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
    with pytest.raises(ConfigError, match=r"/root/m cannot be read \(Permission denied: "):
        find_model("/root/m")


COMMIT, OLDER = "c" * 40, "0" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache as huggingface_hub keeps it, with two commits of a model."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    hub = tmp_path / ".cache" / "huggingface" / "hub"
    repository = hub / "models--Qwen--Qwen3-8B"
    for name, commit, layers in (("main", COMMIT, 36), ("pr/1", OLDER, 12)):
        directory = repository / "snapshots" / commit
        directory.mkdir(parents=True)
        write(directory, LLAMA | {"num_hidden_layers": layers})
        reference = repository / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    return hub


@pytest.mark.parametrize(
    ("revision", "layers"), [("main", 36), (COMMIT, 36), ("pr/1", 12), (OLDER, 12)]
)
def test_the_name_that_vllm_takes(hub: Path, revision: str, layers: int) -> None:
    config, name = find_model("Qwen/Qwen3-8B", revision)
    assert (config["num_hidden_layers"], name) == (layers, "Qwen/Qwen3-8B")


def test_a_directory_comes_first(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hub)
    Path("Qwen").mkdir()
    write(Path("Qwen/Qwen3-8B"), GPT_OSS)
    assert find_model("Qwen/Qwen3-8B") == (GPT_OSS, "Qwen3-8B")


@pytest.mark.parametrize(
    ("variable", "named"),
    [
        ("HF_HUB_CACHE", "$MOVED/hub"),
        ("HUGGINGFACE_HUB_CACHE", "~/moved/hub"),
        ("HF_HOME", "~/moved"),
        ("XDG_CACHE_HOME", "~/above"),
    ],
)
def test_the_cache_is_where_hugging_face_looks(
    hub: Path, monkeypatch: pytest.MonkeyPatch, variable: str, named: str
) -> None:
    moved = hub.parents[2] / "moved"
    (moved.parent / "above").mkdir()
    hub.parent.rename(moved)
    (moved.parent / "above" / "huggingface").symlink_to(moved)
    with pytest.raises(ConfigError, match="does not have it"):
        find_model("Qwen/Qwen3-8B")
    monkeypatch.setenv("MOVED", str(moved))
    monkeypatch.setenv(variable, named)
    assert find_model("Qwen/Qwen3-8B")[1] == "Qwen/Qwen3-8B"


def test_what_is_not_in_the_cache_is_said(hub: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cache {hub} does not have it .*start vLLM with it"):
        find_model("org/other")
    with pytest.raises(ConfigError, match=rf"revision 'v2': give --revision, one of {OLDER}, c"):
        find_model("Qwen/Qwen3-8B", "v2")
    (hub / "models--Qwen--Qwen3-8B" / "snapshots" / COMMIT / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file.*config.json\)"):
        find_model("Qwen/Qwen3-8B")


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
    words = ("size", write(tmp_path / "m", GPT_OSS), "--prompt-tokens", "100")
    assert "in chunks of 256 tokens" in one_sentence(run(*words), 2)

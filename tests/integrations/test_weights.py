# SPDX-License-Identifier: Apache-2.0
"""Two models have the same digest only if their weights are equal."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="needs vLLM (scripts/setup installs it)")
pytest.importorskip("torch")

from lmcache_redis.config import ClientConfig
from lmcache_redis.errors import ConfigError, Unsupported
from lmcache_redis.integrations.vllm.identity import weights
from lmcache_redis.integrations.vllm.identity.weights import (
    digest_files,
    weights_identity,
)

TENSOR_BYTES = 1 << 20


def change(path: Path, offset: int, count: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(count)
        file.seek(offset)
        file.write(bytes(255 - byte for byte in old))


def write_safetensors(path: Path, sizes: list[int]) -> list[int]:
    """Where each tensor begins."""
    header, begin = {}, 0
    for number, size in enumerate(sizes):
        header[f"layer.{number}"] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [begin, begin + size],
        }
        begin += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + os.urandom(begin))
    begins = [8 + len(text)]
    for size in sizes[:-1]:
        begins.append(begins[-1] + size)
    return begins


def test_three_changed_bytes_of_any_tensor_are_seen(tmp_path: Path) -> None:
    path, size = tmp_path / "model.safetensors", 200_000
    begins = write_safetensors(path, [size] * 40)
    assert path.stat().st_size > 4 << 20  # or it is read whole
    digests = {digest_files(path)}
    for begin in begins:
        for offset in (begin, begin + size // 2, begin + size - 3):
            change(path, offset)
            digests.add(digest_files(path))
    assert len(digests) == 1 + 3 * len(begins)


def test_a_table_is_read_whole_and_a_large_tensor_at_more_places(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    (begin,) = write_safetensors(path, [64 << 20])
    before = digest_files(path)
    seen = 0
    for sample in range(11):  # evenly spread places
        change(path, begin + ((64 << 20) - 4096) * sample // 10)
        seen += digest_files(path) != before
        change(path, begin + ((64 << 20) - 4096) * sample // 10)
        assert digest_files(path) == before
    assert seen == 11
    change(path, begin + (1 << 20))  # between them: docs/internals/identity.md says so
    assert digest_files(path) == before
    change(path, 12)  # a name
    assert digest_files(path) != before


def test_a_fine_tune_of_norms_alone_is_seen(tmp_path: Path) -> None:
    """Tensors of a few KiB between large ones, each at any place."""
    path = tmp_path / "model.safetensors"
    sizes = [3 << 20, 8192, 3 << 20, 2048, 3 << 20]
    begins = write_safetensors(path, sizes)
    digests = {digest_files(path)}
    for number in (1, 3):
        for offset in range(0, sizes[number], 1000):
            change(path, begins[number] + offset)
            digests.add(digest_files(path))
    assert len(digests) == 1 + 9 + 3


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_every_byte_of_a_torch_zip_counts(tmp_path: Path, name: str) -> None:
    import torch

    path = tmp_path / name
    state = {f"w{n}": torch.randn(700_000, generator=torch.Generator()) for n in range(3)}
    torch.save(state, path)
    before = digest_files(tmp_path)
    torch.save(state, path)
    assert digest_files(tmp_path) == before
    state["w1"][123_456] += 1  # between the samples: the CRC tells
    torch.save(state, path)
    assert digest_files(tmp_path) != before


@pytest.mark.parametrize("head", [b"GGUF", b"\x80\2\x8a\n", b"PK\3\4"])
def test_a_file_of_another_format_is_read_whole(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(head + os.urandom((9 << 20) + 5))
    digests = {digest_files(path)}
    for offset in (9, (4 << 20) - 1, 5_000_000, (9 << 20) + 8):
        change(path, offset, 1)
        digests.add(digest_files(path))
    assert len(digests) == 5


def test_files_elsewhere_are_the_same_names_count(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two" / "deeper"
    for directory in (one, two):
        directory.mkdir(parents=True)
    write_safetensors(one / "model.safetensors", [5_000_000] * 2)
    (one / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    for path in one.iterdir():
        (two / path.name).write_bytes(path.read_bytes())
    (two / "README.md").write_text("not weights")
    for elsewhere in (".cache", "original", "checkpoint-500"):
        (two / elsewhere).mkdir()
        (two / elsewhere / "model.safetensors").write_text("not loaded")
    before = digest_files(one)
    assert digest_files(two) == before
    (two / "model.safetensors.index.json").write_text('{"weight_map": {"a": "y"}}')
    assert digest_files(two) != before
    (two / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x"}}')
    (two / "model.safetensors").rename(two / "other.safetensors")
    assert digest_files(two) != before


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 10) + b"not JSON..",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 11) + b'{"a":[1,2]}',
        struct.pack("<Q", 40) + b'{"a":{"data_offsets":[0,999999999999]}} '.ljust(40),
        struct.pack("<Q", 40) + b'{"a":{"data_offsets":[-9,12]}}'.ljust(40),
        struct.pack("<Q", 40) + b'{"a":{"data_offsets":[]}}'.ljust(40),
        struct.pack("<Q", 40) + b'{"a":{"data_offsets":[Infinity,1]}}'.ljust(40),
        b"PK\3\4 no central directory",
    ],
)
def test_a_table_out_of_bounds_is_not_believed(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(head + os.urandom(5 << 20))
    before = digest_files(path)  # neither an error nor a read out of bounds
    assert digest_files(path) == before
    change(path, path.stat().st_size - 3)
    assert digest_files(path) != before


def test_a_file_that_becomes_shorter_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, [5_000_000])
    table = weights._table

    def shorten(*args: Any) -> Any:
        found = table(*args)
        os.truncate(path, 1000)
        return found

    monkeypatch.setattr(weights, "_table", shorten)
    with pytest.raises(OSError, match="shorter"):
        digest_files(path)


# Which weights an engine holds


def model(name: object, **settings: Any) -> Any:
    fields = {"model": str(name), "model_weights": "", "revision": None, "seed": 0}
    return SimpleNamespace(**fields | {"hf_config": SimpleNamespace(_commit_hash=None)} | settings)


def load(load_format: str = "auto", **settings: Any) -> Any:
    fields = {"load_format": load_format, "download_dir": None, "model_loader_extra_config": {}}
    return SimpleNamespace(**fields | settings)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", [1000] * 3)
    return directory


def test_a_name_that_the_operator_gives_always_counts(local: Path) -> None:
    plain = weights_identity(model(local), load(), None)
    named = weights_identity(model(local), load(), "mine")
    assert plain["weights"] == named["weights"] != ""
    assert (plain["weights_id"], named["weights_id"]) == ("", "mine")


@pytest.mark.parametrize("problem", ["dangling", "fifo", "directory", "nothing"])
def test_weights_that_cannot_be_read_need_a_name(local: Path, problem: str) -> None:
    path = local / "model.safetensors"
    path.unlink()
    if problem == "dangling":
        path.symlink_to("nowhere")
    elif problem == "fifo":
        os.mkfifo(path)
    elif problem == "directory":
        path.mkdir()
    with pytest.raises(Unsupported, match="weights_id"):
        weights_identity(model(local), load(), None)
    found = weights_identity(model(local), load(), "mine")
    assert (found["weights"], found["weights_id"]) == ("", "mine")


@pytest.mark.parametrize(
    ("described", "loaded"),
    [
        (model("s3://bucket/model"), load("runai_streamer")),
        (model("/tmp", model_weights="gs://bucket/model"), load("runai_streamer_sharded")),
        (model("/tmp"), load("tensorizer", model_loader_extra_config={"tensorizer_uri": "s3://"})),
        (model("/tmp"), load("modelexpress")),
        (model("/tmp"), load("ipc_cache")),
        (model("/tmp"), load("my_plugin")),
        (model("lmcache-redis-tests/no-such-model"), load()),
        (model("no/such/path.gguf"), load("gguf")),
    ],
)
def test_weights_from_elsewhere_need_a_name(described: Any, loaded: Any) -> None:
    with pytest.raises(Unsupported, match="set weights_id in kv_connector_extra_config"):
        weights_identity(described, loaded, None)
    assert weights_identity(described, loaded, "mine")["weights_id"] == "mine"


def test_a_hub_model_is_its_cached_files_or_its_commit(tmp_path: Path, local: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "hub"
    repository = cache / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    described = model("some/model", hf_config=SimpleNamespace(_commit_hash=commit))
    cached = load(download_dir=str(cache))
    assert weights_identity(described, cached, None)["weights"] == f"commit {commit}"
    blob = local / "model.safetensors"
    (snapshot / "model.safetensors").symlink_to(blob)
    found = weights_identity(described, cached, None)["weights"]
    assert found == digest_files(local)
    nameless = model("some/model")  # refs/main leads there too
    assert weights_identity(nameless, cached, None)["weights"] == found


def test_weights_that_are_made_from_a_seed_are_the_seed(tmp_path: Path) -> None:
    found = [weights_identity(model(tmp_path, seed=n), load("dummy"), None) for n in (0, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_the_format_chooses_among_the_files(local: Path) -> None:
    found = [weights_identity(model(local), load(each), None) for each in ("auto", "sharded_state")]
    assert found[0] != found[1]


@pytest.mark.parametrize("name", ["", "x" * 257, 7, True, ["a"]])
def test_a_name_of_weights_is_a_short_text(name: object) -> None:
    assert ClientConfig.from_extra_config({"weights_id": "x" * 256}).weights_id == "x" * 256
    assert ClientConfig.from_extra_config({}).weights_id is None
    with pytest.raises(ConfigError, match="weights_id"):
        ClientConfig.from_extra_config({"weights_id": name})

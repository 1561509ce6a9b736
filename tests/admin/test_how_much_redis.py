# SPDX-License-Identifier: Apache-2.0
"""The table and the example of docs/how-much-redis.md are what `size` says."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.admin.sizes.sizing import ModelSize, SizeOptions, size_model
from lmcache_redis.cli.size import size
from lmcache_redis.units import shown_bytes
from tests.admin.models import PUBLISHED, Published

pytest.importorskip("transformers", reason="writes the configs of models")

PAGE = Path(__file__).parents[2] / "docs" / "how-much-redis.md"
EXAMPLE = "meta-llama/Llama-3.1-8B"
SHOWN = (
    *("Llama-3.1-8B", "Llama-3.3-70B", "Qwen3-8B", "Qwen3-30B-A3B", "gpt-oss-120b"),
    *("Gemma-3-27B", "Qwen3-Next-80B-A3B", "DeepSeek-V3"),
)


def sized(model: Published) -> ModelSize:
    return size_model(model.config(), model.name, SizeOptions(compress=True))


def of_name(name: str) -> Published:
    return next(model for model in PUBLISHED if model.name == name)


def sizes_table() -> str:
    rows = [
        "| model, bfloat16 | a token | a prompt in Redis | break-even | notes |",
        "| --- | --- | --- | --- | --- |",
        *(_row(of_name(name)) for name in SHOWN),
    ]
    return "\n".join(rows)


def _row(model: Published) -> str:
    found = sized(model)
    even = found.break_even_bytes_per_s / 1e9
    cells = [
        model.name,
        shown_bytes(found.bytes_per_token),
        shown_bytes(found.stored_bytes),
        f"{even:.2f} GB/s",
        ", ".join(_besides(found)),
    ]
    return f"| {' | '.join(cells)} |"


def _besides(found: ModelSize) -> Iterator[str]:
    loaded = found.loaded_bytes
    if found.groups[0].kind == "MLA":
        yield "MLA: one copy for all ranks"
    if found.state_bytes:
        yield f"states of {shown_bytes(found.state_bytes)}"
    if (saved := found.saved_by_windows) > 0:
        yield f"windows save {100 * saved / (saved + loaded):.0f} % of a load"


def example(hub: Path, name: str) -> str:
    """What the command prints of a model in the cache of huggingface_hub."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    config = of_name(name.rpartition("/")[2]).config()
    (repository / "snapshots" / "c0ffee" / "config.json").write_text(json.dumps(config))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        size(name)
    return said.getvalue()


def test_the_table_is_that_of_the_code() -> None:
    assert sizes_table() in PAGE.read_text(), (
        "the table in docs/how-much-redis.md is not that of the code; print it with: python -c "
        "'from tests.admin.test_how_much_redis import sizes_table; print(sizes_table())'"
    )


def test_the_example_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert f"$ lmcache-redis size {EXAMPLE}\n{example(tmp_path, EXAMPLE)}" in PAGE.read_text()

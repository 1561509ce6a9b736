# SPDX-License-Identifier: Apache-2.0
"""What lies on disk names an engine's memory only if it lay there when vLLM read it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm import plugins
from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import CONNECTOR_NAME, making, register
from lmcache_redis.integrations.vllm.identity import files
from lmcache_redis.integrations.vllm.identity.engine_identity import (
    engine_identity,
    look_at_files,
    require_looks,
)
from lmcache_redis.integrations.vllm.wrapping import wrap_once
from tests.integrations.test_identity import write_model

pytestmark = pytest.mark.unit


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Of an engine with a model, a draft model and a file of scales, that vLLM has not read yet."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(files, "_seen", {})
    register()
    draft: Any = {"method": "draft_model", "model": str(write_model(tmp_path / "draft"))}
    made: VllmConfig = EngineArgs(
        model=str(write_model(tmp_path / "model")),
        skip_tokenizer_init=True,
        speculative_config={**draft, "num_speculative_tokens": 2},
        kv_transfer_config=KVTransferConfig(kv_connector=CONNECTOR_NAME, kv_role="kv_both"),
    ).create_engine_config()
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    made.model_config.multimodal_config = MultiModalConfig(
        mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(scales)
    )
    return made


def identify(config: VllmConfig, weights_id: str | None = None) -> dict[str, str]:
    return engine_identity(config, rank=0, backend="", weights_id=weights_id)


def rewrite(path: Path) -> None:
    """Of the same size, with the time put back."""
    times = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def rename(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def remove_and_restore(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model", rewrite),
        ("draft", rewrite),
        ("model", rename),
        ("model", Path.touch),  # an equal file would be right, but who has compared them?
        ("model", remove_and_restore),
    ],
)
def test_weights_that_have_changed_since_are_not_known(
    config: VllmConfig, tmp_path: Path, name: str, change: Callable[[Path], None]
) -> None:
    look_at_files(config)
    before = identify(config)
    change(tmp_path / name / "model.safetensors")
    with pytest.raises(Unsupported, match=r"has changed since this engine started.* weights_id"):
        identify(config)
    named = identify(config, "mine")
    assert named["weights"] == ("" if name == "model" else before["weights"])
    assert named["draft"] != before["draft"] or name == "model"


@pytest.mark.parametrize(
    "name", ["model/adapter.safetensors", "model/modeling_x.py", "scales.json"]
)
def test_other_files_that_have_changed_since_are_not_known(
    config: VllmConfig, tmp_path: Path, name: str
) -> None:
    look_at_files(config)
    identify(config)
    (tmp_path / name).write_bytes(b"new")
    with pytest.raises(Unsupported, match=f"{name} has changed"):
        identify(config)


def test_files_that_decide_nothing_may_change(config: VllmConfig, tmp_path: Path) -> None:
    look_at_files(config)
    before = identify(config)
    (tmp_path / "model" / "README.md").write_text("new")
    assert identify(config) == before


def test_a_directory_in_place_of_a_hub_name_is_not_known(
    config: VllmConfig, tmp_path: Path
) -> None:
    shutil.move(tmp_path / "model", tmp_path / "away")
    look_at_files(config)
    shutil.move(tmp_path / "away", tmp_path / "model")
    with pytest.raises(Unsupported, match="has changed"):
        identify(config)


def test_a_model_that_vllm_may_have_read_before_needs_a_name(config: VllmConfig) -> None:
    with pytest.raises(Unsupported, match="VLLM_PLUGINS"):
        require_looks(config)
    look_at_files(config)
    require_looks(config)


def test_every_process_of_an_engine_looks_first(config: VllmConfig) -> None:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    register()  # once more, as vLLM does
    require = lambda *_: require_looks(config)  # noqa: E731
    executor: Any = type("Fake", (Executor,), {"_init_executor": require})
    executor.__abstractmethods__ = frozenset()
    executor(config)

    files._seen.clear()
    wrapper: Any = WorkerWrapperBase()
    wrapper.vllm_config = config
    wrapper.worker = type("Worker", (), {"init_device": require})()
    wrapper.init_device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "kv_transfer_config", None)  # no business of ours
        files._seen.clear()
        look_at_files(config)
        assert not files._seen


def test_a_failing_look_is_no_reason_for_vllm_to_fail() -> None:
    class Owner:
        def __init__(self, value: int) -> None:
            self.value = value

    wrap_once(Owner, "__init__", making.after(lambda *_: 1 // 0))
    assert Owner(3).value == 3


@pytest.mark.parametrize(
    ("moved", "without"),
    [
        ("vllm.v1.executor.abstract.Executor", "the cache stays off"),
        ("vllm.v1.worker.worker_base.WorkerWrapperBase", "the cache stays off"),
        ("vllm.v1.worker.worker_base.WorkerWrapperBase.init_device", "the cache stays off"),
        ("vllm.platforms.interface.Platform.is_cpu", "no earlier epoch"),
        (
            "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory",
            "there is no LMCacheRedisConnector",
        ),
        ("vllm.v1.kv_offload.tiering.factory.SecondaryTierFactory._registry", "no type redis"),
    ],
)
def test_a_vllm_that_has_moved_something_starts(
    config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    moved: str,
    without: str,
) -> None:
    """vLLM loads plugins without a guard, whether the connector is used or not."""
    monkeypatch.setenv("VLLM_PLUGINS", "lmcache_redis")
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.delattr(moved)
    with caplog.at_level("WARNING", logger="vllm.lmcache_redis"):
        plugins.load_general_plugins()
    (sentence,) = [each.getMessage() for each in caplog.records if each.name.endswith("_redis")]
    assert without in sentence
    with pytest.raises(Unsupported, match="was not seen reading"):
        require_looks(config)

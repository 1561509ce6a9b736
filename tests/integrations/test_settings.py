# SPDX-License-Identifier: Apache-2.0
"""Each setting of vLLM has one verdict, and counts or not as it says."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm import envs
from vllm.config import KVTransferConfig, LoadConfig, MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import CONNECTOR_NAME, register
from lmcache_redis.integrations.vllm.identity import engine_identity as settings
from lmcache_redis.integrations.vllm.identity.engine_identity import engine_identity
from lmcache_redis.integrations.vllm.identity.pairs import PAIRS, Names, Pair
from lmcache_redis.integrations.vllm.support import supported_groups
from tests.integrations.test_identity import LLAMA, differ
from tests.integrations.test_support import FULL, engine
from tests.integrations.test_weights import write_safetensors
from tests.matrix.left_out import LEFT_OUT
from tests.matrix.names import Setting, settings_of_vllm, verdicts

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "identity.md"
INSTALLED = set(settings_of_vllm())


def test_every_setting_has_one_verdict() -> None:
    """A new setting? Its verdict belongs in identity/pairs.py or in tests/matrix/left_out.py."""
    tables = list(verdicts())
    wrong = {}
    for kind, name in INSTALLED:
        found = [
            verdict for of, names, verdict in tables if of == kind and fnmatch.fnmatch(name, names)
        ]
        if len(found) != 1:
            wrong[f"{kind}.{name}"] = found
    assert not wrong


def test_every_configuration_of_an_engine_was_read(config: VllmConfig) -> None:
    classes = {kind for kind, _ in INSTALLED}
    assert {type(each).__name__ for each in configurations(config)} <= classes
    assert {"CacheConfig", "MultiModalConfig", "LoRAConfig", "SpeculativeConfig"} <= classes


def configurations(config: Any) -> Iterator[Any]:
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("vllm."):
            yield from configurations(value)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    """An engine with a connector, adapters and a draft model, so that it has their settings."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("model", "draft"):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(LLAMA))
        write_safetensors(directory / name / "model.safetensors", [1000])
    register()
    draft = {"method": "draft_model", "model": str(directory / "draft")}
    made: VllmConfig = EngineArgs(
        model=str(directory / "model"),
        skip_tokenizer_init=True,
        enable_lora=True,
        speculative_config={**draft, "num_speculative_tokens": 2},
        kv_transfer_config=KVTransferConfig(kv_connector=CONNECTOR_NAME, kv_role="kv_both"),
    ).create_engine_config()
    made.model_config.multimodal_config = MultiModalConfig()  # as a model with images has
    return made


def identity(config: VllmConfig) -> dict[str, str]:
    return engine_identity(config, rank=0, backend="")


def change(config: VllmConfig, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name = setting
    if kind == "os.environ":
        monkeypatch.setenv(name, "changed")
    elif kind == "environment":
        monkeypatch.setitem(envs.environment_variables, name, lambda: "changed")
    else:
        monkeypatch.setattr(settings._place(kind, config), name, "changed")


def named(names: Names) -> Iterator[Setting]:
    for kind, each in names.items():
        yield from ((kind, name) for name in each.split())


def test_a_setting_in_a_pair_counts_there(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("changed").write_text("{}")
    before = identity(config)
    changed = 0
    for pair, each in PAIRS.items():
        for setting in named(each.digested):
            if setting in INSTALLED or setting[0] == "os.environ":
                with monkeypatch.context() as patch:
                    change(config, setting, patch)
                    found = differ(before, identity(config))
                # The draft of a model has the model's settings.
                assert found - {"draft"} in ({pair}, {pair} - {"draft"}), (pair, setting)
                assert pair in found, (pair, setting)
                changed += 1
    assert changed > 100


def test_the_pairs_are_those_of_an_engine(config: VllmConfig) -> None:
    of_layers = {"kv_packing", "kv_scales"}  # probe.py makes them
    of_sharing = {"kv_shares", "computation"}  # heads.py, versions.py
    assert identity(config).keys() | of_layers | of_sharing == PAIRS.keys()


def test_a_setting_that_is_left_out_does_not(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = identity(config)
    names = [(kind, pattern) for left in LEFT_OUT for kind, pattern in named(left.names)]
    changed = 0
    for kind, name in sorted(INSTALLED):
        if kind not in {*settings._PLACES, "environment"}:
            continue  # the identity does not look there
        if not any(of == kind and fnmatch.fnmatch(name, family) for of, family in names):
            continue
        if not name.endswith("_config"):  # whose own settings are looked at
            change(config, (kind, name), monkeypatch)
            changed += 1
    assert changed > 300
    assert differ(before, identity(config)) == set()


def test_the_contents_of_a_file_of_scales_count(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, scales in ("a", "{}"), ("b", "{}"), ("b", '{"x": 1}'):
        (tmp_path / name).write_text(scales)
        images = config.model_config.multimodal_config
        monkeypatch.setattr(images, "mm_encoder_fp8_scale_path", str(tmp_path / name))
        found.append(identity(config))
    assert differ(found[0], found[1]) == set()
    assert differ(found[1], found[2]) == {"model_config"}
    (tmp_path / "b").unlink()
    with pytest.raises(Unsupported, match="cannot be read"):
        identity(config)


def test_a_draft_has_a_loader_and_a_length_of_its_own(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "lmcache_redis.integrations.vllm.identity.engine_identity._ANY_LENGTH", frozenset()
    )
    speculative: Any = config.speculative_config
    found = [identity(config)]
    monkeypatch.setattr(speculative.draft_model_config, "max_model_len", 1234)
    found.append(identity(config))
    load = LoadConfig(model_loader_extra_config={"pattern": "a-{rank}.safetensors"})
    monkeypatch.setattr(speculative, "draft_load_config", load)
    found.append(identity(config))
    assert [differ(*each) for each in itertools.pairwise(found)] == [{"draft"}, {"draft"}]


def test_an_engine_with_simulated_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # for vLLM 0.27
    monkeypatch.setenv(name, "")
    assert supported_groups(engine(), FULL, takes_failed_loads=True)
    monkeypatch.setenv(name, "uniform_random")
    with pytest.raises(Unsupported, match=f"with {name}=uniform_random, experts are chosen"):
        supported_groups(engine(), FULL, takes_failed_loads=True)


def test_examples_are_of_their_own_row() -> None:
    for row in (*PAIRS.values(), *LEFT_OUT):
        text, names = (
            (row.content, row.digested) if isinstance(row, Pair) else (row.what, row.names)
        )
        families = [family for _, family in named(names)]
        for example in re.findall(r"`([\w*]+)`", text.partition("(")[2]):
            assert any(fnmatch.fnmatch(example, family) for family in families), example


def test_the_page_has_every_pair() -> None:
    page = PAGE.read_text()
    section = page.partition("## In the identity\n\n")[2].partition("\n\n")[0]
    listed = re.sub(r"\s\([^()]*(\([^()]*\))?[^()]*\)", "", section)
    assert set(re.findall(r"`(\w+)`", listed)) == set(PAIRS)
    assert "`VLLM_MOE_ROUTING_SIMULATION_STRATEGY`" in page

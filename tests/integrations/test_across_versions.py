# SPDX-License-Identifier: Apache-2.0
"""Versions of vLLM share if and only if what computes K and V is the same in them."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import torch
import vllm

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import making
from lmcache_redis.integrations.vllm.identity import engine_identity as settings
from lmcache_redis.integrations.vllm.identity import versions
from lmcache_redis.integrations.vllm.identity.engine_identity import engine_identity
from lmcache_redis.integrations.vllm.identity.versions import computation, pairs_of_version
from tests.integrations.layers import BLOCK, cpu_layer, registration
from tests.integrations.test_groups import full
from tests.integrations.test_identity import LLAMA, Identity, differ, identity
from tests.integrations.test_support import engine

__all__ = ["identity"]  # a fixture

SHARED = {"engine": "any", "transformers": "any", "computation": "a digest"}
LAYERS = """
import torch
from torch import nn

class RMSNorm(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.variance_epsilon = eps

    def forward_native(self, x):
        return x * self.variance_epsilon

    def forward_cuda(self, x):
        return self.forward_native(x)
"""
ROTARY = """
import torch
from torch import nn

class RotaryEmbedding(nn.Module):
    def __init__(self, base=10000.0):
        super().__init__()
        self.rotary_dim, self.head_size, self.is_neox_style = 8, 8, True
        angles = torch.arange(64.0)[:, None] * base ** (-torch.arange(0, 1, 0.25))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1))

    def forward_native(self, x):
        return x
"""
MODEL = '''
from torch import nn
from norms import RMSNorm
from ropes import RotaryEmbedding

def doubled(x):
    return 2 * x

class TinyAttention(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.scaling = 0.125
        self.rope = rope

    def forward(self, x):
        """Attention."""
        return self.rope.forward_native(x) * self.scaling

class TinyForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        rope = RotaryEmbedding()
        self.layers = nn.ModuleList(TinyAttention(rope) for _ in range(2))
        self.norm = RMSNorm()

    def forward(self, x):
        for each in self.layers:
            x = each(x)
        return doubled(self.norm.forward_native(x))
'''
NAMES = {
    "vllm.model_executor.layers.layernorm": LAYERS,
    "vllm.model_executor.layers.rotary_embedding.base": ROTARY,
    "vllm.model_executor.models.tiny": MODEL,
}

Change = tuple[str, str]
Version = Callable[..., torch.nn.Module]


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Version:
    """A model as one version of vLLM has it; changes: of its sources, and of its names."""
    numbers = itertools.count()

    def made(*changes: Change) -> torch.nn.Module:
        modules: dict[str, ModuleType] = {}
        for number, (name, text) in enumerate(NAMES.items()):
            for old, new in changes:
                name, text = name.replace(old, new), text.replace(old, new)
            path = tmp_path / f"{next(numbers)}.py"
            path.write_text(text)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            alias = ("norms", "ropes", "tiny")[number]
            modules[alias] = module
            for each in (name, alias):
                monkeypatch.setitem(sys.modules, each, module)
            spec.loader.exec_module(module)
        model: torch.nn.Module = modules["tiny"].TinyForCausalLM()
        return model

    return made


def digest(model: torch.nn.Module) -> str:
    return computation(model, torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        ("eps=1e-6", "eps=1e-5"),
        ("RMSNorm", "GemmaRMSNorm"),
        ("x * self.variance_epsilon", "x + self.variance_epsilon"),
        ("base=10000.0", "base=10001.0"),
        ("is_neox_style = 8, 8, True", "is_neox_style = 8, 8, False"),
        ("rotary_dim, self.head_size, self.is_neox_style = 8", "rotary_dim, self.head_size, "
         "self.is_neox_style = 4"),
        ("self.scaling = 0.125", "self.scaling = 0.25"),
        ("forward_native(x) * self.scaling", "forward_native(x)"),
        ("return 2 * x", "return 3 * x"),
        ("self.rope = rope", "self.rope, self.is_new = rope, True"),
        ("in range(2)", "in range(3)"),
        ("TinyAttention(rope)", "TinyAttention(RotaryEmbedding(5.0))"),
        ("self.norm = RMSNorm()", 'self.norm = RMSNorm(); '
         'self.register_buffer("normalizer", __import__("torch").tensor(4.0))'),
    ],
)  # fmt: skip
def test_what_computes_k_and_v_counts(version: Version, change: Change) -> None:
    assert digest(version(change)) != digest(version())


@pytest.mark.parametrize(
    "change",
    [
        ('"""Attention."""', '"""Another sentence."""\n        # and another'),
        ("def forward(self, x)", "def forward(self, x: object) -> object"),
        ("from torch import nn\nfrom norms", "from torch import cos, nn\nfrom norms"),
        ("eps=1e-6):", "eps: float = 1e-6, unused=None):"),
        ("return self.forward_native(x)\n", "return None\n"),  # a kernel
        ("angles.sin()), -1)", "angles.sin()), -1).bfloat16()"),  # as after the first step
    ],
)
def test_what_rounds_otherwise_does_not(version: Version, change: Change) -> None:
    assert digest(version(change)) == digest(version())


def test_which_layer_has_which_rotary_embedding_counts(version: Version) -> None:
    def swapped(order: int) -> torch.nn.Module:
        model: Any = version()
        other = type(model.layers[0].rope)(5.0)
        model.layers[order].rope = other
        return model  # type: ignore[no-any-return]

    assert digest(swapped(0)) != digest(swapped(1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sliding_window", 128),
        ("attn_type", "encoder"),
        ("has_sink", True),
        ("scale", 0.5),
        ("logits_soft_cap", 30.0),
        ("alibi_slopes", [1.0]),
    ],
)
def test_how_a_layer_attends_counts(version: Version, name: str, value: object) -> None:
    def made(**others: object) -> torch.nn.Module:
        model: Any = version()
        layer, impl = model.layers[0], SimpleNamespace(scale=0.25, num_heads=4)
        layer.impl, layer.sliding_window, layer.attn_type = impl, None, "decoder"
        for each, number in others.items():
            setattr(layer if hasattr(layer, each) or each == "has_sink" else impl, each, number)
        return model  # type: ignore[no-any-return]

    assert digest(made(**{name: value})) != digest(made())
    assert digest(made(num_heads=2)) == digest(made()), "TP sizes share"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("layers.layernorm", "layers.fused_moe.layer"), "RMSNorm .* may compute otherwise"),
        (("models.tiny", "models.transformers.tiny"), "TinyForCausalLM .* may compute otherwise"),
        (("vllm.model_executor.models.tiny", "plugin.tiny"), "Tiny.* may compute otherwise"),
        (("cos_sin_cache", "table"), "RotaryEmbedding has no table of its angles"),
    ],
)
def test_what_is_not_known_is_refused(version: Version, change: Change, why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        digest(version(change))


MEDIA, TEXT_ALONE = SimpleNamespace(), SimpleNamespace(language_model_only=True)
SHARES: dict[str, Any] = {
    "model_config": {"dtype": torch.bfloat16},
    "load_config": {"load_format": "auto"},
    "speculative_config": {"method": "ngram", "draft_model_config": object()},
}


def config(**changes: dict[str, Any]) -> Any:
    """Settings of an engine that shares across versions, but for ``changes`` (by config)."""
    return engine(
        **{name: SHARES.get(name, {}) | changes.get(name, {}) for name in SHARES | changes}
    )


@pytest.fixture
def runs(version: Version, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that the worker of each engine runs."""
    runner = SimpleNamespace(get_model=version)
    monkeypatch.setattr(making, "worker_of", lambda config: SimpleNamespace(model_runner=runner))
    return runner


@pytest.mark.parametrize(
    ("of", "unprobed", "why"),
    [
        ({}, [], ""),
        ({"model_config": {"quantization": "fp8"}}, [], "its weights are quantized (fp8)"),
        ({"cache_config": {"cache_dtype": "fp8_e4m3"}}, [], "its KV is quantized (fp8_e4m3)"),
        ({"load_config": {"load_format": "dummy"}}, [], "--load-format dummy draws the weights"),
        ({"model_config": {"multimodal_config": MEDIA}}, [], "prepares images and other media"),
        ({"model_config": {"multimodal_config": TEXT_ALONE}}, [], ""),
        ({"lora_config": {}}, [], "applies adapters"),
        ({"speculative_config": {"method": "eagle"}}, [], "its draft model shares the blocks"),
        ({}, ["its layers (A) cannot be probed"], "its layers (A) cannot be probed"),
    ],
)
def test_in_doubt_the_version_stays_and_one_line_says_why(
    runs: Any, caplog: pytest.LogCaptureFixture, of: Any, unprobed: list[str], why: str
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.lmcache_redis"):
        pairs = pairs_of_version(config(**of), unprobed)
    said = [each.getMessage() for each in caplog.records]
    if why:
        assert pairs == {}, "as without the setting, so that such engines share"
        assert len(said) == 1
        assert why in said[0]
    else:
        assert pairs == {**SHARED, "computation": pairs["computation"]}
        assert not said


def test_plugins_of_others_keep_the_version(
    runs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "foreign_plugins", lambda: ["theirs (package==1)"])
    assert pairs_of_version(config(), []) == {}
    assert "are loaded: theirs (package==1)" in caplog.text


def test_a_model_that_cannot_be_read_keeps_its_version(
    runs: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError(f"at {id(runs):x}")

    monkeypatch.setattr(runs, "get_model", broken)
    assert pairs_of_version(config(), []) == {}
    assert "its model cannot be read (RuntimeError)" in caplog.text
    monkeypatch.setattr(making, "worker_of", lambda config: None)
    assert pairs_of_version(config(), []) == {}
    assert making.NOT_SEEN in caplog.text


def test_the_version_leaves_the_identity(
    identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = identity.config(LLAMA)

    def both() -> tuple[dict[str, str], dict[str, str]]:
        plain = engine_identity(made, rank=0, backend="CPU_ATTN")
        return plain, engine_identity(made, rank=0, backend="CPU_ATTN", versions=SHARED)

    before = both()
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.setattr(settings, "version", lambda package: "99.0")
    # A setting that this version lacks, and one that only it has.
    monkeypatch.delattr(type(made.attention_config), "use_non_causal", raising=False)
    monkeypatch.delattr(made.attention_config, "use_non_causal", raising=False)
    monkeypatch.setattr(made.cache_config, "use_replayssm", False, raising=False)
    after = both()
    assert {"engine", "transformers"} <= differ(before[0], after[0])
    assert differ(before[1], after[1]) == set()
    monkeypatch.setattr(made.cache_config, "use_replayssm", True, raising=False)
    assert differ(before[1], both()[1]) == {"kv_cache"}


def test_an_engine_registers_what_it_has_found(tmp_path: Path) -> None:
    layer = cpu_layer("vec", heads=4)
    layers, caches = {"layer.0": layer}, {"layer.0": layer.kv_cache}
    for share in (False, True):
        how = {"times": 2, "share_across_versions": share}
        _, pairs = registration(tmp_path, [full(BLOCK)], caches, layers=layers, **how)
        assert pairs["engine"] == f"vllm {vllm.__version__}", making.NOT_SEEN

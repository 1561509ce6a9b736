# SPDX-License-Identifier: Apache-2.0
"""What `why --layouts` advises: something for every pair, and nothing that does not exist."""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.engine.arg_utils import EngineArgs
from vllm.envs import environment_variables as ENVIRONMENT

from lmcache_redis.chunks.names import Reach
from lmcache_redis.config import AgentConfig, ClientConfig
from lmcache_redis.device.layout import KVLayout, Segment, named_pairs
from lmcache_redis.integrations.vllm.identity.advice import ADVICE, advice
from lmcache_redis.integrations.vllm.identity.pairs import PAIRS
from lmcache_redis.settings import settings_of


def test_every_pair_of_a_layout_has_advice() -> None:
    identity = tuple((name, "") for name in PAIRS)
    segments = (Segment(0, 0, 1000, 1000),)
    layout = KVLayout(identity, "uint8", "cpu", 16, 4, segments, "", Reach("window", 20))
    named = named_pairs(layout.canonical(64))
    assert {"page_format", "blocks_per_part", *PAIRS} < named.keys()
    assert ADVICE.keys() == {"model", *named}
    for name, each in ADVICE.items():
        assert each.change
        assert set(each.follows.split()) <= ADVICE.keys() - {name}
        assert advice(name, [name]) == each.change


def test_options_in_advice_exist() -> None:
    """Those of vLLM, by the classes of its configuration, and the agent's."""
    of_vllm = {f"--{each.name.replace('_', '-')}" for each in dataclasses.fields(EngineArgs)}
    of_agents = {each.option for each in settings_of(AgentConfig).values()}
    text = " ".join(each.change for each in ADVICE.values())
    assert set(re.findall(r"--[a-z-]+", text)) <= of_vllm | of_agents
    sentences = [
        each.change for each in ADVICE.values() if "kv_connector_extra_config" in each.change
    ]
    assert len(sentences) >= 4
    for each in sentences:
        assert any(name in each for name in settings_of(ClientConfig)), each
    variables = re.findall(r"\bVLLM_\w+", text)
    assert variables
    assert all(name in ENVIRONMENT for name in variables)


def test_what_follows_from_another_pair_says_so() -> None:
    differing = ["tensor_parallel", "rank", "page_format", "kv_packing"]
    said = {name: advice(name, differing) for name in differing}
    assert said["tensor_parallel"].startswith("share_across_tp on both")
    assert said["rank"] == "it follows from tensor_parallel"
    assert said["page_format"] == "it follows from tensor_parallel"
    assert advice("rank", ["rank"]).startswith("nothing: ranks hold different KV")
    assert advice("of another version", ["of another version"]) == ""

# SPDX-License-Identifier: Apache-2.0
"""A connector that brings KV of its own making, which vLLM loads in `test_provenance`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

# Prompts that begin with this token have so many others in the sibling's cache.
FIRST_TOKEN = 7
BROUGHT_TOKENS = 512


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Brings blocks within the step, and leaves in them what is there."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.prompt_token_ids[0] != FIRST_TOKEN:
            return 0, False
        return max(0, BROUGHT_TOKENS - num_computed_tokens), False

    def update_state_after_alloc(self, *args: Any) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def beside(ours: dict[str, Any]) -> dict[str, Any]:
    """The settings of vLLM for both."""
    sibling = {
        "kv_connector": "Sibling",
        "kv_connector_module_path": "tests.integrations.sibling",
        "kv_role": "kv_both",
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [sibling, ours]},
    }

"""What vLLM does about a load that failed: it has to compute, not to fail the request."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

if TYPE_CHECKING:
    from types import FrameType


def recompute_failed_loads(connector: KVConnectorBase_V1) -> None:
    """Sets ``kv_load_failure_policy`` to ``recompute``; vLLM's default would fail the request.

    The scheduler reads the policy from its own config, after it has made the connector. A child of
    ``MultiConnector`` is given a copy of that config with a transfer config of its own, and no way
    up. So those who are just making us are found on the stack.
    """
    connector._kv_transfer_config.kv_load_failure_policy = "recompute"
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, KVConnectorBase_V1):
            maker._kv_transfer_config.kv_load_failure_policy = "recompute"
        frame = frame.f_back

# SPDX-License-Identifier: Apache-2.0
"""A vLLM whose attention has another kernel, which is wrong. Run in an engine before it starts."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

_forward = CPUAttentionBackendImpl.forward


def forward(*args: Any, **kwargs: Any) -> Any:
    output = _forward(*args, **kwargs)
    return output.neg_()


CPUAttentionBackendImpl.forward = forward

# SPDX-License-Identifier: Apache-2.0
"""A tensor that passes for one on a GPU, and a process that exports it.

Each line in names how its memory is allocated, each line out is a wrapper in hexadecimal.
"""

from __future__ import annotations

import sys

import torch

from lmcache_redis.compat.custom_types import CudaIPCWrapper
from tests.cuda_driver.engine import Host, Memory, gpus

SHAPE = (256, 128)


def gpu_tensor(host: Host, memory: Memory = "allocations") -> torch.Tensor:
    (tensor,) = host.tensors(["tensor"], SHAPE, memory=memory).values()
    tensor.copy_(torch.arange(tensor.numel()).view(SHAPE))
    return tensor


def main() -> None:
    with gpus() as host:
        tensors = []
        for line in sys.stdin:
            tensors.append(gpu_tensor(host, line.strip()))  # type: ignore[arg-type]
            print(CudaIPCWrapper.Serialize(CudaIPCWrapper(tensors[-1])).hex(), flush=True)


if __name__ == "__main__":
    main()

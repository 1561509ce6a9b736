"""Compiles the kernels for an H200 (sm_90) and prints the results as JSON.

Triton compiles for a GPU that is not there; only running takes one. Each entry counts the
accesses to global memory in PTX by kind, and names registers, shared and spilled bytes.

Uses inner parts of Triton (3.6 and 3.9 were tried), which the package itself does not.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from typing import Any

from lmcache_redis.device.cuda_kernels import _WARPS, _move_chunks
from lmcache_redis.device.table import UNITS_PER_TILE


def compile_for_h200(width: int, narrow: int, *, scatter: bool) -> Any:
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        "UNITS": UNITS_PER_TILE,
        "WIDTH": width,
        "NARROW": narrow,
        "SCATTER": scatter,
    }
    signature = {
        "rows": "*i64",
        "block_ids": "*i64",
        "staging": "*u8",
        "n_blocks": "i32",
        "staging_stride_bytes": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }
    # As in a launch: the three tensors are aligned, the counts are arbitrary.
    aligned = {(at,): [["tt.divisibility", 16]] for at in range(3)}
    source = ASTSource(_move_chunks, signature, constants, aligned)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": _WARPS})


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack (what is spilled lies there)."""
    import subprocess
    import tempfile

    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def specializations() -> int:
    """How many kernels Triton would compile for launches that differ in their counts alone."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(_move_chunks.signature, _move_chunks.params, backend)
    numbers, staging = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.uint8)
    constants = {"UNITS": UNITS_PER_TILE, "WIDTH": 16, "NARROW": 0, "SCATTER": False}
    counts = [(1, 16), (16, 4096), (17, 33), (256, 1 << 20), (2, 1)]
    keys = {
        str(bind(numbers, numbers, staging, *count, **constants, num_warps=_WARPS)[1])
        for count in counts
    }
    return len(keys)


def main() -> None:
    warnings.simplefilter("ignore")
    found = []
    for width, narrow in ((16, 0), (8, 0), (4, 0), (2, 0), (1, 0), (16, 4), (16, 1)):
        for scatter in (False, True):
            kernel = compile_for_h200(width, narrow, scatter=scatter)
            ptx = kernel.asm["ptx"]
            registers, spilled = resources(kernel.asm["cubin"])
            found.append(
                {
                    "widths": [width, narrow] if narrow else [width],
                    "scatter": scatter,
                    "loads": Counter(re.findall(r"ld\.global(\.\S+)", ptx)),
                    "stores": Counter(re.findall(r"st\.global(\.\S+)", ptx)),
                    "shared_bytes": kernel.metadata.shared,
                    "registers": registers,
                    "spilled_bytes": spilled,
                }
            )
    print(json.dumps({"kernels": found, "specializations": specializations()}))


if __name__ == "__main__":
    main()

"""A stand-in for an engine on a GPU; like `tests.device.exporter`, but always in a child process.

Commands: ``share``, ``read`` (block ids), ``fill late`` (a value, written by the GPU after a
pause that it is still in when the answer goes out). EXTRA_MIB in its environment makes it larger.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.errors import DeviceError

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 12, 2, 16, 64, 3
PAUSE_CYCLES = 1_000_000_000  # about half a second


class CudaExporter:
    """A child process that runs `main`, with changes to its environment."""

    def __init__(self, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.cuda_exporter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | environment,
            text=True,
        )

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def share(self) -> tuple[KVLayout, list[CudaIPCHandle]]:
        """Raises DeviceError if the child could not export."""
        answer = self.ask("share")
        if isinstance(answer, str):
            raise DeviceError(answer)
        _, handles, ((segments, page_format, _),) = answer
        layout = KVLayout(
            identity=(),
            dtype="float16",
            device="cuda",
            block_size_tokens=TOKENS,
            num_blocks=BLOCKS,
            segments=msgspec.convert(segments, tuple[Segment, ...]),
            page_format=page_format,
        )
        return layout, msgspec.convert(handles, list[CudaIPCHandle])

    def chunk(self, block_ids: list[int]) -> bytes:
        """The chunk in those blocks, as the engine sees it."""
        return bytes.fromhex(self.ask("read", block_ids))

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    import torch

    from lmcache_redis.device.context import export_kv_caches

    # Two storages: layers 0 and 1 in one, blocks outermost; layer 2, K and V apart.
    pair = torch.rand((2, BLOCKS, HEADS, TOKENS, WIDTH), device="cuda").to(torch.float16)
    last = torch.rand((2, BLOCKS, TOKENS, HEADS, WIDTH // 2), device="cuda").to(torch.float16)
    caches = {"layer.0": pair[0], "layer.1": pair[1], "layer.2": last}
    extra_bytes = int(os.environ.get("EXTRA_MIB", 0)) << 20
    if extra_bytes:  # one more layer, of whole pages
        page_bytes = extra_bytes // BLOCKS // 4096 * 4096
        caches["layer.3"] = torch.zeros((BLOCKS, page_bytes), dtype=torch.uint8, device="cuda")
    # Kernels are loaded at their first use, which may wait for work in flight: a first ``fill_``
    # behind the pause would return only after it.
    torch.cuda._sleep(1)
    for tensor in (pair, last):
        torch.empty_like(tensor).fill_(1.0)
    torch.cuda.synchronize()
    events = []
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = None
        if command == "share":
            try:
                answer = msgspec.to_builtins(export_kv_caches([caches], BLOCKS))
            except DeviceError as error:
                answer = str(error)
        elif command == "read":
            ids = arguments[0]
            pages = [pair[0][ids], pair[1][ids], last[0][ids], last[1][ids]]
            answer = b"".join(page.cpu().numpy().tobytes() for page in pages).hex()
        elif command == "fill late":
            torch.cuda._sleep(PAUSE_CYCLES)
            pair.fill_(arguments[0])
            last.fill_(arguments[0])
            events.append(torch.cuda.Event(interprocess=True))
            events[-1].record()
            answer = [events[-1].ipc_handle().hex(), events[-1].query()]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

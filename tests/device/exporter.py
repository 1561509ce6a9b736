# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an engine: exports KV caches, and answers questions on its standard streams.

Each line in is a JSON array, a command and its arguments; each line out is the answer. Ends when
its standard input does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from lmcache_redis.device.handles import SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout, Segment

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 12, 2, 4, 16, 3


class Exporter:
    """A child process that runs `main`; started by the test, ended by it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.exporter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def share(self, kind: str) -> tuple[KVLayout, list[SharedMemoryHandle]]:
        _, handles, ((segments, page_format, _),), _ = self.ask("share", kind)
        layout = KVLayout(
            identity=(),
            dtype="float32",
            device="cpu",
            block_size_tokens=TOKENS,
            num_blocks=BLOCKS,
            segments=msgspec.convert(segments, tuple[Segment, ...]),
            page_format=page_format,
        )
        return layout, msgspec.convert(handles, list[SharedMemoryHandle])

    def storages(self, kind: str) -> list[bytes]:
        """The bytes of the child's storages, as the child sees them."""
        return [bytes.fromhex(each) for each in self.ask("read", kind)]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def make_caches(kind: str) -> dict[str, Any]:
    """KV caches as vLLM makes them, with random contents."""
    import torch

    if kind == "one storage":
        shape = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)
        whole = torch.rand(shape, dtype=torch.float32)
        return {f"layer.{layer}": whole[layer] for layer in range(LAYERS)}
    if kind == "k and v apart":
        shape = (2, BLOCKS, TOKENS, HEADS, WIDTH // 2)
        return {f"layer.{layer}": torch.rand(shape) for layer in range(LAYERS)}
    raise AssertionError(kind)


def bytes_of(caches: dict[str, Any]) -> list[bytes]:
    """The contents of the distinct storages, in order."""
    import torch

    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in caches.values()}
    flat = (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values())
    return [each.numpy().tobytes() for each in flat]


def main() -> None:
    from lmcache_redis.device.context import export_kv_caches

    kept: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        command, kind = json.loads(line)
        caches = kept.setdefault(kind, make_caches(kind))
        if command == "share":
            answer: Any = msgspec.to_builtins(export_kv_caches([caches], BLOCKS))
        else:
            answer = [each.hex() for each in bytes_of(caches)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

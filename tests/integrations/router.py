# SPDX-License-Identifier: Apache-2.0
"""A router that listens to vLLM's KV events, written against vLLM's own schema."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from tests.integrations.indexes import Indexes

TOPIC = "kv-events"
# Events come with an engine's steps; the publisher's thread looks every 0.1 s.
_QUIET_S = 0.5

Place = tuple[str, "str | None"]  # medium, locality


class Block(NamedTuple):
    """What an event says of a stored block."""

    token_ids: tuple[int, ...]
    parent: Any
    group: int | None
    kind: str | None
    extra_keys: Any


class Router:
    """Subscribes to one engine that is started with ``options``. A context manager.

    Attributes:
        there: the blocks in each place, by hash.
        indexes: what routers of every kind have of the connector's places.
        resets: how often vLLM has cleared its own cache.
        stored_by_vllm: every block that vLLM has ever stored in its own cache.
        sequence: the numbers of the batches.
    """

    def __init__(self, directory: Path) -> None:
        self._endpoint = f"ipc://{directory}/kv-events.sock"
        self.options: dict[str, Any] = {
            "disable_log_stats": False,
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self._endpoint,
                "topic": TOPIC,
            },
        }
        self.indexes = Indexes()
        self.resets = 0
        self.there: defaultdict[Place, dict[Any, Block]] = defaultdict(dict)
        self.stored_by_vllm: dict[Any, Block] = {}
        self.sequence: list[int] = []

    def __enter__(self) -> Router:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._socket.connect(self._endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def told(self, step: Callable[[], object]) -> Router:
        """Takes the events up to those of a step of the engine, which carries what is due."""
        time.sleep(_QUIET_S)
        step()
        while self._socket.poll(_QUIET_S * 1000):
            self._take(*self._socket.recv_multipart())
        return self

    def of_prompt(self, prompt: list[int], tokens: int) -> list[Any]:
        """The hashes of the first ``tokens`` of a prompt, found by their tokens from the root."""
        children = {(block.parent, block.token_ids): h for h, block in self.stored_by_vllm.items()}
        size = len(next(iter(self.stored_by_vllm.values())).token_ids)
        hashes: list[Any] = []
        for begin in range(0, tokens, size):
            parent = hashes[-1] if hashes else None
            hashes.append(children[parent, tuple(prompt[begin : begin + size])])
        return hashes

    def _take(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

        assert topic == TOPIC.encode()
        self.sequence.append(int.from_bytes(sequence, "big"))
        events = msgspec.msgpack.decode(payload, type=KVEventBatch).events
        self.indexes.take(events)
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    # Nothing is removed that was not stored before.
                    del self.there[event.medium, event.locality][each]
            else:  # all blocks of vLLM's own cache
                self.resets += 1
                self.there["GPU", None].clear()
        self._check()

    def _check(self) -> None:
        """Whatever kind of index a router has, it is told the same."""
        there: dict[tuple[Any, ...], set[Any]] = {}
        for (medium, locality), blocks in self.there.items():
            for each, block in blocks.items():
                if medium != "GPU":
                    there.setdefault((medium, locality, block.group), set()).add(each)
        assert self.indexes.there() == there

    def _store(self, event: Any) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        for number, each in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[number * size : (number + 1) * size])
            extra_keys = event.extra_keys[number] if event.extra_keys else None
            block = Block(tokens, parent, event.group_idx, event.kv_cache_spec_kind, extra_keys)
            there = self.there[event.medium, event.locality]
            if event.medium == "GPU":
                self.stored_by_vllm[each] = block
            else:
                assert each not in there, "a block that was told before"
            there[each] = block
            parent = each

# SPDX-License-Identifier: Apache-2.0
"""The connector's part in vLLM's scheduler, step by step, with scripted answers of the agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from lmcache_redis.chunks.names import FULL_REACH
from lmcache_redis.client.scheduler import Ranks
from lmcache_redis.integrations.vllm.epoch import Epochs, named_epoch
from lmcache_redis.integrations.vllm.parameters import UNREAD
from lmcache_redis.integrations.vllm.planning import BlockReferences, StepPlanner
from lmcache_redis.integrations.vllm.reports.stats import Recorder
from lmcache_redis.integrations.vllm.requests import CachePolicy, RequestNames
from lmcache_redis.integrations.vllm.scheduler import ConnectorScheduler
from lmcache_redis.integrations.vllm.support import LayerGroup
from lmcache_redis.integrations.vllm.worker import StepMetadata

BLOCK, CHUNK = 16, 64
# Of a `FakeRequest`, which has four chunks and a token.
BLOCKS = list(range(1, 18))


class ScriptedAdapter:
    """Gives scripted answers and records the questions."""

    def __init__(self) -> None:
        self.tokens: int | None = 0
        self.tiers: list[str] = []
        self.chunk = CHUNK
        self.ranks = Ranks(1)
        self.lookups: list[tuple[str, int]] = []
        self.released: list[str] = []
        self.ended: list[str] = []
        self.jobs: set[str] = set()
        self.canary_every = 0
        self.names_before = False
        self.before = 0  # chunks named before the last lookup
        self.pinned: int | None = None  # if not all of it may be loaded
        self.answers_in_s = 0.0  # if it is not waited for as long, a lookup is not answered

    def chunk_size_tokens(self) -> int:
        return self.chunk

    def begin_lookup(
        self,
        request_id: str,
        hashes: Any,
        first_chunk: int,
        before: Any,
        token_s: float,
        busy_s: float,
        tenant: str,
        stored_tokens: int,
    ) -> None:
        self.token_s, self.busy_s, self.tenant = token_s, busy_s, tenant
        self.stored_tokens = stored_tokens
        self.hashes = len(hashes)
        self.before = len(before)
        if request_id not in self.jobs:
            self.jobs.add(request_id)
            self.lookups.append((request_id, first_chunk))

    def hit_tokens(self, request_id: str, wait_s: float) -> int | None:
        return self.tokens if wait_s >= self.answers_in_s else None

    def pinned_tokens(self, request_id: str) -> int:
        return (self.tokens or 0) if self.pinned is None else self.pinned

    def hit_tiers(self, request_id: str) -> list[str]:
        return self.tiers

    def forget_lookup(self, request_id: str) -> None:
        self.jobs.discard(request_id)

    def release_lookup(self, request_id: str) -> None:
        self.released.append(request_id)

    def end_session(self, request_id: str) -> None:
        self.jobs.discard(request_id)
        self.ended.append(request_id)


@dataclass
class FakeRequest:
    request_id: str = "r"
    tokens: int = 4 * CHUNK + 1
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: Any = None
    lora_request: Any = None
    over: bool = False
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grow(self.tokens)

    def grow(self, tokens: int) -> None:
        self.tokens = tokens
        self.block_hashes[:] = [n.to_bytes(4, "big") for n in range(tokens // BLOCK)]

    @property
    def num_tokens(self) -> int:
        return self.tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self.tokens

    def is_finished(self) -> bool:
        return self.over


def wishing(request_id: str = "r", **wishes: Any) -> FakeRequest:
    return FakeRequest(request_id, kv_transfer_params={"lmcache_redis": wishes})


class Scripted(ConnectorScheduler):
    """With what lies around it at hand.

    tables: the blocks of requests, as vLLM's manager has them after a `step`.
    """

    def __init__(
        self,
        *,
        recorder: Recorder | None = None,
        announcer: Any = None,
        media: Any = None,
        groups: Sequence[LayerGroup] = (LayerGroup(0, (), BLOCK, FULL_REACH),),
        block_ids: Callable[[str], Sequence[Sequence[int]]] | None = None,
        hash_tokens: int = BLOCK,
        **policy: Any,
    ) -> None:
        self.adapter = ScriptedAdapter()
        # vLLM's own. Block 0 is its null block.
        self.pool = BlockPool(num_gpu_blocks=128, enable_caching=True, hash_block_size=BLOCK)
        self.references = BlockReferences(self.pool, world_size=2)
        self.tables: dict[str, list[int]] = {}
        block_ids = block_ids or (lambda request_id: (self.tables.get(request_id, []),))
        super().__init__(
            self.adapter,  # type: ignore[arg-type]
            StepPlanner(
                self.references,
                groups,
                (),
                4 * CHUNK,
                lambda name: [[self.pool.blocks[each] for each in ids] for ids in block_ids(name)],
            ),
            RequestNames(Epochs(None, None, lambda: UNREAD), media),
            CachePolicy(hash_tokens, **policy),
            recorder or Recorder(),
            announcer,
        )

    def begin(
        self, request: Any, blocks: Sequence[int] | None = None, local: int = 0
    ) -> int | None:
        """vLLM asks for it, and has allocated these blocks, into which what is found is loaded."""
        tokens = self.matched_tokens(request, local)
        self.allocated(request, [blocks] if blocks else [], (tokens or 0) if blocks else 0)
        return tokens

    def step(
        self,
        *,
        new: tuple[str, Sequence[int], int, int] | None = None,
        cached: tuple[str, Sequence[int] | None, int, int] | None = None,
        resumed: bool = False,
        preempted: set[str] | None = None,
    ) -> Any:
        """A SchedulerOutput: (request id, block ids, computed before, scheduled now)."""
        rows = [row for row in (new, cached) if row]
        for name, block_ids, *_ in rows:
            if new or resumed:
                self.tables[name] = []
            self.tables.setdefault(name, []).extend(block_ids or [])
        scheduled = {row[0]: row[3] for row in rows}
        return SimpleNamespace(
            total_num_scheduled_tokens=sum(scheduled.values()),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=preempted,
            scheduled_new_reqs=[
                SimpleNamespace(req_id=row[0], num_computed_tokens=row[2]) for row in (new,) if row
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[cached[0]] if cached else [],
                num_computed_tokens=[cached[2]] if cached else [],
                resumed_req_ids={cached[0]} if cached and resumed else set(),
            ),
        )

    def run(self, **step: Any) -> StepMetadata:
        """A `step` whose output vLLM takes: its metadata, with the stores of what it fills."""
        output = self.step(**step)
        metadata = self.build_metadata(output)
        self.output_taken(output)
        metadata.stores, self._steps.stores = self._steps.stores, []
        return metadata

    def prefill(
        self, request: Any, blocks: Sequence[int] = BLOCKS, tokens: int = 0, local: int = 0
    ) -> StepMetadata:
        """A request that loads nothing begins: the step of its first tokens, or of all."""
        self.begin(request, local=local)
        return self.run(new=(request.request_id, blocks, local, tokens or request.tokens - local))

    def computed_before(self, blocks: Sequence[int], tokens: int, lora: Any = None) -> None:
        """Another request has computed these tokens, and vLLM has its blocks in its own cache."""
        request: Any = wishing("before", load=False, store=False)
        request.grow(tokens)
        request.lora_request = lora
        self.prefill(request, blocks)
        count = tokens // BLOCK
        filled = [self.pool.blocks[each] for each in blocks[:count]]
        self.pool.cache_full_blocks(request, filled, 0, count, BLOCK, 0)
        self.finished(request)

    def name_weights(self, weights_id: str) -> bytes:
        """The epoch that begins with an update."""
        self.change_epoch(lambda epochs: epochs.weights_have_id(weights_id), "an update")
        return named_epoch(weights_id)

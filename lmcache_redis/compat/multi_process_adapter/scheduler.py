"""The adapter of an engine's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from lmcache_redis import messages as m
from lmcache_redis.chunks.keys import hash_chunks
from lmcache_redis.client.link import AgentCall
from lmcache_redis.client.scheduler import SchedulerClient
from lmcache_redis.compat.multi_process_adapter.engine import (
    ENGINE_ID_VARIABLE,
    TIMEOUT_S,
    AdapterOfEngine,
)
from lmcache_redis.compat.multi_process_adapter.operations import (
    check_names,
    chunk_hashes,
    salt_bytes,
)
from lmcache_redis.config import ClientConfig

logger = logging.getLogger(__name__)


class LMCacheMPSchedulerAdapter(SchedulerClient, AdapterOfEngine):
    """Asks the agent which leading tokens of prompts are cached.

    server_url: the agent's endpoint, ``ipc://PATH``.
    context: a `zmq.Context`; see above.
    model_name, world_size: as in every key of this engine.
    kv_rank: kept as ``worker_id``. A lookup asks for the chunks of all ranks.
    vllm_block_size: tokens of one block of vLLM.
    engine_id: see above.

    Raises AgentUnreachable if no agent answers within ``timeout_s``, ConfigError for an endpoint
    that cannot be one, TypeError and ValueError.
    """

    def __init__(
        self,
        server_url: str,
        context: zmq.Context[Any],
        model_name: str,
        world_size: int,
        kv_rank: int,
        vllm_block_size: int,
        *,
        engine_id: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._named = self._join(
            context, model_name, world_size, kv_rank, vllm_block_size, engine_id, is_worker=False
        )
        self._asked_for_workers = False
        super().__init__(
            ClientConfig(endpoint=server_url).endpoint,
            model_name,
            world_size,
            vllm_block_size,
            **self._named,
        )
        self._await_agent(timeout_s)

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk."""
        return self.chunk_size_tokens()

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a lookup for ``request_id``, unless that request has one.

        Exactly one of ``block_hashes`` (one per block) and ``token_ids`` is given, both from the
        start of the prompt. ``cache_salt`` stands for everything else that the KV of ``token_ids``
        depends on (salt, LoRA, images); stores need the same salt. Raises ``ValueError``,
        ``TypeError`` otherwise.
        """
        check_names(token_ids, block_hashes, cache_salt)
        if request_id in self._lookups:
            return
        hashes: Sequence[bytes] = ()
        if block_hashes is not None and self.blocks_in_chunk:
            hashes = chunk_hashes(self.blocks_in_chunk, block_hashes)
        elif token_ids is not None and self.chunk_size:
            hashes = hash_chunks(token_ids, self.chunk_size, salt=salt_bytes(cache_salt))
        self.begin_lookup(request_id, hashes)

    def check_lookup_result(self, request_id: str, *, wait_s: float = 0.0) -> int | None:
        """The number of cached leading tokens; None if it is not known yet.

        Raises ValueError for a request without a lookup.
        """
        if request_id not in self._lookups:
            raise ValueError(
                f"request {request_id!r} has no lookup: call maybe_submit_lookup_request first"
            )
        tokens = self.hit_tokens(request_id, wait_s=wait_s)
        if tokens == 0 and not self._asked_for_workers:
            self._asked_for_workers = True
            self.link.submit(m.Status, self._check_workers)
        return tokens

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forgets the result of a lookup; its chunks stay pinned."""
        self.forget_lookup(request_id)

    def _check_workers(self, call: AgentCall) -> None:
        """Warns if no lookup can hit, because the workers are those of another engine."""
        if not isinstance(call.answer, m.StatusReport):
            return
        engines = msgspec.json.decode(call.answer.report)["engines"]
        ranks = {each["worker_id"] for each in engines if self._is_ours(each)}
        if len(ranks) < self.world_size:
            logger.warning(
                "lookups miss while only %d of %d workers of engine %s are registered; if the "
                "others run, give them and the scheduler the same engine_id or $%s",
                len(ranks), self.world_size, self._named["engine_id"], ENGINE_ID_VARIABLE,
            )  # fmt: skip

    def _is_ours(self, worker: Mapping[str, Any]) -> bool:
        """Whether a worker, as STATUS tells it, is one of this engine."""
        world = (worker["model"], worker["world_size"]) == (self.model_name, self.world_size)
        unnamed = self._named["unnamed"] and worker["unnamed"]
        return worker["engine_id"] == self._named["engine_id"] or (unnamed and world)

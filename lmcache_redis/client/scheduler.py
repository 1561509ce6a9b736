"""The scheduler's side: how many leading tokens of a prompt can be had?"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_redis import messages as m
from lmcache_redis.client.link import AgentLink, Call
from lmcache_redis.client.operations import check_names, chunk_names

logger = logging.getLogger(__name__)

# What an agent may take to answer beyond its own deadline before it counts as lost.
_GRACE_S = 0.25


@dataclass(slots=True)
class _LookupJob:
    call: Call | None
    chunks: m.ChunkNames
    first_chunk: int
    chunk_size_tokens: int
    expires_s: float
    hit_tokens: int | None = None


class LMCacheMPSchedulerAdapter:
    """Asks the agent which leading chunks of prompts are cached, without ever blocking on it.

    endpoint: where the agent listens.
    model_name, world_size: as in every key of this engine.
    block_size_tokens: tokens of one paged block, which divides the agent's chunk size.
    engine_id: shared by the scheduler and the workers of one engine, and by nobody else.

    While no agent is there every lookup is a miss.
    """

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        world_size: int,
        block_size_tokens: int,
        *,
        engine_id: str,
        agent_dead_after_s: float = 1.5,
    ) -> None:
        self._model_name = model_name
        self._world_size = world_size
        self._block_size_tokens = block_size_tokens
        self._jobs: dict[str, _LookupJob] = {}
        self._complained_of: int | None = None
        self.link = AgentLink(
            endpoint,
            engine_id=engine_id,
            model_name=model_name,
            world_size=world_size,
            worker_id=None,
            dead_after_s=agent_dead_after_s,
        )

    def chunk_size_tokens(self) -> int:
        """Tokens of one chunk; 0 while unknown, or where it is no multiple of the block size."""
        welcome = self.link.welcome
        if welcome is None:
            return 0
        chunk = welcome.chunk_size_tokens
        if chunk % self._block_size_tokens == 0:
            return chunk
        if self._complained_of != chunk:
            self._complained_of = chunk
            logger.error(
                "the agent's chunk size of %d tokens is no multiple of the engine's block size of "
                "%d: start the agent with --chunk-size-tokens %d; until then there are no hits",
                chunk, self._block_size_tokens,
                -(-chunk // self._block_size_tokens) * self._block_size_tokens,
            )  # fmt: skip
        return 0

    def num_blocks_per_chunk(self) -> int:
        """Paged blocks of one chunk; 0 while no usable agent is known."""
        return self.chunk_size_tokens() // self._block_size_tokens

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        token_ids: Sequence[int] | None = None,
        *,
        first_chunk: int = 0,
        cache_salt: str | bytes = "",
    ) -> None:
        """Starts a lookup unless one is known for ``request_id``.

        Exactly one of ``block_hashes`` (one a block) and ``token_ids`` is given, both
        from the start of the prompt; whole chunks from number ``first_chunk`` on are
        looked up. ``cache_salt`` is whatever the KV depends on beside ``token_ids`` (salt, LoRA,
        images), as for the stores. Raises ``ValueError``, ``TypeError`` otherwise.
        """
        check_names(token_ids, block_hashes, cache_salt)
        if request_id in self._jobs:
            return
        blocks_per_chunk = self.num_blocks_per_chunk()
        chunk = self._block_size_tokens * blocks_per_chunk
        chunks = m.ChunkNames()
        if blocks_per_chunk and self.link.online:
            if block_hashes is not None:
                block_hashes = block_hashes[first_chunk * blocks_per_chunk :]
            chunks = chunk_names(
                self._model_name,
                self._world_size,
                request_id,
                blocks_per_chunk=blocks_per_chunk,
                block_hashes=block_hashes,
                token_ids=token_ids,
                start=first_chunk * chunk,
                end=0 if token_ids is None else len(token_ids) // chunk * chunk,
                cache_salt=cache_salt,
            )
        some = bool(chunks.hashes) or chunks.tokens is not None
        now_s = time.monotonic()
        job = _LookupJob(None, chunks, first_chunk, chunk, now_s, None if some else 0)
        if some:
            welcome = self.link.welcome
            job.expires_s += _GRACE_S + (welcome.lookup_deadline_s if welcome else 0.0)
            job.call = self.link.submit(m.Lookup, request_id=request_id, chunks=chunks)
        self._jobs[request_id] = job

    def check_lookup_result(self, request_id: str, *, wait_s: float = 0.0) -> int | None:
        """Leading tokens of the prompt that are held for it; None while that is not known.

        Waits for up to ``wait_s``. An unknown request, a lost agent, and an answer that does
        not come within the agent's lookup deadline and a grace are 0.
        """
        job = self._jobs.get(request_id)
        if job is None:
            return 0
        if job.hit_tokens is None and job.call is not None:
            if job.call.wait(wait_s):
                job.hit_tokens = self._tokens(job)
            elif time.monotonic() >= job.expires_s:
                logger.warning("a lookup was not answered in time; computing %s", request_id)
                job.hit_tokens = 0
                self.link.submit(m.EndSession, request_id=request_id)
        return job.hit_tokens

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forgets the result of a lookup; its pins stay."""
        self._jobs.pop(request_id, None)

    def release_lookup_locks(self, request_id: str, first_chunk: int = 0) -> None:
        """Unpins the chunks from number ``first_chunk`` on that a lookup pinned."""
        job = self._jobs.get(request_id)
        if job is None or not job.hit_tokens:
            return
        chunks = job.chunks
        if first_chunk > job.first_chunk:
            # In token mode one key names all chunks: there they go with the session.
            chunks = m.ChunkNames(chunks.hashes[first_chunk - job.first_chunk :])
        if chunks.hashes or chunks.tokens is not None:
            self.link.submit(m.ReleaseLocks, request_id=request_id, chunks=chunks)

    def end_session(self, request_id: str) -> None:
        """The request is over: cancels its lookup and unpins everything it pinned."""
        self._jobs.pop(request_id, None)
        self.link.submit(m.EndSession, request_id=request_id)

    def clear(self, epoch: bytes | None = None) -> None:
        """Has the agent remove this engine's chunks whose hashes begin with ``epoch``, or all.

        Returns at once. An agent that is not there, or a Redis that does not answer, keeps them.
        """
        self.link.submit(m.Clear, epoch=epoch)

    def shutdown(self) -> None:
        """Closes the connection; the agent unpins what this scheduler's lookups pinned."""
        self.link.close()

    def _tokens(self, job: _LookupJob) -> int:
        answer = job.call.answer if job.call is not None else None
        if not isinstance(answer, m.LookupResult) or not answer.hit_chunks:
            return 0
        return (job.first_chunk + answer.hit_chunks) * job.chunk_size_tokens

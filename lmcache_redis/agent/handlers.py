"""What the agent does with each question."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from lmcache_redis import __version__
from lmcache_redis import messages as m
from lmcache_redis.agent.copyjob import Reply
from lmcache_redis.agent.lookups import look_up
from lmcache_redis.agent.parts import Agent
from lmcache_redis.agent.peers import Peer
from lmcache_redis.agent.registering import Registering
from lmcache_redis.agent.registration import Registration, epoch_prefixes
from lmcache_redis.agent.retrieves import RetrieveJob
from lmcache_redis.agent.sessions import Session
from lmcache_redis.agent.status import status_report
from lmcache_redis.agent.stores import StoreJob
from lmcache_redis.errors import DeviceError, WireError
from lmcache_redis.keys import IPCCacheEngineKey, hash_chunks

_JOIN_POLL_S = 0.01


class Handlers:
    """Turns questions into jobs; runs on the loop thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._jobs = agent.jobs
        self._sessions = agent.jobs.sessions
        self._metrics = agent.jobs.cache.metrics
        self._peers = agent.peers
        self._registering = Registering(agent)

    def answer_anyone(self, question: m.Question, reply: Reply) -> bool:
        """Answers what may be asked without a HELLO; returns whether it was that."""
        if isinstance(question, m.Ping):
            reply(m.Pong(0, os.getpid(), __version__))
        elif isinstance(question, m.GetChunkSize):
            reply(m.ChunkSize(0, self._agent.config.chunk_size_tokens))
        elif isinstance(question, m.Status):
            report = status_report(self._agent)
            reply(m.StatusReport(0, msgspec.json.encode(report)))
        else:
            return False
        return True

    def answer_peer(self, peer: Peer, question: m.Question, reply: Reply) -> None:
        """Answers a peer, now or when the job that this starts has ended."""
        if isinstance(question, m.Lookup):
            self._lookup(peer, question, reply)
        elif isinstance(question, m.Retrieve):
            self._retrieve(peer, question, reply)
        elif isinstance(question, m.Store):
            self._store(peer, question, reply)
        elif isinstance(question, m.RegisterKVCache):
            self._registering.register(peer, question, reply)
        elif isinstance(question, m.UnregisterKVCache):
            self._registering.unregister(peer, "it said so")
            self._registering.when_unmapped(peer, lambda: reply(m.Done(0)))
        elif isinstance(question, m.ReleaseLocks):
            self._release(peer, question, reply)
        elif isinstance(question, m.EndSession):
            session = self._sessions.get((peer.engine_id, question.request_id))
            if session is not None:
                self._metrics.count("sessions_ended")
                self._sessions.end(session)
            reply(m.Done(0))
        elif isinstance(question, m.Goodbye):
            self.forget(peer, "it said goodbye")
        elif isinstance(question, m.Clear):
            self._clear(peer, question, reply)

    def forget(self, peer: Peer, why: str) -> None:
        """Drops a peer: its registration, and with a scheduler its engine's sessions."""
        self._peers.remove(peer)
        self._registering.unregister(peer, why)
        if peer.hello.worker_id is None:
            for session in self._sessions:
                if session.key[0] == peer.engine_id:
                    self._sessions.end(session)

    # Jobs

    def _lookup(self, peer: Peer, question: m.Lookup, reply: Reply) -> None:
        hashes = self._hashes(peer, question.chunks)
        if not hashes:
            reply(m.LookupResult(0, 0))
            return
        deadline_s = time.monotonic() + self._agent.config.lookup_deadline_s
        self._look_up(peer, question.request_id, hashes, deadline_s, reply)

    def _look_up(
        self, peer: Peer, request_id: str, hashes: Sequence[bytes], deadline_s: float, reply: Reply
    ) -> None:
        """Begins the lookup, now or when registrations in progress have ended."""
        now_s = time.monotonic()
        ranks = self._peers.ranks(peer.engine_id, peer.hello.world_size)
        if ranks is None and (now_s >= deadline_s or not self._peers.joining(peer, now_s)):
            reply(m.LookupResult(0, 0))
            return
        session = self._session(peer, request_id, for_lookup=True)
        if session.cancel_lookup is not None:
            session.cancel_lookup()
        if ranks is None:
            again = partial(self._look_up, peer, request_id, hashes, deadline_s, reply)
            session.cancel_lookup = self._agent.loop.after(_JOIN_POLL_S, again).cancel
            return
        look_up(self._jobs.cache, session, ranks, hashes, reply, deadline_s)

    def _retrieve(self, peer: Peer, question: m.Retrieve, reply: Reply) -> None:
        registration = self._registration(peer)
        hashes = self._hashes(peer, question.chunks)
        _check_blocks(registration, hashes, question.block_ids)
        if question.skip_first_n_tokens < 0:
            raise WireError("skip_first_n_tokens is negative")
        session = self._session(peer, question.request_id, for_lookup=False)
        job = RetrieveJob(self._jobs, session, registration, hashes, question, reply)
        job.start(question.skip_first_n_tokens)

    def _store(self, peer: Peer, question: m.Store, reply: Reply) -> None:
        registration = self._registration(peer)
        hashes = self._hashes(peer, question.chunks)
        _check_blocks(registration, hashes, question.block_ids)
        session = self._session(peer, question.request_id, for_lookup=False)
        StoreJob(self._jobs, session, registration, hashes, question, reply).start()

    def _release(self, peer: Peer, question: m.ReleaseLocks, reply: Reply) -> None:
        hashes = self._hashes(peer, question.chunks)
        session = self._sessions.get((peer.engine_id, question.request_id))
        released = 0 if session is None else sum(map(session.release, hashes))
        reply(m.Done(0, released))

    def _clear(self, peer: Peer, question: m.Clear, reply: Reply) -> None:
        """The engine has begun a new epoch and never asks for the old one's chunks again."""
        forms = [registration.form for registration in self._peers.registrations(peer.engine_id)]
        prefixes = {each for form in forms for each in epoch_prefixes(form, question.epoch)}
        self._metrics.count("clears")
        reply(m.Done(0, self._jobs.cache.clear(sorted(prefixes))))

    # Bounds

    def _session(self, peer: Peer, request_id: str, *, for_lookup: bool) -> Session:
        key = (peer.engine_id, request_id)
        if self._sessions.get(key) is None:
            self._metrics.count("sessions_opened")
        return self._sessions.open(key, time.monotonic(), for_lookup=for_lookup)

    @staticmethod
    def _registration(peer: Peer) -> Registration:
        if peer.registration is None:
            raise DeviceError("no KV cache is registered on this connection")
        return peer.registration

    def _hashes(self, peer: Peer, chunks: m.ChunkNames) -> Sequence[bytes]:
        """The hashes of the chunks. Raises ``WireError`` where they do not go together."""
        key = chunks.tokens
        if key is None:
            if len(set(map(len, chunks.hashes))) > 1:
                raise WireError("chunk hashes of different lengths in one message")
            return chunks.hashes
        if chunks.hashes:
            raise WireError("chunks are named by hashes or by tokens, not by both")
        if key.token_ids is None:
            raise WireError("the key of a message in token mode has token ids")
        chunk = self._agent.config.chunk_size_tokens
        if key.start % chunk or key.end % chunk:
            raise WireError(f"tokens {key.start} to {key.end} are no whole chunks of {chunk}")
        _check_owner(peer.hello, key)
        hashes = hash_chunks(key.token_ids[: key.end], chunk, salt=key.salt)
        return hashes[key.start // chunk : key.end // chunk]


def _check_blocks(
    registration: Registration, hashes: Sequence[bytes], block_ids: Sequence[int]
) -> None:
    expected = len(hashes) * registration.blocks_per_chunk
    if len(block_ids) != expected:
        raise WireError(f"{len(block_ids)} block ids for {len(hashes)} chunks of {expected} blocks")
    num_blocks = registration.device.layout.num_blocks
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise WireError(f"a block id outside the {num_blocks} blocks of the KV cache")


def _check_owner(hello: m.Hello, key: IPCCacheEngineKey) -> None:
    """Raises ``WireError`` unless the key is of the model and the ranks that ``hello`` named."""
    if key.model_name != hello.model_name:
        raise WireError(f"a key of model {key.model_name!r}, a HELLO of {hello.model_name!r}")
    if key.world_size != hello.world_size:
        raise WireError(f"a key of {key.world_size} ranks, a HELLO of {hello.world_size}")
    if key.worker_id is not None and key.worker_id != hello.worker_id:
        who = "a scheduler" if hello.worker_id is None else f"rank {hello.worker_id}"
        raise WireError(f"a key of rank {key.worker_id}, a HELLO of {who}")

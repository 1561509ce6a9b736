"""What the agent does with each question."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from lmcache_redis import messages as m
from lmcache_redis.agent.clears import clear
from lmcache_redis.agent.copies import REGISTERING, CopyOutcome
from lmcache_redis.agent.core import Core, Reply
from lmcache_redis.agent.lookups import LookupJob
from lmcache_redis.agent.peers import Peer, Peers
from lmcache_redis.agent.registration import ChunkForm, Registration
from lmcache_redis.agent.retrieves import RetrieveJob
from lmcache_redis.agent.sessions import Session
from lmcache_redis.agent.status import status_report
from lmcache_redis.agent.stores import StoreJob
from lmcache_redis.agent.writes import Writes
from lmcache_redis.device.base import DeviceContext
from lmcache_redis.device.handles import check_owner, is_running
from lmcache_redis.device.opening import open_device
from lmcache_redis.errors import ConfigError, DeviceError, WireError
from lmcache_redis.hashing import hash_chunks
from lmcache_redis.keys import IPCCacheEngineKey
from lmcache_redis.version import __version__

logger = logging.getLogger(__name__)

_JOIN_POLL_S = 0.01

_Place = tuple[str, "int | None"]  # engine id, worker id


class Handlers:
    """Turns questions into jobs; runs on the loop thread."""

    def __init__(self, core: Core, peers: Peers, writes: Writes) -> None:
        self._core = core
        self._peers = peers
        self._writes = writes
        self._closing: dict[_Place, int] = {}
        self._after_closing: dict[_Place, list[Callable[[], None]]] = {}

    def answer_anyone(self, question: m.Question, reply: Reply) -> bool:
        """Answers what may be asked without a HELLO; returns whether it was that."""
        if isinstance(question, m.Ping):
            reply(m.Pong(0, os.getpid(), __version__))
        elif isinstance(question, m.GetChunkSize):
            reply(m.ChunkSize(0, self._core.config.chunk_size_tokens))
        elif isinstance(question, m.Status):
            report = status_report(self._core, self._peers, self._writes)
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
            self._register(peer, question, reply)
        elif isinstance(question, m.UnregisterKVCache):
            self._unregister(peer, "it said so")
            self._when_closed(_place(peer), lambda: reply(m.Done(0)))
        elif isinstance(question, m.ReleaseLocks):
            self._release(peer, question, reply)
        elif isinstance(question, m.EndSession):
            session = self._core.sessions.get((peer.engine_id, question.request_id))
            if session is not None:
                self._core.metrics.count("sessions_ended")
                self._core.log_line(self._core.sessions.end(session))
            reply(m.Done(0))
        elif isinstance(question, m.Goodbye):
            self.forget(peer, "it said goodbye")
        elif isinstance(question, m.Clear):
            self._clear(peer, question, reply)

    def forget(self, peer: Peer, why: str) -> None:
        """Drops a peer: its registration, and with a scheduler its engine's sessions."""
        self._peers.remove(peer)
        self._unregister(peer, why)
        if peer.hello.worker_id is None:
            for session in self._core.sessions:
                if session.key[0] == peer.engine_id:
                    self._core.log_line(self._core.sessions.end(session))

    # Jobs

    def _lookup(self, peer: Peer, question: m.Lookup, reply: Reply) -> None:
        hashes = self._hashes(peer, question.chunks)
        if not hashes:
            reply(m.LookupResult(0, 0))
            return
        deadline_s = time.monotonic() + self._core.config.lookup_deadline_s
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
            session.cancel_lookup = self._core.timers.after(_JOIN_POLL_S, again).cancel
            return
        job = LookupJob(self._core, session, ranks, hashes, reply, deadline_s)
        session.cancel_lookup = job.cancel
        job.start()

    def _retrieve(self, peer: Peer, question: m.Retrieve, reply: Reply) -> None:
        registration = self._registration(peer)
        hashes = self._hashes(peer, question.chunks)
        _check_blocks(registration, hashes, question.block_ids)
        if question.skip_first_n_tokens < 0:
            raise WireError("skip_first_n_tokens is negative")
        session = self._session(peer, question.request_id, for_lookup=False)
        RetrieveJob(self._core, session, registration, hashes, question, reply).start()

    def _store(self, peer: Peer, question: m.Store, reply: Reply) -> None:
        registration = self._registration(peer)
        hashes = self._hashes(peer, question.chunks)
        _check_blocks(registration, hashes, question.block_ids)
        session = self._session(peer, question.request_id, for_lookup=False)
        StoreJob(self._core, self._writes, session, registration, hashes, question, reply).start()

    def _release(self, peer: Peer, question: m.ReleaseLocks, reply: Reply) -> None:
        hashes = self._hashes(peer, question.chunks)
        session = self._core.sessions.get((peer.engine_id, question.request_id))
        released = 0 if session is None else sum(map(session.release, hashes))
        reply(m.Done(0, released))

    def _clear(self, peer: Peer, question: m.Clear, reply: Reply) -> None:
        forms = [registration.form for registration in self._peers.registrations(peer.engine_id)]
        reply(m.Done(0, clear(self._core, self._writes, forms, question.epoch)))

    # Registrations

    def _register(self, peer: Peer, question: m.RegisterKVCache, reply: Reply) -> None:
        config = self._core.config
        worker_id = peer.hello.worker_id
        if worker_id is None or not 0 <= worker_id < peer.hello.world_size:
            raise WireError("only a worker, with a rank inside its world, registers a KV cache")
        if not peer.engine_id:  # its former mapping could not be told from another engine's
            raise WireError("the engine of a KV cache has an id")
        try:
            form = ChunkForm.of(
                question.layout,
                model_name=peer.hello.model_name,
                kv_rank=question.kv_rank,
                chunk_size_tokens=config.chunk_size_tokens,
                slot_bytes=config.slot_bytes,
                key_prefix=config.key_prefix,
            )
        except ConfigError as error:
            reply(m.Failure(0, m.REFUSED, str(error)))
            return
        if form.fingerprint != question.fingerprint:
            reason = (
                "engine and agent compute different fingerprints of one layout: "
                "install the same lmcache-redis on both sides"
            )
            reply(m.Failure(0, m.REFUSED, reason))
            return
        if form.stripe_count > self._core.pool.slot_count:
            reason = (
                f"a chunk of {form.chunk_bytes} bytes does not fit the host pool: "
                "start the agent with a larger --pool-bytes"
            )
            reply(m.Failure(0, m.REFUSED, reason))
            return
        try:
            _check_processes(question.storages)
        except DeviceError as error:
            reply(m.Failure(0, m.REFUSED, str(error)))
            return
        self._unregister(peer, "it registers anew")
        peer.mapping = True
        opened: list[DeviceContext | DeviceError] = []
        self._core.copies.scatter(
            REGISTERING,
            partial(self._open, question, opened, config.device),
            lambda outcome: self._core.post(
                partial(self._mapped, peer, form, question, opened, reply)
            ),
        )

    def _open(
        self, question: m.RegisterKVCache, opened: list[DeviceContext | DeviceError], allowed: str
    ) -> CopyOutcome:
        # On a copy thread: mapping a KV cache takes its time, pinning the host pool seconds.
        try:
            device = open_device(question.layout, question.storages, allowed)
        except DeviceError as error:
            opened.append(error)
            return CopyOutcome.FAILED
        opened.append(device)
        try:
            self._core.pin_pool(device)
        except DeviceError as error:
            logger.warning("%s", error)
        return CopyOutcome.DONE

    def _mapped(
        self,
        peer: Peer,
        form: ChunkForm,
        question: m.RegisterKVCache,
        opened: list[DeviceContext | DeviceError],
        reply: Reply,
    ) -> None:
        peer.mapping = False
        device = opened[0] if opened else DeviceError("the agent could not map the KV cache")
        if isinstance(device, DeviceError):
            logger.warning("refused the KV cache of %s: %s", _name(peer), device)
            reply(m.Failure(0, m.REFUSED, str(device)))
            return
        worker_id = peer.hello.worker_id
        assert worker_id is not None
        registration = Registration(
            peer.engine_id, worker_id, peer.hello.world_size, form, device, question.storages
        )
        if self._peers.get(peer.identity) is not peer:  # it left while its memory was mapped
            self._close(registration)
            return
        peer.registration = registration
        self._core.metrics.count("registrations")
        logger.info(
            "registered %s: chunks of %.1f MiB in %d stripes, layout %s",
            _name(peer), form.chunk_bytes / 2**20, form.stripe_count, form.fingerprint.hex()[:12],
        )  # fmt: skip
        # The engine takes this for the end of every copy through a former mapping.
        self._when_closed(_place(peer), lambda: reply(m.Done(0)))

    def _unregister(self, peer: Peer, why: str) -> None:
        registration, peer.registration = peer.registration, None
        if registration is None:
            return
        self._core.metrics.count("unregistrations")
        logger.info("unregistered %s: %s", _name(peer), why)
        self._close(registration)

    def _close(self, registration: Registration) -> None:
        place = (registration.engine_id, registration.worker_id)
        self._closing[place] = self._closing.get(place, 0) + 1

        # Closing waits for copies in progress, so it has to be done off the loop.
        def close() -> CopyOutcome:
            registration.device.close()
            return CopyOutcome.DONE

        self._core.copies.gather(
            registration.place,
            close,
            lambda outcome: self._core.post(partial(self._closed, place, outcome)),
        )

    def _closed(self, place: _Place, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            return  # a mapping that would not close: whoever waits for its end waits on
        self._closing[place] -= 1
        if not self._closing[place]:
            del self._closing[place]
            for action in self._after_closing.pop(place, ()):
                action()

    def _when_closed(self, place: _Place, action: Callable[[], None]) -> None:
        """Does it as soon as no former mapping of that worker is open."""
        if place in self._closing:
            self._after_closing.setdefault(place, []).append(action)
        else:
            action()

    # Bounds

    def _session(self, peer: Peer, request_id: str, *, for_lookup: bool) -> Session:
        key = (peer.engine_id, request_id)
        if self._core.sessions.get(key) is None:
            self._core.metrics.count("sessions_opened")
        return self._core.sessions.open(key, time.monotonic(), for_lookup=for_lookup)

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
        chunk = self._core.config.chunk_size_tokens
        if key.start % chunk or key.end % chunk:
            raise WireError(f"tokens {key.start} to {key.end} are no whole chunks of {chunk}")
        _check_owner(peer.hello, key)
        hashes = hash_chunks(key.token_ids[: key.end], chunk, salt=key.salt)
        return hashes[key.start // chunk : key.end // chunk]


def _check_blocks(
    registration: Registration, hashes: Sequence[bytes], block_ids: Sequence[int]
) -> None:
    expected = len(hashes) * registration.form.blocks_per_chunk
    if len(block_ids) != expected:
        raise WireError(f"{len(block_ids)} block ids for {len(hashes)} chunks of {expected} blocks")
    num_blocks = registration.device.layout.num_blocks
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise WireError(f"a block id outside the {num_blocks} blocks of the KV cache")


def _check_processes(storages: Sequence[m.StorageHandle]) -> None:
    """Raises ``DeviceError`` unless they are processes of this user that the agent can watch."""
    for pid, pid_start_time in {(each.pid, each.pid_start_time) for each in storages}:
        check_owner(pid)
        if not is_running(pid, pid_start_time):
            raise DeviceError(
                f"process {pid} is not the engine that registered: that one has ended, or runs "
                "in another PID namespace"
            )


def _check_owner(hello: m.Hello, key: IPCCacheEngineKey) -> None:
    """Raises ``WireError`` unless the key is of the model and the ranks that ``hello`` named."""
    if key.model_name != hello.model_name:
        raise WireError(f"a key of model {key.model_name!r}, a HELLO of {hello.model_name!r}")
    if key.world_size != hello.world_size:
        raise WireError(f"a key of {key.world_size} ranks, a HELLO of {hello.world_size}")
    if key.worker_id is not None and key.worker_id != hello.worker_id:
        who = "a scheduler" if hello.worker_id is None else f"rank {hello.worker_id}"
        raise WireError(f"a key of rank {key.worker_id}, a HELLO of {who}")


def _name(peer: Peer) -> str:
    who = "scheduler" if peer.hello.worker_id is None else f"worker {peer.hello.worker_id}"
    return f"{who} of engine {peer.engine_id[:8]} ({peer.hello.model_name})"


def _place(peer: Peer) -> _Place:
    return peer.engine_id, peer.hello.worker_id

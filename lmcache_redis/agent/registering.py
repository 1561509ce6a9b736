"""Registrations: an engine's memory is mapped and unmapped, on threads that may take seconds.

An engine that registers anew takes the answer for the end of every copy through its former mapping,
so that one is closed first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import REGISTERING, CopyOutcome
from lmcache_redis.agent.copyjob import Reply
from lmcache_redis.agent.parts import Agent
from lmcache_redis.agent.peers import Peer
from lmcache_redis.agent.registration import Registration, form_of
from lmcache_redis.device.context import DeviceContext, open_device
from lmcache_redis.device.handles import check_owner
from lmcache_redis.errors import ConfigError, DeviceError, WireError
from lmcache_redis.naming import ChunkForm
from lmcache_redis.processes import is_running

logger = logging.getLogger(__name__)

_Place = tuple[str, "int | None"]  # engine id, worker id


class Registering:
    """Registers and unregisters workers. Owned by the loop thread."""

    def __init__(self, agent: Agent) -> None:
        self._config = agent.config
        self._cache = agent.jobs.cache
        self._copies = agent.jobs.copies
        self._peers = agent.peers
        self._pinned_pool = agent.pinned_pool
        self._closing: dict[_Place, int] = {}
        self._after_closing: dict[_Place, list[Callable[[], None]]] = {}

    def register(self, peer: Peer, question: m.RegisterKVCache, reply: Reply) -> None:
        """Maps a worker's memory and answers, or refuses with a sentence.

        Raises ``WireError`` for a peer that is no worker of an engine.
        """
        worker_id = peer.hello.worker_id
        if worker_id is None or not 0 <= worker_id < peer.hello.world_size:
            raise WireError("only a worker, with a rank inside its world, registers a KV cache")
        if not peer.engine_id:  # its former mapping could not be told from another engine's
            raise WireError("the engine of a KV cache has an id")
        try:
            form = self._form(peer, question)
            _check_processes(question.storages)
        except (ConfigError, DeviceError) as error:
            reply(m.Failure(0, m.REFUSED, str(error)))
            return
        self.unregister(peer, "it registers anew")
        peer.mapping = True
        opened: list[DeviceContext | DeviceError] = []
        self._copies.scatter(
            REGISTERING,
            partial(self._open, question, opened, self._config.device),
            lambda outcome: self._cache.owner.post(
                partial(self._mapped, peer, form, question, opened, reply)
            ),
        )

    def _form(self, peer: Peer, question: m.RegisterKVCache) -> ChunkForm:
        """Raises ``ConfigError`` where the chunks cannot be cached as things are."""
        form = form_of(question.layout, peer.hello.model_name, question.kv_rank, self._config)
        if form.fingerprint != question.fingerprint:
            raise ConfigError(
                "engine and agent compute different fingerprints of one layout: "
                "install the same lmcache-redis on both sides"
            )
        if form.stripe_count > self._cache.pool.capacity:
            raise ConfigError(
                f"a chunk of {form.chunk_bytes} bytes does not fit the host pool: "
                "start the agent with a larger --pool-bytes"
            )
        return form

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
            self._pinned_pool.pin(device)
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
            peer.engine_id,
            worker_id,
            peer.hello.world_size,
            form,
            question.layout.blocks_per_chunk(self._config.chunk_size_tokens),
            device,
            question.storages,
        )
        if self._peers.get(peer.identity) is not peer:  # it left while its memory was mapped
            self._close(registration)
            return
        peer.registration = registration
        self._cache.metrics.count("registrations")
        logger.info(
            "registered %s: chunks of %.1f MiB in %d stripes, layout %s",
            _name(peer), form.chunk_bytes / 2**20, form.stripe_count, form.fingerprint.hex()[:12],
        )  # fmt: skip
        # The engine takes this for the end of every copy through a former mapping.
        self.when_unmapped(peer, lambda: reply(m.Done(0)))

    def unregister(self, peer: Peer, why: str) -> None:
        """Unmaps a worker's memory, once its copies have ended. No-op without one."""
        registration, peer.registration = peer.registration, None
        if registration is None:
            return
        self._cache.metrics.count("unregistrations")
        logger.info("unregistered %s: %s", _name(peer), why)
        self._close(registration)

    def _close(self, registration: Registration) -> None:
        place = (registration.engine_id, registration.worker_id)
        self._closing[place] = self._closing.get(place, 0) + 1

        # Closing waits for copies in progress, so it has to be done off the loop.
        def close() -> CopyOutcome:
            registration.device.close()
            return CopyOutcome.DONE

        self._copies.gather(
            registration.place,
            close,
            lambda outcome: self._cache.owner.post(partial(self._closed, place, outcome)),
        )

    def _closed(self, place: _Place, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            return  # a mapping that would not close: what waits for its end goes on waiting
        self._closing[place] -= 1
        if not self._closing[place]:
            del self._closing[place]
            for action in self._after_closing.pop(place, ()):
                action()

    def when_unmapped(self, peer: Peer, action: Callable[[], None]) -> None:
        """Runs ``action`` as soon as no former mapping of that worker is open."""
        place = (peer.engine_id, peer.hello.worker_id)
        if place in self._closing:
            self._after_closing.setdefault(place, []).append(action)
        else:
            action()


def _check_processes(storages: Sequence[m.StorageHandle]) -> None:
    """Raises ``DeviceError`` unless they are processes of this user that the agent can watch."""
    for pid, pid_start_time in {(each.pid, each.pid_start_time) for each in storages}:
        check_owner(pid)
        if not is_running(pid, pid_start_time):
            raise DeviceError(
                f"process {pid} is not the engine that registered: that one has ended, or runs "
                "in another PID namespace"
            )


def _name(peer: Peer) -> str:
    who = "scheduler" if peer.hello.worker_id is None else f"worker {peer.hello.worker_id}"
    return f"{who} of engine {peer.engine_id[:8]} ({peer.hello.model_name})"

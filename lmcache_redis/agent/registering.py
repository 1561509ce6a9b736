# SPDX-License-Identifier: Apache-2.0
"""Registrations: mapping and unmapping engines' memory, on threads because it may take seconds.

The answer to a registration tells the engine that every copy through its former mapping has ended,
so a former mapping is closed before the answer. What can wait comes after the answer: the host pool
is pinned for GPUs then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.copies import REGISTERING, CopyOutcome
from lmcache_redis.agent.peers import Peer, Registration, Reply
from lmcache_redis.cache.threads import posting
from lmcache_redis.chunks.keys import held_ranks
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, engine_chunk_tokens
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.context import open_device
from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import Gpus
from lmcache_redis.device.handles import check_exporter
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import ConfigError, DeviceError, FormatError, GpuLost, WireError

logger = logging.getLogger(__name__)

MAX_GROUPS = 256  # of layers

_Worker = tuple[str, "int | None"]  # engine id, worker id


def form_of(
    layout: KVLayout, model_name: str, kv_rank: int, chunk_tokens: int, config: AgentConfig
) -> ChunkForm:
    """The form of a group's parts. Raises ``ConfigError`` if they cannot be cached."""
    held, cut = len(held_ranks(kv_rank)), max(1, layout.shares)
    if held != cut:
        raise ConfigError(
            f"a kv_rank of {held} shares has a layout of {cut}: both must be cut alike"
        )
    try:
        return ChunkForm.of(
            ChunkNames(layout.fingerprint(chunk_tokens), config.key_prefix),
            model_name,
            kv_rank,
            layout.metadata(chunk_tokens),
            config.slot_bytes,
            layout.reach,
            layout.share.metadata(chunk_tokens) if layout.shares else None,
        )
    except FormatError as error:
        raise ConfigError(f"chunks of this KV cache cannot be cached: {error}") from error


class Registering:
    """Registers and unregisters workers. Owned by the loop thread."""

    def __init__(self, agent: Agent) -> None:
        self._config = agent.config
        self._cache = agent.cache
        self._copies = agent.copies
        self._peers = agent.peers
        self._pinning = agent.pinning
        self._gpus = Gpus(
            agent.config.direct_copy_bytes,
            agent.pinning.pieces_of,
            batch_copies=agent.config.batch_copies != "off",
        )
        self._closing: dict[_Worker, int] = {}  # former mappings that are still open
        self._after_closing: dict[_Worker, list[Callable[[], None]]] = {}

    def register(self, peer: Peer, question: m.RegisterKVCache, reply: Reply) -> None:
        """Maps a worker's memory and answers, or refuses with a reason.

        Raises ``WireError`` if the peer is not a worker of an engine.
        """
        worker_id = peer.hello.worker_id
        if worker_id is None or not 0 <= worker_id < peer.hello.world_size:
            raise WireError("only a worker whose rank is within its world registers a KV cache")
        if not peer.engine_id:  # its former mapping is found by this id
            raise WireError("a KV cache is registered without an engine id")
        try:
            chunk_tokens, forms = self._forms(peer, question)
            # There is often one storage per layer, all of one process.
            handles = (*question.storages, *filter(None, (question.signals,)))
            for handle in {(each.pid, each.pid_start_time): each for each in handles}.values():
                check_exporter(handle)
        except (ConfigError, DeviceError) as error:
            reply(m.Failure(0, m.REFUSED, str(error)))
            return

        def open_memory() -> Registration:
            layouts = [group.layout for group in question.groups]
            device = open_device(layouts, question.storages, question.signals, self._gpus)
            return Registration(
                peer.engine_id, worker_id, chunk_tokens, forms, device, question.storages
            )

        self._when_mapped(peer, lambda: self._map(peer, open_memory, reply))

    def unregister_when_mapped(
        self, peer: Peer, question: m.UnregisterKVCache, reply: Reply
    ) -> None:
        def unregister() -> None:
            self.unregister(peer, "it asked for that")
            self._when_unmapped(peer, lambda: reply(m.Done(0)))

        self._when_mapped(peer, unregister)

    def _when_mapped(self, peer: Peer, action: Callable[[], None]) -> None:
        """Runs ``action`` once no registration of this peer is in progress.

        What a peer asks for takes effect in its order. Does nothing if the peer leaves before.
        """
        if peer.mapping:
            peer.after_mapping.append(action)
        else:
            action()

    def _map(self, peer: Peer, open_memory: Callable[[], Registration], reply: Reply) -> None:
        self.unregister(peer, "it registers again")
        peer.mapping_from_s = self._cache.owner.now()
        self._peers.mapping += 1
        # Why not, else. Not the error: with its traceback it would keep all that is here.
        mapped: Registration | str = "the agent could not map the KV cache"

        def map_memory() -> CopyOutcome:
            # On a copy thread: mapping a KV cache takes seconds.
            nonlocal mapped
            try:
                mapped = open_memory()
            except DeviceError as error:
                mapped = str(error)
                if isinstance(error, GpuLost):
                    raise
            return CopyOutcome.DONE

        def ended() -> None:
            peer.mapping_from_s = None
            self._peers.mapping -= 1
            if isinstance(mapped, str):
                logger.warning("refused the KV cache of %s: %s", _name(peer), mapped)
                reply(m.Failure(0, m.REFUSED, mapped))
            else:
                self._mapped(peer, mapped, reply)
            actions, peer.after_mapping = peer.after_mapping, []
            for action in actions:
                if self._peers.get(peer.identity) is peer:
                    self._when_mapped(peer, action)

        self._copies.put(
            "scatter", REGISTERING, map_memory, lambda outcome: self._cache.owner.post(ended)
        )

    def _mapped(self, peer: Peer, registration: Registration, reply: Reply) -> None:
        if self._peers.get(peer.identity) is not peer:  # it left while its memory was mapped
            self._close(registration)
            return
        peer.registration = registration
        self._cache.metrics.count("registrations")
        groups = "; ".join(map(_sentence, registration.forms))
        logger.info("registered %s: %s", _name(peer), groups)
        if self._cache.warming is not None:
            self._cache.warming.warm(registration.forms)
        # This tells the engine that every copy through a former mapping has ended.
        self._when_unmapped(peer, lambda: reply(m.Done(0)))
        if isinstance(registration.device, CudaDevice):
            self._pinning.begin(registration.device.use_context)

    def _forms(self, peer: Peer, question: m.RegisterKVCache) -> tuple[int, tuple[ChunkForm, ...]]:
        """The tokens of a chunk, and its parts. Raises ``ConfigError`` if none can be cached."""
        sizes = [group.layout.block_size_tokens for group in question.groups]
        if not 0 < len(sizes) <= MAX_GROUPS or min(sizes) < 1:
            raise ConfigError(
                f"{len(sizes)} groups; there may be 1 to {MAX_GROUPS}, of whole blocks"
            )
        chunk_tokens = engine_chunk_tokens(self._config.chunk_size_tokens, sizes)
        model_name, forms = peer.hello.model_name, []
        for each in question.groups:
            form = form_of(each.layout, model_name, each.kv_rank, chunk_tokens, self._config)
            if form.fingerprint != each.fingerprint:
                raise ConfigError(
                    "engine and agent compute different fingerprints of one layout: "
                    "install the same lmcache-redis on both sides"
                )
            forms.append(form)
        if sum(map(self._cache.units, forms)) > self._cache.pool.capacity:
            chunk_bytes = sum(form.chunk_bytes for form in forms)
            raise ConfigError(
                f"a chunk of {chunk_bytes} bytes does not fit the host pool: "
                "start the agent with a larger --pool-bytes"
            )
        return chunk_tokens, tuple(forms)

    def unregister(self, peer: Peer, why: str) -> None:
        """Unmaps a worker's memory once its copies have ended. Does nothing if none is mapped."""
        registration, peer.registration = peer.registration, None
        if registration is None:
            return
        self._cache.metrics.count("unregistrations")
        logger.info("unregistered %s: %s", _name(peer), why)
        self._close(registration)

    def _close(self, registration: Registration) -> None:
        worker = (registration.engine_id, registration.worker_id)
        self._closing[worker] = self._closing.get(worker, 0) + 1

        closed = posting(self._cache.owner, partial(self._closed, worker))
        what = f"worker {registration.worker_id} of engine {registration.engine_id[:8]}"
        self._copies.close_memory(what, registration.device, closed)

    def _closed(self, worker: _Worker, outcome: CopyOutcome) -> None:
        if outcome is not CopyOutcome.DONE:
            return  # the mapping may still be open, so questions that wait for its end keep waiting
        self._closing[worker] -= 1
        if not self._closing[worker]:
            del self._closing[worker]
            for action in self._after_closing.pop(worker, ()):
                action()

    def _when_unmapped(self, peer: Peer, action: Callable[[], None]) -> None:
        worker = (peer.engine_id, peer.hello.worker_id)
        if worker in self._closing:
            self._after_closing.setdefault(worker, []).append(action)
        else:
            action()


def _name(peer: Peer) -> str:
    hello = peer.hello
    return f"worker {hello.worker_id} of engine {peer.engine_id[:8]} ({hello.model_name})"


def _sentence(form: ChunkForm) -> str:
    return (
        f"chunks of {form.chunk_bytes / 2**20:.1f} MiB (stripes: {form.stripe_count}, "
        f"reach: {form.reach.kind}), layout {form.fingerprint.hex()[:16]}"
    )

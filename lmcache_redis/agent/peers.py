# SPDX-License-Identifier: Apache-2.0
"""Whom the agent serves: its peers, the memory that workers have registered, and their trust.

There is one peer for each connection. It is forgotten when it sends GOODBYE, when its process has
ended, when its client connects again, or when it has been silent for too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CPU
from lmcache_redis.agent.uses import ModelUse, Tenants
from lmcache_redis.cache.pacing import Computing
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.device.calls import DeviceContext
from lmcache_redis.device.handles import CudaHandle
from lmcache_redis.processes import has_ended

# A worker registers right after its HELLO. The HELLOs of one engine arrive within this time of each
# other, because links retry their HELLO every half second. A KV cache is mapped within it, unless
# it is large or another process holds up the driver.
_JOIN_S = 2.0
# The step after a store produces the request's first token. If the engine computes on the agent's
# cores, writes to the tiers start after that step.
_FIRST_TOKEN_FIRST_S = 0.1
# Each is a label in Prometheus.
MAX_MODELS = 64
OTHER_MODELS = "(others)"
CANARIES_AGAIN = 100
_MOST_SAID = 1024

Reply = Callable[[m.Answer], None]


@dataclass(eq=False)
class Registration:
    """One worker whose memory is mapped, and how the parts of its chunks are named and cut.

    forms: of the parts of each group of layers, as `device.layouts`.
    """

    engine_id: str
    worker_id: int
    chunk_tokens: int
    forms: tuple[ChunkForm, ...]
    device: DeviceContext
    storages: tuple[m.StorageHandle, ...]

    @property
    def place(self) -> str:
        """Where its memory is; copies of different places do not wait for each other."""
        storage = self.storages[0]
        return storage.device_uuid if isinstance(storage, CudaHandle) else CPU

    @property
    def write_delay_s(self) -> float:
        """Until its chunks are written, if their writes would slow its engine down."""
        return _FIRST_TOKEN_FIRST_S if self.device.on_host_cores else 0.0


@dataclass(eq=False)
class Peer:
    """One connection that has sent HELLO."""

    identity: bytes
    hello: m.Hello
    greeted_s: float  # when it sent HELLO
    silent_s: float = 0.0  # since its last message, while the agent listened
    welcomed: bool = False  # it has sent a message since its HELLO, so it has received WELCOME
    registration: Registration | None = None
    holds_stores: bool = False  # of its engine
    mapping_from_s: float | None = None  # since when its registration is in progress
    after_mapping: list[Callable[[], None]] = field(default_factory=list)  # what waits for that
    elsewhere: frozenset[int] = frozenset()  # a scheduler's workers that have other agents
    warned: bool = False  # that its lookups miss because layouts differ
    computing: Computing = field(default_factory=Computing)  # what a scheduler's engine computes

    @property
    def engine_id(self) -> str:
        return self.hello.engine_id

    @property
    def mapping(self) -> bool:
        """Whether its registration is in progress."""
        return self.mapping_from_s is not None

    @property
    def joins_by_s(self) -> float:
        """When its registration has ended, or is not waited for any more."""
        return max(self.greeted_s, self.mapping_from_s or 0.0) + _JOIN_S

    @property
    def place(self) -> tuple[str, int | None, str]:
        """Engine, role and client."""
        return self.engine_id, self.hello.worker_id, self.hello.client_id

    def is_same(self, hello: m.Hello) -> bool:
        return msgspec.structs.replace(hello, call_id=self.hello.call_id) == self.hello

    def may_be_of(self, other: Peer) -> bool:
        """Whether both are of unnamed engines, which may be one."""
        mine, theirs = self.hello, other.hello
        return (
            mine.unnamed
            and theirs.unnamed
            and (mine.model_name, mine.world_size) == (theirs.model_name, theirs.world_size)
        )

    def process_gone(self) -> bool:
        """Whether a process whose memory is registered is known to have ended."""
        storages = self.registration.storages if self.registration is not None else ()
        owners = {(each.pid, each.pid_start_time) for each in storages}  # often one of all layers
        return any(has_ended(*owner) for owner in owners)


class Peers:
    """All peers, by the identity of their connection; and what each model and tenant has used.

    secret: see `tenants.shown`.
    mapping: registrations in progress, also of peers that have left since: their driver may hold up
    this process.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self.mapping = 0
        self._by_identity: dict[bytes, Peer] = {}
        self.models: dict[str, ModelUse] = {}
        self.tenants = Tenants(secret)

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._by_identity.values()))

    def get(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def add(self, peer: Peer) -> list[Peer]:
        """Adds a peer. Returns those it replaces: former connections of the same client."""
        replaced = [
            old
            for old in self
            if old.identity == peer.identity or (peer.engine_id and old.place == peer.place)
        ]
        for old in replaced:
            self.remove(old)
        self._by_identity[peer.identity] = peer
        return replaced

    def has_namesake(self, peer: Peer) -> bool:
        """Whether another client has the same engine and role."""
        own = peer.place
        return any(each.place[:2] == own[:2] and each.place != own for each in self)

    def remove(self, peer: Peer) -> None:
        if self._by_identity.get(peer.identity) is peer:
            del self._by_identity[peer.identity]

    def use_of(self, model_name: str) -> ModelUse:
        """The counts of a model; those of `OTHER_MODELS` for what comes after `MAX_MODELS`."""
        if model_name not in self.models and len(self.models) >= MAX_MODELS:
            model_name = OTHER_MODELS
        return self.models.setdefault(model_name, ModelUse())

    def uses_of(self, model_name: str, tenant: str) -> tuple[ModelUse, ...]:
        """All counts that are to be added to. tenant: as shown."""
        return self.use_of(model_name), *self.tenants.uses_of(tenant)

    @property
    def saved_prefill_s(self) -> float:
        return sum(use.saved_prefill_s for use in self.models.values())

    @property
    def registered(self) -> list[Registration]:
        return [each.registration for each in self if each.registration is not None]

    def ranks(self, scheduler: Peer) -> list[Registration] | None:
        """The registrations of the scheduler's engine by rank, without workers elsewhere.

        None if a worker is registered neither here nor elsewhere, or if layouts differ.
        """
        found = {each.worker_id: each for each in self.registrations(scheduler)}
        ranks = range(scheduler.hello.world_size)
        if any(rank not in found and rank not in scheduler.elsewhere for rank in ranks):
            return None
        return [found[rank] for rank in ranks if rank in found]

    def joined_by_s(self, scheduler: Peer) -> float:
        """Until when missing ranks of the scheduler's engine are waited for; 0.0: none is missing.

        They are for a moment after a rank's HELLO (or the scheduler's, if it has sent none), and
        after the agent has begun to map its memory.
        """
        missing = self._missing(scheduler)
        return min((max(p.joins_by_s for p in each) for each in missing), default=0.0)

    def is_mapping(self, scheduler: Peer) -> bool:
        """Whether memory of a missing rank of the scheduler's engine is being mapped."""
        return any(p.mapping for each in self._missing(scheduler) for p in each)

    def _missing(self, scheduler: Peer) -> list[list[Peer]]:
        """Of each rank that is registered neither here nor with another agent, who may be it."""
        workers = self._workers(scheduler)
        return [
            workers.get(rank, [scheduler])
            for rank in range(scheduler.hello.world_size)
            if rank not in scheduler.elsewhere
            and not any(p.registration for p in workers.get(rank, ()))
        ]

    def complete(self, worker: Peer) -> bool:
        """Whether its engine can hit: its scheduler is connected and every worker is registered.

        Workers with other agents count from the first lookup that names them.
        """
        return any(
            p.hello.worker_id is None
            and p.welcomed
            and (p.engine_id == worker.engine_id or p.may_be_of(worker))
            and self.ranks(p) is not None
            for p in self
        )

    def registrations(self, scheduler: Peer) -> list[Registration]:
        """One registration for each rank of the scheduler's engine; none if layouts differ."""
        differ = self.layouts_differ(scheduler)
        return [] if differ else [found[0] for found in self._registered(scheduler)]

    def layouts_differ(self, scheduler: Peer) -> bool:
        """Whether a rank may be one of several workers, with different layouts."""
        return any(
            len({tuple((f.kv_rank, f.fingerprint) for f in each.forms) for each in found}) > 1
            for found in self._registered(scheduler)
        )

    def hold_stores(self, worker: Peer) -> bool:
        """Whether a worker of the same engine holds the stores of all of them."""
        return any(
            each.holds_stores and (each.engine_id == worker.engine_id or each.may_be_of(worker))
            for each in self._by_identity.values()
        )

    def engines_of(self, worker: Peer) -> list[str]:
        """The ids of the engines whose sessions the worker's transfers may belong to."""
        own, found = worker.engine_id, []
        if worker.hello.unnamed:
            schedulers = (p for p in self if p.hello.worker_id is None and p.may_be_of(worker))
            found = [p.engine_id for p in schedulers]
        return [own] if own in found else [*found, own]

    def _registered(self, scheduler: Peer) -> list[list[Registration]]:
        return [
            found
            for workers in self._workers(scheduler).values()
            if (found := [p.registration for p in workers if p.registration is not None])
        ]

    def _workers(self, scheduler: Peer) -> dict[int, list[Peer]]:
        """The workers of the scheduler's engine by rank; several where any of them may be its."""
        own: dict[int, list[Peer]] = {}
        others: dict[int, list[Peer]] = {}
        for peer in self._by_identity.values():
            rank = peer.hello.worker_id
            if rank is None:
                continue
            if peer.engine_id == scheduler.engine_id:
                own.setdefault(rank, []).append(peer)
            elif peer.may_be_of(scheduler):
                others.setdefault(rank, []).append(peer)
        return others | own


class LayoutTrust:
    """Whether what is cached may be loaded: what canaries have found, by layout and epoch.

    A layout is distrusted in the epoch in which a canary has found other KV than was cached. It is
    trusted again after `CANARIES_AGAIN` canaries in a row without a difference, or when an operator
    says so (`lmcache-redis trust`). A new process knows nothing of what the former one has found.

    chunk_hash: of any chunk of the epoch.
    """

    def __init__(self) -> None:
        # By fingerprint and epoch, of those distrusted: canaries in a row without a difference.
        self._agreed: dict[tuple[bytes, bytes], int] = {}
        self._said: set[bytes] = set()  # layouts of which chunks with media have differed

    def allows(self, fingerprints: Iterable[bytes], chunk_hash: bytes) -> bool:
        if not self._agreed:
            return True
        epoch = epoch_of(chunk_hash)
        return all((each, epoch) not in self._agreed for each in fingerprints)

    def differed(self, fingerprint: bytes, chunk_hash: bytes) -> bool:
        """A canary has found a difference. Returns whether the layout was trusted before."""
        found = (fingerprint, epoch_of(chunk_hash))
        was_trusted = found not in self._agreed
        self._agreed[found] = 0
        return was_trusted

    def differed_by_name(self, fingerprint: bytes) -> bool:
        """A canary has found a difference under a name that clients may have given.

        Returns whether it is the first of the layout.
        """
        is_first = fingerprint not in self._said and len(self._said) < _MOST_SAID
        if is_first:
            self._said.add(fingerprint)
        return is_first

    def agreed(self, fingerprint: bytes, chunk_hash: bytes) -> bool:
        """A canary has found none. Returns whether the layout is trusted from now on."""
        found = (fingerprint, epoch_of(chunk_hash))
        if found not in self._agreed:
            return False
        self._agreed[found] += 1
        if self._agreed[found] < CANARIES_AGAIN:
            return False
        del self._agreed[found]
        return True

    def restore(self) -> int:
        count = len(self._agreed)
        self._agreed.clear()
        return count

    def report(self) -> list[dict[str, Any]]:
        return [
            {"layout": fingerprint.hex(), "epoch": epoch.hex(), "agreed": count}
            for (fingerprint, epoch), count in self._agreed.items()
        ]


def epoch_of(chunk_hash: bytes) -> bytes:
    """What a name begins with, before its adapter's digest and its block hash."""
    rest = len(chunk_hash) - m.EPOCH_BYTES
    return chunk_hash[: m.EPOCH_BYTES] if rest in m.HASH_BYTES_OF_AN_EPOCH else b""

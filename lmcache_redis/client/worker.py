# SPDX-License-Identifier: Apache-2.0
"""The worker's client: registers its paged KV cache once, then sends only block ids.

The engine may reuse the blocks of a store or a retrieve when that is ``over``. The docstring of
`messages` gives the reasons (Leases). A call that never reached the agent (lost, not ``sent``)
holds no blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from lmcache_redis import __version__
from lmcache_redis import messages as m
from lmcache_redis.chunks.names import engine_chunk_tokens
from lmcache_redis.client.link import AgentCall, AgentLink
from lmcache_redis.client.registering import CacheGroup, ExportedMemory, SentRegistration
from lmcache_redis.client.scheduler import RankPlace
from lmcache_redis.device import export
from lmcache_redis.device.handles import CudaFdHandle
from lmcache_redis.errors import DeviceError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.lmcache_redis")

STORE_LEASE_S = 1.5
# A store from a GPU waits for the queued work of that GPU: the step that computes the blocks.
STEP_S = 5.0
# A retrieve also has the time that its bytes take at this rate: the agent may have to load them.
RETRIEVE_LEASE_S = 5.0
LEAST_RETRIEVE_RATE = 100e6
# In the place of a ticket that could not be recorded: what comes after it is lost at once.
NEVER = 0


@dataclass(frozen=True)
class TransferOp:
    """Parts of chunks of one request, and the blocks to store or to load them.

    block_ids: ids of paged blocks in token order, equally many for each chunk: all of its blocks,
        or the last ones if the group's parts hold no more (`Reach.blocks_per_part`).
    skip_blocks: a load does not write this many of the first, because other requests may be reading
        them.
    client_named: of a comparison, see `messages.Compare`.
    tenant: of the request, see `tenants`.
    """

    block_ids: Sequence[int]
    hashes: Sequence[bytes]
    skip_blocks: int = 0
    group: int = 0
    client_named: int = 0
    tenant: str = ""

    @property
    def blocks_per_part(self) -> int:
        """Blocks of each chunk's part; 1 for an operation without chunks."""
        return max(1, len(self.block_ids) // max(1, len(self.hashes)))

    def share(self, number: int, of: int) -> TransferOp:
        """What replica ``number`` stores of ``of``: every chunk belongs to one, by its hash."""
        if of == 1:
            return self
        size = self.blocks_per_part
        mine = [n for n, name in enumerate(self.hashes) if name[-1] % of == number]
        return replace(
            self,
            block_ids=[block for n in mine for block in self.block_ids[n * size : (n + 1) * size]],
            hashes=[self.hashes[n] for n in mine],
        )


@dataclass(slots=True, eq=False)
class BlockTransfer:
    """An operation, the call that carries it, and its deadline on CLOCK_MONOTONIC.

    registration: the last one when the call had been sent, with the agent that got it.
    """

    call: AgentCall
    op: TransferOp
    lease_ns: int
    registration: SentRegistration | None

    @property
    def chunks(self) -> int:
        return len(self.op.hashes)

    @property
    def ended(self) -> bool:
        """Whether it is answered, or lost and no agent can be executing it."""
        if not self.call.lost or not self.call.sent:
            return self.call.done
        return self.registration is not None and self.registration.agent_has_ended()


@dataclass(slots=True, eq=False)
class StoreTransfer(BlockTransfer):
    """The agent reads the blocks."""

    @property
    def over(self) -> bool:
        """Whether the agent no longer needs the blocks."""
        return time.monotonic_ns() > self.lease_ns or self.ended

    @property
    def result(self) -> m.StoreResult:
        """The agent's answer; without one, all chunks count as dropped."""
        answer = self.call.answer
        return answer if isinstance(answer, m.StoreResult) else m.StoreResult(0, 0, 0, self.chunks)


@dataclass(slots=True, eq=False)
class RetrieveTransfer(BlockTransfer):
    """The agent writes the blocks, except those to skip.

    remapped: whether the agent has mapped the engine's memory again since the call.
    """

    remapped: Callable[[], bool]

    @property
    def over(self) -> bool:
        """Whether the agent can no longer write to the blocks."""
        return self.ended or (self.call.lost and self.remapped())

    @property
    def given_up(self) -> bool:
        """Whether the load counts as failed, although its blocks may still be written."""
        is_late = not self.call.done and time.monotonic_ns() > self.lease_ns
        return is_late or self.call.lost

    @property
    def failed_chunks(self) -> Sequence[int]:
        """Indices of the operation's chunks that were not loaded."""
        answer, chunks = self.call.answer, range(self.chunks)
        # An answer that names what was not asked for is not of this operation.
        if isinstance(answer, m.RetrieveResult) and all(n in chunks for n in answer.failed_chunks):
            return answer.failed_chunks
        return chunks

    @property
    def failed_blocks(self) -> set[int]:
        """Ids of the blocks that the retrieve should have written and did not."""
        size = self.op.blocks_per_part
        return {
            self.op.block_ids[block]
            for index in self.failed_chunks
            for block in range(max(self.op.skip_blocks, index * size), (index + 1) * size)
        }


class WorkerClient:
    """Stores and retrieves the blocks of one worker through the agent of its node.

    endpoint, model_name, world_size, engine_id, unnamed: as for `SchedulerClient`.
    worker_id: this worker's rank in the world.
    speaks: as for `AgentLink`; not on the node of the engine's scheduler.
    block_size_tokens: tokens of one paged block.
    on_registered: called on the link's thread when an agent has mapped the memory; must not block.
    """

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        world_size: int,
        worker_id: int,
        block_size_tokens: int,
        *,
        engine_id: str,
        unnamed: bool = False,
        agent_dead_after_s: float = 1.5,
        speaks: bool = True,
        on_registered: Callable[[SentRegistration], None] | None = None,
    ) -> None:
        self._when_registered = on_registered
        self._world_size = world_size
        self._worker_id = worker_id
        self._block_size_tokens = block_size_tokens
        self._memory = ExportedMemory()
        self._registration: SentRegistration | None = None  # the last one
        self._unregistering: AgentCall | None = None
        self._mapped = 0  # number of the last registration that an agent has completed
        # Registrations are sent by the caller's thread and by the link's. The agent must get the
        # last one last.
        self._sending = threading.Lock()
        self.link = AgentLink(
            endpoint,
            m.Hello(0, engine_id, model_name, world_size, worker_id, __version__, unnamed),
            dead_after_s=agent_dead_after_s,
            on_welcome=self._welcomed,
            speaks=speaks,
        )

    # Registration

    def register_groups(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int,
        identity: Mapping[str, str],
        block_strides: Mapping[str, int] | None = None,
    ) -> None:
        """Exports the paged KV cache and registers it, now and with every later agent.

        groups: their numbers are their positions. One dimension of every tensor is ``num_blocks``
            long. CPU tensors move into shared memory, in place.
        identity: everything else that decides the bytes of a chunk (model revision, backend, ...).
        block_strides: bytes between blocks, by tensor, if the engine knows them.
        Raises ``DeviceError`` if the memory cannot be exported, or its GPU cannot signal.
        """
        memory = ExportedMemory.of(groups, num_blocks, identity, block_strides)
        with self._sending:
            former, self._memory, self._unregistering = self._memory, memory, None
        export.withdraw(former.storages)
        self._register()

    @property
    def ready(self) -> bool:
        """Whether an agent has mapped this worker's memory and is alive."""
        return self.place is not None

    @property
    def place(self) -> RankPlace | None:
        """The agent that has mapped this worker's memory; None while it is not `ready`."""
        # In this order, because the link stores a new agent's WELCOME before it is online again.
        of_now = self._registration_of_now() if self.link.online else None
        return of_now.place if of_now is not None and of_now.is_mapped else None

    def _registration_of_now(self) -> SentRegistration | None:
        """That of the memory with the agent that has said WELCOME last; None: it was not sent."""
        last = self._registration
        if last is None or last.memory is not self._memory or last.welcome is not self.link.welcome:
            return None
        return last

    @property
    def on_cuda(self) -> bool:
        return self._memory.signals is not None

    def num_blocks_per_chunk(self) -> int:
        """Paged blocks of one chunk; 0 before the first WELCOME."""
        welcome = self.link.welcome
        return 0 if welcome is None else self._chunk_tokens(welcome) // self._block_size_tokens

    def _chunk_tokens(self, welcome: m.Welcome) -> int:
        sizes = [layout.block_size_tokens for layout in self._memory.layouts]
        return engine_chunk_tokens(welcome.chunk_size_tokens, sizes or [self._block_size_tokens])

    def _welcomed(self, welcome: m.Welcome) -> str | None:
        """Called for each WELCOME. Returns why the agent cannot be used, if it cannot."""
        self._register()
        return None

    def _register(self) -> None:
        """Registers the memory with the agent that has said WELCOME last, once with each."""
        with self._sending:
            # Without layouts there may be no link yet.
            if self._memory.layouts and self.link.welcome and self._registration_of_now() is None:
                self._send_registration(self.link.welcome)

    def _send_registration(self, welcome: m.Welcome) -> None:
        memory, chunk_tokens = self._memory, self._chunk_tokens(welcome)
        groups = memory.named(self._worker_id, self._world_size, chunk_tokens)
        parts = tuple(
            m.RemoteParts(self._worker_id, group.kv_rank, group.fingerprint, group.layout.reach)
            for group in groups
        )
        place = RankPlace(welcome.agent_id, parts)
        registration = SentRegistration(memory, welcome, place, chunk_tokens)
        self._registration = registration  # before it is sent: what follows it is of this agent
        if not registration.agent_is_visible:
            registration.refuse(
                "the agent cannot be used: its process is not visible from the engine, which "
                "could not notice its end; let both share one PID namespace "
                "(docker run --pid=container:NAME, shareProcessNamespace in Kubernetes)",
            )
            return
        if any(isinstance(each, CudaFdHandle) for each in memory.storages):
            export.permit(welcome.agent_pid)
        self.link.submit(
            m.RegisterKVCache,
            partial(self._on_registered, registration),
            groups=groups,
            storages=memory.storages,
            signals=None if memory.signals is None else memory.signals.handle,
        )

    def _on_registered(self, registration: SentRegistration, call: AgentCall) -> None:
        if isinstance(call.answer, m.Done):
            self._mapped = registration.number
            registration.is_mapped = True
            if self._when_registered is not None:
                self._when_registered(registration)
        elif isinstance(call.answer, m.Failure):
            refusal = f"the agent refused the KV cache: {call.answer.reason}"
            if call.answer.code == m.UNKNOWN_PEER:
                logger.error("%s", refusal)  # the link says HELLO again, and it is sent again
            else:
                registration.refuse(refusal)

    # Transfers

    def signal(self, event: torch.cuda.Event | None = None) -> int | None:
        """A ticket for what is queued by now on torch's current stream; None on the CPU.

        event: the stream waits for it first. `NEVER` if the GPU hangs or is lost, which is logged:
        then nothing is stored and no load succeeds.
        """
        signals = self._memory.signals
        if signals is None:
            return None
        stream = export.current_stream(signals.gpu)
        if event is not None:
            event.wait(stream)
        try:
            return signals.record(stream.cuda_stream)
        except DeviceError as error:
            logger.error("stores are dropped and loads fail: %s", error)
            return NEVER

    def begin_stores(
        self,
        request_ids: Sequence[str],
        ops: Sequence[TransferOp],
        after: int | None = None,
        *,
        compare: bool = False,
    ) -> list[StoreTransfer]:
        """Starts a store of each op's chunks for its request, all in one message.

        after: of `signal`; the agent uses the blocks when the GPU has come to it.
        compare: the agent compares the blocks with what it has, and stores nothing. Each replica
            compares all chunks, because its own bytes may be wrong.
        Raises ``ValueError``, and starts none, for lists of different lengths.
        """
        if self._memory.groups and not compare:
            ops = [op.share(*self._memory.groups[op.group].replica) for op in ops]
        lease_ns = _lease(STORE_LEASE_S if after is None else STEP_S + STORE_LEASE_S)
        questions: list[m.Store] = []
        for name, op in zip(request_ids, ops, strict=True):
            hashes, block_ids = tuple(op.hashes), tuple(op.block_ids)
            of_op = name, hashes, block_ids, lease_ns, after, op.group, op.tenant
            named = op.client_named
            questions.append(m.Compare(0, *of_op, named) if compare else m.Store(0, *of_op))
        calls = self._submit(questions)
        return [
            StoreTransfer(call, op, lease_ns, self._registration)
            for call, op in zip(calls, ops, strict=True)
        ]

    def begin_retrieves(
        self,
        request_ids: Sequence[str],
        ops: Sequence[TransferOp],
        after: int | None = None,
        *,
        lease_ns: int | None = None,
    ) -> list[RetrieveTransfer]:
        """As `begin_stores`: loads chunks that lookups have pinned into the ops' blocks.

        lease_ns: the end of the lease; None: by the bytes of each op.
        """
        leases = [
            lease_ns or _lease(RETRIEVE_LEASE_S + self._nbytes(op) / LEAST_RETRIEVE_RATE)
            for op in ops
        ]
        calls = self._submit(
            [
                m.Retrieve(
                    0, name, tuple(op.hashes), tuple(op.block_ids),
                    op.skip_blocks * self._block_tokens(op), lease_ns, after, op.group, op.tenant,
                )
                for name, op, lease_ns in zip(request_ids, ops, leases, strict=True)
            ]
        )  # fmt: skip
        last = self._registration
        number = 0 if last is None else last.number
        return [
            RetrieveTransfer(call, op, lease_ns, last, lambda: self._mapped > number)
            for call, op, lease_ns in zip(calls, ops, leases, strict=True)
        ]

    def hold_stores(self, held: bool) -> AgentCall:
        """Has the agent refuse the stores of all workers of this engine, or take them again."""
        return self.link.submit(m.HoldStores, held=held)

    def unregister(self, wait_s: float = 0.0) -> bool:
        """Unregisters the memory; whether it is certain that no agent accesses it any more."""
        with self._sending:
            former, self._memory = self._memory, ExportedMemory()
            call = self._unregistering
            if (call is None or call.lost) and self.link.online:
                call = self._unregistering = self.link.submit(m.UnregisterKVCache)
        closed = call is not None and call.wait(wait_s) and isinstance(call.answer, m.Done)
        export.withdraw(former.storages)
        last = self._registration
        return closed or last is None or last.agent_has_ended()

    def shutdown(self) -> bool:
        """Unregisters the memory within a second, as `unregister`, and closes the connection."""
        closed = self.unregister(1.0)
        self.link.close()
        return closed

    def _submit(self, questions: Sequence[m.Store | m.Retrieve]) -> list[AgentCall]:
        """Sends the questions. They are lost if they come after `NEVER`, or without memory."""
        if not self._memory.layouts or any(each.after == NEVER for each in questions):
            return self.link.lost(len(questions))
        return self.link.submit_all(questions)

    def _nbytes(self, op: TransferOp) -> int:
        layouts = self._memory.layouts
        return layouts[op.group].block_bytes * len(op.block_ids) if layouts else 0

    def _block_tokens(self, op: TransferOp) -> int:
        groups = self._memory.groups
        return groups[op.group].block_size_tokens if groups else self._block_size_tokens


def _lease(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)

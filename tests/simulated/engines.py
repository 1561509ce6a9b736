# SPDX-License-Identifier: Apache-2.0
"""Simulated engines: they send what real ones send, and not always in a reasonable order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.agent.registering import form_of
from lmcache_redis.chunks.names import ChunkForm, Reach
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.handles import CudaIPCHandle, SharedMemoryHandle
from lmcache_redis.device.layout import KVLayout, Pages, Segment
from tests.harness import block_hashes
from tests.simulated.copies import Memory
from tests.simulated.world import Resume, Story, Wait, World

CHUNK_TOKENS = 16
BLOCK_TOKENS = 8
BLOCKS_A_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS
_BLOCKS = 40
_MESSAGE_S = 0.0003
_HELLO_S = 0.5
_PING_S = 4.0


class Model(NamedTuple):
    """groups: the bytes of a page, and the reach. shares: ranks hold equal bytes. elsewhere: the
    last rank is another agent's.
    """

    name: str
    groups: Sequence[tuple[int, Reach]]
    ranks: int = 1
    shares: bool = False
    elsewhere: bool = False
    device: str = "cpu"


FULL, WINDOW, STATE = Reach(), Reach("window", 12), Reach("state")
MODELS = [
    Model("one", [(3072, FULL)]),
    Model("one", [(1536, FULL)]),
    Model("gpu", [(3072, FULL)], device="cuda"),
    Model("two", [(1024, FULL)], ranks=2, device="cuda"),
    Model("equal", [(1536, FULL)], ranks=2, shares=True),
    Model("window", [(1024, FULL), (512, WINDOW)], ranks=2),
    Model("state", [(2048, STATE), (1024, FULL)], device="cuda"),
    Model("nodes", [(1024, FULL), (512, WINDOW)], ranks=2, elsewhere=True),
]
PROMPTS = [block_hashes(f"prompt {number // 2}", 3 + number % 5) for number in range(12)]


def layout_of(model: Model, rank: int, group: int) -> KVLayout:
    page_bytes, reach = model.groups[group]
    return KVLayout(
        identity=(("model", model.name), ("group", str(group))),
        dtype="float16",
        device=model.device,
        block_size_tokens=BLOCK_TOKENS,
        num_blocks=_BLOCKS,
        segments=(Segment(0, 0, page_bytes, page_bytes),),
        reach=reach,
        pages=(Pages((1,), "float16", (page_bytes // 2,)),),
    )


class _Call(NamedTuple):
    question: m.Message
    told: Resume
    asked_s: float


class Link:
    """One connection of an engine, that is made again when it is lost.

    worker_id: None: of the scheduler.
    """

    def __init__(self, engine: Engine, worker_id: int | None) -> None:
        self.worker_id = worker_id
        self.is_ready = self.is_registered = False
        self.open: dict[int, _Call] = {}
        self.engine_id = engine.engine_id
        if engine.is_unnamed and worker_id is not None:
            self.engine_id += f", made up by {worker_id}"
        self._engine, self._world = engine, engine.world
        self._identity = b""
        self._calls = itertools.count(1)
        self._there_s = self._here_s = 0.0  # of the last message, which none overtakes
        self._connect()

    def ask(self, question: m.Message, told: Resume) -> None:
        """told: the answer; None: it was lost."""
        call_id = next(self._calls)
        self.open[call_id] = _Call(question, told, self._world.now_s)
        self._send(msgspec.structs.replace(question, call_id=call_id))

    def tell(self, question: m.Message) -> None:
        self._send(msgspec.structs.replace(question, call_id=next(self._calls)))

    def _send(self, message: m.Message) -> None:
        self.send_frames(transport.encode(message))

    def send_frames(self, frames: list[bytes]) -> None:
        identity, world = self._identity, self._world
        sent_s = max(world.now_s, self._engine.silent_until_s)
        self._there_s = max(self._there_s, sent_s + world.soon(_MESSAGE_S))

        def arrive() -> None:
            if self._engine.cluster.links.get(identity) is self:
                self._engine.cluster.host.inbox.append([identity, *frames])

        world.at(self._there_s, arrive)

    def answered(self, answer: m.Message) -> None:
        """The agent has sent an answer."""
        world, call = self._world, self.open.get(answer.call_id)
        world.note(self._identity, type(answer).__name__, answer.call_id, _told(answer))
        if call is not None:
            self._engine.check(call.question, answer, world.now_s - call.asked_s)
        self._here_s = max(self._here_s, world.now_s + world.soon(_MESSAGE_S))
        world.at(self._here_s, partial(self._receive, self._identity, answer))

    def _receive(self, identity: bytes, answer: m.Message) -> None:
        if self._engine.is_gone or identity != self._identity:
            return
        if isinstance(answer, m.Failure) and answer.code == m.UNKNOWN_PEER and self.is_ready:
            self.is_ready = False
            self._engine.excuse()
            self._greet()
        call = self.open.pop(answer.call_id, None)
        if call is not None:
            call.told(answer)
        elif not isinstance(answer, m.Failure):  # what is told only may be refused
            self._world.violated(f"an answer to no question: {answer}")

    def lost(self) -> None:
        """The agent's process has ended."""
        self._engine.cluster.links.pop(self._identity, None)
        calls, self.open, self.is_ready = self.open, {}, False
        self.is_registered = False
        if not self._engine.is_gone:
            self._connect()
            for call in calls.values():
                call.told(None)

    def close(self) -> None:
        self._engine.cluster.links.pop(self._identity, None)
        self.open.clear()

    def _connect(self) -> None:
        self._identity = b"link %d" % next(self._engine.cluster.numbers)
        self._engine.cluster.links[self._identity] = self
        self._greet()

    def _greet(self) -> None:
        identity, engine = self._identity, self._engine

        def again() -> None:
            if not (self.is_ready or engine.is_gone) and self._identity == identity:
                hello = m.Hello(
                    0, self.engine_id, engine.model.name, engine.model.ranks,
                    self.worker_id, "0", engine.is_unnamed, engine.client_id,
                )  # fmt: skip
                self.ask(hello, welcomed)
                self._world.after(_HELLO_S, again)

        def welcomed(answer: Any) -> None:
            if isinstance(answer, m.Welcome) and not self.is_ready:
                self.is_ready = True
                if self.worker_id is not None:
                    engine.register(self)
                self._ping(identity)

        self._world.after(self._world.soon(0.05), again)

    def _ping(self, identity: bytes) -> None:
        if self.is_ready and not self._engine.is_gone and self._identity == identity:
            self.ask(m.Ping(0), lambda answer: None)
            self._world.after(_PING_S, lambda: self._ping(identity))


def _told(answer: m.Message) -> object:
    """What a trace has of an answer: no names that are made up."""
    if isinstance(answer, m.Welcome | m.StatusReport | m.Pong):
        return None
    return msgspec.to_builtins(answer)


@dataclass(eq=False)
class Request:
    """excused: why what was promised to it may fail; empty: it may not."""

    name: str
    hashes: tuple[bytes, ...] = field(repr=False)
    excused: str = ""

    def excuse(self, why: str) -> None:
        self.excused = self.excused or why


class Engine:
    """One engine, until its processes have ended.

    cluster: has the host, the links and the numbers.

    Attributes:
        silent_until_s: its processes are stopped: what they send arrives later.
    """

    def __init__(self, cluster: Any, model: Model, engine_id: str, config: AgentConfig) -> None:
        self.world: World = cluster.world
        self.cluster, self.model, self.engine_id = cluster, model, engine_id
        self.is_gone = False
        self.silent_until_s = 0.0
        self.is_unnamed = not model.elsewhere and self.world.chance(cluster.unnamed)
        self.pid = 1_000_000 + next(cluster.numbers)
        self.client_id = f"client {self.pid}"
        self.epoch = b""
        self.requests: dict[str, Request] = {}
        self._config = config
        self._numbers = itertools.count()
        here = range(model.ranks - model.elsewhere)
        groups = range(len(model.groups))
        every = [[layout_of(model, rank, group) for group in groups] for rank in range(model.ranks)]
        self.forms: list[list[ChunkForm]] = [
            [
                form_of(layout, model.name, self._kv_rank(rank), CHUNK_TOKENS, config)
                for layout in layouts
            ]
            for rank, layouts in enumerate(every)
        ]
        self.memories = [Memory(every[rank]) for rank in here]
        for number, memory in enumerate(self.memories):
            cluster.memories[self.pid * 8 + number] = memory
        self.scheduler = Link(self, None)
        self.workers = [Link(self, rank) for rank in here]
        self.token_s = self.world.random.choice([0.0, 0.0, 2e-4, 2e-3])

    def _kv_rank(self, rank: int) -> int:
        return 0 if self.model.shares else rank

    @property
    def links(self) -> list[Link]:
        return [self.scheduler, *self.workers]

    def end(self, says_goodbye: bool) -> None:
        """Its processes end."""
        if says_goodbye:
            for link in self.links:
                link.tell(m.Goodbye(0))
        self.world.after(0.05 if says_goodbye else 0.0, self._gone)
        self.excuse()

    def _gone(self) -> None:
        self.is_gone = True
        self.cluster.dead.add(self.pid)
        for memory in self.memories:
            memory.is_gone = True
        for link in self.links:
            link.close()

    def excuse(self, why: str = "its link was lost") -> None:
        for request in self.requests.values():
            request.excuse(why)

    def register(self, link: Link) -> None:
        rank, memory = link.worker_id or 0, self.memories[link.worker_id or 0]
        link.is_registered = False
        self.excuse("its worker registers again")
        sizes = sum(each.num_blocks * each.block_bytes for each in memory.layouts)
        number = self.pid * 8 + rank
        storage: m.StorageHandle = SharedMemoryHandle(self.pid, 1, 3, 0, number, sizes)
        if self.model.device == "cuda":
            name = number.to_bytes(8, "big")
            storage = CudaIPCHandle(self.pid, 1, f"GPU {rank}", name, sizes, 0, sizes)
        groups = tuple(
            m.KVGroup(self._kv_rank(rank), layout, form.fingerprint)
            for layout, form in zip(memory.layouts, self.forms[rank], strict=True)
        )

        def again() -> None:
            if link.is_ready and not self.is_gone:
                self.register(link)

        def told(answer: Any) -> None:
            if isinstance(answer, m.Done):
                link.is_registered = True
                for awaited in memory.awaited:
                    awaited.clear()  # every copy through the former mapping has ended
            elif isinstance(answer, m.Failure) and answer.code == m.REFUSED:
                self.world.after(1.0, again)

        link.ask(m.RegisterKVCache(0, groups, (storage,)), told)

    def unregister(self, link: Link, told: Resume) -> None:
        link.is_registered = False
        self.excuse("its worker unregisters")
        link.ask(m.UnregisterKVCache(0), told)

    def new_epoch(self) -> None:
        """Its chunks are cleared, and its next ones have other names."""
        self.excuse("its chunks are cleared")
        if self.epoch:
            self.scheduler.ask(m.Clear(0, self.epoch), lambda answer: None)
        self.epoch = self.world.random.randbytes(m.EPOCH_BYTES)

    def check(self, question: m.Message, answer: m.Message, took_s: float) -> None:
        """An answer is sent: whether it may be."""
        violated = self.world.violated
        if isinstance(answer, m.Failure):
            return
        if isinstance(question, m.Clear):
            self.cluster.excuse_all("chunks are cleared")
        if isinstance(question, m.Lookup) and isinstance(answer, m.LookupResult):
            is_late = self.silent_until_s > self.world.now_s - 2 * took_s
            hit = answer.hit_chunks
            if hit > len(question.hashes) or len(answer.tiers) != hit:
                violated(f"{answer} to {len(question.hashes)} chunks")
            if took_s > self._config.lookup_deadline_s + 0.1 and not is_late:
                violated(f"a lookup took {took_s:.3f} s")
        elif isinstance(question, m.Store) and isinstance(answer, m.StoreResult):
            count = answer.stored + answer.already_cached + answer.dropped
            if count != len(question.hashes):
                violated(f"{answer} to {len(question.hashes)} chunks")

    # What it asks for

    def ask(self, link: Link, question: m.Message) -> Wait:
        return partial(link.ask, question)

    def start(self, story: Story) -> None:
        """Runs a story until it waits for what does not come any more."""

        def resume(value: Any = None) -> None:
            if not self.is_gone:
                try:
                    wait = story.send(value)
                except StopIteration:
                    return
                wait(resume)

        resume()


def all_of(waits: Sequence[Wait]) -> Wait:
    """What comes of each."""

    def wait(resume: Resume) -> None:
        found: dict[int, Any] = {}

        def one(number: int, value: Any) -> None:
            found[number] = value
            if len(found) == len(waits):
                resume([found[each] for each in range(len(waits))])

        for number, each in enumerate(waits):
            each(partial(one, number))

    return wait


def first_of(waits: Sequence[Wait]) -> Wait:
    """What comes first."""

    def wait(resume: Resume) -> None:
        is_over = False

        def one(value: Any) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                resume(value)

        for each in waits:
            each(one)

    return wait


def memory_number(handle: Any) -> int:
    """Of a registered handle."""
    if isinstance(handle, CudaIPCHandle):
        return int.from_bytes(handle.memory_handle, "big")
    return int(handle.inode)

# SPDX-License-Identifier: Apache-2.0
"""What a simulated engine does for one request, from its lookup to its end.

Its blocks hold what the names of its chunks say, and are scribbled over as soon as they may be.
What was promised and not loaded is a violation, unless something has happened to the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from lmcache_redis import messages as m
from lmcache_redis import transport
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.chunks.names import Reach
from lmcache_redis.objects.cache import HeapMemory
from lmcache_redis.tiers import ChunkIO
from tests.simulated.copies import Memory
from tests.simulated.engines import (
    BLOCK_TOKENS,
    BLOCKS_A_CHUNK,
    CHUNK_TOKENS,
    PROMPTS,
    Engine,
    Link,
    Request,
    all_of,
    first_of,
)
from tests.simulated.world import Resume, Story, Wait, content, scribble

_COMPUTE_S = 0.02


class _Held(NamedTuple):
    """The blocks of a run of chunks of one worker and group."""

    link: Link
    memory: Memory
    rank: int
    group: int
    chunks: Sequence[int]
    block_ids: list[int]

    @property
    def per_chunk(self) -> int:
        return len(self.block_ids) // len(self.chunks)


class Asking:
    """The story of one request."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._world = engine, engine.world
        choose = self._world.random
        hashes = choose.choice(engine.cluster.prompts)
        count = choose.randint(1, len(hashes))
        self._request = Request(name, tuple(engine.epoch + each for each in hashes[:count]))
        self._first = choose.choice([0, 0, 0, min(1, count - 1), count - 1])
        self._after = 1 if engine.model.device == "cuda" else None
        self._tenant = choose.choice(["", "name:a", "name:b"])

    def run(self) -> Story:
        engine, world, request = self._engine, self._world, self._request
        engine.requests[request.name] = request
        if world.now_s < engine.cluster.excused_until_s:
            request.excuse("chunks may be gone")
        if world.chance(0.15):  # it is aborted, or ended by mistake
            world.after(world.soon(0.05), self._abort)
        hit, compares, asked_s = 0, False, world.now_s
        if not world.chance(0.05):
            if world.chance(0.03):  # twice
                request.excuse("it has asked again")
                engine.scheduler.ask(self._question(), lambda answer: None)
            answer = yield partial(engine.scheduler.ask, self._question())
            if isinstance(answer, m.LookupResult):
                hit, compares = answer.hit_chunks, answer.compare_only
        end = self._first + hit
        if self._units(end) > engine.cluster.host.arena.capacity:
            request.excuse("it is larger than the pool")
        if hit and not request.excused:
            self._check_held(end)
        compares = compares or bool(
            hit and not self._first and world.chance(0.1 + engine.cluster.differing)
        )
        if world.chance(0.1):
            yield world.pause(world.random.uniform(0.0, 20.0))  # it is preempted
        if world.now_s - asked_s > 15.0:
            request.excuse("its session may have expired")
        if hit and not compares:
            yield from self._load(end)
        elif hit:
            yield world.pause(world.soon(_COMPUTE_S))
            yield from self._store(m.Compare, range(end))
        yield world.pause(world.soon(_COMPUTE_S))
        if not world.chance(0.1):
            first = 0 if world.chance(0.1) else end
            yield from self._store(m.Store, range(first, len(request.hashes)))
        if not world.chance(0.05):
            engine.scheduler.ask(m.EndSession(0, request.name), lambda answer: None)
        if world.chance(0.03):
            request.excuse("it has ended")
            yield from self._load(end)
        del engine.requests[request.name]

    def _check_held(self, end: int) -> None:
        """Every part of a hit is pinned for its worker."""
        engine, request = self._engine, self._request
        session = engine.cluster.host.agent.sessions.get((engine.engine_id, request.name))
        for rank in range(len(engine.workers)):
            for group, form in enumerate(engine.forms[rank]):
                for chunk in self._reached(form.reach, end):
                    held = session and session._pins.get(request.hashes[chunk], {})
                    if not held or (rank, group) not in held:
                        self._world.violated(f"chunk {chunk} is promised and not held: {request}")

    def _reached(self, reach: Reach, end: int) -> range:
        """The chunks whose parts a prefix needs behind the first ones."""
        return range(max(self._first, reach.first_chunk(end, CHUNK_TOKENS)), end)

    def _units(self, end: int) -> int:
        """That its hit takes."""
        here = self._engine.forms[: len(self._engine.workers)]
        forms = {form.stem(40): form for forms in here for form in forms}
        return sum(form.stripe_count * (end - self._first) for form in forms.values())

    def _question(self) -> m.Lookup:
        engine, request, first = self._engine, self._request, self._first
        remote = tuple(
            m.RemoteParts(rank, form.kv_rank, form.fingerprint, form.reach)
            for rank in range(len(engine.workers), engine.model.ranks)
            for form in engine.forms[rank]
        )
        return m.Lookup(
            0,
            request.name,
            request.hashes[first:],
            first,
            remote=remote,
            token_s=engine.token_s,
            busy_s=self._world.random.choice([0.0, 0.1]),
            before=request.hashes[:first],
            tenant=self._tenant,
        )

    def _abort(self) -> None:
        self._request.excuse("it was aborted")
        scheduler, name = self._engine.scheduler, self._request.name
        if self._engine.is_gone:
            return
        if self._world.chance(0.7):
            scheduler.ask(m.EndSession(0, name), lambda answer: None)
        else:
            scheduler.ask(m.ReleaseLocks(0, name, self._request.hashes), lambda answer: None)

    def _take(self, chunks: range, *, reaches: bool) -> list[_Held]:
        """Blocks of all workers and groups. reaches: only for what a prefix of these needs."""
        engine, held = self._engine, []
        for rank, (link, memory) in enumerate(zip(engine.workers, engine.memories, strict=True)):
            for group, form in enumerate(engine.forms[rank]):
                reach, some = form.reach, chunks
                if reaches:
                    some = self._reached(reach, chunks.stop)
                count = len(some) * reach.blocks_per_part(BLOCKS_A_CHUNK, BLOCK_TOKENS)
                if some and (block_ids := memory.take(group, count)) is not None:
                    self._world.random.shuffle(block_ids)
                    held.append(_Held(link, memory, rank, group, some, block_ids))
        return held

    def _parts(self, held: _Held) -> Iterable[tuple[int, list[int], list[bytes]]]:
        """Each chunk with its blocks, and what these are to contain."""
        form, count = self._engine.forms[held.rank][held.group], held.per_chunk
        nbytes = form.chunk_bytes // count
        for number, chunk in enumerate(held.chunks):
            data = content(form.key(self._request.hashes[chunk]), form.chunk_bytes)
            blocks = held.block_ids[number * count :][:count]
            yield chunk, blocks, [data[at * nbytes :][:nbytes] for at in range(count)]

    # Loads

    def _load(self, end: int) -> Story:
        world, engine = self._world, self._engine
        if self._first >= end or world.chance(0.05):
            return  # its pins are left to its end
        held = self._take(range(self._first, end), reaches=True)
        if not held:
            return
        lease_s = world.random.choice([0.02, 5.0, 30.0])
        if lease_s < 1.0:
            self._request.excuse("its lease is short")
        if world.chance(0.05):
            again = world.random.choice(held).link
            world.after(world.soon(0.003), partial(self._register_again, again))
        results = yield all_of([partial(self._retrieve, each, lease_s) for each in held])
        has_failed = any(getattr(each, "failed_chunks", ()) for each in results)
        if has_failed and world.chance(0.5):
            engine.scheduler.ask(m.HoldStores(0, True), lambda answer: None)
            yield world.pause(0.05)
            engine.scheduler.ask(m.HoldStores(0, False), lambda answer: None)
        for each, result in zip(held, results, strict=True):
            if result is None:
                yield world.pause(0.1)
            each.memory.awaited[each.group].difference_update(each.block_ids)
            each.memory.give_back(each.group, each.block_ids)

    def _register_again(self, link: Link) -> None:
        if link.is_registered and not self._engine.is_gone:
            self._engine.register(link)

    def _retrieve(self, held: _Held, lease_s: float, resume: Resume) -> None:
        world, memory, group = self._world, held.memory, held.group
        if not held.link.is_registered:
            resume(None)
            return
        lease_until_s, skips = world.now_s + lease_s, 0
        if held.chunks[0] == self._first and len(held.block_ids) > held.per_chunk == 2:
            skips = world.random.choice([0, 0, 1])
        for block in held.block_ids:
            scribble(memory.blocks[group][block])
        memory.awaited[group].update(held.block_ids[skips:])

        def told(answer: Any) -> None:
            if isinstance(answer, m.RetrieveResult):
                self._check(held, answer, skips, world.now_s > lease_until_s)
            resume(answer)

        question = m.Retrieve(
            0,
            self._request.name,
            tuple(self._request.hashes[each] for each in held.chunks),
            tuple(held.block_ids),
            skips * BLOCK_TOKENS,
            int(lease_until_s * 1e9),
            self._after,
            group,
            self._tenant,
        )
        held.link.ask(question, told)

    def _check(self, held: _Held, answer: m.RetrieveResult, skips: int, is_late: bool) -> None:
        memory, group = held.memory, held.group
        blank = b"\x5a" * len(memory.blocks[group][0])
        for number, (chunk, block_ids, wanted) in enumerate(self._parts(held)):
            found = [bytes(memory.blocks[group][each]) for each in block_ids]
            if number == 0 and skips:
                wanted = [blank] * skips + wanted[skips:]
            if number not in answer.failed_chunks:
                if found != wanted:
                    self._world.violated(f"chunk {chunk} of {self._request} is loaded wrong")
                continue
            has_failed = is_late or memory.failed[group].intersection(block_ids)
            if not (self._request.excused or has_failed):
                self._world.violated(
                    f"chunk {chunk} of rank {held.rank}, group {group} was promised and is not "
                    f"loaded: {self._request}"
                )

    # Stores

    def _store(self, kind: type[m.Store], chunks: range) -> Story:
        world, engine = self._world, self._engine
        held = self._take(chunks, reaches=False) if chunks else []
        if not held:
            return
        lease_s = world.random.choice([0.005, 0.05, 5.0, 30.0])
        differs = kind is m.Compare and lease_s < 10.0 and world.chance(engine.cluster.differing)
        if differs:
            engine.cluster.excuse_all("a canary has differed", lease_s + 1.0)
        for each in held:
            for _, block_ids, wanted in self._parts(each):
                for block, data in zip(block_ids, wanted, strict=True):
                    each.memory.blocks[each.group][block][:] = data
                    if differs:
                        scribble(each.memory.blocks[each.group][block])
        yield all_of([partial(self._ask_to_store, kind, each, lease_s) for each in held])
        if kind is m.Store:
            self._store_elsewhere(chunks)

    def _ask_to_store(
        self, kind: type[m.Store], held: _Held, lease_s: float, resume: Resume
    ) -> None:
        """Frees the blocks when the answer is there, or when the lease has expired."""
        world = self._world
        named: Any = {"client_named": world.random.choice([0, 0, 1])} if kind is m.Compare else {}
        question = kind(
            0,
            self._request.name,
            tuple(self._request.hashes[each] for each in held.chunks),
            tuple(held.block_ids),
            int((world.now_s + lease_s) * 1e9),
            self._after,
            held.group,
            self._tenant,
            **named,
        )

        def over(answer: Any) -> None:
            held.memory.give_back(held.group, held.block_ids)
            resume(answer)

        expired = world.pause(lease_s + 1e-6)
        first_of([partial(held.link.ask, question), expired])(over)

    def _store_elsewhere(self, chunks: range) -> None:
        """What another agent stores of its workers."""
        engine, redis = self._engine, self._engine.cluster.tiers[-1]
        for rank in range(len(engine.workers), engine.model.ranks):
            for form in engine.forms[rank]:
                for chunk in chunks:
                    redis.put(job_of(form, self._request.hashes[chunk], self._world.now_s + 1.0))


def job_of(form: Any, chunk_hash: bytes, deadline_s: float) -> ChunkIO:
    """The right bytes of a chunk."""
    frame: ChunkFrame = form.frame(chunk_hash)
    data = memoryview(content(form.key(chunk_hash), form.chunk_bytes))
    slots = HeapMemory().views(data, form.stripe_sizes)
    return ChunkIO(form.key(chunk_hash), frame, slots, deadline_s)


def watching(engine: Engine) -> Story:
    """A scheduler that asks what becomes of its chunks, again and again."""
    forms = [(rank, form) for rank, forms in enumerate(engine.forms) for form in forms]
    parts = tuple(m.RemoteParts(n, f.kv_rank, f.fingerprint, f.reach) for n, f in forms)
    while True:
        wait: Wait = partial(engine.scheduler.ask, m.Watch(0, parts))
        if not isinstance((yield wait), m.Changes):
            yield engine.world.pause(1.0)


def mischief(engine: Engine) -> None:
    """Messages that have to have no effect."""
    world = engine.world
    link = world.random.choice(engine.links)
    name, lease_ns = f"odd {next(engine.cluster.numbers)}", int((world.now_s + 1) * 1e9)
    hashes = PROMPTS[0][:2]
    what = world.random.randrange(5)
    if what == 0:
        frames = transport.encode(m.Ping(1))
        cut = world.random.randrange(len(frames[1]))
        link.send_frames([frames[0], frames[1][:cut] + world.random.randbytes(3)])
    elif what == 1:
        link.send_frames([m.MAGIC + b"\x00\x01", b""])
    elif what == 2:
        link.tell(m.Retrieve(0, name, tuple(hashes), (1, 2, 3, 1 << 30), 0, lease_ns, 1))
    elif what == 3:
        link.tell(m.Store(0, name, tuple(hashes), (0, 1, 2, 3), lease_ns, 1, group=7))
    else:
        link.tell(m.Lookup(0, name, (hashes[0], hashes[1][:5])))

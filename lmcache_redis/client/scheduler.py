# SPDX-License-Identifier: Apache-2.0
"""The scheduler's client: asks how many leading tokens of a prompt are cached.

And beside it, what it needs to know of an engine: where its workers are registered (`Ranks`), which
hits it compares instead of loading (`Canaries`), what comes and goes in the tiers (`ChunkWatch`).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lmcache_redis import __version__
from lmcache_redis import messages as m
from lmcache_redis.chunks.names import engine_chunk_tokens
from lmcache_redis.client.link import AgentCall, AgentLink

logger = logging.getLogger("vllm.lmcache_redis")

# A lookup is given up this long after the agent's own deadline.
_GRACE_S = 0.25
# An engine that steps reports every worker within this time.
_REPORTED_WITHIN_S = 2.0
# Of the prompt tokens that the engine computes, those of canaries.
CANARY_SHARE = 0.02
# Beside them, so that a new engine begins: about the prompts of ten chats.
FIRST_CANARY_TOKENS = 16_384
# Of an engine that shares across versions, the first hits that all are canaries.
FIRST_COMPARED = 16
_HELD_BACK = 0.25
_MISS = m.LookupResult(0, 0)
_LOST = m.Changes(0, (), lost=True)


@dataclass(frozen=True)
class RankPlace:
    """An agent that has mapped a worker's memory, and how the worker names its parts."""

    agent_id: str
    parts: tuple[m.RemoteParts, ...]


class Ranks:
    """The last place that each worker has reported; before, it counts as local."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._places: dict[int, RankPlace | None] = {}
        self._parts: dict[int, tuple[m.RemoteParts, ...]] = {}  # when it was last registered
        self._own_agents: set[str] = set()
        self._asked_s: float | None = None

    def reported(self, places: Mapping[int, RankPlace | None]) -> None:
        """Where workers are registered now; None: with no agent."""
        self._places.update(places)
        self._parts |= {rank: place.parts for rank, place in places.items() if place is not None}

    def own_agent(self, agent_id: str) -> None:
        """The scheduler's own agent, now or before it was restarted."""
        self._own_agents.add(agent_id)

    def known(self) -> bool:
        """Whether all workers have reported, or will not: they may be on other nodes."""
        if self._world_size == 1 or len(self._places) >= self._world_size:
            return True
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        return time.monotonic() - self._asked_s > _REPORTED_WITHIN_S

    def local_parts(self) -> dict[m.RemoteParts, int]:
        """The parts of a chunk, with their groups, if all workers have the scheduler's agent."""
        places = [self._places.get(rank) for rank in range(self._world_size)]
        parts: dict[tuple[bytes, int], tuple[m.RemoteParts, int]] = {}
        for place in places:
            if place is None or place.agent_id not in self._own_agents:
                return {}
            for group, part in enumerate(place.parts):
                # Ranks that hold equal bytes share a part.
                parts.setdefault((part.fingerprint, part.kv_rank), (part, group))
        return dict(parts.values())

    def all_parts(self) -> tuple[m.RemoteParts, ...]:
        """Those of all workers, also of one that is registered with no agent now: it sleeps."""
        return tuple(part for parts in self._parts.values() for part in parts)

    def remote(self) -> tuple[m.RemoteParts, ...]:
        """The parts of the workers that are registered with other agents."""
        places = [place for place in self._places.values() if place is not None]
        others = [place for place in places if place.agent_id not in self._own_agents]
        return tuple(part for place in others for part in place.parts)


@dataclass(slots=True)
class _AskedLookup:
    """A lookup until its end. result: None while it is not known."""

    hashes: Sequence[bytes]
    first_chunk: int
    chunk_size_tokens: int
    call: AgentCall
    deadline_s: float
    result: m.LookupResult | None = None

    @property
    def pinned_tokens(self) -> int:
        """The end of the result's prefix; 0 without a hit."""
        if self.result is None or not self.result.hit_chunks:
            return 0
        return (self.first_chunk + self.result.hit_chunks) * self.chunk_size_tokens


class SchedulerClient:
    """Asks the agent which leading chunks of prompts are cached. Without one, every lookup misses.

    model_name, world_size: as in every key of this engine.
    block_size_tokens: tokens of one paged block, or the least common multiple if groups differ.
    engine_id: shared by the scheduler and the workers of one engine, unique to that engine.
    unnamed: the id is made up, and the workers may have other ones (`messages`, Unnamed engines).
    """

    def __init__(
        self,
        endpoint: str,
        model_name: str,
        world_size: int,
        block_size_tokens: int,
        *,
        engine_id: str,
        unnamed: bool = False,
        agent_dead_after_s: float = 1.5,
    ) -> None:
        self._block_size_tokens = block_size_tokens
        self._lookups: dict[str, _AskedLookup] = {}
        self._begun: dict[str, None] = {}  # requests with lookups, since the last question
        self._uncleared: set[bytes] = set()
        self.ranks = Ranks(world_size)
        self.link = AgentLink(
            endpoint,
            m.Hello(0, engine_id, model_name, world_size, None, __version__, unnamed),
            dead_after_s=agent_dead_after_s,
            on_welcome=self._welcomed,
        )

    def _welcomed(self, welcome: m.Welcome) -> str | None:
        """Called for each WELCOME. Returns why the agent cannot be used, if it cannot."""
        self.ranks.own_agent(welcome.agent_id)
        return None

    def chunk_size_tokens(self) -> int:
        """Tokens of one chunk, a multiple of the block size; 0 if it is not known yet."""
        welcome = self.link.welcome
        if welcome is None:
            return 0
        return engine_chunk_tokens(welcome.chunk_size_tokens, [self._block_size_tokens])

    @property
    def names_before(self) -> bool:
        """Whether lookups are to name the chunks before their first one."""
        welcome = self.link.welcome
        return welcome is not None and welcome.store_after > 1

    @property
    def canary_every(self) -> int:
        """One hit in this many is to be compared instead of loaded; 0: none."""
        welcome = self.link.welcome
        return 0 if welcome is None else welcome.canary_every

    def num_blocks_per_chunk(self) -> int:
        """Paged blocks of one chunk; 0 as for `chunk_size_tokens`."""
        return self.chunk_size_tokens() // self._block_size_tokens

    def begin_lookup(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        first_chunk: int = 0,
        before: Sequence[bytes] = (),
        token_s: float = 0.0,
        busy_s: float = 0.0,
        tenant: str = "",
        stored_tokens: int = 0,
    ) -> None:
        """Starts a lookup, as LOOKUP says it, unless the request has one.

        before: of any agent. stored_tokens: of the prompt, that another engine stores just now.
        """
        if request_id in self._lookups:
            return
        hashes, chunk_tokens = tuple(hashes), self.chunk_size_tokens()
        begun = tuple(self._begun)
        if hashes:
            self._begun = {}
        remote = self.ranks.remote()
        welcome = self.link.welcome
        before = tuple(before) if self.names_before else ()
        stored_chunks = stored_tokens // chunk_tokens - first_chunk if chunk_tokens else 0
        stored_chunks = max(0, min(stored_chunks, len(hashes)))
        how = token_s, busy_s, begun, before, tenant, stored_chunks
        question = m.Lookup(0, request_id, hashes, first_chunk, remote, *how)
        (call,) = self.link.submit_all([question]) if hashes else self.link.lost(1)
        deadline_s = time.monotonic() + _GRACE_S + (welcome.lookup_deadline_s if welcome else 0.0)
        lookup = _AskedLookup(hashes, first_chunk, chunk_tokens, call, deadline_s)
        self._lookups[request_id] = lookup

    def hit_tokens(self, request_id: str, *, wait_s: float = 0.0) -> int | None:
        """The end of the prefix that can be loaded in tokens, 0 for a miss; None if not known yet.

        Also 0 without an agent, and for a lookup that is not answered soon after its deadline.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return 0
        if lookup.result is None:
            if lookup.call.wait(wait_s):
                lookup.result = self._believed(request_id, lookup)
            elif time.monotonic() >= lookup.deadline_s:
                logger.warning("no answer to a lookup in time; computing request %s", request_id)
                lookup.result = _MISS
                self.link.submit(m.EndSession, request_id=request_id)
            else:
                return None
        return 0 if lookup.result.compare_only else lookup.pinned_tokens

    def _believed(self, request_id: str, lookup: _AskedLookup) -> m.LookupResult:
        """The answer to a lookup; a miss if there is none, or none that can be right."""
        answer = lookup.call.answer
        if isinstance(answer, m.LookupResult) and 0 <= answer.hit_chunks <= len(lookup.hashes):
            return answer
        if isinstance(answer, m.Failure):
            logger.warning("the lookup of request %s failed: %s", request_id, answer.reason)
        elif answer is not None:
            # An engine that loads more than its prompt has ends.
            logger.error("the answer to the lookup of request %s cannot be: %s", request_id, answer)
            self.link.submit(m.EndSession, request_id=request_id)
        return _MISS

    def pinned_tokens(self, request_id: str) -> int:
        """As `hit_tokens`, and what may only be compared; 0 without a result."""
        lookup = self._lookups.get(request_id)
        return 0 if lookup is None else lookup.pinned_tokens

    def hit_tiers(self, request_id: str) -> Sequence[str]:
        """Where each chunk of the result was: host, disk or redis."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.result is None:
            return []
        return [m.TIER_NAMES[each] for each in lookup.result.tiers]

    def forget_lookup(self, request_id: str) -> None:
        """Forgets the result of a lookup: its request begins. Its chunks stay pinned."""
        if self._lookups.pop(request_id, None) is not None:
            self._begun[request_id] = None

    def release_lookup(self, request_id: str) -> None:
        """Unpins the chunks of a lookup."""
        lookup = self._lookups.get(request_id)
        if lookup is not None and lookup.pinned_tokens:
            self.link.submit(m.ReleaseLocks, request_id=request_id, hashes=lookup.hashes)

    def end_session(self, request_id: str) -> None:
        """The request has ended: cancels its lookup and unpins its chunks."""
        self._lookups.pop(request_id, None)
        self._begun.pop(request_id, None)
        self.link.submit(m.EndSession, request_id=request_id)

    def clear(self, epoch: bytes | None = None, *, wait_s: float = 0.0) -> None:
        """Asks the agent to remove this engine's chunks: those of an epoch, or all.

        Asks again for those epochs that no agent has been asked about, because there was none.
        """
        again = tuple(self._uncleared)
        self._uncleared.difference_update(again)
        for each in (*again, epoch):
            listener = partial(self._has_cleared, each)
            call = self.link.submit(m.Clear, listener, epoch=each, remote=self.ranks.all_parts())
        call.wait(wait_s)

    def _has_cleared(self, epoch: bytes | None, call: AgentCall) -> None:
        """On the link's thread."""
        if call.lost and epoch:
            self._uncleared.add(epoch)

    def shutdown(self) -> None:
        """Closes the connection; the agent unpins what lookups have pinned."""
        self.link.close()


class Canaries:
    """Decides which hits of one engine are canaries: computed again, and compared with the cache.

    No rule says that a name covers everything that decides KV; looking does. A canary is computed
    from its first token: what is computed behind a loaded prefix would inherit its faults. Each hit
    is one with the same probability, whatever came before, so that restarts make no difference.
    draw: a number from 0 to below 1. first: hits at the start that are canaries, too. Hits behind
    local tokens cannot be compared: meanwhile they are held back.
    """

    def __init__(self, draw: Callable[[], float] = random.random, *, first: int = 0) -> None:
        self._draw = draw
        self._first = float(first)
        self._left_tokens = float(FIRST_CANARY_TOKENS)

    def computed(self, prompt_tokens: int) -> None:
        """The engine has computed these tokens of prompts, those of canaries included."""
        self._left_tokens += CANARY_SHARE * prompt_tokens

    def takes(self, hit_tokens: int, every: int) -> bool:
        """Whether a hit that can be loaded is a canary; one in ``every`` is, 0: none."""
        if every and self._first > 0:
            self._first -= 1
            return True
        if not every or self._left_tokens < hit_tokens or self._draw() * every >= 1:
            return False
        self._left_tokens -= hit_tokens
        return True

    def holds_back(self, every: int) -> bool:
        """Whether a hit behind local tokens is not loaded. Each counts a little: where all are
        behind such tokens, the cache must not stay off.
        """
        if not every or self._first <= 0:
            return False
        self._first -= _HELD_BACK
        return True


class ChunkWatch:
    """Asks which chunks come and go, while all workers of the engine are registered with one agent.

    groups: of each part that a chunk has, the number of its group. `Change.part` is an index.
    """

    def __init__(self, link: AgentLink, ranks: Ranks) -> None:
        self.groups: tuple[int, ...] = ()
        self._link = link
        self._ranks = ranks
        self._welcome: m.Welcome | None = None
        self._parts: tuple[m.RemoteParts, ...] = ()
        self._call: AgentCall | None = None

    @property
    def has_news(self) -> bool:
        return self._call is not None and self._call.done

    def take(self) -> m.Changes | None:
        """The changes since the last call, if any. ``lost``: what was known before is void."""
        welcome = self._link.welcome if self._link.online else None
        parts = {} if welcome is None else self._ranks.local_parts()
        if welcome is not self._welcome or tuple(parts) != self._parts:
            self._welcome, self._parts = welcome, tuple(parts)
            self.groups = tuple(parts.values())
            self._ask()
            return _LOST
        if self._call is None or not self._call.done:
            return None
        answer, self._call = self._call.answer, None
        if isinstance(answer, m.Failure):
            logger.warning("the agent reports no changes of chunks: %s", answer.reason)
        else:
            self._ask()
        return answer if isinstance(answer, m.Changes) else _LOST

    def _ask(self) -> None:
        parts = self._parts
        self._call = self._link.submit(m.Watch, parts=parts) if parts else None

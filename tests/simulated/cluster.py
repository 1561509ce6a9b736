# SPDX-License-Identifier: Apache-2.0
"""One agent, its tiers and engines, and what befalls them: all that a seed decides.

Now and then nothing new begins and nothing fails: what has begun has to end, and nothing may be
held then (`Host.audit_idle`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from lmcache_redis import messages as m
from lmcache_redis.tiers import WriteOutcome
from tests.simulated.copies import Memory
from tests.simulated.engines import MODELS, PROMPTS, Engine, Link
from tests.simulated.host import Host, config_of, in_this
from tests.simulated.requests import Asking, job_of, mischief, watching
from tests.simulated.tiers import ODD, SimulatedTier
from tests.simulated.world import Violation, World

ENGINES = 3
_AUDIT_EVERY = 50
_QUIET_EVERY = 5000
# Longer than all that waits by itself: sessions, claims, leases, copies that hang, second sweeps.
_QUIET_S = 200.0
_REQUESTS_S = 40.0


class Cluster:
    """Attributes: links: by identity. memories: by number. dead: processes that have ended.
    differing: the share of canaries that find other KV. unnamed: of engines that are.
    """

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        self.config = config_of(world)
        self.links: dict[bytes, Link] = {}
        self.memories: dict[int, Memory] = {}
        self.dead: set[int] = set()
        self.numbers = itertools.count(1)
        redis = SimulatedTier(world, "Redis", has_index=False)
        disk = SimulatedTier(world, "disk", has_index=True)
        self.tiers = [disk, redis] if world.chance(0.7) else [redis]
        self.engines: list[Engine] = []
        self.is_quiet = False
        self.quiets = 0
        self.excused_until_s = 0.0
        self.differing = world.random.choice([0.0, 0.05, 0.3])
        self.unnamed = world.random.choice([0.0, 0.2, 1.0])
        self.prompts = world.random.sample(PROMPTS, world.random.choice([2, 5, len(PROMPTS)]))
        self._models = world.random.sample(MODELS, world.random.choice([1, 2, len(MODELS)]))
        self._request_s = world.random.choice([0.02, 0.05])
        self._copy_s = world.random.choice([0.001, 0.003, 0.03])
        # Each seed has its own mixture: what is rare in one is frequent in another.
        usual: list[tuple[Callable[[], None], int]] = [
            (self._tier_fault, 6),
            (self._others, 4),
            (self._engine_fault, 3),
            (self._copy_fault, 1),
            (self._mischief, 1),
            (self._agent_ends, 1),
        ]
        self._faults = [
            fault for fault, weight in usual for _ in range(weight * world.random.choice([0, 1, 3]))
        ] or [self._mischief]

    def run(self, events: int) -> str:
        """Raises `Violation`; the digest of the trace, else."""
        world = self.world
        with in_this(world, self.memories, self.dead, lambda: self.host):
            self._start_host()
            self._begin()
            audit_at, quiet_at = _AUDIT_EVERY, _QUIET_EVERY
            while world.events < events:
                self._turn()
                if world.events >= audit_at or world.violations:
                    audit_at = world.events + _AUDIT_EVERY
                    self.host.audit()
                if world.events >= quiet_at:
                    self._be_quiet()
                    quiet_at = world.events + _QUIET_EVERY
            self._be_quiet()
            self.host.end()
        return world.digest

    def excuse_all(self, why: str, for_s: float = 0.0) -> None:
        """Whatever is asked for, now and for a while."""
        self.excused_until_s = max(self.excused_until_s, self.world.now_s + for_s)
        for engine in self.engines:
            engine.excuse(why)

    def _turn(self) -> None:
        if not self.host.turn():
            self.excuse_all("the agent has ended")
            self.world.note("a new agent")
            self._start_host()
            for link in [*self.links.values()]:
                link.lost()

    def _start_host(self) -> None:
        ends = partial(self.excuse_all, "the agent ends")
        self.host = Host(self.world, self.config, self.tiers, self.links, self._copy_s, ends)

    def _begin(self) -> None:
        while len(self.engines) < ENGINES:
            self._new_engine()
        self.is_quiet = False
        self._next_request()
        self._next_fault()

    def _new_engine(self) -> None:
        model = self.world.random.choice(self._models)
        engine = Engine(self, model, f"engine {next(self.numbers)}", self.config)
        self.engines.append(engine)
        if self.world.chance(0.2):
            engine.start(watching(engine))

    def _next_request(self) -> None:
        world = self.world
        if self.is_quiet:
            return
        engine = world.random.choice(self.engines)
        if len(engine.requests) < 6:
            name = f"request {next(self.numbers)}"
            engine.start(Asking(engine, name).run())
        world.after(world.soon(self._request_s), self._next_request)

    # ---------------------------------------------------------------- what befalls them

    def _next_fault(self) -> None:
        world = self.world
        if self.is_quiet:
            return
        fault = world.random.choice(self._faults)
        world.note("fault", fault.__name__)
        fault()
        world.after(world.soon(1.0), self._next_fault)

    def _tier_fault(self) -> None:
        world, tier = self.world, self.world.random.choice(self.tiers)
        what = world.random.randrange(7)
        if what == 0:
            tier.reason = "it is down"
        elif what == 1:
            tier.silent_until_s = world.now_s + world.soon(3.0)
        elif what == 2:
            tier.slower = world.random.choice([3.0, 30.0])
        elif what == 3:
            tier.refuses = world.random.choice([WriteOutcome.FULL, WriteOutcome.REJECTED])
        elif what == 4:
            tier.lose(tier.some_keys(1 << 10 if world.chance(0.2) else 5))
        else:
            odd = world.random.choice(ODD)
            tier.odd |= dict.fromkeys(tier.some_keys(80), odd)
        if what in (0, 4) and world.chance(0.3):
            self.excuse_all("what it had is lost")
        world.after(world.soon(2.0), tier.heal)

    def _others(self) -> None:
        """Other agents write, and say that they will."""
        world, redis = self.world, self.tiers[-1]
        engine = world.random.choice(self.engines)
        forms = [form for forms in engine.forms for form in forms]
        hashes = [engine.epoch + each for each in world.random.choice(self.prompts)]
        if world.chance(0.3):
            redis.claim([form.key(each) for form in forms for each in hashes])
        else:
            for each in hashes:
                for form in forms:
                    redis.put(job_of(form, each, world.now_s + 1.0))

    def _engine_fault(self) -> None:
        world, engine = self.world, self.world.random.choice(self.engines)
        what = world.random.randrange(6)
        if what == 0:
            engine.end(says_goodbye=world.chance(0.5))
            self.engines.remove(engine)
            self._new_engine()
        elif what == 1:
            engine.silent_until_s = world.now_s + world.random.uniform(0.0, 15.0)
            engine.excuse("it was silent")
        elif what == 2:
            engine.new_epoch()
        elif what == 3:
            link = world.random.choice(engine.workers)
            if link.is_ready:
                engine.unregister(link, lambda answer: link.is_ready and engine.register(link))
        elif what == 4:
            engine.scheduler.ask(m.Clear(0), lambda answer: None)
        else:
            engine.scheduler.ask(m.Trust(0), lambda answer: None)
            engine.scheduler.ask(m.Why(0, "request"), lambda answer: None)

    def _mischief(self) -> None:
        mischief(self.world.random.choice(self.engines))

    def _copy_fault(self) -> None:
        copies = self.host.copies
        faults = [(0.3, 0.0, 0.0), (0.0, 0.1, 0.0), (0.0, 0.0, 0.03)]
        copies.failing, copies.hung, copies.losing = self.world.random.choice(faults)

        self.world.after(self.world.soon(1.0), copies.heal)

    def _agent_ends(self) -> None:
        self.host.has_crashed = self.world.chance(0.5)
        if not self.host.has_crashed:
            self.host.service.stop()

    # ---------------------------------------------------------------- when nothing is asked for

    def _be_quiet(self) -> None:
        world = self.world
        world.note("quiet")
        self.is_quiet = True
        self.quiets += 1
        for tier in self.tiers:
            tier.heal()
        self.host.copies.heal()
        self._pass(_REQUESTS_S)
        if waiting := [engine.requests for engine in self.engines if engine.requests]:
            raise Violation(f"requests have not ended: {waiting}")
        for engine in [*self.engines]:
            open_calls = [c.question for link in engine.links for c in link.open.values()]
            if left := [each for each in open_calls if not isinstance(each, m.Watch | m.Ping)]:
                raise Violation(f"questions were not answered: {left}")
            if world.chance(0.5):
                engine.end(says_goodbye=world.chance(0.7))
                self.engines.remove(engine)
        self._pass(_QUIET_S)
        self.host.audit_idle()
        self._begin()

    def _pass(self, seconds: float) -> None:
        over: list[bool] = []
        self.world.after(seconds, partial(over.append, True))
        while not over:
            self._turn()

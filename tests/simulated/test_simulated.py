# SPDX-License-Identifier: Apache-2.0
"""Simulated agents keep their invariants, a seed decides everything, and mistakes are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.agent import handlers, registering
from lmcache_redis.agent.jobs import CopyJob, RetrieveJob, StoreJob
from lmcache_redis.agent.lookups import LookupJob
from lmcache_redis.agent.sessions import Session
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.parts import LookupParts
from lmcache_redis.cache.pool import HostPool
from lmcache_redis.cache.writebehind import WriteBehind
from tests.simulated.cluster import Cluster

ROOT = Path(__file__).parent.parent.parent
SEEDS, EVENTS = (1, 2, 3), 6_700


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_wrong_and_nothing_is_left(seed: int) -> None:
    Cluster(seed).run(EVENTS)


def run_seeds(seeds: range, events: int) -> None:
    for seed in seeds:
        Cluster(seed).run(events)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 150, 10))
def test_nor_is_it_with_other_seeds(first: int) -> None:
    run_seeds(range(first, first + 10), 20_000)


@pytest.mark.servers
def test_a_seed_decides_everything() -> None:
    """Also in another process, where the hashes of names are others."""
    command = [sys.executable, "-m", "tests.simulated", "--seed", "7", "--events", "900"]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed 7: {Cluster(7).run(900)}," in done.stdout
    assert Cluster(8).run(900) not in done.stdout


Patch = pytest.MonkeyPatch


def now_and_then(patch: Patch, owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """One call in ten of a method is replaced: by a call with the method, and its arguments."""
    method, calls = getattr(owner, name), [0]

    def call(self: Any, *args: Any, **named: Any) -> Any:
        calls[0] += 1
        whole = partial(method, self, *args, **named)
        return instead(whole, self, *args) if calls[0] % 10 == 0 else whole()

    patch.setattr(owner, name, call)


def nothing(whole: Callable[[], Any], *_: Any) -> None:
    """The call is lost."""


def twice(whole: Callable[[], Any], *_: Any) -> Any:
    whole()
    return whole()


def keeps_a_pin(patch: Patch) -> None:
    def ended(whole: Callable[[], Any], job: RetrieveJob, chunk: int, entry: Any, *_: Any) -> None:
        if entry is not None:
            job._cache.pool.pin(entry)
        whole()

    now_and_then(patch, RetrieveJob, "_ended", ended)


def drops_a_pin_of_a_session(patch: Patch) -> None:
    def hold(whole: Callable[[], Any], session: Session, *args: Any) -> None:
        whole()
        session._pool.unpin(args[2])

    now_and_then(patch, Session, "hold", hold)


def gives_slots_back_twice(patch: Patch) -> None:
    def give_back(whole: Callable[[], Any], pool: HostPool, entry: Any) -> None:
        whole()
        pool.memory.give_back(entry.block)

    now_and_then(patch, HostPool, "_give_back", give_back)


def publishes_what_was_read_late(patch: Patch) -> None:
    patch.setattr(StoreJob, "_move", lambda job, chunks, call: gathers(job, call))


def gathers(job: StoreJob, call: Any) -> bool:
    job._registration.device.gather(call._replace(until_ns=None), lambda: None)
    return True


def frees_blocks_before_they_are_read(patch: Patch) -> None:
    def gather(whole: Callable[[], Any], job: StoreJob, chunks: Any) -> None:
        job._unread = set(chunks)
        job._answer()
        job._unread = set()
        job._begin(chunks)
        job._begin_calls(chunks)

    now_and_then(patch, StoreJob, "_gather", gather)


def promises_what_it_has_not(patch: Patch) -> None:
    def take(whole: Callable[[], Any], *_: Any) -> Any:
        """The pins of a hit are released, not kept."""
        return {}

    now_and_then(patch, LookupParts, "take", take)


def registers_before_the_former_copies_end(patch: Patch) -> None:
    patch.setattr(registering.Registering, "_when_unmapped", lambda self, peer, action: action())


# What is done wrong, and what a simulation says of it.
MISTAKES: dict[str, tuple[Callable[[Patch], object], str]] = {
    "keeps a pin": (keeps_a_pin, "has stopped with|pinned units"),
    "drops a pin": (drops_a_pin_of_a_session, "hold|unpinned below zero"),
    "gives slots back twice": (gives_slots_back_twice, "lost or held twice"),
    "publishes what was read late": (publishes_what_was_read_late, "other bytes than"),
    "frees blocks before they are read": (frees_blocks_before_they_are_read, "other bytes than"),
    "registers before the former copies end": (
        registers_before_the_former_copies_end,
        "which others use",
    ),
    "loses the end of a write": (
        lambda patch: now_and_then(patch, WriteBehind, "_written", nothing),
        "has stopped with|left at the end",
    ),
    "ends a write twice": (
        lambda patch: now_and_then(patch, WriteBehind, "_end", twice),
        "an action failed",
    ),
    "loses the end of a load": (
        lambda patch: now_and_then(patch, Cache, "_loaded", nothing),
        "has stopped with|left at the end",
    ),
    "loses the end of a copy": (
        lambda patch: now_and_then(patch, CopyJob, "_copied", nothing),
        "has stopped with|not answered|not ended",
    ),
    "does not end a session": (
        lambda patch: patch.setattr(handlers.Handlers, "end_expired", lambda self, now_s: None),
        "'sessions'",
    ),
    "does not answer a lookup that it cancels": (
        lambda patch: patch.setattr(LookupJob, "_cancel", lambda self, cancel: cancel()),
        "not answered|not ended",
    ),
    "promises what it has only asked for": (promises_what_it_has_not, "promised and not held"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_it, found = MISTAKES[mistake]
    make_it(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=found):
        run_seeds(range(1, 20), 2_500)

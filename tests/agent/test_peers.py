# SPDX-License-Identifier: Apache-2.0
"""Which workers serve which scheduler, and which layouts are distrusted."""

from __future__ import annotations

import os
import resource
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import peers
from lmcache_redis.agent.copies import CPU
from lmcache_redis.agent.peers import (
    CANARIES_AGAIN,
    LayoutTrust,
    Peer,
    Peers,
    Registration,
    epoch_of,
)
from lmcache_redis.device.handles import CudaFdHandle
from lmcache_redis.processes import process_start_time

NOW_S = 1000.0


class Played:
    """Peers whose registrations have nothing but names."""

    def __init__(self) -> None:
        self.peers = Peers()

    def join(
        self,
        engine_id: str,
        worker_id: int | None,
        *,
        layout: bytes | None = None,
        unnamed: bool = True,
        model: str = "model",
        world: int = 2,
        ago_s: float = 60.0,
        client: str = "",
    ) -> Peer:
        """A peer, registered if it has a layout."""
        hello = m.Hello(1, engine_id, model, world, worker_id, "0", unnamed, client)
        identity = f"{engine_id} {worker_id} {client}".encode()
        peer = Peer(identity, hello, NOW_S - ago_s)
        if layout is not None and worker_id is not None:
            form: Any = SimpleNamespace(kv_rank=worker_id, fingerprint=layout)
            device: Any = None
            peer.registration = Registration(engine_id, worker_id, 64, (form,), device, ())
        self.peers.add(peer)
        return peer

    def ranks(self, scheduler: Peer) -> list[str] | None:
        """The engine of the registration of each rank."""
        found = self.peers.ranks(scheduler)
        return None if found is None else [each.engine_id for each in found]


def test_a_newer_connection_replaces_the_old() -> None:
    played = Played()
    old = played.join("a", 0)
    others = [played.join("a", 1), played.join("a", None), played.join("b", 0)]
    new = Peer(b"reconnected", old.hello, NOW_S)
    assert played.peers.add(new) == [old]
    assert played.peers.get(old.identity) is None
    assert [*played.peers] == [*others, new]
    again = Peer(b"reconnected", others[0].hello, NOW_S)  # the same connection
    assert played.peers.add(again) == [others[0], new]


def test_another_client_of_the_same_engine_and_rank_stays() -> None:
    played = Played()
    one, other = (played.join("a", 0, client=each, layout=b"0") for each in "12")
    schedulers = [played.join("a", None, client=each) for each in "34"]
    assert [*played.peers] == [one, other, *schedulers]
    again = Peer(b"reconnected", one.hello, NOW_S)
    assert played.peers.add(again) == [one]
    assert played.peers.has_namesake(again)
    assert played.peers.has_namesake(schedulers[0])
    played.peers.remove(schedulers[1])
    assert not played.peers.has_namesake(schedulers[0])


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("layout", [b"0", b"other"])
def test_clients_of_one_engine_and_rank(unnamed: bool, layout: bytes) -> None:
    played = Played()
    scheduler = played.join("a", None, unnamed=unnamed)
    played.join("a", 1, layout=b"1", unnamed=unnamed)
    played.join("a", 0, layout=b"0", unnamed=unnamed, client="1")
    assert played.ranks(scheduler) == ["a", "a"]
    second = played.join("a", 0, layout=layout, unnamed=unnamed, client="2")
    assert played.ranks(scheduler) == (["a", "a"] if layout == b"0" else None)
    assert played.peers.layouts_differ(scheduler) == (layout != b"0")
    played.peers.remove(second)
    assert played.ranks(scheduler) == ["a", "a"]


@pytest.mark.parametrize("unnamed", [False, True])
def test_a_worker_holds_the_stores_of_its_engine(unnamed: bool) -> None:
    played = Played()
    one, two = (played.join("a", rank, unnamed=unnamed) for rank in range(2))
    twin = played.join("a", 0, unnamed=unnamed, client="2")
    other = played.join("b", 1, unnamed=unnamed)
    another_model = played.join("c", 1, unnamed=unnamed, model="another")
    assert not played.peers.hold_stores(one)
    one.holds_stores = True
    assert all(played.peers.hold_stores(each) for each in (one, two, twin))
    assert played.peers.hold_stores(other) == unnamed  # they may be of one engine
    assert not played.peers.hold_stores(another_model)
    played.peers.remove(one)
    assert not played.peers.hold_stores(two)


def test_workers_that_have_registered() -> None:
    played = Played()
    played.join("a", 0)
    worker = played.join("a", 1, layout=b"1")
    assert played.peers.registered == [worker.registration]


def test_where_memory_is_and_when_its_chunks_are_written() -> None:
    def of(storage: Any, on_host_cores: bool) -> Registration:
        device: Any = SimpleNamespace(on_host_cores=on_host_cores)
        others: Any = (storage, None)
        return Registration("a", 0, 64, (), device, others)

    gpu, cpu = of(CudaFdHandle(1, 1, "GPU-1", (), 0, 0, 0), False), of(SimpleNamespace(), True)
    assert (gpu.place, gpu.write_delay_s) == ("GPU-1", 0.0)
    assert cpu.place == CPU
    assert cpu.write_delay_s > 0, "after the first token: the engine uses these cores"


def test_a_hello_again_and_another() -> None:
    peer = Played().join("a", 0)
    assert peer.is_same(msgspec.structs.replace(peer.hello, call_id=99))
    assert not peer.is_same(msgspec.structs.replace(peer.hello, world_size=3))


def test_nothing_is_mapped_or_used_at_first() -> None:
    found = Peers()
    assert (found.mapping, len(found), found.saved_prefill_s) == (0, 0, 0)
    model, *tenants = found.uses_of("model", "team")
    assert model is found.models["model"]
    assert tenants == [*found.tenants.uses_of("team")]


class Storage(NamedTuple):
    pid: int
    pid_start_time: int


def owned_by(*storages: Storage) -> Peer:
    played = Played()
    peer = played.join("a", 0, layout=b"0")
    assert peer.registration is not None
    peer.registration.storages = storages  # type: ignore[assignment]
    return peer


def test_memory_is_gone_with_any_of_its_processes() -> None:
    own = Storage(os.getpid(), process_start_time(os.getpid()) or 0)
    ended = Storage(own.pid, own.pid_start_time + 1)  # the id was used again
    assert not owned_by(own, own).process_gone()
    assert owned_by(own, ended).process_gone()
    assert owned_by(ended).process_gone()


def test_a_process_that_cannot_be_read_is_not_gone() -> None:
    """Out of file descriptors, no living engine is unregistered."""
    peer = owned_by(Storage(os.getpid(), process_start_time(os.getpid()) or 0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        gone = peer.process_gone()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not gone


def test_a_rank_of_the_same_id_comes_first() -> None:
    """Ray may run one rank in the scheduler's process, and the others in processes of their own."""
    played = Played()
    scheduler = played.join("a", None)
    played.join("b", 0, layout=b"other")
    assert played.ranks(scheduler) is None, "every rank is needed"
    played.join("c", 1, layout=b"1")
    assert played.ranks(scheduler) == ["b", "c"]
    played.join("a", 0, layout=b"0")
    assert played.ranks(scheduler) == ["a", "c"]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({}, ["b", "c"]),
        ({"layout": b"other"}, None),
        ({"layout": b"other", "unnamed": False}, ["b", "c"]),
        ({"layout": b"other", "model": "another"}, ["b", "c"]),
        ({"layout": b"other", "world": 3}, ["b", "c"]),
    ],
    ids=["equal", "other layout", "named", "another model", "another world"],
)
def test_another_worker_of_a_rank(others: dict[str, Any], expected: list[str] | None) -> None:
    played = Played()
    scheduler = played.join("a", None)
    played.join("b", 0, layout=b"0")
    played.join("c", 1, layout=b"1")
    played.join("d", 1, **{"layout": b"1", **others})
    assert played.ranks(scheduler) == expected
    assert played.peers.layouts_differ(scheduler) == (expected is None)
    assert [each.engine_id for each in played.peers.registrations(scheduler)] == (expected or [])


def test_nobody_is_waited_for_when_layouts_differ() -> None:
    played = Played()
    scheduler = played.join("a", None, ago_s=0.1)
    played.join("b", 0, layout=b"0", ago_s=0.1)
    assert played.peers.joined_by_s(scheduler) > NOW_S
    played.join("c", 1, layout=b"1", ago_s=0.1)
    played.join("d", 1, layout=b"other", ago_s=0.1)
    assert played.ranks(scheduler) is None
    assert played.peers.joined_by_s(scheduler) <= NOW_S


@pytest.mark.parametrize("mapping", [True, False])
def test_one_worker_that_comes_is_enough(mapping: bool) -> None:
    played = Played()
    scheduler = played.join("a", None)
    played.join("b", 0, layout=b"0")
    played.join("c", 1)
    assert played.peers.joined_by_s(scheduler) <= NOW_S
    worker = played.join("d", 1)
    worker.mapping_from_s = NOW_S - 0.1 if mapping else None
    assert (played.peers.joined_by_s(scheduler) > NOW_S) is mapping
    assert played.peers.is_mapping(scheduler) is worker.mapping is mapping
    worker.mapping_from_s = NOW_S - 60
    assert played.peers.joined_by_s(scheduler) <= NOW_S


def test_an_engine_is_complete_with_the_scheduler_that_it_serves() -> None:
    played = Played()
    workers = [played.join("b", 0, layout=b"0"), played.join("c", 1, layout=b"1")]
    named = played.join("d", 0, layout=b"0", unnamed=False)
    assert not any(map(played.peers.complete, workers))
    scheduler = played.join("a", None)
    assert not any(map(played.peers.complete, workers))
    scheduler.welcomed = True
    assert all(map(played.peers.complete, workers))
    assert not played.peers.complete(named)
    played.join("e", 1, layout=b"other")
    assert not any(map(played.peers.complete, workers))


def test_sessions_of_transfers() -> None:
    """Those of the scheduler with the worker's id, else of all that may be its."""
    played = Played()
    scheduler = played.join("a", None)
    worker, named = played.join("b", 0), played.join("c", 0, unnamed=False)
    played.join("other", None, model="another")
    assert played.peers.engines_of(scheduler) == ["a"]
    assert played.peers.engines_of(worker) == ["a", "b"]
    assert played.peers.engines_of(named) == ["c"]
    played.join("b", None)
    assert played.peers.engines_of(worker) == ["b"]


# What is distrusted, by layout and epoch, and for how long

LAYOUT, OTHER = b"l" * 32, b"o" * 32
EPOCH, ADAPTER, BLOCK = b"e" * 8, b"a" * 16, b"b" * 32


def test_the_epoch_of_a_name() -> None:
    assert epoch_of(BLOCK) == epoch_of(ADAPTER + BLOCK) == epoch_of(b"token hash") == b""
    assert epoch_of(EPOCH + BLOCK) == epoch_of(EPOCH + ADAPTER + BLOCK) == EPOCH


def test_a_layout_is_distrusted_in_one_epoch() -> None:
    trust = LayoutTrust()
    assert trust.differed(LAYOUT, EPOCH + BLOCK)
    assert not trust.differed(LAYOUT, EPOCH + ADAPTER + BLOCK)
    assert not trust.allows([OTHER, LAYOUT], EPOCH + BLOCK)
    assert trust.allows([OTHER], EPOCH + BLOCK)
    assert trust.allows([LAYOUT], BLOCK)
    assert trust.report() == [{"layout": LAYOUT.hex(), "epoch": EPOCH.hex(), "agreed": 0}]
    assert (trust.restore(), trust.restore(), trust.report()) == (1, 0, [])
    assert trust.allows([LAYOUT], EPOCH + BLOCK)


def test_canaries_in_a_row_bring_trust_back() -> None:
    trust = LayoutTrust()
    assert not trust.agreed(LAYOUT, BLOCK)
    trust.differed(LAYOUT, BLOCK)
    for _ in range(CANARIES_AGAIN - 1):
        assert not trust.agreed(LAYOUT, BLOCK)
        assert not trust.agreed(OTHER, BLOCK)
        assert not trust.agreed(LAYOUT, EPOCH + BLOCK)
    trust.differed(LAYOUT, BLOCK)
    found = [trust.agreed(LAYOUT, BLOCK) for _ in range(CANARIES_AGAIN)]
    assert found == [False] * (CANARIES_AGAIN - 1) + [True]
    assert trust.allows([LAYOUT], BLOCK)


def test_a_difference_under_a_clients_name_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MOST_SAID", 2)
    trust = LayoutTrust()
    layouts = [LAYOUT, LAYOUT, OTHER, LAYOUT, b"t" * 32, b"t" * 32]
    assert [trust.differed_by_name(each) for each in layouts] == [
        True, False, True, False, False, False,
    ]  # fmt: skip
    assert trust.allows(layouts, BLOCK), "only the chunk goes"

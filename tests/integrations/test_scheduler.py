# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler, step by step, with scripted answers of the agent.

The whole of it runs against a real agent and a real vLLM in test_vllm.py; here are the cases
that a real scheduler reaches only by luck.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.cache.pacing import Computing, TransferRate, WorthLoading
from lmcache_redis.client.scheduler import Ranks
from lmcache_redis.client.worker import TransferOp
from lmcache_redis.integrations.vllm import planning
from lmcache_redis.integrations.vllm.identity.lora import AdapterDigests
from lmcache_redis.integrations.vllm.worker import StepMetadata, WorkerReport
from tests.integrations.scripted import BLOCK, BLOCKS, CHUNK, FakeRequest, Scripted, wishing


@pytest.fixture
def scheduler() -> Scripted:
    return Scripted()


def only_store(metadata: StepMetadata) -> TransferOp:
    ((_, _, (op,), *_),) = metadata.stores
    return op


def test_an_idle_engine_waits_for_a_tier_that_is_measured(scheduler: Scripted) -> None:
    computing = Computing()
    computing.told(0.1 / 1024, 0.0, (), 0.0)  # a prompt of 1,024 tokens in 0.1 s
    measured_s = WorthLoading(computing, 4, 256).patience_s(TransferRate(), 0.0)
    scheduler.adapter.answers_in_s = measured_s + 0.004  # and the question, over two sockets
    # Not None: vLLM would run an empty step before it asks again.
    assert scheduler.matched_tokens(FakeRequest(), 0) == 0
    assert not scheduler.run(new=("r", BLOCKS, 0, 4 * CHUNK)).idle
    assert scheduler.matched_tokens(FakeRequest("behind a model's step"), 0) is None
    assert scheduler.run().idle
    assert scheduler.matched_tokens(FakeRequest("behind an empty step"), 0) == 0


def test_what_is_before_a_lookup_is_named_if_it_counts(scheduler: Scripted) -> None:
    for name, scheduler.adapter.names_before in (("off", False), ("on", True)):
        scheduler.matched_tokens(FakeRequest(name), 2 * CHUNK)
        assert scheduler.adapter.lookups[-1] == (name, 2)
        assert scheduler.adapter.before == (2 if scheduler.adapter.names_before else 0)


def test_a_lookup_waits_for_all_workers_and_is_asked_once(scheduler: Scripted) -> None:
    scheduler.adapter.ranks = Ranks(2)
    request = FakeRequest()
    assert scheduler.matched_tokens(request, 0) is None
    scheduler.reported(WorkerReport({}, places={0: None}))
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.adapter.lookups == []
    scheduler.reported(WorkerReport({}, places={1: None}))
    for answer in (None, None, 3 * CHUNK):
        scheduler.adapter.tokens = answer
        assert scheduler.matched_tokens(request, 0) == answer
    assert scheduler.adapter.lookups == [("r", 0)]


def test_lookups_loads_and_stores_say_whose_they_are(scheduler: Scripted) -> None:
    """What was loaded is not stored again."""
    scheduler.adapter.tokens = CHUNK
    assert scheduler.begin(wishing(tenant="team"), BLOCKS) == CHUNK
    assert scheduler.adapter.tenant == "team"
    ((_, _, (load,), *_),) = scheduler.run().loads
    scheduler.load_ended("r")
    store = only_store(scheduler.run(new=("r", BLOCKS, CHUNK, 3 * CHUNK + 1)))
    assert (load.tenant, store.tenant) == ("team", "team")
    assert list(store.block_ids) == BLOCKS[4:16]


def test_a_request_without_blocks_lets_a_loaded_one_go_on(scheduler: Scripted) -> None:
    """vLLM 0.27 to 0.30 stop for ever at the first request that they cannot allocate blocks for."""
    loaded, blocked = FakeRequest("r"), FakeRequest("s")
    scheduler.adapter.tokens = 4 * CHUNK
    scheduler.begin(loaded, BLOCKS)
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK  # the load has not ended
    scheduler.load_ended("r")
    assert scheduler.matched_tokens(blocked, 0) is None
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK
    scheduler.allocated(loaded, [], 0)
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK
    assert scheduler.matched_tokens(blocked, 0) == 4 * CHUNK


def test_evicted_local_blocks_are_looked_up_again(scheduler: Scripted) -> None:
    request = FakeRequest()
    scheduler.adapter.tokens = None
    assert scheduler.matched_tokens(request, 2 * CHUNK) is None
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.adapter.lookups == [("r", 2), ("r", 0)]
    assert scheduler.adapter.ended == ["r"]


@pytest.mark.parametrize(
    "asking",
    [
        FakeRequest(tokens=0),
        FakeRequest(tokens=CHUNK - 1),
        FakeRequest(skip_reading_prefix_cache=True),
        wishing(load=False),
        wishing(max_load_tokens=CHUNK - 1),
    ],
)
def test_short_prompts_and_those_against_it_are_not_looked_up(
    scheduler: Scripted, asking: FakeRequest
) -> None:
    scheduler.adapter.tokens = CHUNK
    assert scheduler.matched_tokens(asking, 0) == 0
    assert scheduler.adapter.lookups == []


def test_without_an_agent_nothing_is_looked_up_or_stored(scheduler: Scripted) -> None:
    scheduler.adapter.tokens, scheduler.adapter.chunk = CHUNK, 0
    assert scheduler.matched_tokens(FakeRequest(), 0) == 0
    assert scheduler.prefill(FakeRequest()).stores == []
    assert scheduler.adapter.lookups == []


def test_chunks_are_stored_when_they_are_complete_and_once(scheduler: Scripted) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 40)
    blocks = list(range(50, 61))
    # Chunked prefill: the first step ends inside the second chunk.
    first = scheduler.prefill(request, blocks, CHUNK + 10)
    assert list(only_store(first).block_ids) == blocks[:4]
    second = scheduler.run(cached=("r", None, CHUNK + 10, CHUNK + 30))
    assert list(only_store(second).block_ids) == blocks[4:8]
    assert scheduler.run(cached=("r", None, 2 * CHUNK + 40, 1)).stores == []
    # Decoding completes the third chunk, whose last block came later.
    request.grow(3 * CHUNK)
    third = scheduler.run(cached=("r", [99], 3 * CHUNK - 1, 1))
    assert list(only_store(third).block_ids) == [*blocks[8:], 99]
    # Computed, but its last token is not final yet: no hash, no store.
    assert scheduler.run(cached=("r", [100, 101, 102, 103], 3 * CHUNK, 64)).stores == []


def test_blocks_are_referenced_until_all_workers_read_them(scheduler: Scripted) -> None:
    request = FakeRequest(tokens=CHUNK + 1)
    blocks = scheduler.pool.get_new_blocks(5)
    ids = [block.block_id for block in blocks]
    ((transfer_id, *_),) = scheduler.prefill(request, ids).stores
    scheduler.finished(request)
    scheduler.pool.free_blocks(reversed(blocks))  # as vLLM does at the end of the request
    free = scheduler.pool.get_num_free_blocks()
    # The connector still holds the first four: taking all free blocks does not return them.
    taken = {block.block_id for block in scheduler.pool.get_new_blocks(free)}
    assert taken.isdisjoint(ids[:4])
    assert ids[4] in taken
    scheduler.references.ended({0: [transfer_id]})
    scheduler.references.ended({0: [transfer_id]})  # reported again by the same rank
    assert scheduler.pool.get_num_free_blocks() == 0
    scheduler.references.ended({1: [transfer_id]})
    assert {block.block_id for block in scheduler.pool.get_new_blocks(4)} == set(ids[:4])
    assert not scheduler.references._held


def test_the_blocks_of_a_rank_that_stopped_are_given_back(scheduler: Scripted) -> None:
    free = scheduler.pool.get_num_free_blocks()
    scheduler.prefill(FakeRequest())
    assert scheduler.pool.get_num_free_blocks() == free - 16
    scheduler.references.rank_stopped(0)
    assert scheduler.pool.get_num_free_blocks() == free - 16
    scheduler.references.rank_stopped(1)
    assert scheduler.pool.get_num_free_blocks() == free


def test_vllm_steps_on_for_reports_but_not_for_a_frozen_agent(
    scheduler: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    references = scheduler.references
    assert not references.expects_reports()
    transfer_id = references.take([1, 2])
    assert references.expects_reports()  # until the workers have it, whenever that is
    references.sent([transfer_id])
    assert references.expects_reports()
    later_s = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert not references.expects_reports()
    assert len(references._held) == 1


def test_a_failed_load_is_not_tried_again(scheduler: Scripted) -> None:
    request = FakeRequest("r")
    scheduler.adapter.tokens = 4 * CHUNK
    scheduler.begin(request, BLOCKS)
    scheduler.run()
    # One rank reports the failure in one step; the load ends in a later step.
    scheduler.reported(WorkerReport({}, failed={"r"}))
    scheduler.run()
    scheduler.load_ended("r")
    lookups = len(scheduler.adapter.lookups)
    assert scheduler.matched_tokens(request, 0) == 0
    assert len(scheduler.adapter.lookups) == lookups
    # Computed chunks are stored, because chunks that were thought to be cached may not be.
    metadata = scheduler.run(new=("r", BLOCKS, 0, 4 * CHUNK + 1))
    assert len(only_store(metadata).block_ids) == 16


def test_a_preempted_request_starts_over(scheduler: Scripted) -> None:
    request = FakeRequest(tokens=2 * CHUNK + 1)
    scheduler.prefill(request, tokens=CHUNK)
    scheduler.run(preempted={"r"})
    scheduler.adapter.tokens = CHUNK
    blocks = list(range(20, 29))
    assert scheduler.begin(request, blocks) == CHUNK
    assert scheduler.adapter.lookups == [("r", 0), ("r", 0)]
    scheduler.run()
    scheduler.load_ended("r")
    resumed = scheduler.run(cached=("r", blocks, CHUNK, CHUNK + 1), resumed=True)
    assert list(only_store(resumed).block_ids) == blocks[4:8]


def test_an_agent_that_comes_back_with_other_chunks(scheduler: Scripted) -> None:
    request = FakeRequest()
    scheduler.adapter.tokens = None
    assert scheduler.matched_tokens(request, 0) is None
    scheduler.adapter.chunk = 2 * CHUNK
    assert scheduler.matched_tokens(request, 0) is None
    assert scheduler.adapter.ended == ["r"]
    assert scheduler.adapter.lookups == [("r", 0), ("r", 0)]


def test_what_is_recent_is_stored_again_if_a_lookup_misses_it(scheduler: Scripted) -> None:
    """Then the cache was emptied in between."""
    # The second has all tokens in vLLM's own blocks, so there is nothing to look up.
    for request_id, local, stores in (("r", 0, 1), ("s", 2 * CHUNK, 0), ("t", 0, 1)):
        scheduler.begin(FakeRequest(request_id, tokens=2 * CHUNK + 1), local=local)
        metadata = scheduler.run(new=(request_id, BLOCKS, 0, 2 * CHUNK + 1))
        assert [len(each.ops[0].block_ids) for each in metadata.stores] == [8] * stores


def test_a_chunk_that_the_agent_dropped_is_stored_again(scheduler: Scripted) -> None:
    scheduler.computed_before(BLOCKS, 4 * CHUNK)
    for request_id, dropped in (("r", False), ("s", True), ("t", False)):
        stores = scheduler.prefill(FakeRequest(request_id), local=4 * CHUNK).stores
        assert [row[1] for row in stores] == ([] if request_id == "s" else [request_id])
        if dropped:
            scheduler.reported(WorkerReport({}, dropped=True))


def store_of(scheduler: Scripted, request_id: str, lora: str | None = None) -> StepMetadata:
    return scheduler.prefill(FakeRequest(request_id, tokens=2 * CHUNK + 1, lora_request=lora))


def test_names_begin_with_the_epoch_and_the_adapter(
    scheduler: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {None: b"", "known": b"A" * 16, "unknown": None}
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digests[lora])
    plain = FakeRequest(tokens=2 * CHUNK + 1).block_hashes[3::4]
    assert only_store(store_of(scheduler, "r")).hashes == plain
    names = only_store(store_of(scheduler, "s", lora="known")).hashes
    assert names == [b"A" * 16 + h for h in plain]
    assert store_of(scheduler, "t", lora="unknown").stores == []  # not identified
    assert [request_id for request_id, _ in scheduler.adapter.lookups] == ["r", "s"]
    epoch = scheduler.name_weights("step-1")
    assert len(epoch) == 8
    assert only_store(store_of(scheduler, "u")).hashes == [epoch + h for h in plain]
    names = only_store(store_of(scheduler, "v", lora="known")).hashes
    assert names == [epoch + b"A" * 16 + h for h in plain]


def test_a_request_across_epochs_is_not_cached(scheduler: Scripted) -> None:
    """Its blocks hold KV of two weights."""
    computing, waiting = FakeRequest("r", tokens=2 * CHUNK + 1), FakeRequest("s")
    assert len(scheduler.prefill(computing, tokens=CHUNK).stores) == 1
    scheduler.adapter.tokens = None
    assert scheduler.matched_tokens(waiting, 0) is None
    scheduler.name_weights("step-1")
    assert scheduler.run(cached=("r", None, CHUNK, CHUNK + 1)).stores == []
    # Preempted, it begins again, and is still not cached.
    scheduler.run(preempted={"r"})
    assert scheduler.matched_tokens(computing, 0) == 0
    # One that only waited looks up again, under the new names.
    assert scheduler.matched_tokens(waiting, 0) is None
    assert scheduler.adapter.lookups == [("r", 0), ("s", 0), ("s", 0)]


def asked_behind(
    scheduler: Scripted, name: str, local: int, blocks: list[int], lora: str | None = None
) -> tuple[int | None, StepMetadata]:
    """What is loaded and stored of four chunks of which vLLM has ``local`` tokens of its own."""
    request = FakeRequest(name, lora_request=lora)
    found = scheduler.matched_tokens(request, local)
    if found is None:  # the step that was being scheduled may have known more
        found = scheduler.matched_tokens(request, local)
    scheduler.allocated(request, [blocks], 0)
    metadata = scheduler.run(new=(name, blocks, local, request.tokens - local))
    scheduler.finished(request)
    scheduler._planner.recent.clear()
    return found, metadata


def test_old_kv_in_vllms_cache_is_neither_stored_nor_continued(
    scheduler: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's hashes have an adapter's name and path, and nothing of weights: old blocks are hits.

    Nor is stored what is computed behind them; and nothing is loaded there.
    """
    digests = {"v1": b"A" * 16, "v2": b"B" * 16}
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digests[lora])
    part = [*BLOCKS[:4], *range(44, 57)]
    scheduler.computed_before(BLOCKS, 4 * CHUNK, lora="v1")
    scheduler.adapter.tokens = 4 * CHUNK
    for name, local, blocks, adapter, loaded, stored in (
        ("s", 4, BLOCKS, "v2", 0, []),
        ("t", 1, part, "v2", 0, []),
        ("u", 4, part, "v2", 0, []),  # what "t" has computed behind it is not known
        ("v", 4, BLOCKS, "v1", 0, [4]),  # the old one is still there
        ("w", 1, part, "v1", 3, [4]),
        ("x", 0, list(range(60, 77)), "v2", 4, [4]),
    ):
        found, metadata = asked_behind(scheduler, name, local * CHUNK, blocks, adapter)
        assert found == loaded * CHUNK, name
        assert [len(each.ops[0].hashes) for each in metadata.stores] == stored, name


def test_a_block_that_is_given_away_is_not_known(scheduler: Scripted) -> None:
    taken = scheduler.pool.get_new_blocks(17)
    blocks = [each.block_id for each in taken]
    assert asked_behind(scheduler, "r", 0, blocks)[1].stores
    assert asked_behind(scheduler, "s", 4 * CHUNK, blocks)[1].stores
    scheduler.pool.free_blocks(taken)
    for rank in (0, 1):
        scheduler.references.rank_stopped(rank)
    scheduler.pool.get_new_blocks(scheduler.pool.get_num_free_blocks())  # whoever fills them now
    assert asked_behind(scheduler, "t", 4 * CHUNK, blocks)[1].stores == []


def test_a_request_from_before_an_epoch_does_not_load(scheduler: Scripted) -> None:
    """Preempted at once, before any store told it that its names are old."""
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    scheduler.prefill(request, tokens=CHUNK)
    scheduler.name_weights("step-1")
    scheduler.run(preempted={"r"})
    assert scheduler.matched_tokens(request, 0) == 0
    assert scheduler.adapter.lookups == [("r", 0)]


def test_an_adapter_that_is_replaced_while_a_request_runs(
    scheduler: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed since has no name, neither the old adapter's nor the new one's."""
    digest: list[bytes | None] = [b"A" * 16]
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: digest[0])
    request = FakeRequest("r", tokens=3 * CHUNK + 1, lora_request="adapter")
    assert len(only_store(scheduler.prefill(request, tokens=CHUNK)).hashes) == 1
    digest[0] = b"B" * 16
    assert scheduler.run(cached=("r", None, CHUNK, CHUNK)).stores == []
    digest[0] = b"A" * 16  # no way back: what was computed meanwhile is unknown
    assert scheduler.run(cached=("r", None, 2 * CHUNK, CHUNK + 1)).stores == []


@pytest.mark.parametrize(
    ("read", "stored"), [(b"A" * 16, True), (b"B" * 16, False), (b"", False), (None, True)]
)
@pytest.mark.parametrize("ended", [False, True])
def test_an_adapter_that_is_read_as_another_than_it_was_named(
    scheduler: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    read: bytes | None,
    stored: bool,
    ended: bool,
) -> None:
    """Its files were replaced between our look and vLLM's reading, in the step that computes."""
    monkeypatch.setattr(AdapterDigests, "digest", lambda self, lora: b"A" * 16)
    lora = SimpleNamespace(lora_int_id=1, lora_path="/adapter")
    request = FakeRequest("r", tokens=2 * CHUNK + 1, lora_request=lora)
    other = FakeRequest("other", tokens=CHUNK + 1)
    waiting = FakeRequest("waiting", lora_request=lora)
    scheduler.matched_tokens(waiting, 0)
    seen = {} if read is None else {1: read}
    names: list[str] = []
    for each, blocks in ((request, BLOCKS), (other, list(range(40, 45)))):
        output = begun(scheduler, each, blocks, each.tokens)
        names += [store.request_id for store in scheduler.build_metadata(output).stores]
        if ended:
            scheduler.finished(each)
        scheduler.reported(WorkerReport({}, adapters={0: seen}))
        scheduler.output_taken(output)
    output = scheduler.step()
    names += [store.request_id for store in scheduler.build_metadata(output).stores]
    scheduler.output_taken(output)
    assert names == (["r", "other"] if stored else ["other"])
    # Nor is what it has left in vLLM's own cache.
    scheduler.reported(WorkerReport({}, adapters={0: {1: b"A" * 16}}))
    if ended:
        scheduler._planner.recent.clear()
        request = FakeRequest("s", lora_request=lora)
        assert bool(scheduler.prefill(request, local=2 * CHUNK).stores) == stored
    # One that was waiting has looked up under the wrong name.
    scheduler.matched_tokens(waiting, 0)
    assert scheduler.adapter.lookups.count(("waiting", 0)) == (1 if stored else 2)


def test_after_a_failed_step_workers_tell_their_adapters_again(scheduler: Scripted) -> None:
    scheduler.adapters_read({0: {}})
    lost = begun(scheduler, FakeRequest("r"), BLOCKS, CHUNK + 1)
    taken = begun(scheduler, FakeRequest("s"), list(range(20, 29)), CHUNK + 1)
    for output in (lost, taken):
        assert not scheduler.build_metadata(output).adapters
    scheduler.output_taken(taken)
    assert scheduler.build_metadata(scheduler.step()).adapters
    scheduler.reported(WorkerReport({}, adapters={0: {}}))
    assert not scheduler.build_metadata(scheduler.step()).adapters


# ------------------------------------------------------- beside other connectors


@pytest.mark.parametrize("local", [0, CHUNK])
def test_what_another_connector_has_loaded_is_not_stored(scheduler: Scripted, local: int) -> None:
    """Nor what is computed behind it, by this request or by one that finds its blocks."""
    if local:
        scheduler.computed_before(BLOCKS[:4], local)
    request = FakeRequest("r")
    scheduler.begin(request, local=local)
    brought = scheduler.run(new=("r", BLOCKS, local + CHUNK, 3 * CHUNK + 1 - local))
    assert [len(store.ops[0].hashes) for store in brought.stores] == [1] * (local // CHUNK)
    request.grow(5 * CHUNK)
    assert scheduler.run(cached=("r", [20, 21, 22], 4 * CHUNK + 1, CHUNK)).stores == []
    scheduler.finished(request)
    assert asked_behind(scheduler, "s", 4 * CHUNK, BLOCKS)[1].stores == []
    # Preempted, a request computes all of it itself.
    again = list(range(40, 57))
    assert len(only_store(asked_behind(scheduler, "t", 0, again)[1]).hashes) == 4


def test_a_request_that_resumes_with_a_siblings_load(scheduler: Scripted) -> None:
    scheduler.prefill(FakeRequest("r", tokens=2 * CHUNK + 1), tokens=1)
    resumed = ("r", list(range(20, 30)), CHUNK, CHUNK + 1)
    assert scheduler.run(cached=resumed, resumed=True, preempted={"r"}).stores == []
    assert scheduler.run(cached=("r", None, 2 * CHUNK + 1, 1)).stores == []
    resumed = ("r", list(range(40, 50)), 0, 2 * CHUNK + 1)
    stored = scheduler.run(cached=resumed, resumed=True, preempted={"r"})
    assert only_store(stored).block_ids == list(range(40, 48))


# ------------------------------------------------------- steps that fail


def begun(scheduler: Scripted, request: FakeRequest, blocks: list[int], tokens: int) -> Any:
    scheduler.begin(request)
    return scheduler.step(new=(request.request_id, blocks, 0, tokens))


def test_a_step_is_stored_once_its_output_was_taken(scheduler: Scripted) -> None:
    """Two steps are in flight, as with asynchronous scheduling. The session ends behind its stores.

    vLLM 0.33 gives its scheduler empty outputs to deliver reports of steps that have failed.
    """
    first = begun(scheduler, FakeRequest(), BLOCKS, 2 * CHUNK)
    assert scheduler.build_metadata(first).stores == []
    second = scheduler.step(cached=("r", None, 2 * CHUNK, 2 * CHUNK + 1))
    assert scheduler.build_metadata(second).stores == []
    assert scheduler.references.expects_reports()  # vLLM steps on, so that they are sent
    scheduler.output_taken(scheduler.step())  # of no step
    scheduler.output_taken(first)
    third = scheduler.step(cached=("r", None, 4 * CHUNK + 1, 1))
    assert list(only_store(scheduler.build_metadata(third)).block_ids) == BLOCKS[:8]
    scheduler.finished(FakeRequest())
    scheduler.output_taken(second)
    scheduler.output_taken(third)
    assert scheduler.adapter.ended == []
    carries = scheduler.step()
    assert list(only_store(scheduler.build_metadata(carries)).block_ids) == BLOCKS[8:16]
    assert scheduler.adapter.ended == []
    assert scheduler.build_metadata(scheduler.step()).stores == []
    scheduler.output_taken(carries)
    assert scheduler.adapter.ended == ["r"]
    scheduler.finished(FakeRequest("without stores"))
    assert scheduler.adapter.ended == ["r", "without stores"]


def test_nothing_that_a_failed_step_has_computed_is_stored(scheduler: Scripted) -> None:
    """Nor a later step's, which may have used it. vLLM goes on after faults of experts."""
    free = scheduler.pool.get_num_free_blocks()
    good = begun(scheduler, FakeRequest("good"), list(range(20, 37)), 4 * CHUNK + 1)
    scheduler.build_metadata(good)
    scheduler.output_taken(good)
    ((sent, *_),) = scheduler.build_metadata(scheduler.step()).stores
    scheduler.references.sent([sent])
    failed = begun(scheduler, FakeRequest(), BLOCKS, 2 * CHUNK)
    scheduler.build_metadata(failed)
    behind = scheduler.step(cached=("r", None, 2 * CHUNK, 2 * CHUNK + 1))
    scheduler.build_metadata(behind)
    scheduler.output_taken(behind)
    after = scheduler.build_metadata(scheduler.step())
    assert after.stores == []
    assert after.unsure == [sent]  # its end may have been reported in the failed step
    scheduler.references.ended({0: [sent], 1: [sent]})
    assert scheduler.pool.get_num_free_blocks() == free
    # What vLLM still has of it in its own cache is not stored, nor what others compute behind it.
    assert asked_behind(scheduler, "s", 2 * CHUNK, BLOCKS)[1].stores == []
    assert scheduler.run(cached=("r", [60, 61], 4 * CHUNK + 1, 1)).stores == []
    assert len(asked_behind(scheduler, "t", 0, list(range(40, 57)))[1].stores) == 1


def test_loads_of_failed_steps_are_asked_for_while_vllm_waits(scheduler: Scripted) -> None:
    scheduler.adapter.tokens = 2 * CHUNK
    for name, first in (("waits", 1), ("ended", 20)):
        assert scheduler.begin(FakeRequest(name), list(range(first, first + 17))) == 2 * CHUNK
    loads = scheduler.build_metadata(scheduler.step()).loads
    scheduler.references.sent(each.transfer_id for each in loads)
    after = scheduler.step()
    scheduler.build_metadata(after)
    scheduler.load_ended("ended")  # vLLM 0.33 saves some reports of a failed step
    scheduler.output_taken(after)
    asked = scheduler.build_metadata(scheduler.step())
    assert asked.unsure == [each.transfer_id for each in loads]
    assert asked.awaited == [loads[0]]
    assert loads[0].written == list(range(1, 9))
    assert (asked.number, asked.lost_steps) == (3, (1,))
    assert not scheduler.build_metadata(scheduler.step()).awaited


def test_a_step_behind_a_lost_one_may_be_lost_too(scheduler: Scripted) -> None:
    """Its reports are asked for again, although nothing of it would be stored."""
    scheduler.adapter.tokens = 2 * CHUNK
    assert scheduler.begin(FakeRequest(), BLOCKS) == 2 * CHUNK
    steps = [scheduler.step() for _ in range(5)]
    for each in steps[:3]:
        scheduler.references.sent(load.transfer_id for load in scheduler.build_metadata(each).loads)
    for taken, asking, lost in ((1, 3, (1,)), (3, 4, (1, 3))):
        scheduler.output_taken(steps[taken])
        asked = scheduler.build_metadata(steps[asking])
        assert [each.request_id for each in asked.awaited] == ["r"]
        assert asked.lost_steps == lost


@pytest.mark.parametrize("taken", [False, True])
def test_what_waits_to_be_stored_is_dropped_at_a_pause(scheduler: Scripted, taken: bool) -> None:
    """In its caller's process vLLM goes to sleep without another step, and discards the KV."""
    free = scheduler.pool.get_num_free_blocks()
    output = begun(scheduler, FakeRequest(), BLOCKS, 2 * CHUNK)
    scheduler.build_metadata(output)
    if taken:
        scheduler.output_taken(output)
    scheduler.finished(FakeRequest("r"))
    scheduler.paused()
    assert scheduler.pool.get_num_free_blocks() == free
    assert scheduler.adapter.ended == ["r"]
    if not taken:
        scheduler.output_taken(output)
    assert scheduler.run().stores == []
    # Whoever computes it again stores it.
    again = scheduler.prefill(FakeRequest("s"), list(range(20, 37)), 2 * CHUNK)
    assert list(only_store(again).block_ids) == list(range(20, 28))


@pytest.mark.parametrize(("beside", "tokens"), [(True, 0), (False, 2 * CHUNK)])
def test_a_prompt_that_a_prefiller_sends_is_not_loaded(beside: bool, tokens: int) -> None:
    """Half a hit would replace the transfer of all of it. Without another connector, none comes."""
    scheduler = Scripted(beside_others=beside)
    scheduler.adapter.tokens = 2 * CHUNK
    params: dict[str, Any] = {"do_remote_prefill": True, "remote_host": "prefiller"}
    request = FakeRequest(kv_transfer_params=params)
    assert scheduler.matched_tokens(request, 0) == tokens
    params["do_remote_prefill"] = False  # as Nixl does it, once it has the blocks
    assert scheduler.matched_tokens(request, 0) == tokens
    assert len(scheduler.adapter.lookups) == (0 if beside else 1)


# ---------------------------------------------------- prefill and decode apart


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        (None, 0),
        ({"lmcache_redis": {"stored_tokens": 2 * CHUNK}}, 2 * CHUNK),
        ({"do_remote_prefill": True}, sys.maxsize),
        ({"do_remote_prefill": True, "lmcache_redis": {"stored_tokens": CHUNK}}, CHUNK),
        ({"do_remote_prefill": True, "lmcache_redis": {"stored_tokens": 0}}, 0),
        ({"do_remote_prefill": False, "do_remote_decode": True}, 0),
    ],
)
def test_what_another_engine_is_storing_is_waited_for_once(
    scheduler: Scripted, params: Any, tokens: int
) -> None:
    request = FakeRequest(kv_transfer_params=params)
    scheduler.prefill(request, tokens=2 * CHUNK)
    assert scheduler.adapter.stored_tokens == tokens
    scheduler.run(preempted={"r"})
    scheduler.matched_tokens(request, 0)
    assert scheduler.adapter.stored_tokens == 0
    assert len(scheduler.adapter.lookups) == 2


def test_a_prefill_says_how_much_of_it_is_stored(scheduler: Scripted) -> None:
    params = {"do_remote_decode": True, "remote_host": None}
    some, nothing = ({"lmcache_redis": {"stored_tokens": n}} for n in (2 * CHUNK, 0))
    for name, more, told in [
        ("prefill", params, some),
        ("known", params, some),
        ("not stored", {**params, "lmcache_redis": {"store": False}}, nothing),
        ("not said", None, None),
        ("held back", params, nothing),
    ]:
        scheduler.adapter.names_before = name == "held back"
        request = FakeRequest(name, 2 * CHUNK + 20, kv_transfer_params=more)
        scheduler.prefill(request)
        assert scheduler.finished(request) == told
    assert scheduler.finished(FakeRequest("never seen", kv_transfer_params=params)) == nothing


# ------------------------------------------------------- memory


def test_a_hit_that_is_refused_while_nothing_runs_is_computed(scheduler: Scripted) -> None:
    scheduler.adapter.tokens = 2 * CHUNK
    request = FakeRequest()
    for _ in range(3):  # a step runs: blocks may become free
        assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
        scheduler.run(cached=("other", None, 1, 1))
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    transfer = scheduler.references.take([5])  # one is in flight
    scheduler.run()
    assert scheduler.matched_tokens(request, 0) == 2 * CHUNK
    scheduler.references.ended({0: [transfer], 1: [transfer]})
    scheduler.run()
    assert scheduler.matched_tokens(request, 0) == 0
    assert scheduler.adapter.ended == ["r"]
    assert scheduler.matched_tokens(request, 0) == 0
    assert scheduler.adapter.lookups == [("r", 0)]


def test_vllm_waits_for_blocks_that_only_stores_hold(
    scheduler: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(planning.time, "monotonic", lambda: now)
    pool, references = scheduler.pool, scheduler.references
    blocks = pool.get_new_blocks(2)
    store = references.take([blocks[0].block_id], for_store=True)
    load = references.take([blocks[1].block_id])
    references.sent([store, load])
    assert not references.frees_soon()  # the request has them too
    pool.free_blocks(blocks)
    assert references.frees_soon()
    now += 1.0  # a slow agent: a request is preempted rather than held up
    assert not references.frees_soon()
    now -= 1.0
    references.ended({0: [store], 1: [store]})
    assert not references.frees_soon()  # a load may take long


def test_an_aborted_load_that_fails_is_stored_again(scheduler: Scripted) -> None:
    """Its chunks may not be cached, although a lookup has found them."""
    scheduler.adapter.tokens = 2 * CHUNK
    request = FakeRequest("r", tokens=2 * CHUNK + 1)
    assert scheduler.begin(request, BLOCKS) == 2 * CHUNK
    ((transfer_id, *_),) = scheduler.run().loads
    request.over = True
    scheduler.finished(request)
    assert len(scheduler.references._held) == 1  # the agent may still be writing
    scheduler.adapter.tokens = 0
    scheduler.reported(WorkerReport({}, failed={"r"}))
    scheduler.load_ended("r")
    scheduler.load_ended("r")  # another connector's load, or reported twice
    assert "r" not in scheduler._tracked
    scheduler.references.ended({0: [transfer_id], 1: [transfer_id]})
    assert not scheduler.references._held
    # A lookup would tell that they are missing.
    other = FakeRequest("s", tokens=2 * CHUNK + 1, skip_reading_prefix_cache=True)
    assert len(only_store(scheduler.prefill(other)).hashes) == 2


def test_a_prefix_is_given_back_so_that_its_end_is_evicted_first(scheduler: Scripted) -> None:
    pool, references = scheduler.pool, scheduler.references
    blocks = pool.get_new_blocks(3)
    computed: Any = FakeRequest(tokens=3 * BLOCK)
    pool.cache_full_blocks(computed, blocks, 0, 3, BLOCK, 0)
    store = references.take([each.block_id for each in blocks], for_store=True)
    pool.free_blocks(reversed(blocks))
    references.ended({0: [store], 1: [store]})
    freed = [each.block_id for each in pool.free_block_queue.get_all_free_blocks()][-3:]
    assert freed == [each.block_id for each in reversed(blocks)]


def test_recent_chunks_are_forgotten_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(planning.time, "monotonic", lambda: now)
    recent = planning.RecentChunks()
    recent.add(0, [b"chunk"])
    now += 59
    assert (0, b"chunk") in recent
    now += 2
    assert (0, b"chunk") not in recent
    assert (1, b"chunk") not in recent


# ------------------------------------------------------- what a request asks for


def test_a_request_loads_at_most_what_it_allows(scheduler: Scripted) -> None:
    scheduler.matched_tokens(wishing(max_load_tokens=2 * CHUNK + 1), 0)
    assert scheduler.adapter.hashes == 2


def test_a_request_that_must_not_be_stored_is_loaded(scheduler: Scripted) -> None:
    scheduler.adapter.tokens = CHUNK
    assert scheduler.matched_tokens(wishing(store=False), 0) == CHUNK
    assert scheduler.run(new=("r", BLOCKS, 0, 4 * CHUNK + 1)).stores == []


# ------------------------------------------------------- what computing costs


@pytest.mark.parametrize("load_always", [False, True])
def test_lookups_say_what_the_engine_takes_to_compute_a_token(load_always: bool) -> None:
    """Of its prompts, unless all is loaded, however slowly."""
    scheduler = Scripted(load_always=load_always)
    scheduler.matched_tokens(FakeRequest(), 0)
    assert scheduler.adapter.token_s == scheduler.adapter.busy_s == 0.0
    for computed, is_measured in ((4 * CHUNK + 1, False), (4 * CHUNK, not load_always)):
        output = scheduler.step(new=("r", list(range(1, 31)), computed, 200))
        scheduler.build_metadata(output)
        time.sleep(0.02)
        scheduler.output_taken(output)
        scheduler.matched_tokens(FakeRequest(f"behind {computed}"), 0)
        assert (scheduler.adapter.token_s > 0.02 / 200) == is_measured
        assert is_measured or scheduler.adapter.token_s == 0.0


def test_lookups_say_what_is_left_of_the_prompts_begun(scheduler: Scripted) -> None:
    def asked(name: str) -> int:
        """What another request's lookup says, in tokens."""
        scheduler.matched_tokens(FakeRequest(name), 0)
        return round(scheduler.adapter.busy_s / scheduler.adapter.token_s)

    first = FakeRequest("first", 9 * CHUNK)
    scheduler.prefill(first, list(range(1, 37)), 4 * CHUNK)
    assert scheduler.adapter.busy_s == 0.0
    first.num_computed_tokens = 4 * CHUNK  # as vLLM does behind each step
    assert asked("second") == 5 * CHUNK
    scheduler.begin(FakeRequest("third", 2 * CHUNK))
    assert asked("fourth") == 7 * CHUNK
    # One is preempted, and asks again before it begins again.
    first.num_computed_tokens = 0
    scheduler.build_metadata(scheduler.step(preempted={"first"}))
    assert asked("first") == 2 * CHUNK
    scheduler.finished(FakeRequest("third", 2 * CHUNK))
    assert asked("fifth") == 0

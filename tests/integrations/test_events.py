# SPDX-License-Identifier: Apache-2.0
"""KV events: what vLLM itself would say of the same blocks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from lmcache_redis import messages as m
from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.integrations.vllm.connector import LMCacheRedisConnector
from lmcache_redis.integrations.vllm.reports import events
from lmcache_redis.integrations.vllm.reports.events import Announcer
from lmcache_redis.integrations.vllm.support import LayerGroup
from tests.integrations.scripted import BLOCK, BLOCKS, CHUNK, FakeRequest, Scripted
from tests.integrations.test_guard import Broken, bind, config, manager_of

HASH = 16
FULL = LayerGroup(0, (), HASH, FULL_REACH)
WIDE = LayerGroup(1, (), 2 * HASH, FULL_REACH)
WINDOW = LayerGroup(1, (), HASH, Reach("window", 20))
STATE = LayerGroup(1, (), 2 * HASH, Reach("state"))


def told(lost: bool, *changes: m.Change) -> m.Changes:
    return m.Changes(0, changes, lost)


class ScriptedWatch:
    """Gives scripted news."""

    def __init__(self, *news: m.Changes, groups: Sequence[int] = (0,)) -> None:
        self.news = [told(True), *news]
        self.groups = tuple(groups)

    @property
    def has_news(self) -> bool:
        return bool(self.news)

    def take(self) -> m.Changes | None:
        return self.news.pop(0) if self.news else None

    def tell(self, tier: str, there: bool, *names: bytes, part: int = 0) -> None:
        self.news.append(told(False, m.Change(part, tier[0], there, names)))


def announcer(watch: ScriptedWatch, *groups: LayerGroup) -> Announcer:
    specs: list[dict[str, Any]] = [{} for _ in groups]
    return Announcer(watch, groups, HASH, specs)  # type: ignore[arg-type]


def request_of(tokens: int, *, shared: int | None = None, other: int = 7, **options: Any) -> Any:
    """shared: from this token on, the prompt is one that ``other`` decides."""
    init_none_hash(sha256)
    shared = tokens if shared is None else shared
    return Request(
        request_id="r",
        prompt_token_ids=[n * (7 if n < shared else other) % 1000 for n in range(tokens)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(HASH, sha256),
        **options,
    )


def names_of(request: Any, chunk_tokens: int = CHUNK) -> list[bytes]:
    hashes = request.block_hashes
    return list(hashes[chunk_tokens // HASH - 1 :: chunk_tokens // HASH])


def vllms_own(request: Any, group: LayerGroup, first: int, last: int) -> BlockStored:
    """What vLLM publishes for blocks ``first`` to ``last``, if they were in our host pool."""
    pool = BlockPool(64, enable_caching=True, hash_block_size=HASH, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(last)
    pool.cache_full_blocks(
        request=request,
        blocks=blocks,
        num_cached_blocks=first,
        num_full_blocks=last,
        block_size=group.block_size_tokens,
        kv_cache_group_id=group.number,
    )
    (event,) = pool.take_events()
    event.medium, event.locality = "CPU", "LOCAL"
    if hasattr(event, "session_id"):
        event.session_id = None
    return event


def followed(
    request: Any, group: LayerGroup = FULL
) -> tuple[list[bytes], ScriptedWatch, Announcer]:
    """The names of a prompt's chunks, which are followed. group: whose parts are told."""
    names, watch = names_of(request), ScriptedWatch(groups=(group.number,))
    made = announcer(watch, FULL, *([group] if group.number else []))
    assert made.take() == []
    made.named(request, names, range(len(names)), CHUNK)
    assert made.take() == []
    return names, watch, made


LORA = LoRARequest("adapter", 3, "/nowhere")


@pytest.mark.parametrize("options", [{}, {"cache_salt": "salt"}, {"lora_request": LORA}], ids=str)
@pytest.mark.parametrize(
    "group", [FULL, WIDE, WINDOW, STATE], ids=["full", "wide", "window", "state"]
)
def test_a_stored_chunk_is_described_as_by_vllm(group: LayerGroup, options: dict[str, Any]) -> None:
    request = request_of(3 * CHUNK + 5, **options)
    names, watch, made = followed(request, group)
    watch.tell("host", True, *reversed(names))
    parts = [group.part(number, CHUNK) for number in range(3)]  # in the order of the prompt
    assert made.take() == [vllms_own(request, group, each.start, each.stop) for each in parts]


def test_events_have_the_number_that_vllm_gave_the_group() -> None:
    """Its own cache leaves out the groups between."""
    request = request_of(2 * CHUNK)
    names = names_of(request)
    watch = ScriptedWatch(groups=(0, 1))
    later = replace(WIDE, number=3)
    made = Announcer(watch, [FULL, later], HASH, [{}, {}, {}, {"kv_cache_spec_kind": "third"}])  # type: ignore[arg-type]
    made.named(request, names, range(2), CHUNK)
    made.take()
    watch.tell("host", True, *names, part=1)
    stored = made.take()
    assert {(each.group_idx, each.kv_cache_spec_kind) for each in stored} == {(3, "third")}
    assert {each.block_size for each in stored} == {2 * HASH}
    watch.tell("host", False, *names, part=1)
    (removed,) = made.take()
    assert removed.group_idx == 3


def test_a_chunk_that_is_named_again_is_followed_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_CHUNKS", 2)
    request = request_of(3 * CHUNK)
    names = names_of(request)
    watch = ScriptedWatch()
    made = announcer(watch, FULL)
    for number in (0, 1, 0, 2):  # the second one is forgotten for the third
        made.named(request, names, range(number, number + 1), CHUNK)
    assert made.take() == []
    watch.tell("host", True, *names)
    told = {event.block_hashes[-1] for event in made.take() if isinstance(event, BlockStored)}
    assert len(told) == 2
    ends = [request.block_hashes[(number + 1) * CHUNK // HASH - 1] for number in range(3)]
    assert told == {kv_cache_utils.maybe_convert_block_hash(ends[number]) for number in (0, 2)}


@pytest.mark.parametrize(
    ("tier", "place"),
    [
        ("host", ("CPU", "LOCAL")),
        ("disk", ("STORAGE", "LOCAL")),
        ("redis", ("STORAGE", "REMOTE")),
    ],
)
def test_stored_and_removed(tier: str, place: tuple[str, str]) -> None:
    names, watch, made = followed(request_of(2 * CHUNK))
    watch.tell(tier, True, *names)
    stored = made.take()
    watch.tell(tier, False, *names)
    (removed,) = made.take()
    assert isinstance(removed, BlockRemoved)
    assert (removed.medium, removed.locality, removed.group_idx) == (*place, 0)
    assert {(each.medium, each.locality) for each in stored} == {place}
    assert removed.block_hashes == [each for event in stored for each in event.block_hashes]


def test_a_loss_removes_everything_and_more_follows_later() -> None:
    names, watch, made = followed(request_of(2 * CHUNK))
    watch.tell("host", True, *names)
    watch.tell("redis", True, names[0])
    stored = [each for _ in range(2) for each in made.take()]
    assert len(stored) == 3
    watch.news.append(told(True, m.Change(0, "h", True, (names[1],))))
    *removed, again = made.take()
    assert [(type(each), each.medium) for each in removed] == [
        (BlockRemoved, "CPU"), (BlockRemoved, "STORAGE"),
    ]  # fmt: skip
    assert again == stored[1]


@pytest.mark.parametrize("group", [FULL, WIDE], ids=["full", "wide"])
@pytest.mark.parametrize("number", [0, 1])
def test_blocks_that_two_chunks_share_are_told_once(group: LayerGroup, number: int) -> None:
    part = group.part(number, CHUNK)
    middle = (part.start + part.stop) // 2
    shared, tokens = middle * group.block_size_tokens, (number + 1) * CHUNK
    one, two = (request_of(tokens, shared=shared, other=other) for other in (1, 2))
    names, watch, made = followed(one, group)
    made.named(two, names_of(two), range(number, number + 1), CHUNK)
    names = [names[number], names_of(two)[number]]
    watch.tell("host", True, names[0])
    (first,) = made.take()
    watch.tell("host", True, names[1])
    (second,) = made.take()
    assert second == vllms_own(two, group, middle, part.stop)
    assert second.parent_block_hash == first.block_hashes[middle - part.start - 1]
    # The first one is evicted: the other prompt's chain stays whole.
    watch.tell("host", False, names[0])
    (removed,) = made.take()
    assert removed.block_hashes == first.block_hashes[middle - part.start :]
    watch.tell("host", False, names[1])
    (removed,) = made.take()
    assert removed.block_hashes == first.block_hashes[: middle - part.start] + second.block_hashes


def test_a_reset_removes_everything_once_and_stores_it_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many events take several steps."""
    monkeypatch.setattr(events, "CHUNKS_PER_STEP", 2)
    names, watch, made = followed(request_of(5 * CHUNK))
    watch.tell("host", True, *names)
    steps = []
    while made.has_events:
        steps.append(made.take())
    assert [len(each) for each in steps] == [2, 2, 1]
    before = [event for step in steps for event in step]
    made.tell_again()
    removed, *stored = made.take()
    assert isinstance(removed, BlockRemoved)
    assert {*removed.block_hashes} == {each for event in before for each in event.block_hashes}
    watch.tell("host", False, names[3])  # evicted before it was stored anew
    assert stored == before[:2]
    assert made.take() == [before[2], before[4]]
    assert not made.has_events


def test_what_cannot_be_loaded_now_is_removed() -> None:
    """An epoch that returns brings its chunks."""
    names, watch, made = followed(request_of(CHUNK))
    watch.tell("redis", True, *names)
    (stored,) = made.take()
    for change in (lambda: made.begin_epoch(b"12345678"), made.forget):
        assert not made.has_events
        change()
        assert made.has_events
        (removed,) = made.take()
        assert removed.block_hashes == stored.block_hashes
        made.begin_epoch(b"")
        assert made.take() == ([stored] if change != made.forget else [])


def test_chunks_of_another_size_are_described_anew() -> None:
    """The name of a chunk is that of its last block, whatever its size."""
    request = request_of(2 * CHUNK)
    watch = ScriptedWatch()
    made = announcer(watch, FULL)
    made.take()
    (name,) = names_of(request, 2 * CHUNK)
    for tokens, names in ((CHUNK, names_of(request)), (2 * CHUNK, [name])):
        made.named(request, names, range(len(names)), tokens)
        watch.news.append(told(True, m.Change(0, "h", True, (name,))))
        stored = made.take()[-1]
        assert len(stored.token_ids) == tokens
        assert isinstance(stored, BlockStored)


def test_a_paused_engine_does_not_step_for_events() -> None:
    """vLLM counts such steps as work, and wants none before it releases memory."""
    paused = True
    watch = ScriptedWatch()
    made = Announcer(watch, [FULL], HASH, [{}], lambda: paused)  # type: ignore[arg-type]
    assert not made.has_events
    paused = False
    assert made.has_events


def test_a_failure_ends_the_events_only(caplog: pytest.LogCaptureFixture) -> None:
    names, watch, made = followed(request_of(CHUNK))
    watch.tell("host", True, *names)
    (stored,) = made.take()
    watch.news.append(told(False, None))  # type: ignore[arg-type]
    with caplog.at_level(logging.ERROR, "vllm.lmcache_redis"):
        assert made.has_events
        (removed,) = made.take()  # nothing would correct it later
        assert removed.block_hashes == stored.block_hashes
        assert made.take() == []
        watch.tell("host", True, b"a")
        assert not made.has_events, "vLLM would step for ever"
        made.named(Broken(), [b"a"], range(1), CHUNK)  # type: ignore[arg-type]
        assert made.take() == []
    assert len(caplog.records) == 1


def test_images_are_told_as_vllm_tells_them() -> None:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    images = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=40))
        for name, offset in (("first", 10), ("second", 90))
    ]
    request = request_of(2 * CHUNK, mm_features=images)
    names, watch, made = followed(request)
    watch.tell("host", True, *names)
    told = [each for event in made.take() for each in event.extra_keys]
    assert told == vllms_own(request, FULL, 0, 2 * CHUNK // HASH).extra_keys
    assert sum(each is not None for each in told) == 7


def test_requests_name_the_chunks_they_look_up_and_store() -> None:
    named: list[tuple[list[int], int]] = []
    epochs: list[bytes] = []
    listener = SimpleNamespace(
        named=lambda request, names, chunks, chunk_tokens: named.append(([*chunks], chunk_tokens)),
        begin_epoch=epochs.append,
    )
    scheduler, request = Scripted(announcer=listener), FakeRequest(tokens=3 * CHUNK + 1)
    scheduler.computed_before(BLOCKS, CHUNK)
    assert scheduler.begin(request, local=CHUNK) == 0
    assert named == [([1, 2], CHUNK)]
    scheduler.run(new=("r", BLOCKS[:13], CHUNK, 2 * CHUNK + 1))
    assert named[1:] == [([0, 1, 2], CHUNK)]
    # Chunks that are generated are named when they are stored.
    request.grow(4 * CHUNK + 1)
    scheduler.run(cached=("r", BLOCKS[13:], 3 * CHUNK + 1, CHUNK))
    assert named[2:] == [([3], CHUNK)]
    epoch = scheduler.name_weights("step-1")
    assert named[3:] == []
    assert epochs == [b"", epoch]


@pytest.fixture
def groups() -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[group], num_blocks=64, kv_cache_tensors=[])


def connector(directory: Path, groups: Any, publishes: bool | None) -> LMCacheRedisConnector:
    """publishes: None: this vLLM has no events."""
    settings = config(directory)
    if publishes is not None:
        settings.kv_events_config = SimpleNamespace(enable_kv_cache_events=publishes)
    made = LMCacheRedisConnector(settings, KVConnectorRole.SCHEDULER, groups)
    bind(made, manager_of(64))
    return made


@pytest.mark.parametrize("publishes", [None, False, True])
def test_events_are_made_only_if_vllm_publishes_them(
    tmp_path: Path, groups: Any, publishes: bool | None
) -> None:
    made = connector(tmp_path, groups, publishes)
    assert (made._announcer is not None) is (publishes is True)
    assert not made.take_events()
    assert not made.has_pending_push_work()
    made.turn_off()
    assert not made.take_events()
    made.shutdown()


def test_a_reset_of_vllms_cache_tells_everything_again(tmp_path: Path, groups: Any) -> None:
    made = connector(tmp_path, groups, None)
    names, watch, made._announcer = followed(request_of(CHUNK))
    watch.tell("host", True, *names)
    (stored,) = made.take_events()
    assert made._references is not None
    assert made._references.pool.reset_prefix_cache()
    assert made.has_pending_push_work()
    removed, again = made.take_events()
    assert isinstance(removed, BlockRemoved)
    assert again == stored
    assert not made.has_pending_push_work()
    made.shutdown()


def test_a_vllm_without_what_events_need_still_caches(
    tmp_path: Path, groups: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, events.__name__, None)
    with caplog.at_level(logging.ERROR, "vllm.lmcache_redis"):
        made = connector(tmp_path, groups, publishes=True)
    assert made._scheduler is not None
    assert made.take_events() == ()
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert ["KV events" in each.getMessage() for each in errors] == [True]
    made.shutdown()

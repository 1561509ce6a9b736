# SPDX-License-Identifier: Apache-2.0
"""Epochs: KV of weights that differ, or may differ, never has one name."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.integrations.vllm.epoch import EPOCH_BYTES, Epochs, named_epoch, version_epoch
from lmcache_redis.integrations.vllm.parameters import UNREAD, Parameters


class Memory:
    """The parameters in an engine's memory. is_whole: all of it can be read."""

    def __init__(self, digest: bytes | None = b"first", *, is_whole: bool = True) -> None:
        self.digest = digest
        self.derived = b""
        self.is_whole = is_whole

    def __call__(self) -> Parameters | None:
        if self.digest is None:
            return None
        return Parameters(self.digest, self.digest + self.derived if self.is_whole else None)


def epochs(
    memory: Memory | None = None, *, name: str | None = None, run: str | None = None
) -> Epochs:
    return Epochs(name, run, memory or Memory())


def test_the_first_epoch_is_shared_or_named() -> None:
    assert epochs().current == b""
    assert epochs(name="step-1").current == named_epoch("step-1") != b""
    assert len(named_epoch("step-1")) == EPOCH_BYTES
    assert not epochs().is_own
    assert not epochs(name="step-1").is_own


def test_versions_of_two_runs_are_two_names() -> None:
    """A version is unique in its run at most: trainers count steps."""
    memory = Memory()
    one, other = epochs(memory), epochs(memory)
    memory.digest = b"second"
    for each in (one, other):
        each.weights_have_version("100")
    assert one.is_own
    assert one.current != other.current
    assert len(one.current) == len(other.current) == EPOCH_BYTES


def test_versions_of_a_named_run_are_shared() -> None:
    ours = [epochs(run="run-7"), epochs(run="run-7")]
    theirs = epochs(run="run-8")
    for each in (*ours, theirs):
        each.weights_have_version("100")
    assert ours[0].current == ours[1].current == version_epoch("run-7", "100")
    assert not ours[0].is_own
    assert theirs.current != ours[0].current
    ours[0].weights_have_version("101")
    assert ours[0].current != ours[1].current
    # Neither another split of the same letters nor an id is the same name.
    assert version_epoch("run-7", "100") != version_epoch("run-71", "00")
    assert version_epoch("a", "b") != named_epoch('["a", "b"]')


def test_an_update_of_many_calls_is_one_epoch() -> None:
    each = epochs()
    each.weights_may_differ()
    first = each.current
    for _ in range(100):
        each.weights_may_differ()
    assert each.current == first != b""
    each.is_used = True  # by a request
    each.weights_may_differ()
    second = each.current
    assert second not in (b"", first)
    each.weights_have_id("step-2")
    assert each.current == named_epoch("step-2")
    each.weights_may_differ()  # a shared epoch ends at once
    assert each.current not in (b"", first, second, named_epoch("step-2"))
    each.weights_have_id("step-2")
    assert each.current == named_epoch("step-2")


def test_a_clear_begins_an_epoch_even_if_none_is_used() -> None:
    each = epochs()
    each.begin_own()
    first = each.current
    each.begin_own()
    assert each.is_own
    assert each.current not in (b"", first)


def test_a_name_stands_for_what_is_in_memory_then() -> None:
    """Named at the end of an update: the reset that follows finds the named weights."""
    for name in ("weights_have_id", "weights_have_version"):
        memory = Memory()
        each = epochs(memory, run="run")
        each.weights_may_differ()
        memory.digest = b"updated for " + name.encode()
        getattr(each, name)("step-1")
        named = each.current
        each.is_used = True
        each.check_parameters()
        assert each.current == named
        memory.digest = b"written past every call"
        each.check_parameters()
        assert each.current != named
        assert each.is_own


def test_after_an_unknown_update_used_epochs_do_not_last() -> None:
    """What ran between the update and the reset may have had other weights than those now."""
    each = epochs(Memory(is_whole=False))
    each.weights_may_differ()
    unused = each.current
    each.check_parameters()
    assert each.current == unused
    each.weights_may_differ()
    each.is_used = True
    each.check_parameters()
    assert each.current != unused


def test_parameters_that_cannot_be_read_are_doubted() -> None:
    memory = Memory(None)
    each = epochs(memory)
    each.is_used = True
    each.check_parameters()
    first = each.current
    assert each.is_own
    each.is_used = True
    each.check_parameters()
    assert each.current != first


def used(each: Epochs) -> bytes:
    """The epoch, which a request has used from now on."""
    each.is_used = True
    return each.current


class TestTheSameWeightsAgain:
    """An engine returns to the epoch that its parameters had."""

    def test_after_calls_that_say_nothing_and_a_reset(self) -> None:
        each = epochs()
        each.weights_may_differ()
        used(each)
        assert each.check_parameters()
        assert (each.current, each.is_own) == (b"", False)

    def test_an_own_epoch_too(self) -> None:
        memory = Memory()
        each = epochs(memory)
        memory.digest = b"second"
        each.check_parameters()
        own = used(each)
        each.weights_may_differ()
        assert each.take_ended() == []  # it is not known what is in memory
        each.weights_were_loaded()
        assert (each.current, each.is_own, each.is_used) == (own, True, True)
        memory.digest = b"first"
        each.weights_were_loaded()
        assert (each.current, each.is_own) == (b"", False)
        assert each.take_ended() == [own]
        memory.digest = b"second"
        each.weights_were_loaded()
        assert each.current not in (b"", own)  # its chunks are gone

    def test_what_was_named_last_counts(self) -> None:
        each = epochs()
        each.weights_have_id("step-1")
        used(each)
        each.weights_may_differ()
        each.check_parameters()
        assert each.current == named_epoch("step-1")

    def test_not_if_something_else_differs_or_is_not_known(self) -> None:
        for spoil in ("derived", "not whole", "unreadable"):
            memory = Memory()
            each = epochs(memory)
            each.weights_may_differ()
            memory.derived = b"stale" if spoil == "derived" else b""
            memory.is_whole = spoil != "not whole"
            memory.digest = None if spoil == "unreadable" else b"first"
            each.check_parameters()
            assert each.is_own, spoil

    def test_not_without_reading(self) -> None:
        """``check_weights`` is false."""
        each = Epochs(None, None, lambda: UNREAD)
        assert not each.check_parameters()
        each.weights_may_differ()
        each.weights_were_loaded()
        each.check_parameters()
        assert each.is_own

    def test_not_to_before_a_clear(self) -> None:
        each = epochs()
        each.begin_own()
        own = used(each)
        each.weights_were_loaded()
        assert each.current == own

    def test_what_is_derived_later_belongs_to_the_epoch(self) -> None:
        """Some models make tensors at their first step."""
        memory = Memory()
        each = epochs(memory)
        used(each)
        memory.derived = b"of the first step"
        assert not each.check_parameters()
        each.weights_may_differ()
        assert each.weights_were_loaded()
        assert each.current == b""


class TestEndedEpochs:
    """Own epochs whose chunks are of no use to any engine."""

    def test_never_one_that_others_share(self) -> None:
        memory = Memory()
        each = epochs(memory, name="step-1")
        for name in ("step-2", "step-3"):
            used(each)
            memory.digest = name.encode()
            each.weights_have_id(name)
        used(each)
        each.begin_own()
        assert each.take_ended() == []

    def test_without_a_reset_none_is_forgotten(self) -> None:
        """Requests between the calls of an update, which is never said to have ended."""
        each = epochs()
        ended, owns = [], []
        for _ in range(50):
            each.weights_may_differ()
            owns.append(used(each))
            ended += each.take_ended()
        assert ended == owns[:-1]

"""Epochs: KV of weights that differ, or may differ, never has one name."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from lmcache_redis.integrations.vllm.epoch import EPOCH_BYTES, Epochs, named_epoch, version_epoch


class Memory:
    """The parameters in an engine's memory: their digest, and how often it was read."""

    def __init__(self, digest: bytes | None = b"first") -> None:
        self.digest = digest
        self.reads = 0

    def __call__(self) -> bytes | None:
        self.reads += 1
        return self.digest


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
    one, other = epochs(), epochs()
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


def test_equal_parameters_keep_the_epoch() -> None:
    each = epochs(name="step-1")
    each.is_used = True
    each.check_parameters()
    each.check_parameters()
    assert each.current == named_epoch("step-1")


def test_other_parameters_in_memory_begin_an_epoch() -> None:
    """A trainer that wrote to them without a call is seen at the next reset."""
    memory = Memory()
    each = epochs(memory)
    each.is_used = True
    memory.digest = b"second"
    each.check_parameters()
    first = each.current
    assert each.is_own
    each.is_used = True
    each.check_parameters()
    assert each.current == first  # the same parameters as at the last reset
    memory.digest = b"third"
    each.check_parameters()
    assert each.current not in (b"", first)


def test_a_name_stands_for_what_is_in_memory_then() -> None:
    """Named at the end of an update: the reset that follows finds the named weights."""
    memory = Memory()
    for name in ("weights_have_id", "weights_have_version"):
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
    each = epochs()
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

"""Which keys exist, asked in groups: one round trip, two where the answer is not plain.

EXISTS counts. The keys go in groups of 32, one EXISTS each, packed by hand, many in one
write; only a group whose count is neither nothing nor all is looked into.
1,000 keys take 0.3 ms so, against 7.5 ms with one EXISTS a key (docs/data-plane.md).

A prefix ends where the first key is missing. It is known then, and answered, while the server is
still busy with the rest; and what has to be asked once more is asked before that is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from lmcache_redis.errors import RedisProtocolError
from lmcache_redis.resp.wire import Reply, keys_command, keys_commands

GROUP_KEYS = 32

# Groups in a write: the first is small, so that the server has something to do at once, and
# looks these up while the next are packed.
_FIRST_GROUPS = 2
_WRITE_GROUPS = 32


class Asking(Protocol):
    """What is needed of a `talk.Talk`."""

    outstanding: int

    def send(self, requests: Iterable[bytes], replies: int, /) -> None: ...

    def receive(self, least: int, /) -> Sequence[Reply]: ...


def first_question(keys: Sequence[bytes]) -> tuple[Iterator[bytes], int]:
    """What is to be sent before `count_prefix` or `find_present`, and how many replies come."""
    return _in_groups(keys, GROUP_KEYS)


def count_prefix(talk: Asking, keys: Sequence[bytes]) -> int:
    """How many keys exist from the first on without a gap, once the `first_question` was sent.

    Raises what `talk` raises. May leave replies outstanding that do not matter any more.
    """
    before = 0
    least = 1
    while before < len(keys):
        for found in _counts(talk.receive(least), keys, before, GROUP_KEYS):
            group = keys[before : before + GROUP_KEYS]
            if found == 0:
                return before
            if found < len(group):
                return before + _first_gap(talk, group, found)
            before += GROUP_KEYS
        # Every time it is woken for replies costs the server too.
        least = -(-talk.outstanding // 2)
    return len(keys)


def _first_gap(talk: Asking, group: Sequence[bytes], found: int) -> int:
    """Where the first gap is in a group of which `found` exist, asked behind what is outstanding.

    Almost always those are the first, and one EXISTS of them says so; who knows it does not wait
    for what was asked together with it, each key by itself.
    """
    uninteresting = talk.outstanding
    requests = (keys_command(b"EXISTS", group[:found]), keys_commands(b"EXISTS", group, 1))
    talk.send((b"".join(requests),), 1 + len(group))
    replies = [*talk.receive(uninteresting + 1)]
    (of_first,) = _counts(replies[uninteresting : uninteresting + 1], group[:found], 0, found)
    if of_first == found:
        return found
    if talk.outstanding:
        replies += talk.receive(talk.outstanding)
    for number, there in enumerate(_counts(replies[uninteresting + 1 :], group, 0, 1)):
        if not there:
            return number
    # Without a gap now: the missing one came in since. The later groups are not asked again.
    return len(group)


def find_present(talk: Asking, keys: Sequence[bytes]) -> list[bool]:
    """For each key whether it exists, once the `first_question` was sent.

    Raises what `talk` raises.
    """
    groups = [keys[start : start + GROUP_KEYS] for start in range(0, len(keys), GROUP_KEYS)]
    counts = _all_counts(talk, keys, GROUP_KEYS)
    unclear = [g for g, found in zip(groups, counts, strict=True) if 0 < found < len(g)]
    one_by_one = [key for group in unclear for key in group]
    talk.send(*_in_groups(one_by_one, 1))
    looked_up = iter(_all_counts(talk, one_by_one, 1))
    present: list[bool] = []
    for group, found in zip(groups, counts, strict=True):
        if 0 < found < len(group):
            present += [next(looked_up) > 0 for _ in group]
        else:
            present += [found > 0] * len(group)
    return present


def _all_counts(talk: Asking, keys: Sequence[bytes], group_keys: int) -> list[int]:
    """How many there are of each group of keys, which have been asked for."""
    return list(_counts(talk.receive(talk.outstanding), keys, 0, group_keys)) if keys else []


def _in_groups(keys: Sequence[bytes], group_keys: int) -> tuple[Iterator[bytes], int]:
    """The commands, packed as they are needed, and how many they are."""
    first = group_keys * _FIRST_GROUPS
    step = group_keys * _WRITE_GROUPS
    ends = [0, *range(first, len(keys), step), len(keys)] if keys else []
    requests = (
        keys_commands(b"EXISTS", keys[start:end], group_keys)
        for start, end in itertools.pairwise(ends)
    )
    return requests, -(-len(keys) // group_keys)


def _counts(
    replies: Sequence[Reply], keys: Sequence[bytes], before: int, group_keys: int
) -> Iterator[int]:
    """Replies as counts of the groups that begin `before` keys from the first."""
    for reply in replies:
        most = min(group_keys, len(keys) - before)
        if not isinstance(reply, int) or not 0 <= reply <= most:
            raise RedisProtocolError("the reply to an EXISTS is no count of its keys")
        yield reply
        before += group_keys

"""Which keys exist, asked in groups: one round trip, two where the answer is not plain.

EXISTS counts. The keys go in groups of 32, one EXISTS each, packed by hand and sent in one
write; only a group whose count is neither nothing nor all is looked into, key by key.
1,000 keys take 0.3 ms so, against 7.5 ms with one EXISTS a key (docs/data-plane.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_redis.errors import RedisProtocolError
from lmcache_redis.resp.wire import Reply, keys_command

GROUP_KEYS = 32

# Sends packed commands, gives exactly that many replies: `BulkConnection.call` with its deadline.
Call = Callable[[bytes, int], Sequence[Reply]]


def count_prefix(call: Call, keys: Sequence[bytes]) -> int:
    """How many keys exist from the first on without a gap. Raises what `call` raises."""
    if not keys:
        return 0
    groups = _groups(keys)
    for number, (group, found) in enumerate(zip(groups, _counts(call, groups), strict=True)):
        if found == len(group):
            continue
        before = number * GROUP_KEYS
        if found == 0:
            return before
        present = _one_by_one(call, group)
        # Without a gap now: the missing one came in since. The later groups are not asked again.
        return before + (present.index(False) if False in present else len(present))
    return len(keys)


def find_present(call: Call, keys: Sequence[bytes]) -> list[bool]:
    """For each key whether it exists. Raises what `call` raises."""
    if not keys:
        return []
    groups = _groups(keys)
    counts = _counts(call, groups)
    unclear = [g for g, found in zip(groups, counts, strict=True) if 0 < found < len(g)]
    looked_up = iter(_one_by_one(call, [key for group in unclear for key in group]))
    present: list[bool] = []
    for group, found in zip(groups, counts, strict=True):
        if 0 < found < len(group):
            present += [next(looked_up) for _ in group]
        else:
            present += [found > 0] * len(group)
    return present


def _groups(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[start : start + GROUP_KEYS] for start in range(0, len(keys), GROUP_KEYS)]


def _one_by_one(call: Call, keys: Sequence[bytes]) -> list[bool]:
    if not keys:
        return []
    return [count > 0 for count in _counts(call, [(key,) for key in keys])]


def _counts(call: Call, groups: Sequence[Sequence[bytes]]) -> list[int]:
    request = b"".join([keys_command(b"EXISTS", group) for group in groups])
    counts: list[int] = []
    for group, reply in zip(groups, call(request, len(groups)), strict=True):
        if not isinstance(reply, int) or not 0 <= reply <= len(group):
            raise RedisProtocolError("the reply to an EXISTS is no count of its keys")
        counts.append(reply)
    return counts

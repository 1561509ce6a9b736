"""Which keys exist, asked in groups: one round trip, two where the answer is not plain.

EXISTS counts. The keys go in groups of 32, one EXISTS each, packed by hand, many in one
write; only a group whose count is neither nothing nor all is looked into, key by key.
1,000 keys take 0.3 ms so, against 7.5 ms with one EXISTS a key (docs/data-plane.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lmcache_redis.errors import RedisProtocolError
from lmcache_redis.resp.wire import Reply, keys_commands

GROUP_KEYS = 32

# Groups in one write: the server looks these up while the next are packed.
_WRITE_GROUPS = 16

# Sends packed commands, gives exactly that many replies; raises the first error among them.
Call = Callable[[Iterable[bytes], int], Sequence[Reply]]


def count_prefix(call: Call, keys: Sequence[bytes]) -> int:
    """How many keys exist from the first on without a gap. Raises what `call` raises."""
    if not keys:
        return 0
    for number, found in enumerate(_counts(call, keys, GROUP_KEYS)):
        before = number * GROUP_KEYS
        group = keys[before : before + GROUP_KEYS]
        if found == len(group):
            continue
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
    groups = [keys[start : start + GROUP_KEYS] for start in range(0, len(keys), GROUP_KEYS)]
    counts = _counts(call, keys, GROUP_KEYS)
    unclear = [g for g, found in zip(groups, counts, strict=True) if 0 < found < len(g)]
    looked_up = iter(_one_by_one(call, [key for group in unclear for key in group]))
    present: list[bool] = []
    for group, found in zip(groups, counts, strict=True):
        if 0 < found < len(group):
            present += [next(looked_up) for _ in group]
        else:
            present += [found > 0] * len(group)
    return present


def _one_by_one(call: Call, keys: Sequence[bytes]) -> list[bool]:
    if not keys:
        return []
    return [count > 0 for count in _counts(call, keys, 1)]


def _counts(call: Call, keys: Sequence[bytes], group_keys: int) -> list[int]:
    """How many there are of each group of keys."""
    step = group_keys * _WRITE_GROUPS
    requests = (
        keys_commands(b"EXISTS", keys[start : start + step], group_keys)
        for start in range(0, len(keys), step)
    )
    groups = -(-len(keys) // group_keys)
    counts: list[int] = []
    for number, reply in enumerate(call(requests, groups)):
        most = min(group_keys, len(keys) - number * group_keys)
        if not isinstance(reply, int) or not 0 <= reply <= most:
            raise RedisProtocolError("the reply to an EXISTS is no count of its keys")
        counts.append(reply)
    return counts

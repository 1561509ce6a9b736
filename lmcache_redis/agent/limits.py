# SPDX-License-Identifier: Apache-2.0
"""`--tenant-bytes`: how much of Redis each tenant may have written, in an account of all agents.

    lmcr2:tenant:DIGEST:BUCKET     payload bytes, as they lie, written in an eighth of the TTL

An agent adds what it has written and reads the sums, of all tenants in one exchange, when one of
them stores, and not within `_EVERY_S` seconds of the last. The owner thread waits for nothing. A
bucket expires a TTL after its end, about when what was written in it does; without a TTL, after a
day.

What Redis holds is not known exactly. A chunk that was evicted, removed or cleared is counted until
its bucket expires, and one that `--ttl-refresh` keeps alive no longer than that. An addition that a
server refuses is made later. One whose answer is lost is not made again: it may be missing, and
nothing counts twice. While an account is not known, the last known one holds, with what was written
here since. If it was never read, chunks are written: not known is not full. Owned by the loop
thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from lmcache_redis.cache.threads import OneTimer, Owner, posting
from lmcache_redis.chunks.names import account_keys
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.settings import format_size
from lmcache_redis.tenants import EVERY, NONE
from lmcache_redis.tiers import NumbersResult

BUCKETS: Final = 8
DAY_S: Final = 86_400
_EVERY_S: Final = 2.0
_MOST_KNOWN: Final = 4096


class TenantLimits:
    """See the module. limits: bytes by tenant; `EVERY`: of each other one. ttl_s: 0: none."""

    def __init__(
        self, limits: Mapping[str, int], plane: RedisPlane, owner: Owner, ttl_s: int
    ) -> None:
        self._limits = limits
        self._plane = plane
        self._owner = owner
        self._bucket_s = max(1, (ttl_s or DAY_S) // BUCKETS)
        self._known: dict[str, int] = {}  # in Redis, when it was read last
        self._pending: Counter[str] = Counter()  # written here, and not in what is known
        self._seen: set[str] = set()  # since the last exchange
        self._is_asking, self._next_s = False, 0.0
        self._timer = OneTimer(owner, self._exchange)
        plane.adds_up = True

    def limit_of(self, tenant: str) -> int | None:
        return None if tenant == NONE else self._limits.get(tenant, self._limits.get(EVERY))

    def used_by(self, tenant: str) -> int | None:
        """Bytes; None: not known."""
        known = self._known.get(tenant)
        return None if known is None else known + self._pending[tenant]

    def why_not(self, tenant: str) -> str | None:
        """Why chunks of the tenant are not stored; None: they are. Reads its account, later."""
        limit = self.limit_of(tenant)
        if limit is None:
            return None
        self._ask_about(tenant)
        if (self.used_by(tenant) or 0) < limit:
            return None
        used = f"tenant {tenant} has used the {format_size(limit)} of its --tenant-bytes"
        return f"not written to Redis: {used}"

    def stored(self, tenant: str, nbytes: int) -> None:
        if self.limit_of(tenant) is not None:
            self._pending[tenant] += nbytes
            self._ask_about(tenant)

    def _ask_about(self, tenant: str) -> None:
        self._seen.add(tenant)
        self._ask_in_time()

    def _ask_in_time(self) -> None:
        if self._seen and not self._is_asking:
            self._timer.fire_by(max(self._owner.now(), self._next_s))

    def _exchange(self) -> None:
        """Adds what is pending, and reads the accounts of all who have asked."""
        tenants, self._seen, self._is_asking = sorted(self._seen), set(), True
        self._next_s = self._owner.now() + _EVERY_S
        last = int(time.time()) // self._bucket_s
        keys: list[bytes] = []
        prefix = self._plane.options.key_prefix
        amounts: dict[bytes, int] = {}
        sent = {each: self._pending[each] for each in tenants}
        for tenant in tenants:
            mine = account_keys(tenant, range(last, last - BUCKETS - 1, -1), prefix)
            keys += mine
            if sent[tenant]:
                amounts[mine[0]] = sent[tenant]
        deadline = self._owner.now() + self._plane.options.op_timeout_s
        ttl_s = self._bucket_s * (BUCKETS + 1)
        done = posting(self._owner, partial(self._exchanged, tenants, sent))
        try:
            self._plane.add_up(keys, amounts, ttl_s, deadline, done)
        except RuntimeError:  # the plane was closed in the meantime
            self._is_asking = False

    def _exchanged(
        self, tenants: Sequence[str], sent: Mapping[str, int], result: NumbersResult
    ) -> None:
        self._is_asking = False
        every = BUCKETS + 1
        for number, tenant in enumerate(tenants):
            mine = slice(number * every, (number + 1) * every)
            if any(result.refused[mine][:1]):
                continue  # nothing was added: it is pending still
            self._pending[tenant] -= sent[tenant]  # it was added, or the answer was lost
            numbers = [each for each in result.numbers[mine] if each is not None]
            if len(numbers) == every:
                self._known[tenant] = sum(numbers)
            elif tenant in self._known:
                self._known[tenant] += sent[tenant]
        self._pending = +self._pending
        if max(len(self._known), len(self._pending)) > _MOST_KNOWN:  # clients choose their names
            kept = [each for each in tenants if each in self._known][:_MOST_KNOWN]
            self._known = {each: self._known[each] for each in kept}
            self._pending = Counter(dict(self._pending.most_common(_MOST_KNOWN)))
        self._seen.update(self._pending)
        self._ask_in_time()

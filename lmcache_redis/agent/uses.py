# SPDX-License-Identifier: Apache-2.0
"""What models and tenants have asked of an agent and got. Owned by the loop thread.

At most `MOST_KEPT` tenants are kept. When another one comes, the half that has asked least is added
to `OTHER` and forgotten: clients choose salts and names, so their number has no limit.

Prometheus gets a row for each of the `MOST_ROWS` largest, and one for the others. A counter must
not fall, so nothing moves between rows: what a tenant does is counted in the row that it has then,
its own or that of the others. Which ones are the largest is decided after each look.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from lmcache_redis.agent.limits import TenantLimits
from lmcache_redis.chunks.frame import TENANT_BYTES
from lmcache_redis.chunks.names import tenant_digest
from lmcache_redis.tenants import NONE, OTHER, shown

MOST_KEPT: Final = 1024
MOST_ROWS: Final = 20


@dataclass
class ModelUse:
    """What the engines of one model have asked for and got since the agent's start.

    saved_tokens: loaded instead of computed. saved_untimed_tokens: those of them whose seconds are
    not known. saved_prefill_s: of the others; see `sessions`.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    retrieved_bytes: int = 0
    gathered_bytes: int = 0
    saved_tokens: int = 0
    saved_untimed_tokens: int = 0
    saved_prefill_s: float = 0.0

    def saved(self, tokens: int, seconds: float | None) -> None:
        self.saved_tokens += tokens
        if seconds is None:
            self.saved_untimed_tokens += tokens
        else:
            self.saved_prefill_s += seconds


@dataclass
class TenantUse(ModelUse):
    """stored_bytes: written to Redis, as they lie there. dropped_chunks: because of its limit.

    highest_saved_s: that saved_prefill_s ever was.
    """

    stored_bytes: int = 0
    dropped_chunks: int = 0
    highest_saved_s: float = 0.0

    def saved(self, tokens: int, seconds: float | None) -> None:
        super().saved(tokens, seconds)
        self.highest_saved_s = max(self.highest_saved_s, self.saved_prefill_s)

    def add(self, other: TenantUse) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def report(self) -> dict[str, Any]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["highest_saved_s"]
        return found


class _Tenant:
    """whole: all of it. row: what was counted while it had one."""

    __slots__ = ("row", "whole")

    def __init__(self) -> None:
        self.whole, self.row = TenantUse(), TenantUse()


class Tenants:
    """See the module. An `Account` of Redis. secret: see `tenants.shown`."""

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret
        self._kept: dict[str, _Tenant] = {}
        self._forgotten = TenantUse()
        self._with_rows: set[str] = set()
        self._others_row = TenantUse()
        self.limits: TenantLimits | None = None

    def shown(self, tenant: str) -> str:
        """tenant: of a message."""
        return shown(tenant, self._secret)

    def uses_of(self, name: str) -> tuple[TenantUse, TenantUse]:
        """Both are to be added to. name: as shown."""
        found = self._kept.get(name)
        if found is None:
            if len(self._kept) >= MOST_KEPT:
                self._forget_some()
            found = self._kept[name] = _Tenant()
            if len(self._with_rows) < MOST_ROWS:
                self._with_rows.add(name)
        return found.whole, found.row if name in self._with_rows else self._others_row

    def digest(self, tenant: str) -> bytes:
        """See `tiers.Account`, also of the others."""
        return tenant_digest(tenant)[:TENANT_BYTES] if tenant not in ("", NONE) else b""

    def why_not(self, tenant: str) -> str | None:
        """Why chunks of the tenant are not stored; None: they are."""
        return None if self.limits is None else self.limits.why_not(tenant or NONE)

    def admits(self, tenant: str) -> bool:
        return self.why_not(tenant) is None

    def payer(self, first: str, other: str) -> str:
        """Who is charged for a chunk that two tenants use: the first one, unless only the other has
        room. Empty: no tenant is charged.
        """
        if not first or not (self.admits(first) or not self.admits(other)):
            return other
        return first

    def dropped(self, tenant: str) -> None:
        for use in self.uses_of(tenant or NONE):
            use.dropped_chunks += 1

    def stored(self, tenant: str, nbytes: int) -> None:
        if self.limits is not None:
            self.limits.stored(tenant or NONE, nbytes)
        for use in self.uses_of(tenant or NONE):
            use.stored_bytes += nbytes

    def report(self) -> dict[str, dict[str, Any]]:
        """The whole of each that is kept, the largest first, and of all that were forgotten."""
        limits = self.limits
        of: dict[str, int | None] = {"limit_bytes": None, "used_bytes": None}
        found = {}
        for name in self._by_size():
            if limits is not None:
                of = {"limit_bytes": limits.limit_of(name), "used_bytes": limits.used_by(name)}
            found[name] = self._kept[name].whole.report() | of
        if self._forgotten != TenantUse():
            found[OTHER] = self._forgotten.report() | dict.fromkeys(of)
        return found

    def rows(self) -> dict[str, TenantUse]:
        """The rows that Prometheus gets."""
        found = {name: self._kept[name].row for name in self._with_rows}
        if self._others_row != TenantUse():
            found[OTHER] = self._others_row
        self._with_rows = set(self._by_size()[:MOST_ROWS])
        return found

    def _by_size(self) -> list[str]:
        """The largest first; of two that are equal, first the one that has a row."""

        def size(name: str) -> tuple[int, int, bool]:
            whole = self._kept[name].whole
            return whole.lookup_tokens, whole.gathered_bytes, name in self._with_rows

        return sorted(self._kept, key=size, reverse=True)

    def _forget_some(self) -> None:
        for name in self._by_size()[MOST_KEPT // 2 :]:
            self._forgotten.add(self._kept.pop(name).whole)
            self._with_rows.discard(name)

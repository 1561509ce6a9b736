"""Answers WHY and LAYOUTS: why a request missed, and why two engines do not share.

What a lookup found is kept (`history`). Where its first missed chunk is now, and whether other
layouts have it, is asked when somebody wants to know.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from lmcache_redis import messages as m
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.describing import LayoutDescriptions
from lmcache_redis.agent.peers import Reply
from lmcache_redis.chunks.names import PartNames
from lmcache_redis.device.layout import named_pairs
from lmcache_redis.errors import FormatError
from lmcache_redis.tiers import CallOutcome, ExistsResult

# Shorter than a tool waits for its answer.
_DEADLINE_S = 1.5
# Only for these does it matter what else has the chunk.
_ABSENT = frozenset({"absent", "in_part"})


class Explanations:
    """See the module. Owned by the loop thread."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._descriptions = LayoutDescriptions(agent)

    def why(self, question: m.Why, reply: Reply) -> None:
        history = self._agent.sessions.history
        found = history.find(question.request, question.most)
        report: dict[str, Any] = {
            "kept": len(history),
            "since_s": history.since_s,
            "chunk_size_tokens": self._agent.config.chunk_size_tokens,
            "requests": msgspec.to_builtins(found),
        }
        lookup = found[0].lookup if len(found) == 1 else None
        if lookup is None or (miss := lookup.first_miss) is None or miss.reason not in _ABSENT:
            reply(_json(report))
            return

        def answer(places: Mapping[str, Any]) -> None:
            report["requests"][0]["lookup"]["first_miss"].update(places)
            reply(_json(report))

        deadline_s = time.monotonic() + _DEADLINE_S
        look = partial(self._look_for, miss.hash, lookup.layouts, answer, deadline_s + _DEADLINE_S)
        self._descriptions.names(look, deadline_s)

    def _look_for(
        self,
        missed: str,
        layouts: Sequence[str],
        answer: Callable[[Mapping[str, Any]], None],
        deadline_s: float,
        described: Sequence[PartNames],
    ) -> None:
        """Where the first missed chunk of a lookup with these layouts is now, by layout."""
        names = {_identity(each): each for each in [*described, *self._registered()]}
        keys = {each.key(bytes.fromhex(missed)): each for each in names.values()}

        def found(result: ExistsResult) -> None:
            in_redis = result.present or [False] * len(keys)
            there = {
                each.names.fingerprint.hex(): "host" if key in self._agent.cache.pool else "redis"
                for (key, each), is_there in zip(keys.items(), in_redis, strict=True)
                if is_there or key in self._agent.cache.pool
            }
            own = [there.pop(layout, None) for layout in layouts]
            answer(
                {
                    "now": own,
                    "other_layouts": [*there],
                    "redis_answered": result.outcome is CallOutcome.DONE,
                }
            )

        post = self._agent.loop.post
        self._agent.plane.exists([*keys], deadline_s, lambda result: post(partial(found, result)))

    def _registered(self) -> list[PartNames]:
        return [group.form for each in self._agent.peers.registered for group in each.groups]

    def layouts(self, question: m.Layouts, reply: Reply) -> None:
        wanted = tuple(each.lower() for each in question.wanted)
        rows: list[dict[str, Any]] = []
        canonical: dict[str, bytes] = {}  # of those wanted
        for each in self._agent.peers.registered:
            pairs = zip(each.groups, each.device.layouts, strict=True)
            for number, (group, layout) in enumerate(pairs):
                where = {"engine_id": each.engine_id, "worker_id": each.worker_id, "group": number}
                rows.append(_row(group.form) | where)
                if (name := rows[-1]["layout"]).startswith(wanted):
                    canonical[name] = layout.canonical(each.chunk_tokens)
        here = {_identity(each) for each in self._registered()}
        deadline_s = time.monotonic() + _DEADLINE_S

        def listed(described: Sequence[PartNames]) -> None:
            others = [each for each in described if _identity(each) not in here]
            rows.extend(map(_row, others))
            chosen = [each for each in others if each.names.fingerprint.hex().startswith(wanted)]
            self._descriptions.read(chosen, answer, deadline_s + _DEADLINE_S)

        def answer(described: Mapping[bytes, bytes]) -> None:
            canonical.update((name.hex(), each) for name, each in described.items())
            for row in rows:
                if row["layout"] in canonical:
                    with contextlib.suppress(FormatError):  # its digest is right all the same
                        row["pairs"] = named_pairs(canonical[row["layout"]])
            reply(_json({"layouts": rows}))

        self._descriptions.names(listed, deadline_s)


def _identity(names: PartNames) -> tuple[bytes, str, int]:
    return names.names.fingerprint, names.model_name, names.kv_rank


def _row(names: PartNames) -> dict[str, Any]:
    """A layout for JSON. engine_id: None if no engine with it is registered here."""
    return {
        "layout": names.names.fingerprint.hex(),
        "model": names.model_name,
        "kv_rank": names.kv_rank,
        "engine_id": None,
        "pairs": None,
    }


def _json(report: Mapping[str, Any]) -> m.StatusReport:
    return m.StatusReport(0, msgspec.json.encode(report))

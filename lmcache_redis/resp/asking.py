# SPDX-License-Identifier: Apache-2.0
"""A question about keys: each server is asked for its own, and once more where they moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.control import Steps
from lmcache_redis.resp.jobs import Jobs
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.routes import Lead, Redirected, Routes
from lmcache_redis.tiers import CallOutcome

# The node (None: no server has the keys), whether after ASKING, and the indexes of its keys.
_Asked = tuple[Any, bool, list[int]]


class AskedNodes(Protocol):
    """What a question or a stripe needs of `node.DataNodes`, where the methods are described."""

    jobs: Jobs
    options: RedisOptions
    routes: Routes[Any]

    def ask(
        self,
        steps: Sequence[tuple[Any, Steps[Any]]],
        deadline: float,
        done: Callable[[Sequence[CallOutcome], Sequence[Any]], None],
        is_urgent: bool = True,
    ) -> None: ...

    def redirected(
        self,
        asked: Any,
        error: RedisRedirect,
        key: bytes,
        sent: Routes[Any],
        is_write: bool,
        is_tried: bool,
    ) -> Redirected[Any]: ...

    def follow(self, step: Redirected[Any]) -> Lead[Any]: ...

    def wait(
        self,
        deadline: float,
        is_over: Callable[[Routes[Any]], bool],
        then: Callable[[CallOutcome], None],
    ) -> None: ...


class KeyCall:
    """See `DataNodes.ask_for_each`."""

    def __init__(
        self,
        nodes: AskedNodes,
        make_steps: Callable[..., Steps[Sequence[Any]]],
        deadline: float,
        keys: Sequence[bytes],
        done: Callable[[CallOutcome, Sequence[Any]], None],
        *,
        is_urgent: bool,
        is_write: bool,
    ) -> None:
        self._nodes = nodes
        self._make_steps = make_steps
        self._deadline = deadline
        self._keys = keys
        self._done = done
        self._is_urgent = is_urgent
        self._is_write = is_write
        self._sent = nodes.routes
        self._results: list[Any] = [None] * len(keys)
        self._is_known = not keys
        self._outcomes: set[CallOutcome] = set()

    def begin(self) -> None:
        by_node = self._sent.split(self._keys)
        self._ask([(node, False, indexes) for node, indexes in by_node.items()], is_tried=False)

    def _ask(self, asked: Sequence[_Asked], *, is_tried: bool) -> None:
        steps = []
        for node, is_asking, indexes in asked:
            how = {"is_asking": True} if is_asking else {}
            steps.append((node, self._make_steps([self._keys[n] for n in indexes], **how)))

        def done(outcomes: Sequence[CallOutcome], found: Sequence[Any]) -> None:
            self._outcomes.update(outcomes)
            redirected: dict[int, Redirected[Any]] = {}
            for (node, _, indexes), results in zip(asked, found, strict=True):
                for index, result in zip(indexes, results or (), strict=False):
                    if isinstance(result, RedisRedirect):
                        assert node is not None, "no server has no results"
                        redirected[index] = self._nodes.redirected(
                            node, result, self._keys[index], self._sent, self._is_write, is_tried
                        )
                    else:
                        self._results[index], self._is_known = result, True
            self._follow(redirected)

        self._nodes.ask(steps, self._deadline, done, self._is_urgent)

    def _follow(self, redirected: Mapping[int, Redirected[Any]]) -> None:
        """The answers are there: ask once more where redirections lead, or end."""
        steps = redirected.values()
        leads = [self._nodes.follow(step) for step in steps]
        if any(lead.waits for lead in leads):
            self._nodes.wait(
                self._deadline,
                lambda routes: not any(step.lead(routes).waits for step in steps),
                partial(self._waited, redirected),
            )
        else:
            self._ask_again(redirected)

    def _waited(self, redirected: Mapping[int, Redirected[Any]], outcome: CallOutcome) -> None:
        if outcome is CallOutcome.CANCELLED:
            self._outcomes.add(outcome)
        self._ask_again(redirected)

    def _ask_again(self, redirected: Mapping[int, Redirected[Any]]) -> None:
        self._sent = self._nodes.routes
        again: dict[tuple[Any, bool], list[int]] = defaultdict(list)
        for index, step in redirected.items():
            lead = step.lead(self._sent)
            if lead.to is not None:
                again[lead.to, lead.is_asking].append(index)
        if again:
            try:
                # In the order of the keys: those of claims come first.
                self._ask([(*how, sorted(some)) for how, some in again.items()], is_tried=True)
                return
            except RuntimeError:  # the plane was closed in the meantime
                self._outcomes.add(CallOutcome.CANCELLED)
        self._end()

    def _end(self) -> None:
        if CallOutcome.CANCELLED in self._outcomes:
            outcome = CallOutcome.CANCELLED
        elif self._is_known:
            outcome = CallOutcome.DONE
        elif self._outcomes == {CallOutcome.TIMED_OUT}:
            outcome = CallOutcome.TIMED_OUT
        else:
            outcome = CallOutcome.UNAVAILABLE
        self._done(outcome, self._results)

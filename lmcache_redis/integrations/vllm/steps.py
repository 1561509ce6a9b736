# SPDX-License-Identifier: Apache-2.0
"""Steps between their scheduling and the moment at which vLLM's scheduler takes their output.

Until then it is not known whether a step has computed what it should: it may raise when its output
is fetched, and vLLM may go on nevertheless (faults of expert parallelism). With asynchronous
scheduling several steps are in flight. Their outputs are taken in order. So the stores of what a
step fills wait until its output is taken, and are sent with the step that is scheduled next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmcache_redis.integrations.vllm.worker import Planned

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# A step that tells the workers of lost ones may be lost itself.
_MOST_LOST = 64


@dataclass(frozen=True, slots=True)
class Step:
    """A step, and the stores of what it fills.

    number: counted from 1. sent: stores of what steps before it have filled, which go to the
    workers with it. adapted: its requests with an adapter, and the prefixes of their names.
    """

    number: int
    output: SchedulerOutput
    stores: Sequence[Planned]
    sent: Sequence[Planned] = ()
    adapted: Sequence[tuple[Request, bytes]] = ()


class StepsInFlight:
    """The steps whose output was not taken, and what the next step carries for the others.

    stores: of steps whose output was taken. number: of the next step. lost: numbers of steps whose
    output was never taken. unsure: transfers of which a report may be lost with them.
    awaited: loads that vLLM waits for then.
    """

    def __init__(self) -> None:
        self.stores: list[Planned] = []
        self.unsure: Sequence[int] = ()
        self.awaited: Sequence[Planned] = ()
        self.lost: deque[int] = deque(maxlen=_MOST_LOST)
        self.number = 1
        self._steps: deque[Step] = deque()
        self._ended: list[str] = []

    def __len__(self) -> int:
        return len(self._steps)

    def scheduled(self, step: Step) -> None:
        self._steps.append(step)
        self.number += 1

    def taken(self, output: SchedulerOutput) -> tuple[Step | None, Sequence[Step]]:
        """The step of an output, and those that have failed if one has: then it is one of them.

        A step before it whose output was not taken has failed. It and those behind it compute on
        what that has left in the blocks.
        """
        place = next((n for n, step in enumerate(self._steps) if step.output is output), None)
        if place is None:
            return None, ()
        if place == 0:
            return self._steps.popleft(), ()
        failed = tuple(self._steps)
        self.lost.extend(step.number for step in failed[:place])
        self._steps = deque(replace(step, stores=(), adapted=()) for step in failed[place + 1 :])
        return None, failed

    def request_ended(self, request_id: str) -> None:
        self._ended.append(request_id)

    def take_ended(self) -> Sequence[str]:
        """The requests that have ended, and whose stores the workers have."""
        if not self._ended:
            return ()
        kept = [self.stores, *(step.stores for step in self._steps)]
        kept += [step.sent for step in self._steps]
        waiting = {store.request_id for stores in kept for store in stores}
        ended = [each for each in self._ended if each not in waiting]
        self._ended = [each for each in self._ended if each in waiting]
        return ended

    def drop_stores(self) -> list[Planned]:
        """Those that were not sent; they will not be."""
        dropped = [*self.stores, *(store for step in self._steps for store in step.stores)]
        self.stores = []
        self._steps = deque(replace(step, stores=()) for step in self._steps)
        return dropped

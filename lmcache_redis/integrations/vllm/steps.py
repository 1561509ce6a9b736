"""Steps between their scheduling and the moment at which vLLM's scheduler takes their output.

Until then it is not known whether a step has computed what it should: it may raise when its output
is fetched, and vLLM may go on nevertheless (faults of expert parallelism). With asynchronous
scheduling several steps are in flight. Their outputs are taken in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_redis.integrations.vllm.worker import Planned

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class Step:
    """stores: of what it fills. scheduled_s: `time.monotonic()`."""

    output: SchedulerOutput
    scheduled_s: float
    prompt_tokens: int
    stores: Sequence[Planned]


class StepsInFlight:
    """The steps whose output was not taken."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque()

    def scheduled(self, step: Step) -> None:
        self._steps.append(step)

    def taken(self, output: SchedulerOutput) -> tuple[Step | None, Sequence[Step]]:
        """The step of an output, and those that have failed if one has: then it is one of them.

        A step before it whose output was not taken has failed. It and those behind it compute on
        what that has left in the blocks.
        """
        if not any(step.output is output for step in self._steps):
            return None, ()
        first, *others = self._steps
        if first.output is output:
            return self._steps.popleft(), ()
        self._steps.clear()
        return None, (first, *others)

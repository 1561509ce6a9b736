# SPDX-License-Identifier: Apache-2.0
"""What computing a prompt takes an engine, and how long it is busy with those it has begun."""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

# Steps with fewer prompt tokens say nothing about prefill speed.
_LEAST_TOKENS = 64
# Steps with fewer tokens take about as long: a GPU reads its weights in each step.
_LARGE_TOKENS = 512
_KEPT_STEPS = 5


class BegunPrompts:
    """The prompts that have blocks, until all their tokens have been scheduled."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def begin(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def end(self, request_id: str) -> None:
        """The request has ended, or begins again."""
        self._requests.pop(request_id, None)

    def left_tokens(self) -> int:
        """The tokens that no step was scheduled for yet."""
        total = 0
        for request_id, request in [*self._requests.items()]:
            if (tokens := request.num_prompt_tokens - request.num_computed_tokens) > 0:
                total += tokens
            else:
                del self._requests[request_id]
        return total


class PrefillRate:
    """Seconds per prompt token, of recent steps. Times are those of `time.monotonic()`.

    The median, because single steps take several times as long: the first ones of a process, and
    those beside other work of its machine. Steps may overlap: one begins when the one before it has
    ended.

    Attributes:
        token_s: the median; 0.0: not measured yet. begun: what is to be computed.
    """

    def __init__(self) -> None:
        self.token_s = 0.0
        self.begun = BegunPrompts()
        self._scheduled: deque[tuple[int, float]] = deque()  # prompt tokens, and when
        self._last_end_s = 0.0
        self._token_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._has_large = False

    def busy_s(self, now_s: float) -> float:
        """The time for the steps in flight, and for what is left of the prompts begun."""
        tokens = sum(count for count, _ in self._scheduled)
        begun_s = max(self._scheduled[0][1] if self._scheduled else now_s, self._last_end_s)
        in_flight_s = max(0.0, tokens * self.token_s - (now_s - begun_s))
        return in_flight_s + self.begun.left_tokens() * self.token_s

    def scheduled(self, prompt_tokens: int, now_s: float) -> None:
        """A step with this number of prompt tokens is scheduled."""
        self._scheduled.append((prompt_tokens, now_s))

    def ended(self, now_s: float) -> None:
        """The first of the steps in flight has ended."""
        tokens, scheduled_s = self._scheduled.popleft()
        if tokens >= _LEAST_TOKENS:
            self._measured(tokens, (now_s - max(scheduled_s, self._last_end_s)) / tokens)
        self._last_end_s = now_s

    def failed(self, now_s: float, *, in_flight: int) -> None:
        """Steps were lost, and the one behind them has ended. in_flight: those left."""
        while len(self._scheduled) > in_flight:
            self._scheduled.popleft()
        self._last_end_s = now_s

    def _measured(self, tokens: int, token_s: float) -> None:
        is_large = tokens >= _LARGE_TOKENS
        if is_large and not self._has_large:
            self._has_large = True
            self._token_s.clear()
        if is_large or not self._has_large:
            self._token_s.append(token_s)
        else:  # a large step takes no longer for its tokens than a small one
            self._token_s.extend([min(each, token_s) for each in self._token_s])
        self.token_s = median_low(self._token_s)

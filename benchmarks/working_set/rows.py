"""What is measured of a case, and the row that it becomes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# Shown in the table; the file has counters too.
COLUMNS = (
    *("scenario", "case", "round_s", "requests_per_s", "first_token_mean_s", "first_token_worst_s"),
    *("cached_tokens", "from_redis_mib", "agent_cpu_s", "redis_cpu_s", "engine_cpu_s"),
    *("stored_first", "stored", "mismatches"),
)


@dataclass(slots=True)
class Samples:
    """Of one case in one scenario, over all repetitions.

    used: totals over all rounds but the first. stored: the share of the set that is in Redis.
    """

    scenario: str
    case: str
    requests: int
    first_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    stored_first: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    mismatches: int = 0

    def row(self) -> dict[str, Any]:
        """Medians over rounds; what was used is the mean of a round."""
        rounds = len(self.seconds)
        used = {name: amount / rounds for name, amount in self.used.items()}
        round_s = statistics.median(self.seconds)
        return {
            "scenario": self.scenario,
            "case": self.case,
            "rounds": rounds,
            "requests": self.requests,
            "first_round_s": statistics.median(self.first_s),
            "round_s": round_s,
            "requests_per_s": self.requests / round_s,
            "first_token_mean_s": statistics.mean(self.first_token_s),
            "first_token_worst_s": max(self.first_token_s),
            **{
                name: used.pop(name)
                for name in (
                    *("cached_tokens", "prompt_tokens", "from_redis_mib"),
                    *("agent_cpu_s", "redis_cpu_s", "engine_cpu_s"),
                )
            },
            "stored_first": statistics.median(self.stored_first),
            "stored": statistics.median(self.stored),
            "mismatches": self.mismatches,
            "counters": used,
        }

# SPDX-License-Identifier: Apache-2.0
"""What is measured of a case, and the row that it becomes."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

# The columns of the table and their headings, short enough for one line; the file has more.
COLUMNS = {
    "scenario": "scenario",
    "case": "case",
    "round_s": "round s",
    "requests_per_s": "req/s",
    "first_token_mean_s": "ttft mean",
    "first_token_worst_s": "worst",
    "cached_tokens": "cached",
    "from_redis_mib": "Redis MiB",
    "agent_cpu_s": "agent CPU",
    "redis_cpu_s": "Redis CPU",
    "engine_cpu_s": "engine CPU",
    "stored_first": "stored 1st",
    "stored": "stored",
    "mismatches": "mismatches",
}


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
            "counters": {name: amount for name, amount in used.items() if amount},
        }

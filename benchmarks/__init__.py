# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: the source of every claim about speed. Every result names its machine.

    scripts/bench data-plane    plane/      chunks to and from Redis, beside other clients
    scripts/bench lookup        lookups     a lookup's round trip through an agent
    scripts/bench recovery      recovery    time until requests continue after something stops
    scripts/bench gateway       gateway     the lm:// gateway beside LMCache's server
    scripts/bench gpu           gpu/        copies between a GPU and the host pool
    scripts/bench main-job      main_job    time to first token of a real vLLM
    scripts/bench working-set   working_set/   more than vLLM's own cache holds, in rounds
    scripts/bench slow-link     slow_link   time to first token by the rate of the link to Redis
    scripts/bench first-requests  first_requests   what a new agent does with its first requests

`engine` is an engine without a model; `servers` starts Redis; `fetch` downloads LMCache's wheel,
`lmcache_mp` starts its server; `report` has statistics, tables and JSON; `plots` draws. None of
this is in the package's wheel.
"""

from pathlib import Path

# Where `python -m benchmarks...` finds this package, whatever the working directory.
ROOT = Path(__file__).resolve().parent.parent

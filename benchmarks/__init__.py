"""Benchmarks: the source of every claim about speed, with the machine named.

    scripts/bench data-plane    plane/      chunks to and from Redis, beside other clients
    scripts/bench lookup        lookups     a lookup's round trip through an agent
    scripts/bench recovery      recovery    how soon requests continue when something stops
    scripts/bench gateway       gateway     the lm:// gateway beside LMCache's server
    scripts/bench gpu           gpu/        copies between a GPU and the host pool
    scripts/bench main-job      main_job    time to first token of a real vLLM

`engine` is an engine without a model; `servers` starts Redis; `fetch` downloads LMCache's wheel;
`report` has tables, JSON and statistics; `plots` draws. None of this is in the wheel:
`lmcache-redis bench` (`lmcache_redis.bench`) measures a server in use.
"""

from pathlib import Path

# The working directory for `python -m benchmarks...`.
ROOT = Path(__file__).resolve().parent.parent

"""Benchmarks: what is claimed about speed comes from here, with the machine named.

    scripts/bench data-plane    plane/      chunks to and from Redis, beside other clients
    scripts/bench lookup        lookups     a lookup's round trip through an agent
    scripts/bench recovery      recovery    how soon requests go on when something stops
    scripts/bench gateway       gateway     the lm:// gateway beside LMCache's server
    scripts/bench gpu           gpu/        copies between a GPU and the host pool
    scripts/bench main-job      main_job    time to first token of a real vLLM

`engine` is an engine without a model; `servers` starts Redis; `fetch` brings LMCache's wheel;
`report` has tables, JSON and statistics; `plots` what all plots share. None of this is in the
wheel: `lmcache-redis bench` (`lmcache_redis.bench`) measures a server in use.
"""

from pathlib import Path

# Where `python -m benchmarks...` finds this package, whatever the working directory.
ROOT = Path(__file__).resolve().parent.parent

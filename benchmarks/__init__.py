"""Benchmarks: the source of every claim about speed. Results name the machine.

    scripts/bench data-plane    plane/      chunks to and from Redis, beside other clients
    scripts/bench lookup        lookups     a lookup's round trip through an agent
    scripts/bench recovery      recovery    time until requests continue after something stops
    scripts/bench gateway       gateway     the lm:// gateway beside LMCache's server
    scripts/bench gpu           gpu/        copies between a GPU and the host pool
    scripts/bench main-job      main_job    time to first token of a real vLLM

`engine` is an engine without a model; `servers` starts Redis; `fetch` downloads LMCache's wheel;
`report` has tables, JSON and statistics; `plots` is shared by all plots. None of this is in the
wheel: `lmcache-redis bench` (`lmcache_redis.bench`) measures a server in use.
"""

from pathlib import Path

# Where `python -m benchmarks...` finds this package, whatever the working directory.
ROOT = Path(__file__).resolve().parent.parent

# SPDX-License-Identifier: Apache-2.0
"""A working set that does not fit into vLLM's own cache, asked about in rounds, all at once.

Scenarios:

    documents       each request is a document and a question that is new
    conversations   each request is all that was said and a question; its answer is said too

vLLM's own blocks hold half of the set. The first round computes and stores; the others can load.
Until everything is in Redis, and at most three times, all is asked for one request at a time before
the other rounds: so that they measure loading.

Cases, each with a new engine and an empty Redis:

    none            no connector
    own             no connector; vLLM's own blocks hold the whole set twice
    large           our agent; its host pool holds the whole set twice
    small           our agent; its host pool holds a quarter of the set, the rest comes from Redis
    disk            the same pool, and a disk tier that holds the whole set
    lmcache-large   LMCache's multiprocess mode with its Redis adapter; pool as in `large`
    lmcache-small   the same; pool as in `small`, as a buffer: every hit comes from Redis

`cases` starts what a case needs, `workload` makes the prompts, `rows` makes figures of what was
measured, `plot` draws them, `run` does it all.
"""

# SPDX-License-Identifier: Apache-2.0
"""A stripe that was redirected: read or written once more where the redirection leads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from lmcache_redis.chunks.names import stripe_key
from lmcache_redis.errors import RedisRedirect
from lmcache_redis.resp.asking import AskedNodes
from lmcache_redis.resp.codecs import StripeIO, codec_of
from lmcache_redis.resp.control import ask_each
from lmcache_redis.resp.jobs import StripeTask
from lmcache_redis.resp.net.wire import Reply, get_commands
from lmcache_redis.resp.routes import Lead
from lmcache_redis.resp.transfers import Write
from lmcache_redis.tiers import CallOutcome


def follow(nodes: AskedNodes, asked: Any, task: StripeTask, error: RedisRedirect) -> bool:
    """See `DataServer.redirected`."""
    job, index = task
    if not job.routes.is_cluster:
        return False
    jobs = nodes.jobs
    with jobs.lock:
        is_tried = index in job.redirected
        job.redirected = {*job.redirected, index}
    is_write, key = isinstance(job, Write), stripe_key(job.chunk_key, index)
    step = nodes.redirected(asked, error, key, job.routes, is_write, is_tried)
    jobs.release((job,))
    lead = nodes.follow(step)
    if lead.waits:
        nodes.wait(
            job.deadline,
            lambda routes: not step.lead(routes).waits,
            lambda outcome: _try(nodes, task, step.lead(nodes.routes)),
        )
    else:
        _try(nodes, task, lead)
    return True


def _try(nodes: AskedNodes, task: StripeTask, lead: Lead[Any]) -> None:
    job, index = task
    if lead.to is None:
        nodes.jobs.stop((job,), CallOutcome.UNAVAILABLE)
        return
    with nodes.jobs.lock:
        job.nodes = (*job.nodes[:index], lead.to, *job.nodes[index + 1 :])
    if lead.is_asking:
        # The movers receive one reply a stripe; these are two.
        key = stripe_key(job.chunk_key, index)
        steps = ask_each(get_commands, _whole, [key], is_asking=True)
        read = partial(_read, nodes, task)
        nodes.ask([(lead.to, steps)], job.deadline, read, is_urgent=False)
        return
    if isinstance(job, Write):
        lead.to.put_writes((task,), urgent=True)
    else:
        lead.to.reads.put((task,), urgent=True)
    # It may have gone down, or the plane been closed, in the meantime.
    nodes.jobs.refuse((job,))


def _whole(reply: Reply) -> Reply:
    return reply


def _read(
    nodes: AskedNodes, task: StripeTask, outcomes: Sequence[CallOutcome], found: Sequence[Any]
) -> None:
    """The value of a stripe was asked for, after ASKING."""
    job, index = task
    (outcome,) = outcomes
    if outcome is not CallOutcome.DONE:
        nodes.jobs.stop((job,), outcome)
        return
    ((value,),) = found
    if isinstance(value, RedisRedirect):
        nodes.jobs.stop((job,), CallOutcome.UNAVAILABLE)
    elif nodes.jobs.begin_all((task,)):
        result = codec_of(nodes.options.seal_keys).place(StripeIO.of(job.chunk, index), value)
        with nodes.jobs.lock:
            job.ended(index, result)
        nodes.jobs.conclude((job,))

# SPDX-License-Identifier: Apache-2.0
"""Numbers that several agents add to: on one server, in a cluster, and where a user may not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pytest

from lmcache_redis.resp import RedisPlane
from lmcache_redis.resp.routes import slot_of
from lmcache_redis.tiers import CallOutcome, NumbersResult
from tests.acl import documented_url
from tests.resp.helpers import PATIENCE_S, Answers, running
from tests.servers import RedisServer
from tests.topologies import Cluster

pytestmark = pytest.mark.servers
KEYS = [b"lmcr2:tenant:%d" % number for number in range(40)]


def add_up(
    plane: RedisPlane,
    keys: Sequence[bytes],
    amounts: Mapping[bytes, int],
    within_s: float = PATIENCE_S,
) -> NumbersResult:
    answers = Answers()
    deadline = time.monotonic() + within_s
    plane.add_up(keys, amounts, 100, deadline, answers.callback("add"))
    found: NumbersResult = answers.wait(1)[0]
    return found


def test_amounts_are_added_and_expire(server: RedisServer) -> None:
    client = server.client()
    with running(server.url) as plane:
        found = add_up(plane, KEYS[:3], {KEYS[0]: 5})
        assert found == (CallOutcome.DONE, [5, 0, 0], [False] * 3)
        assert 0 < client.ttl(KEYS[0]) <= 100
        client.expire(KEYS[0], 7)
        assert add_up(plane, KEYS[:3], {KEYS[0]: 1, KEYS[2]: 1 << 50}).numbers == [6, 0, 1 << 50]
        assert client.ttl(KEYS[0]) <= 7, "what is added later lives no longer"
        assert not client.exists(KEYS[1])


def test_one_bad_key_hides_no_other(server: RedisServer) -> None:
    client = server.client()
    client.mset({KEYS[0]: "x", KEYS[1]: (1 << 63) - 1, KEYS[3]: 4})
    client.rpush(KEYS[4], "x")
    with running(server.url) as plane:
        assert add_up(plane, KEYS[:5], {}).numbers == [None, (1 << 63) - 1, 0, 4, None]
        found = add_up(plane, KEYS[:5], dict.fromkeys(KEYS[:3], 2))
    assert found.numbers == [None, None, 2, 4, None]
    assert [*found.refused] == [True, True, False, False, False], "nothing was added"
    assert client.get(KEYS[0]) == b"x"


def test_what_is_refused_is_not_added(server: RedisServer) -> None:
    client = server.client()
    with running(server.url) as plane:
        for name, value in (("maxmemory", 1), ("min-replicas-to-write", 1)):
            client.config_set(name, value)
            try:
                found = add_up(plane, KEYS[:2], {KEYS[0]: 1})
            finally:
                client.config_set(name, 0)
            assert found == (CallOutcome.DONE, [None, 0], [True, False])
        assert add_up(plane, KEYS[:2], {KEYS[0]: 1}).numbers == [1, 0]


def test_a_user_who_may_not_is_told(server: RedisServer) -> None:
    with running(documented_url(server)) as plane:
        found = add_up(plane, KEYS[:2], {KEYS[0]: 1})
        assert found == (CallOutcome.DONE, [None, 0], [False] * 2), "it is never added"
        assert plane.stats().refused["NOPERM"] == 1
        assert add_up(plane, KEYS[:2], {}).numbers == [0, 0]


def test_in_a_cluster_nothing_is_added_twice(cluster: Cluster) -> None:
    with running(cluster.url) as plane:
        assert add_up(plane, KEYS, dict.fromkeys(KEYS, 2)).numbers == [2] * len(KEYS)
        source = cluster.node_of(KEYS[0])
        target = next(node for node in cluster.nodes if node is not source)
        cluster.move(slot_of(KEYS[0]), source, target)  # the plane's map is outdated
        assert add_up(plane, KEYS, dict.fromkeys(KEYS[::2], 3)).numbers == [5, 2] * 20
        assert add_up(plane, KEYS, {}).numbers == [5, 2] * 20


def test_of_a_silent_shard_nobody_knows(cluster: Cluster) -> None:
    with running(cluster.url) as plane:
        assert None not in add_up(plane, KEYS, {}).numbers
        silent = cluster.node_of(KEYS[0])
        silent.stop()
        try:
            found = add_up(plane, KEYS, dict.fromkeys(KEYS, 2), within_s=0.5)
        finally:
            silent.cont()
        assert found.outcome is CallOutcome.DONE
        assert not any(found.refused), "the amounts may have arrived"
        expected = [None if cluster.node_of(key) is silent else 2 for key in KEYS]
        assert found.numbers == expected

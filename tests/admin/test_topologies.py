# SPDX-License-Identifier: Apache-2.0
"""The same over TLS, by way of a Sentinel, and in a cluster, where every node is asked."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_redis.admin import doctor
from lmcache_redis.admin.doctor import Diagnosis, diagnose, examine
from lmcache_redis.admin.facts import Need
from lmcache_redis.admin.inspect import ChunkVerdict, explain, summarise
from lmcache_redis.admin.node import _clock_ahead_s
from lmcache_redis.admin.purge import Selection, choose
from lmcache_redis.admin.rules import Severity
from lmcache_redis.admin.server import open_server
from lmcache_redis.errors import (
    ConfigError,
    RedisAuthError,
    RedisReplyError,
    RedisTimeout,
    RedisUnavailable,
)
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.commands import Use
from lmcache_redis.resp.routes import slot_of
from tests.acl import PASSWORD, documented_url
from tests.admin.cache import Cached, purge, refused
from tests.admin.test_rights import IN_A_CLUSTER, LITTLE, tried
from tests.resp.certificates import Authority
from tests.resp.helpers import running
from tests.servers import RedisServer, free_port, server_binaries, speaks_tls, wait_until
from tests.topologies import Cluster, free_node_port, info, keys_on, running_sentinel

pytestmark = [
    pytest.mark.servers,
    # redis-py leaves a connection to the garbage collector if it cannot make a cluster's client.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MEASURE_S", 0.02)


def put(cluster: Cluster, chunk: Cached) -> None:
    for index, key in enumerate(chunk.keys):
        cluster.node_of(key).command("SET", key, chunk.value(index))


# What agents and tools do without; redis-py tells its version.
_NOT_NEEDED = {"client|setinfo"}


def use_all_tools(url: str, chunk: Cached, servers: Sequence[RedisServer], *more: str) -> Diagnosis:
    """As the user of docs/guides/redis.md, on this chunk alone: servers note what they deny."""
    for server in servers:
        documented_url(server, "admin", *more)
        server.command("ACL", "LOG", "RESET")
    options = RedisOptions(url, username="admin", password=PASSWORD)
    with open_server(options) as server:
        summary = summarise(server, b"", everything=True, verify=True)
        assert [group.chunks for group in summary.groups] == [1]
        assert summary.survey.database_keys
        assert explain(server, chunk.keys[0], b"", True).verdict is ChunkVerdict.COMPLETE
        assert _clock_ahead_s(server) is not None
        assert purge(server, Selection(idle_longer_than_s=-1.0)).chunks == 1
    diagnosis = examine(options, LITTLE, bandwidth=True)
    topics = {finding.topic for finding in diagnosis.findings}
    assert {"maxmemory", "io-threads", "load bandwidth", "latency"} <= topics
    assert not {"not seen", "tools", "bandwidth"} & topics
    for server in servers:
        with server.client() as client:
            assert {each["object"] for each in client.acl_log()} <= _NOT_NEEDED
    return diagnosis


def test_a_user_as_the_page_says_may_use_all_tools(own_server: RedisServer) -> None:
    chunk = Cached(1)
    with own_server.client() as client:
        chunk.put(client)
    use_all_tools(own_server.url, chunk, [own_server])


def test_such_a_user_of_a_cluster_sees_every_node(cluster: Cluster) -> None:
    put(cluster, chunk := Cached(1, stripe_count=12))
    diagnosis = use_all_tools(cluster.url, chunk, cluster.nodes, *IN_A_CLUSTER)
    assert len(diagnosis.facts) == 3
    assert all(facts.read_bytes_per_s for facts in diagnosis.facts)
    topics = [finding.topic for finding in diagnosis.findings]
    assert topics.count("maxmemory") == 3
    assert "cluster" not in topics
    assert keys_on(cluster.nodes) == [0, 0, 0]


def test_a_cluster_is_looked_at_and_purged_as_one(cluster: Cluster) -> None:
    chunks = [Cached(number, stripe_count=12) for number in range(4)]
    stays = Cached(1, layout="second", stripe_count=12)
    for chunk in (*chunks, stays):
        put(cluster, chunk)
    lost = chunks[1].keys[5]
    cluster.node_of(lost).command("DEL", lost)
    assert all(keys_on(cluster.nodes)), "every node has some of the stripes"
    with open_server(RedisOptions(cluster.url)) as server:
        assert len(server.nodes) == 3
        group, _ = summarise(server, b"", everything=True, verify=True).groups
        assert (group.chunks, group.stripes, group.incomplete, group.damaged) == (4, 47, 1, 0)
        for chunk, verdict in zip(
            chunks, (ChunkVerdict.COMPLETE, ChunkVerdict.INCOMPLETE), strict=False
        ):
            assert explain(server, chunk.keys[7], b"", True).verdict is verdict
        result = purge(server, Selection(layouts=frozenset({chunks[0].name.layout})))
    assert (result.chunks, result.stripes, result.left) == (4, 47, {})
    left = {key for node in cluster.nodes for key in node.command("KEYS", "*")}
    assert left == set(stays.keys)


@pytest.mark.parametrize(
    ("prefix", "model", "braces"),
    [
        (b"", "{org}/model", "{org}/model"),
        (b"{team}", "{org}/model", "{team}"),
        (b"", "{}{org}", None),
        (b"{team", "org/model", None),
    ],
)
def test_names_that_keep_a_cache_on_one_shard(
    cluster: Cluster, prefix: bytes, model: str, braces: str | None
) -> None:
    chunks = [Cached(number, model=model, prefix=prefix, stripe_count=12) for number in range(8)]
    for chunk in chunks:
        put(cluster, chunk)
    assert sum(map(bool, keys_on(cluster.nodes))) == (3 if braces is None else 1)
    with open_server(RedisOptions(cluster.url)) as server:
        facts = diagnose(server, prefix, Need(), bandwidth=False).facts
        owner = server.node_of(chunks[0].keys[0]).endpoint.where
    seen = {each.where: each.all_here for each in facts if each.all_here}
    assert seen == ({} if braces is None else {owner: (braces,)})


@pytest.mark.parametrize("name", ["redis", "redis-newest", "valkey-newest"])
def test_redirections_are_followed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After CLIENT NO-TOUCH, Redis 8.2 crashed here."""
    executable = server_binaries()[name]
    if executable is None:
        pytest.skip(f"there is no {name} here")
    (tmp_path / "redis-server").symlink_to(executable)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    chunks = [Cached(number, stripe_count=3) for number in range(24)]
    with ExitStack() as stack:
        own = Cluster(tmp_path, stack)
        for chunk in chunks:
            put(own, chunk)
        with open_server(RedisOptions(own.url)) as server:
            source, target = own.nodes[0], own.add_node()  # no tool has heard of it
            moved, asked = [
                chunk.keys[0] for chunk in chunks if own.node_of(chunk.keys[0]) is source
            ][:2]
            keys = [key for chunk in chunks for key in chunk.keys]
            own.move(slot_of(moved), source, target)
            own.begin_move(slot_of(asked), source, target)
            own.move_keys(slot_of(asked), source, target, 10)
            assert list(server.ask_each(keys, lambda key: [("EXISTS", key)])) == [[1]] * 72
            for key in (moved, asked):
                assert explain(server, key, b"", True).verdict is ChunkVerdict.COMPLETE
            result = purge(server, Selection(everything=True))
        # No SCAN met what a server has that the tools had not heard of.
        assert (result.chunks, result.stripes, result.left) == (22, 66, {})


def test_an_unserved_slot_and_nodes_that_hang_or_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_redis.admin.server.OP_TIMEOUT_S", 0.3)
    names = [Cached(number, stripe_count=1).keys[0] for number in range(30)]
    with ExitStack() as stack:
        own = Cluster(tmp_path, stack)
        first, hanging = own.nodes[0], own.nodes[2]
        keys = [key for key in names if own.node_of(key) is hanging]
        served = next(key for key in names if own.node_of(key) is first)
        first.command("CLUSTER", "DELSLOTS", slot_of(served))
        with open_server(RedisOptions(own.url)) as server:
            with pytest.raises(RedisUnavailable, match="has the slot of this key"):
                explain(server, served, b"", False)
            hanging.stop()
            began_s = time.monotonic()
            with pytest.raises(RedisTimeout, match=f"{hanging.port}, which does not answer"):
                list(server.ask_each(keys, lambda key: [("EXISTS", key)]))
            assert time.monotonic() - began_s < 5.0, "once, and not for each key"
            hanging.kill()
            with pytest.raises(RedisUnavailable, match="refuses connections"):
                summarise(server, b"", everything=True, verify=False)
            with pytest.raises(RedisUnavailable, match="refuses connections"):
                choose(server, b"", Selection(everything=True))
        gone, *others = tried(RedisOptions(own.url), Use.CLUSTER)
    assert [each.severity for each in others] == [Severity.OK] * 2
    assert (gone.severity, gone.where) == (Severity.WARNING, f"127.0.0.1:{hanging.port}")
    assert gone.seen.startswith("not all could be tried: the cluster at ")


def test_one_server_is_no_cluster(own_server: RedisServer) -> None:
    url = own_server.url.replace("redis://", "redis+cluster://")
    refused(RedisOptions(url), ConfigError, "is no cluster: write redis://")


def test_one_node_of_a_cluster_is_not_all_of_it(cluster: Cluster) -> None:
    with open_server(RedisOptions(cluster.nodes[1].url)) as server:
        diagnosis = diagnose(server, b"", Need(), bandwidth=False)
        keys = [b"foreign:%d" % number for number in range(20)]
        elsewhere = next(key for key in keys if cluster.node_of(key) is not cluster.nodes[1])
        with pytest.raises(RedisReplyError, match=r"MOVED .*write redis\+cluster://HOST:PORT"):
            server.nodes[0].ask("GET", elsewhere)
    (finding,) = [finding for finding in diagnosis.findings if finding.topic == "cluster"]
    assert finding.severity is Severity.CRITICAL


def test_a_sentinel_names_the_master(tmp_path: Path) -> None:
    with running_sentinel(tmp_path, password="s3cr3t") as watched:
        with watched.servers[0].client() as client:
            Cached(1).put(client)
        rights = (f"+sentinel|{name}" for name in ("get-master-addr-by-name", "master", "masters"))
        watched.sentinel("ACL", "SETUSER", "seer", "on", f">{PASSWORD}", *rights)
        seer = f"?sentinel_username=seer&sentinel_password={PASSWORD}"
        use_all_tools(watched.url + seer, Cached(1), watched.servers)
        unknown = watched.url.replace("mymaster", "nobody")
        said = refused(RedisOptions(unknown), RedisUnavailable, "no master named nobody")
        assert "s3cr3t" not in said
        wrong = watched.url.replace("s3cr3t", "wr0ng")
        said = refused(RedisOptions(wrong), RedisAuthError, "refuses the user or the password")
        assert "wr0ng" not in said
        with open_server(RedisOptions(watched.url)) as server:
            (node,) = server.nodes
            assert node.endpoint.port == watched.servers[0].port
            assert node.ask("SET", "key", "before")
            old = watched.master
            watched.fail_over()
            wait_until(lambda: watched.master is not old)
            # The former master says READONLY, or has closed the connection.
            wait_until(lambda: info(old, "replication").get("role") == "slave")
            assert node.ask("SET", "key", "after")
        assert watched.master.command("GET", "key") == b"after"
        watched.stop_sentinel()
        refused(
            RedisOptions(watched.url), RedisUnavailable, "refuses connections: start it, or correct"
        )


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cluster of one node, which is also asked as one server."""
    executable = server_binaries()["redis"]
    if executable is None or not speaks_tls(executable):
        pytest.skip("there is no redis-server with TLS here")
    authority = Authority(tmp_path / "tls")
    certificate, key = authority.issue("server", "localhost")
    port = free_node_port()
    words = ["--cluster-enabled", "yes", "--tls-cluster", "yes"]
    words += ["--cluster-announce-ip", "127.0.0.1"]
    words += ["--tls-port", str(port), "--tls-auth-clients", "no"]
    words += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    words += ["--tls-ca-cert-file", str(authority.ca)]
    with RedisServer(tmp_path, tcp=False, args=words, executable=executable) as only:
        only.command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in only.command("CLUSTER", "INFO"))
        with only.client() as client:
            Cached(1).put(client)
        url = f"rediss+cluster://127.0.0.1:{port}?ssl_ca_certs={authority.ca}"
        with open_server(RedisOptions(f"{url}&ssl_check_hostname=false")) as server:
            (group,) = summarise(server, b"", everything=True, verify=True).groups
            assert (group.chunks, group.damaged, server.is_cluster) == (1, 0, True)
        refused(RedisOptions(url), RedisUnavailable, "ssl_check_hostname")
        url = f"rediss://localhost:{port}"
        with open_server(RedisOptions(f"{url}?ssl_ca_certs={authority.ca}")) as server:
            (group,) = summarise(server, b"", everything=True, verify=True).groups
            assert (group.chunks, group.damaged) == (1, 0)
            diagnosis = diagnose(server, b"", Need(), bandwidth=True)
        assert diagnosis.facts[0].read_bytes_per_s
        (finding,) = [finding for finding in diagnosis.findings if finding.topic == "TLS"]
        assert (finding.severity, finding.seen) == (Severity.OK, "on")
        refused(RedisOptions(url), RedisUnavailable, "ssl_ca_certs")
        # A CA that is named is trusted instead of the system's, not beside them.
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
        with open_server(RedisOptions(f"{url}?ssl_check_hostname=true")):
            pass
        other = Authority(tmp_path / "other").ca
        refused(RedisOptions(f"{url}?ssl_ca_certs={other}"), RedisUnavailable, "ssl_ca_certs")


def test_addresses_that_a_cluster_announces(tmp_path: Path) -> None:
    """Its nodes are blamed, not the URL. One that names no host is the one that was asked."""
    with ExitStack() as stack:
        own = Cluster(tmp_path, stack, masters=2)
        first, second = own.nodes
        gone = free_port()
        second.config_set("cluster-announce-port", str(gone))
        port = f":{gone}".encode()
        wait_until(lambda: port in first.command("CLUSTER", "NODES"), "the other has heard of it")
        options = RedisOptions(own.url)
        blamed = (
            f"the cluster at 127.0.0.1:{first.port} names 127.0.0.1:{gone}, which refuses "
            "connections: start it, or see cluster-announce-ip and cluster-announce-hostname"
        )
        refused(options, RedisUnavailable, blamed)
        with running(own.url) as plane:
            wait_until(lambda: blamed in plane.state.reason, "an agent says so, too")
        second.config_set("cluster-announce-port", "0")
        wait_until(lambda: port not in first.command("CLUSTER", "NODES"))
        for node in own.nodes:
            node.config_set("cluster-preferred-endpoint-type", "unknown-endpoint")
        with open_server(RedisOptions(f"redis+cluster://127.0.0.1:{first.port}")) as server:
            assert {node.endpoint.host for node in server.nodes} == {"127.0.0.1"}

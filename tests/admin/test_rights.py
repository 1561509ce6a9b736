# SPDX-License-Identifier: Apache-2.0
"""The rights of users, tried over real servers, in a cluster and behind a Sentinel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin.doctor import Diagnosis, examine
from lmcache_redis.admin.facts import Need
from lmcache_redis.admin.report import diagnosis_lines
from lmcache_redis.admin.rights import (
    Refusal,
    Rights,
    judge_rights,
    refusal_of,
    sent_by_agents,
    try_rights,
)
from lmcache_redis.admin.rules import Finding, Severity
from lmcache_redis.cli.checked import _connect
from lmcache_redis.config import AgentConfig
from lmcache_redis.errors import RedisAuthError, RedisUnavailable
from lmcache_redis.resp import RedisOptions
from lmcache_redis.resp.net.commands import Command, Use, needed
from lmcache_redis.resp.net.wire import ErrorReply
from lmcache_redis.resp.options import parse_deployment
from tests.acl import PASSWORD, documented_url
from tests.servers import RedisServer, free_port, server_binaries
from tests.topologies import Cluster, Watched, keys_on, running_sentinel

pytestmark = [
    pytest.mark.servers,
    # redis-py leaves a connection to the garbage collector if it cannot make a cluster's client.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

BINARIES = server_binaries()
# Whatever this machine does just now, it is enough.
LITTLE = Need(1, 1.0)


def findings_about(topic: str, findings: Iterable[Finding]) -> list[Finding]:
    return [each for each in findings if each.topic == topic]


def tried(options: RedisOptions, *uses: Use, report: Any = None) -> list[Finding]:
    """What is found by trying the commands of agents. report: of an agent, its part on Redis."""
    deployment = parse_deployment(options)
    wanted = needed(uses) if report is None else sent_by_agents(deployment, False, report)
    return judge_rights(try_rights(deployment, options.key_prefix, wanted, report))


@pytest.mark.parametrize("command", needed(()), ids=lambda each: each.name)
def test_each_command_of_an_agent_is_tried(own_server: RedisServer, command: Command) -> None:
    documented_url(own_server, "agent", f"-{command.name}")
    options = RedisOptions(own_server.unix_url, username="agent", password=PASSWORD)
    diagnosis = examine(options, LITTLE, bandwidth=False)
    (found,) = findings_about("rights", diagnosis.findings)
    assert found.severity is (Severity.CRITICAL if command.is_vital else Severity.WARNING)
    assert found.seen == f"{command.shown}, which agents send, is refused to agent"
    assert found.why == f"without it {command.without}"
    assert found.change == (f"ACL SETUSER agent +{command.name}",)
    assert diagnosis.exit_status == 1
    assert own_server.command("DBSIZE") == int(command.name == "unlink")
    assert not findings_about("tools", diagnosis.findings)


@pytest.mark.parametrize("use", [Use.TTL_REFRESH, Use.DATABASE, Use.ROUTERS, Use.WARM])
def test_what_an_agent_uses_is_tried(own_server: RedisServer, use: Use) -> None:
    """In the database of the URL, also if that cannot be selected."""
    documented_url(own_server, "agent", "resetchannels", "&__keyevent@3__:*")
    db = "?db=3" if use is not Use.TTL_REFRESH else ""
    options = RedisOptions(own_server.unix_url + db, username="agent", password=PASSWORD)
    if use is Use.ROUTERS:
        own_server.command("ACL", "SETUSER", "agent", "+select")
    refused = [each for each in needed([use]) if each.use is use]
    found = tried(options, use)
    assert [each.seen.split(",")[0] for each in found] == [
        each.shown for each in sorted(refused, key=lambda each: not each.is_vital)
    ]
    own_server.command("ACL", "SETUSER", "agent", *(f"+{each.name}" for each in refused))
    assert [each.severity for each in tried(options, use)] == [Severity.OK]


def test_another_user_than_the_agents_is_told(own_server: RedisServer) -> None:
    documented_url(own_server, "agent")
    options = RedisOptions(own_server.unix_url, username="agent", password=PASSWORD)
    report = {"redis": {"user": "other", "commands": ["get", "subscribe"]}}
    found = tried(options, report=report)
    assert [each.severity for each in found] == [Severity.WARNING, Severity.HINT]
    assert found[0].seen == "SUBSCRIBE, which agents send, is refused to agent"
    assert "this node's agent is the user other" in found[1].seen


def test_a_database_that_cannot_be_selected(own_server: RedisServer) -> None:
    documented_url(own_server, "agent")
    options = RedisOptions(f"{own_server.unix_url}?db=3", username="agent", password=PASSWORD)
    found = examine(options, LITTLE, bandwidth=False).findings
    assert [(each.severity, each.change[-1]) for each in found] == [
        (Severity.CRITICAL, "ACL SETUSER agent +select"),
        (Severity.WARNING, "or ACL SETUSER agent +select"),
    ]


@pytest.fixture(params=BINARIES)
def any_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    if (executable := BINARIES[request.param]) is None:
        pytest.skip(f"there is no {request.param} here")
    with RedisServer(tmp_path, executable=executable) as server:
        yield server


class TestWhatIsRefused:
    """Over every server here, in its own words."""

    @pytest.fixture
    def options(self, any_server: RedisServer) -> RedisOptions:
        self.server = any_server
        self.user("~*", "+@all")
        return RedisOptions(any_server.unix_url, b"a*b:", username="some", password=PASSWORD)

    def user(self, *rules: str) -> None:
        words = ("reset", "on", f">{PASSWORD}", "resetchannels")
        self.server.command("ACL", "SETUSER", "some", *words, *rules)

    def test_nothing(self, options: RedisOptions) -> None:
        assert [each.severity for each in tried(options)] == [Severity.OK]

    def test_keys(self, options: RedisOptions) -> None:
        self.user("~lmcr2:*", "+@all")
        (found,) = tried(options, Use.TTL_REFRESH)
        assert found.severity is Severity.CRITICAL
        assert found.seen == (
            "the keys a\\*b:lmcr2:* are refused to some, for SET, GET, EXISTS, TOUCH, GETRANGE, "
            "EXPIRE, GETEX, UNLINK"
        )
        assert found.change == ("ACL SETUSER some ~a\\*b:lmcr2:*",)
        self.user("~a\\*b:lmcr2:*", "+@all")
        assert [each.severity for each in tried(options)] == [Severity.OK]

    @pytest.mark.parametrize("db", [0, 2])
    def test_channels(self, options: RedisOptions, db: int) -> None:
        options = replace(options, url=f"{options.url}?db={db}")
        (found,) = tried(options, Use.ROUTERS)
        assert found.severity is Severity.WARNING
        assert found.seen == "the channels that agents SUBSCRIBE to are refused to some"
        assert found.change == ("ACL SETUSER some &__keyevent@*",)
        self.user("~*", "+@all", f"&__keyevent@{db}__:*")
        assert [each.severity for each in tried(options, Use.ROUTERS)] == [Severity.OK]


def test_a_renamed_command(tmp_path: Path) -> None:
    """No right helps."""
    with RedisServer(tmp_path, args=("--rename-command", "UNLINK", "")) as server:
        (found,) = tried(RedisOptions(server.unix_url))
    assert found.severity is Severity.CRITICAL
    assert found.seen == "UNLINK, which agents send, is unknown to the server"
    assert found.change == ("redis.conf: no rename-command UNLINK",)


def test_words_of_servers_to_come() -> None:
    assert refusal_of(ErrorReply("NOPERM", "NOPERM not today")) is Refusal.OTHER
    assert refusal_of(ErrorReply("READONLY", "READONLY a replica")) is None
    (found,) = judge_rights([Rights("a", "some", "", ("get",), {"get": Refusal.OTHER})])
    assert (found.seen, found.change) == ("refused to some: GET", ("compare ACL GETUSER",))


def test_rights_that_cannot_be_tried_are_told() -> None:
    found = tried(RedisOptions(f"redis://127.0.0.1:{free_port()}"))
    assert [(each.severity, each.topic) for each in found] == [(Severity.WARNING, "rights")]
    assert "not all could be tried: Redis at 127.0.0.1:" in found[0].seen


IN_A_CLUSTER = ("+cluster|slots", "+cluster|info", "+asking")


class TestInACluster:
    @pytest.fixture(autouse=True)
    def _user(self, cluster: Cluster) -> None:
        for node in cluster.nodes:
            documented_url(node, "agent", *IN_A_CLUSTER)
        self.cluster = cluster
        self.options = RedisOptions(cluster.url, username="agent", password=PASSWORD)

    def change(self, *rules: str, nodes: int = 3) -> None:
        for node in self.cluster.nodes[:nodes]:
            node.command("ACL", "SETUSER", "agent", *rules)

    def examined(self) -> Diagnosis:
        diagnosis = examine(self.options, LITTLE, bandwidth=False)
        assert keys_on(self.cluster.nodes) == [0, 0, 0]
        return diagnosis

    def test_the_user_of_the_page(self) -> None:
        diagnosis = self.examined()
        rights = findings_about("rights", diagnosis.findings)
        assert [each.severity for each in rights] == [Severity.OK] * 3
        addresses = {f"127.0.0.1:{node.port}" for node in self.cluster.nodes}
        assert {each.where for each in rights} == addresses
        assert {*diagnosis.rights[0].tried} == {each.name for each in needed([Use.CLUSTER])}
        assert not findings_about("tools", diagnosis.findings)
        assert len(diagnosis.facts) == 3
        lines = [*diagnosis_lines(diagnosis)]
        assert all(any(f"{each}: rights: agent may send" in line for line in lines)
                   for each in addresses)  # fmt: skip

    def test_one_server_that_refuses(self) -> None:
        self.change("-getrange", nodes=1)
        rights = findings_about("rights", self.examined().findings)
        assert [each.severity for each in rights] == [Severity.WARNING, Severity.OK, Severity.OK]
        assert rights[0].change == ("ACL SETUSER agent +getrange",)
        assert rights[0].where == f"127.0.0.1:{self.cluster.nodes[0].port}"

    @pytest.mark.parametrize("tools", [False, True])
    def test_servers_that_are_not_told(self, tools: bool) -> None:
        """The one that is named is tried."""
        self.change("-cluster", *(("+command",) if tools else ()))
        diagnosis = self.examined()
        found, less = findings_about("rights", diagnosis.findings)
        assert (found.severity, less.severity) == (Severity.CRITICAL, Severity.WARNING)
        assert found.seen == "CLUSTER SLOTS, which agents send, is refused to agent"
        assert less.change == ("ACL SETUSER agent +cluster|info",)
        assert found.change == ("ACL SETUSER agent +cluster|slots",)
        (tool,) = findings_about("tools", diagnosis.findings)
        assert tool.change[-1] == "or ACL SETUSER agent +cluster|slots"

    def test_a_server_that_does_not_answer(self) -> None:
        gone = f"127.0.0.1:{free_port()}"
        options = replace(self.options, url=f"redis+cluster://{gone},{self.cluster.url[16:]}")
        diagnosis = examine(options, LITTLE, bandwidth=False)
        rights = findings_about("rights", diagnosis.findings)
        assert [each.severity for each in rights] == [Severity.OK] * 3
        assert len(diagnosis.facts) == 3
        with pytest.raises(RedisUnavailable, match="refuses connections"):
            examine(replace(self.options, url=f"redis+cluster://{gone}"), LITTLE, bandwidth=False)

    def test_it_is_asked_by_check_as_agents_ask_it(self) -> None:
        """Each server: one may have another password."""
        config = AgentConfig(redis_username="agent", redis_password=PASSWORD)
        _connect(config, self.cluster.url)
        last = self.cluster.nodes[2]
        last.command("ACL", "SETUSER", "agent", "resetpass", ">wr0ng")
        with pytest.raises(RedisAuthError, match=f"{last.port} refuses the user") as refused:
            _connect(config, self.cluster.url)
        assert PASSWORD not in str(refused.value)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with running_sentinel(tmp_path_factory.mktemp("sentinel")) as watched:
        documented_url(watched.master, "agent")
        yield watched


RIGHTS = ("+sentinel|get-master-addr-by-name", "+sentinel|master")


class TestBehindASentinel:
    @pytest.fixture(autouse=True)
    def _user(self, watched: Watched) -> None:
        self.watched = watched
        self.at_sentinel("reset", "on", f">{PASSWORD}", *RIGHTS)
        parameters = f"?sentinel_username=seer&sentinel_password={PASSWORD}"
        self.options = RedisOptions(watched.url + parameters, username="agent", password=PASSWORD)

    def at_sentinel(self, *rules: str) -> None:
        self.watched.sentinel("ACL", "SETUSER", "seer", *rules)

    def examined(self) -> Diagnosis:
        diagnosis = examine(self.options, LITTLE, bandwidth=False)
        assert self.watched.master.command("DBSIZE") == 0
        return diagnosis

    def test_the_user_of_the_page(self) -> None:
        diagnosis = self.examined()
        at_server, at_sentinel = findings_about("rights", diagnosis.findings)
        assert at_server.severity is at_sentinel.severity is Severity.OK
        assert at_server.where == f"127.0.0.1:{self.watched.master.port}"
        assert at_server.seen.startswith("agent may send what agents send: PING, SET, GET")
        assert at_sentinel.where == f"127.0.0.1:{self.watched.port}"
        said = "seer may send what agents send: SENTINEL GET-MASTER-ADDR-BY-NAME, SENTINEL MASTER"
        assert at_sentinel.seen == said
        (tools,) = findings_about("tools", diagnosis.findings)
        assert tools.why == "they also send SENTINEL MASTERS to the Sentinels"
        assert tools.change[-1] == "or ACL SETUSER seer +sentinel|masters"
        assert (len(diagnosis.findings), diagnosis.exit_status) == (3, 1)

    def test_a_sentinel_that_refuses(self) -> None:
        """Tools find the server all the same."""
        self.at_sentinel("-@all", "+sentinel|masters")
        found, less = findings_about("rights", self.examined().findings)
        assert (found.severity, less.severity) == (Severity.CRITICAL, Severity.WARNING)
        assert found.where == f"127.0.0.1:{self.watched.port}"
        assert found.change == ("ACL SETUSER seer +sentinel|get-master-addr-by-name",)

    def test_the_commands_of_an_agent_elsewhere(self) -> None:
        """One server is no Sentinel, whatever the agent of this node uses."""
        names = [each.name for each in needed([Use.SENTINEL])]
        options = RedisOptions(self.watched.master.url, username="agent", password=PASSWORD)
        found = tried(options, report={"redis": {"user": "agent", "commands": names}})
        assert [each.severity for each in found] == [Severity.OK]

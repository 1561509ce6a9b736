# SPDX-License-Identifier: Apache-2.0
"""The list of commands that agents send, held against what they send and what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.client.control import ControlClient
from lmcache_redis.resp.net.commands import COMMANDS, TOOLS, Use, needed
from tests.acl import PAGE, documented, documented_url
from tests.agent.test_canaries import BLOCKS, HASHES, canary, counts
from tests.agent.test_watching import watched
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

EPOCH = b"epoch..1"
# What the tests themselves send, what any user may, and what agents do not miss.
_OTHERS = {"auth", "info", "acl|setuser", "config|resetstat", "hello", "client|setinfo"}
_OTHERS |= {"client|setname", "config|get", "acl|log"}


def rules(*uses: Use) -> set[str]:
    return {f"+{each.name}" for each in COMMANDS if each.use in uses}


def test_the_page_grants_what_agents_send() -> None:
    keys, *granted = documented("agent")
    assert keys == "~lmcr2:*"
    # And the names of connections, which nobody needs: else each connect is in ACL LOG.
    assert {*granted} == rules(Use.ALWAYS) | {"+client|setname"}
    # And what else it says is needed.
    more = PAGE.read_text().partition("More is needed for")[2].partition("##")[0]
    words = {*re.findall(r"\+[a-z|-]+", more)}
    for use in Use:
        assert use is Use.ALWAYS or rules(use) <= words, use
        assert {f"+{each}" for each in TOOLS.get(use, ())} <= words, use


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path, args=("--notify-keyspace-events", "Egex")) as server:
        yield server


def sent(server: RedisServer) -> set[str]:
    with server.client() as client:
        stats = client.info("commandstats")
    names = {name.removeprefix("cmdstat_") for name, each in stats.items() if each["calls"]}
    return names - _OTHERS


@pytest.mark.servers
@pytest.mark.parametrize(
    "uses", [(), (Use.TTL_REFRESH, Use.DATABASE, Use.ROUTERS, Use.TENANTS, Use.WARM)]
)
def test_agents_send_what_is_listed(
    tmp_path: Path, server: RedisServer, uses: tuple[Use, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store, a hit, canaries, an old epoch, other layouts, and a late removal."""
    rights = [f"+{each.name}" for each in needed(uses)]
    url = documented_url(server, "agent", *rights, "resetchannels", "&__keyevent@*")
    if refreshes := Use.TTL_REFRESH in uses:
        monkeypatch.setenv("LMCACHE_REDIS_TTL_S", "100")
        monkeypatch.setenv("LMCACHE_REDIS_TTL_REFRESH", "true")
    if Use.TENANTS in uses:
        monkeypatch.setenv("LMCACHE_REDIS_TENANT_BYTES", "team=1GiB,*=1GiB")
    if warms := Use.WARM in uses:
        # One of two chunks: the other one is loaded for a request.
        monkeypatch.setenv("LMCACHE_REDIS_WARM_BYTES", "100KiB")
    url += "/3" if Use.DATABASE in uses else ""
    server.command("CONFIG", "RESETSTAT")
    with AgentServer(tmp_path / "agent", url) as agent, Engine(agent.endpoint) as engine:
        if Use.ROUTERS in uses:
            watched(engine)
        assert {*agent.status()["redis"]["commands"]} == {each.name for each in needed(uses)}
        assert agent.status()["redis"]["user"] == "agent"
        engine.tenant = "team"
        engine.randomize(range(engine.num_blocks))
        engine.store("first", HASHES, BLOCKS)
        engine.store("epoch", [EPOCH + each for each in HASHES], BLOCKS)
        agent.wait_idle()
        if Use.TENANTS in uses:
            wait_until(lambda: agent.status()["tenants"]["team"]["used_bytes"], what="its account")
            wait_until(lambda: "incrby" in sent(server), what="what is added")
        engine.scheduler.clear(EPOCH)
        wait_until(lambda: agent.counter("cleared_keys"), what="a cleared epoch")
        ControlClient(agent.endpoint).layouts("", "")
        agent.kill()
        agent.start()
        engine.wait_ready()
        if warms:
            wait_until(lambda: agent.status()["warm"]["done"], what="a filled host pool")
            assert engine.lookup("absent", block_hashes("absent", 8)) == 0
        assert engine.lookup("loads", HASHES) == 128
        engine.scheduler.end_session("loads")
        server.command("ACL", "SETUSER", "agent", "-unlink")
        assert canary(engine, agent, blocks=range(1, 9)) == counts(2, differing=2)
        wait_until(lambda: agent.status()["queues"]["removals"] == 2, what="failed removals")
        server.command("ACL", "SETUSER", "agent", "+unlink")
        wait_until(lambda: not agent.status()["queues"]["removals"], what="late removals")
    with server.client() as client:
        denied = {entry["object"] for entry in client.acl_log()}
    assert denied <= _OTHERS | {"unlink"}, "the page does not allow what is sent"
    wanted = {each.name for each in needed(uses)}
    assert sent(server) - {"cluster|slots"} <= wanted, sent(server) - wanted
    unsent = wanted - sent(server) - ({"get", "touch"} if refreshes else set())
    assert not unsent, "the list names what no agent sends"


def test_an_example_of_each_command_can_be_sent() -> None:
    for each in COMMANDS:
        name = "|".join(map(str, each.words)).lower()
        assert name.startswith(each.name), "the rights are for another command"

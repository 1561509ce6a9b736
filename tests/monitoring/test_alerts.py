# SPDX-License-Identifier: Apache-2.0
"""Alerts, in faults that are staged for real agents under a real Prometheus.

In the rules of these tests a minute is 0.3 seconds. `alerts_test.yml` has what needs hours, many
agents, vLLM or Kubernetes, for promtool.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import yaml

from demo.dashboard import ALERTS, Prometheus, find, free_port
from lmcache_redis.chunks.keys import hash_tag
from tests.harness import AgentServer, Engine, block_hashes
from tests.scraping import documented
from tests.servers import RedisServer, stripe_keys
from tests.test_docs import ROOT, anchors

MINUTE_MS = 300
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
NAMES = {rule["alert"] for rule in RULES}
UNITS = Path(__file__).parent / "alerts_test.yml"
NOT_STAGED = {
    f"LmcacheRedis{name}"
    for name in ("AgentsMissing", "EngineWithoutCache", "NoAgents", "QueueNearlyFull", "TierSlow")
}
FIRES_WITHIN_S = 60.0


def in_fast_motion(rules: str) -> str:
    def faster(found: re.Match[str]) -> str:
        minutes = int(found[1]) * (60 if found[2] == "h" else 1)
        return f"{minutes * MINUTE_MS}ms"

    return re.sub(r"\b(\d+)([mh])\b", faster, rules)


@pytest.mark.servers
def test_the_rules_are_valid_and_say_what_to_do() -> None:
    promtool = find("promtool")
    assert promtool is not None
    for words in (["check", "rules", "--lint-fatal", ALERTS], ["test", "rules", UNITS]):
        done = subprocess.run([promtool, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    tested = set(re.findall(r"LmcacheRedis\w+", UNITS.read_text()))
    assert NOT_STAGED <= tested <= NAMES


def test_alerts_ask_only_for_what_exists() -> None:
    """By docs/reference/metrics.md, which other tests compare with the code."""
    metrics = {name.partition("{")[0] for name, kind in documented() if kind != "histogram"}
    known = {f"lmcache_redis_{name}" for name in metrics}
    for rule in RULES:
        assert set(re.findall(r"\blmcache_redis_\w+", rule["expr"])) <= known, rule["alert"]


def test_alerts_lead_to_headings_of_troubleshooting() -> None:
    for rule in RULES:
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert page == "docs/troubleshooting.md", rule["alert"]
        assert heading in anchors(ROOT / page), rule["alert"]


@dataclass
class Site:
    """One scraped agent with an engine and a Redis of its own."""

    agent: AgentServer
    engine: Engine
    server: RedisServer
    stored: int = 0
    asked: int = 0

    def store(self, chunks: int) -> list[list[bytes]]:
        """Stores prompts of one chunk; returns their hashes."""
        prompts = []
        for _ in range(chunks):
            self.stored += 1
            hashes = block_hashes(f"prompt {self.stored}", 4)
            self.engine.store(f"store {self.stored}", hashes, range(4))
            prompts.append(hashes)
        return prompts

    def ask(self, hashes: list[bytes], *, token_s: float = 0.0, end: bool = True) -> int:
        self.asked += 1
        tokens = self.engine.lookup(f"ask {self.asked}", hashes, token_s=token_s)
        if end:
            self.engine.scheduler.end_session(f"ask {self.asked}")
        return tokens

    def find_other_kv(self) -> None:
        hashes = block_hashes("a canary", 4)
        self.engine.store("canary", hashes, range(4))
        assert self.engine.lookup("canary", hashes) == 64
        self.engine.randomize(range(4))
        self.engine.compare("canary", hashes, range(4))

    def load_in_vain(self) -> None:
        self.asked += 1
        hashes = block_hashes(f"never stored {self.asked}", 4)
        assert self.engine.retrieve(f"ask {self.asked}", hashes, range(4))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    with ExitStack() as stack:

        def start(
            name: str, target: str, server: RedisServer | None = None, **options: int
        ) -> Site:
            if server is None:
                directory = tmp_path / f"{name}-r"
                directory.mkdir()
                server = stack.enter_context(RedisServer(directory, tcp=False))
            agent = AgentServer(tmp_path / name, server.unix_url, metrics=target, **options)
            stack.enter_context(agent)
            return Site(agent, stack.enter_context(Engine(agent.endpoint)), server)

        yield start


@pytest.mark.long
@pytest.mark.servers
def test_alerts_fire_in_their_faults_alone(tmp_path: Path, start: Callable[..., Site]) -> None:
    targets = [f"127.0.0.1:{free_port()}" for _ in range(6)]
    writer, dead, without_redis, full, pinned = (
        start(name, target, **options)
        for name, target, options in (
            ("writer", targets[0], {}),
            ("dead", targets[1], {}),
            ("alone", targets[2], {}),
            ("full", targets[3], {}),
            ("pinned", targets[4], {"pool_bytes": 1 << 20}),
        )
    )
    # Has nothing in its host pool: asks Redis for what the writer has stored.
    reader = start("reader", targets[5], writer.server)
    prompts = writer.store(400)
    writer.agent.wait_idle()
    healthy, incomplete, damaged, slow = (prompts[n : n + 100] for n in range(0, 400, 100))
    with Prometheus(
        tmp_path / "prometheus", targets, "200ms", in_fast_motion(ALERTS.read_text())
    ) as prometheus:
        began_s = time.monotonic()
        for hashes in healthy:
            assert reader.ask(hashes) == 64
            time.sleep(0.05)
        assert time.monotonic() - began_s > 10 * MINUTE_MS / 1e3
        assert prometheus.firing() == set()

        full.find_other_kv()
        dead.agent.kill()
        without_redis.server.kill()
        with redis.Redis.from_url(full.server.url) as client:
            client.config_set("maxmemory", "1")
            client.config_set("maxmemory-policy", "noeviction")
        (wide,) = [block_hashes("as large as the host pool", 32)]
        pinned.engine.store("wide", wide, range(32))
        assert pinned.ask(wide, end=False) == 512
        with redis.Redis.from_url(writer.server.url) as client:
            keys = [*stripe_keys(client)]
            for hashes in incomplete:
                tag = hash_tag(hashes[-1])
                client.unlink(*(k for k in keys if tag in k and k.endswith(b"\0\1")))
            for hashes in damaged:
                for key in (k for k in keys if hash_tag(hashes[-1]) in k):
                    client.setrange(key, 700, b"\x5a\xa5\x5a\xa5")
        fired: set[str] = set()
        faults = zip(incomplete, damaged, slow, strict=True)
        deadline_s = time.monotonic() + FIRES_WITHIN_S
        while not fired >= NAMES - NOT_STAGED and time.monotonic() < deadline_s:
            for hashes in next(faults, ()):
                reader.ask(hashes, token_s=1e-9 if hashes in slow else 0.0)
            reader.load_in_vain()
            without_redis.ask(block_hashes("nowhere", 4))
            full.store(1)
            fired |= prometheus.firing()
            time.sleep(0.12)  # the broken chunks are enough for twelve seconds: 40 minutes
        # The last is only sometimes slow for long enough.
        assert fired - {"LmcacheRedisTierSlow"} == NAMES - NOT_STAGED

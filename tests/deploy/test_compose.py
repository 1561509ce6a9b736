# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml: that it is valid, and that it fits the images."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from lmcache_redis import __version__
from lmcache_redis.config import AgentConfig, ClientConfig, parse_address
from lmcache_redis.settings import option_name
from tests.deploy.images import ENDPOINT, IMAGES, ROOT

WAIT_S = 60


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


def filled_in(text: str, **variables: str) -> str:
    """With variables of the environment, as Compose does it: ${NAME:-default}."""

    def value(found: re.Match[str]) -> str:
        return variables.get(found[1], found[2])

    return re.sub(r"\$\{(\w+):-([^}]*)\}", value, text)


def words_of(services: dict[str, Any]) -> dict[str, str]:
    words = services["agent"]["command"]
    assert words[0] == "agent"
    return dict(zip(words[1::2], words[2::2], strict=True))


@pytest.mark.servers
def test_docker_compose_takes_it(services: dict[str, Any]) -> None:
    """By Docker's own program, which needs no daemon for that."""
    docker = ["docker", "compose"]
    if (
        not shutil.which("docker")
        or subprocess.run([*docker, "version"], capture_output=True).returncode
    ):
        pytest.skip("needs docker compose")
    words = [*docker, "--profile", "metrics", "config"]
    environment = {**os.environ, "REDIS_PASSWORD": "hunter2", "POOL_BYTES": "1GiB"}
    done = subprocess.run(
        [*words, "--format", "json"], cwd=ROOT, env=environment,
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert set(found["services"]) == set(services)
    assert "1GiB" in found["services"]["agent"]["command"]
    assert "hunter2" not in str(found["services"]), "the password is in a file"


def test_images_are_pinned_and_those_of_the_chart(services: dict[str, Any]) -> None:
    images = {name: each["image"] for name, each in services.items()}
    assert images == {
        "node": IMAGES["busybox"],
        "redis": IMAGES["valkey"],
        "agent": f"lmcache-redis-agent:{__version__}",
        "vllm": f"lmcache-redis-vllm:{__version__}",
        "prometheus": IMAGES["prometheus"],
        "grafana": IMAGES["grafana"],
    }
    assert all(re.search(r":v?\d+\.\d+\.\d+(\.dev0)?$", each) for each in images.values())


def needed_by(services: dict[str, Any], *names: str) -> set[str]:
    """What `docker compose up NAMES` starts."""
    found = set(names)
    for name in names:
        found |= needed_by(services, *services[name].get("depends_on", ()))
    return found


def test_further_nodes_use_the_server_of_the_first(services: dict[str, Any]) -> None:
    assert needed_by(services, "agent", "vllm") == {"agent", "vllm", "node"}
    url = words_of(services)["--redis-url"]
    assert filled_in(url) == "redis://redis:6379"
    assert filled_in(url, REDIS_URL="redis://10.0.0.1:6379") == "redis://10.0.0.1:6379"
    (port,) = services["redis"]["ports"]
    assert filled_in(port) == "127.0.0.1::6379", "a free port of loopback"
    assert filled_in(port, REDIS_PUBLISH="10.0.0.1:6379") == "10.0.0.1:6379:6379"


def test_settings_exist_and_agree(services: dict[str, Any]) -> None:
    settings = words_of(services)
    assert set(settings) <= {option_name(name) for name in AgentConfig.__dataclass_fields__}
    words = services["vllm"]["command"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "LMCacheRedisConnector"
    client = ClientConfig.from_extra_config(transfer["kv_connector_extra_config"])
    assert client.endpoint == ENDPOINT
    grace_s = int(services["agent"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > AgentConfig().shutdown_deadline_s
    # /proc/<pid> ends at the border of this namespace.
    assert services["agent"]["pid"] == services["vllm"]["pid"] == "service:node"
    path = services["agent"]["environment"]["LMCACHE_REDIS_PASSWORD_FILE"]
    assert path in services["redis"]["command"][0], "the server wants the agent's password"


def test_prometheus_asks_where_the_agent_listens(services: dict[str, Any]) -> None:
    address, port = parse_address(words_of(services)["--metrics"])
    assert address == "0.0.0.0", "another container asks"
    settings = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (job,) = (each for each in settings["scrape_configs"] if each["job_name"] == "lmcache-redis")
    assert job["static_configs"][0]["targets"] == [f"agent:{port}"]


def test_nothing_listens_beyond_loopback(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert filled_in(port).startswith("127.0.0.1:"), name

# SPDX-License-Identifier: Apache-2.0
"""docker-compose.yml: that it is valid, and that it fits the images."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_redis import __version__
from lmcache_redis.config import AgentConfig, ClientConfig, parse_address
from lmcache_redis.settings import option_name
from tests.deploy.images import ENDPOINT, IMAGES, ROOT, WHERE

WAIT_S = 60


def compose() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert isinstance(document, dict)
    return document


@pytest.fixture
def services() -> dict[str, Any]:
    found = compose()["services"]
    assert isinstance(found, dict)
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


# ------------------------------------------------------------------- compose


@pytest.mark.servers
def test_docker_compose_takes_it(tmp_path: Path) -> None:
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
    assert set(found["services"]) == set(compose()["services"])
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
    for each in images.values():
        assert re.search(r":v?\d+\.\d+\.\d+(\.dev0)?$", each), f"{each} is not pinned"


def test_agent_and_engine_share_namespaces(services: dict[str, Any]) -> None:
    assert not any("ipc" in each for each in services.values())
    assert services["vllm"]["shm_size"] == "16gb"
    for name in ("agent", "vllm"):
        # /proc/<pid> ends at the border of this namespace.
        assert services[name]["pid"] == "service:node"
        assert f"endpoint:{WHERE}" in services[name]["volumes"]
        assert services[name]["build"]["target"] == name
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)


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


def test_redis_wants_a_password_and_evicts(services: dict[str, Any]) -> None:
    whole = compose()
    settings = (ROOT / whole["configs"]["valkey"]["file"]).read_text()
    assert "maxmemory-policy allkeys-lru\n" in settings
    assert 'save ""\n' in settings
    (script,) = services["redis"]["command"]
    assert 'requirepass "%s"' in script
    assert "--maxmemory" in script
    (secret,) = whole["secrets"]
    for name in ("redis", "agent"):
        assert services[name]["secrets"] == [secret]
    path = services["agent"]["environment"]["LMCACHE_REDIS_PASSWORD_FILE"]
    assert path == f"/run/secrets/{secret}"
    assert path in script


def test_nothing_listens_beyond_loopback(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for port in service.get("ports", ()):
            assert filled_in(port).startswith("127.0.0.1:"), name


# ------------------------------------------------------------------- metrics


def test_prometheus_and_grafana_come_with_the_profile(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service.get("profiles", []) == (
            ["metrics"] if name in ("prometheus", "grafana") else []
        )
    address, port = parse_address(words_of(services)["--metrics"])
    assert address == "0.0.0.0", "another container asks"
    settings = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    targets = {
        job["job_name"]: target
        for job in settings["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    assert targets == {"lmcache-redis": f"agent:{port}", "vllm": "vllm:8000"}
    assert settings["rule_files"] == ["alerts.yml"]
    assert "./deploy/prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]


def test_grafana_finds_its_source_and_the_dashboard(services: dict[str, Any]) -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["uid"]) == ("prometheus", "prometheus")
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "lmcache-redis.yml").read_text())[
        "providers"
    ]
    mounts = dict(each.split(":")[:2] for each in services["grafana"]["volumes"])
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    dashboard = mounts["./deploy/grafana/dashboard.json"]
    assert Path(dashboard).parent == Path(provider["options"]["path"])

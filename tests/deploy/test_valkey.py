# SPDX-License-Identifier: Apache-2.0
"""The chart's Valkey: its script and its file, with a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import redis

from tests.deploy import chart
from tests.deploy.chart import Document, containers, find, pods
from tests.resp.certificates import Authority
from tests.servers import free_port, server_binaries, speaks_tls

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")
pytestmark = pytest.mark.servers

SECRET = "a password with $ and '"
NAME = "lmcache-redis-valkey"


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
    container = containers(pods(text)["valkey"])["valkey"]
    for name in ("settings", "auth", "run", "tls"):
        (tmp_path / name).mkdir()
    if with_tls:
        authority = Authority(tmp_path / "ca")
        certificate, key = authority.issue("server", NAME)
        for path, name in ((certificate, "tls.crt"), (key, "tls.key"), (authority.ca, "ca.crt")):
            shutil.copy(path, tmp_path / "tls" / name)

    def here(word: str) -> str:
        for mount in container["volumeMounts"]:
            word = word.replace(f"{mount['mountPath']}/", f"{tmp_path}/{mount['name']}/")
        return word.replace("valkey-cli", f"{program} -p {port}").replace("6379", str(port))

    conf = here(find(text, "ConfigMap", "-valkey")["data"]["valkey.conf"])
    if not with_tls:
        conf += f"\nport {port}"
    (tmp_path / "settings" / "valkey.conf").write_text(f"{conf}\nbind 127.0.0.1\ndir {tmp_path}\n")
    (tmp_path / "auth" / "password").write_text(SECRET)
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
            url = find(text, "ConfigMap", "-agent")["data"]["agent.conf"].split("redis-url = ")[1]
            url = url.splitlines()[0].replace(f"{NAME}:6379", f"127.0.0.1:{port}")
            assert url.startswith("rediss://") == with_tls
            if with_tls:
                ca = "/run/secrets/redis/valkey-ca.crt"
                assert ca in url
                url = url.replace(ca, str(authority.ca)) + "&ssl_check_hostname=false"
            with redis.Redis.from_url(url) as stranger, pytest.raises(redis.AuthenticationError):
                stranger.ping()
            with redis.Redis.from_url(url, password=SECRET) as client:
                assert client.config_get("maxmemory-policy")["maxmemory-policy"] == "allkeys-lru"
                assert client.config_get("maxmemory")["maxmemory"] == str(16 << 30)
                with pytest.raises(redis.ResponseError, match="unknown command"):
                    client.flushall()
        finally:
            process.terminate()

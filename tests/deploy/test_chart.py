"""The chart and the plain manifests: that Kubernetes takes them, and that they fit the product."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_redis import __version__
from lmcache_redis.config import AgentConfig, ClientConfig
from lmcache_redis.settings import config_from, parse_size
from tests.deploy import chart
from tests.deploy.chart import Document, containers, documents, find, pods
from tests.deploy.images import IMAGES, USER, WHERE
from tests.servers import free_port

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")
validator = pytest.importorskip("kubernetes_validate")

# The oldest version that has native sidecars switched on, one in between, the newest known.
KUBERNETES = ("1.29", "1.33", "1.37")
RELEASES: dict[str, Document] = {
    "as it comes": {},
    "with vLLM": {"vllm": {"enabled": True}, "serviceMonitor": {"enabled": True}},
    "sidecars": {"mode": "sidecar", "vllm": {"enabled": True, "tokenSecretName": "hf"}},
    "an existing server": {"redis": {"url": "rediss://cache.example:6380", "password": "p"}},
    "sealed": {"redis": {"sealSecretName": "lmcache-redis-seal"}, "vllm": {"enabled": True}},
    "sidecars, an existing server, no GPU": {
        "mode": "sidecar",
        "redis": {"url": "redis://cache.example"},
        "vllm": {"enabled": True, "args": ["--enforce-eager"]},
        "agent": {"gpu": False, "runtimeClassName": "", "nodeSelector": None, "tolerations": []},
        "networkPolicy": {"enabled": False},
    },
}
releases = pytest.mark.parametrize("values", RELEASES.values(), ids=list(RELEASES))


# ------------------------------------------------------------------ validity


def test_helm_finds_nothing_to_lint() -> None:
    import helm_python

    for kube_version in KUBERNETES:
        report = helm_python.lint(chart.CHART, strict=True, kube_version=f"v{kube_version}.0")
        assert not report["errors"]
        assert {each["error"] for each in report["messages"]} <= {"icon is recommended"}


@releases
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object(values: Document, version: str) -> None:
    text = chart.render(values)
    found = documents(text)
    for each in found:
        if each["kind"] == "ServiceMonitor":
            check_service_monitor(each)
        else:
            validator.validate(each, version, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)
    # An unknown field is what this would find.
    found[0]["spec" if "spec" in found[0] else "data"]["clusterIp"] = {"a": 1}
    with pytest.raises(validator.ValidationError):
        validator.validate(found[0], version, strict=True)


def check_service_monitor(found: Document) -> None:
    """Of monitoring.coreos.com/v1: the fields that the chart uses, and no others.

    https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.ServiceMonitor
    """
    assert found["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(found["spec"]) == {"selector", "endpoints"}
    assert set(found["spec"]["selector"]) == {"matchLabels"}
    for endpoint in found["spec"]["endpoints"]:
        assert set(endpoint) == {"port", "interval", "relabelings"}
        assert re.fullmatch(r"\d+s", endpoint["interval"])
        for each in endpoint["relabelings"]:
            assert set(each) - {"sourceLabels"} in ({"targetLabel"}, {"targetLabel", "replacement"})
            assert isinstance(each.get("sourceLabels", []), list)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"mode": "both"}, "mode"),
        ({"mode": "sidecar"}, "set vllm.enabled"),
        ({"agnet": {}}, "agnet"),
        ({"agent": {"image": "untagged"}}, "image"),
        ({"agent": {"settings": {"endpoint": "ipc:///elsewhere"}}}, "endpoint"),
        ({"redis": {"url": "http://cache"}}, "url"),
        ({"redis": {"url": "redis://:secret@cache"}}, "url"),
        ({"valkey": {"maxmemory": "16GiB"}}, "maxmemory"),
    ],
)
def test_wrong_values_are_refused(values: Document, problem: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError, match=problem):
        chart.render(values)


@pytest.mark.parametrize("name", chart.PLAIN)
def test_the_plain_manifests_are_those_of_the_chart(name: str) -> None:
    assert (chart.MANIFESTS / name).read_text() == chart.plain(name), (
        "write them again: python -m tests.deploy.chart"
    )
    assert {path.name for path in chart.MANIFESTS.iterdir()} == set(chart.PLAIN)


# ----------------------------------------------------------- what pods need


@releases
def test_selectors_select(values: Document) -> None:
    """Each Service, budget, policy and monitor names labels that something has."""
    found = documents(chart.render(values))
    labels = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in found
        if "template" in each.get("spec", {})
    ]
    services = [each["metadata"]["labels"] for each in found if each["kind"] == "Service"]
    for each in found:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            wanted = [spec["selector"]]
        elif each["kind"] == "NetworkPolicy":
            peers = [p for rule in spec["ingress"] for p in rule.get("from", ())]
            peers += [p for rule in spec["egress"] for p in rule.get("to", ())]
            wanted = [spec["podSelector"]["matchLabels"]]
            wanted += [p["podSelector"]["matchLabels"] for p in peers if "podSelector" in p]
        elif "selector" in spec:
            wanted = [spec["selector"]["matchLabels"]]
        else:
            continue
        targets = services if each["kind"] == "ServiceMonitor" else labels
        for one in wanted:
            assert any(one.items() <= target.items() for target in targets), each["metadata"]


@releases
def test_ports_and_volumes_that_are_named_are_there(values: Document) -> None:
    text = chart.render(values)
    for pod in pods(text).values():
        volumes = {each["name"] for each in pod["volumes"]}
        for container in containers(pod).values():
            mounts = container.get("volumeMounts", [])
            assert {each["name"] for each in mounts} <= volumes
            paths = [each["mountPath"] for each in mounts]
            # In a volume that is read-only no directory can be made to mount another one there.
            assert not [(a, b) for a in paths for b in paths if b.startswith(f"{a}/")]
            ports = {each["name"] for each in container.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                how = container.get(probe, {})
                for kind in ("httpGet", "tcpSocket"):
                    assert {how[kind]["port"]} <= ports if kind in how else True
    objects = {(each["kind"], each["metadata"]["name"]) for each in documents(text)}
    for pod in pods(text).values():
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in objects


@releases
def test_every_container_is_bounded_and_has_no_rights(values: Document) -> None:
    for name, pod in pods(chart.render(values)).items():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in containers(pod).values():
            assert "memory" in each["resources"]["limits"], each["name"]
            assert {"cpu", "memory"} <= set(each["resources"]["requests"])
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
            assert "privileged" not in context
            if each["name"] != "endpoint":  # which gives the node's directory to the agent's user
                assert "runAsUser" not in context
                assert "livenessProbe" in each
                assert "add" not in context["capabilities"]
        if name != "valkey":
            assert pod["securityContext"]["runAsUser"] == USER


@releases
def test_agent_and_engine_meet(values: Document) -> None:
    """In the namespaces and directories that the agent needs of an engine."""
    text = chart.render(values)
    found = pods(text)
    settings = find(text, "ConfigMap", "-agent")["data"]["agent.conf"]
    is_sidecar = values.get("mode") == "sidecar"
    if is_sidecar:
        pod = found["vllm"]
        assert pod["shareProcessNamespace"] is True
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
        assert not any("hostPath" in each for each in pod["volumes"])
        agent, vllm = containers(pod)["agent"], containers(pod)["vllm"]
        assert agent["restartPolicy"] == "Always", "a native sidecar"
        assert "readinessProbe" not in agent, "vLLM serves without it"
        (of_agent,) = (m["name"] for m in agent["volumeMounts"] if m["mountPath"] == WHERE)
        (of_vllm,) = (m["name"] for m in vllm["volumeMounts"] if m["mountPath"] == WHERE)
        assert of_agent == of_vllm
        (volume,) = (each for each in pod["volumes"] if each["name"] == of_agent)
        assert volume["emptyDir"]["medium"] == "Memory"
        engines = [vllm]
    else:
        pod = found["agent"]
        agent = containers(pod)["agent"]
        engines = [containers(found["vllm"])["vllm"]] if "vllm" in found else []
        for each in (found[name] for name in ("agent", "vllm") if name in found):
            assert each["hostPID"] is True
            assert "hostIPC" not in each
            (volume,) = (v for v in each["volumes"] if v["name"] == "endpoint")
            assert volume["hostPath"]["path"] == WHERE
        assert containers(pod)["endpoint"]["command"] == [
            "install", "-d", "-o", str(USER), "-g", str(USER), "-m", "0700", WHERE,
        ]  # fmt: skip
    (endpoint,) = re.findall(r"^endpoint = (\S+)$", settings, re.MULTILINE)
    assert endpoint.startswith(f"ipc://{WHERE}/")
    for engine in engines:
        # Its workers communicate through /dev/shm. The agent needs none.
        (shm,) = (m["name"] for m in engine["volumeMounts"] if m["mountPath"] == "/dev/shm")
        (volume,) = (v for v in found["vllm"]["volumes"] if v["name"] == shm)
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
        words = engine["args"]
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == "LMCacheRedisConnector"
        client = ClientConfig.from_extra_config(transfer["kv_connector_extra_config"])
        assert client.endpoint == endpoint


@releases
def test_the_agent_takes_its_settings(
    values: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = chart.render(values)
    found = pods(text)
    pod = found.get("agent") or found["vllm"]
    agent = containers(pod)["agent"]
    assert agent["args"][:2] == ["agent", "--config"]
    path = tmp_path / Path(agent["args"][2]).name
    path.write_text(find(text, "ConfigMap", "-agent")["data"][path.name])
    (tmp_path / "password").write_text("secret\n")
    (variable,) = (e for e in agent["env"] if e["name"] == "LMCACHE_REDIS_PASSWORD_FILE")
    mounted = {each["mountPath"]: each["name"] for each in agent["volumeMounts"]}
    assert mounted[str(Path(variable["value"]).parent)] == "auth"
    assert mounted[str(Path(agent["args"][2]).parent)] == "settings"
    monkeypatch.setenv(variable["name"], str(tmp_path / "password"))
    config: AgentConfig = config_from(AgentConfig, {"config": str(path)})
    assert config.redis_password_file == str(tmp_path / "password")
    assert config.redis_url == values.get("redis", {}).get(
        "url", "redis://lmcache-redis-valkey:6379"
    )
    if secret := values.get("redis", {}).get("sealSecretName"):
        assert config.seal_key_file is not None
        assert mounted[str(Path(config.seal_key_file).parent)] == "seal"
        (volume,) = (each for each in pod["volumes"] if each["name"] == "seal")
        # What `read_seal_keys` takes: the group may read, others may not.
        assert volume["secret"] == {"secretName": secret, "defaultMode": 0o440}
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert config.metrics is not None
    port = int(config.metrics.rpartition(":")[2])
    assert {"name": "metrics", "containerPort": port} in agent["ports"]
    service = find(text, "Service", "-metrics")["spec"]["ports"]
    assert [each["port"] for each in service] == [port]
    limits = agent["resources"]["limits"]
    assert config.pool_bytes * 1.2 < parse_size(f"{limits['memory']}B"), "beside the pool"
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_deadline_s + 10


def test_sidecars_need_no_privileged_namespace() -> None:
    """The restricted standard: https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    for pod in pods(chart.render(RELEASES["sidecars"])).values():
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "emptyDir", "secret"}
        for each in containers(pod).values():
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in each["ports"])


def test_numbers_arrive_as_they_were_written(tmp_path: Path) -> None:
    settings = {"ttl-s": 10_000_000, "op-timeout-s": 0.5, "ttl-refresh": True, "slot-bytes": 8192}
    text = chart.render({"agent": {"settings": settings}})
    (tmp_path / "agent.conf").write_text(find(text, "ConfigMap", "-agent")["data"]["agent.conf"])
    config: AgentConfig = config_from(AgentConfig, {"config": str(tmp_path / "agent.conf")})
    assert (config.ttl_s, config.op_timeout_s, config.ttl_refresh) == (10_000_000, 0.5, True)
    assert config.slot_bytes == 8192


def test_only_agents_reach_the_server() -> None:
    text = chart.render()
    policy = find(text, "NetworkPolicy", "-valkey")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "agent"
    assert policy["egress"] == []
    policy = find(text, "NetworkPolicy", "-agent")["spec"]
    assert [each["port"] for rule in policy["ingress"] for each in rule["ports"]] == [9464]


def test_the_images_are_those_that_are_built() -> None:
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert values["agent"]["image"] == f"lmcache-redis-agent:{__version__}"
    assert values["vllm"]["image"] == f"lmcache-redis-vllm:{__version__}"
    assert values["valkey"]["image"] == IMAGES["valkey"]
    described = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert described["appVersion"] == __version__


# ----------------------------------------------------------- a real server


@pytest.mark.servers
def test_valkey_starts_as_the_chart_says(tmp_path: Path) -> None:
    """Its script and its file, with a real server: it wants the password and evicts."""
    if not shutil.which("valkey-server") or not shutil.which("redis-cli"):
        pytest.skip("needs valkey-server and redis-cli")
    text = chart.render()
    container = containers(pods(text)["valkey"])["valkey"]
    secret, port = "a password with $ and '", free_port()
    for name in ("settings", "auth", "run"):
        (tmp_path / name).mkdir()
    settings: str = find(text, "ConfigMap", "-valkey")["data"]["valkey.conf"]
    settings += f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
    (tmp_path / "settings" / "valkey.conf").write_text(settings)
    (tmp_path / "auth" / "password").write_text(secret)

    def here(word: str) -> str:
        for mount in container["volumeMounts"]:
            word = word.replace(f"{mount['mountPath']}/", f"{tmp_path}/{mount['name']}/")
        return word.replace("valkey-cli", f"redis-cli -p {port}")

    words = [here(word) for word in (*container["command"], *container["args"])]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        try:
            probe = [here(word) for word in container["readinessProbe"]["exec"]["command"]]
            deadline_s = time.monotonic() + 30
            while subprocess.run(probe, capture_output=True).returncode:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            assert Path(f"/proc/{process.pid}/comm").read_text().startswith("valkey"), "no shell"
            assert "password" not in Path(f"/proc/{process.pid}/cmdline").read_text()
            client: Any = [shutil.which("redis-cli"), "-p", str(port)]
            said = subprocess.run([*client, "ping"], capture_output=True, text=True).stdout
            assert "NOAUTH" in said
            environment = {**os.environ, "REDISCLI_AUTH": secret}
            for command, answer in (
                (["config", "get", "maxmemory-policy"], "allkeys-lru"),
                (["config", "get", "maxmemory"], str(16 << 30)),
                (["flushall"], "unknown command"),
            ):
                said = subprocess.run(
                    [*client, *command], env=environment, capture_output=True, text=True
                ).stdout
                assert answer in said
        finally:
            process.terminate()

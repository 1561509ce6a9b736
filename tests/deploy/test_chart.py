# SPDX-License-Identifier: Apache-2.0
"""The chart and the plain manifests: that Kubernetes takes them, and that they fit the product."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lmcache_redis import __version__
from lmcache_redis.config import AgentConfig, ClientConfig
from lmcache_redis.settings import parse_size
from lmcache_redis.sources import config_from
from tests.deploy import chart
from tests.deploy.chart import Document, containers, documents, find, pods
from tests.deploy.images import IMAGES, USER, WHERE
from tests.release import chart_version

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")
validator = pytest.importorskip("kubernetes_validate")

# The oldest version that has native sidecars switched on, the newest known.
KUBERNETES = ("1.29", "1.37")
AGENT = "lmcache-redis-agent"
MONITORED = {name: {"enabled": True} for name in ("podMonitor", "prometheusRule", "dashboard")}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
# What every site adds somewhere.
OPEN: Document = {
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "pod": {
        "priorityClassName": "high",
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [SPREAD],
        "serviceAccountName": "cache",
        "schedulerName": "mine",
    },
}
OPEN_CONTAINER: Document = {
    "env": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
}
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "500Gi"}}}
RELEASES: dict[str, Document] = {
    "for your own pods": {"monitoring": MONITORED},
    "sidecars": {"vllm": {"enabled": True, "tokenSecretName": "hf"}, "monitoring": MONITORED},
    "daemonset": {"mode": "daemonset", "monitoring": MONITORED},
    "daemonset with vLLM": {"mode": "daemonset", "vllm": {"enabled": True}},
    "an existing server": {
        "mode": "daemonset",
        "redis": {"url": "rediss://cache.example:6380", "password": "p"},
    },
    "no password, a disk of the node": {
        "mode": "daemonset",
        "redis": {"url": "unix:///run/redis/redis.sock", "secretName": ""},
        "agent": {"diskVolume": {"hostPath": {"path": "/mnt/ssd"}}},
    },
    "sealed, TLS, a volume for each pod": {
        "redis": {"sealSecretName": "lmcache-redis-seal", "sealSecretKey": "mine"},
        "valkey": {"tlsSecretName": "valkey-tls", "podDisruptionBudget": True},
        "agent": {"diskVolume": {"ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}}},
        "vllm": {"enabled": True, "cacheVolume": {"persistentVolumeClaim": {"claimName": "m"}}},
    },
    "all that is open": {
        "mode": "daemonset",
        "imagePullSecrets": [{"name": "registry"}],
        "agent": OPEN | OPEN_CONTAINER,
        "vllm": OPEN | OPEN_CONTAINER | {"enabled": True, "podDisruptionBudget": False},
        "valkey": OPEN,
        "gateway": OPEN | {"enabled": True, "settings": {"allowed-peers": "10.0.0.0/8"}},
        "networkPolicy": {"extraClients": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
        "redis": {"secretKey": "auth-token"},
    },
    "sidecars, no GPU": {
        "redis": {"url": "redis://cache.example"},
        "vllm": {"enabled": True, "args": ["--enforce-eager"]},
        "gpu": {"enabled": False},
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
    found = documents(chart.render(values))
    core = [each for each in found if not each["apiVersion"].startswith("monitoring.coreos.com")]
    for each in core:
        validator.validate(each, version, strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)
    # An unknown field is what this would find.
    core[0]["spec" if "spec" in core[0] else "data"]["clusterIp"] = {"a": 1}
    with pytest.raises(validator.ValidationError):
        validator.validate(core[0], version, strict=True)


@pytest.mark.parametrize("name", chart.PLAIN)
def test_the_plain_manifests_are_those_of_the_chart(name: str) -> None:
    assert (chart.MANIFESTS / name).read_text() == chart.plain(name), (
        "write them again: python -m tests.deploy.chart"
    )
    assert {path.name for path in chart.MANIFESTS.iterdir()} == set(chart.PLAIN)


def test_the_images_are_those_that_are_built() -> None:
    values = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    assert values["agent"]["image"] == f"lmcache-redis-agent:{__version__}"
    assert values["vllm"]["image"] == f"lmcache-redis-vllm:{__version__}"
    assert values["valkey"]["image"] == IMAGES["valkey"]
    described = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert described["appVersion"] == __version__
    assert described["version"] == chart_version(__version__)


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
    # Of your own pods, if the release has none.
    labels.append({"lmcache-redis/client": "lmcache-redis"})
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
        for one in wanted:
            assert any(one.items() <= target.items() for target in labels), each["metadata"]


@releases
def test_ports_and_volumes_that_are_named_are_there(values: Document) -> None:
    text = chart.render(values)
    for pod in pods(text).values():
        volumes = [each["name"] for each in pod["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in containers(pod).values():
            mounts = container.get("volumeMounts", [])
            assert {each["name"] for each in mounts} <= {*volumes}
            paths = [each["mountPath"] for each in mounts]
            # In a volume that is read-only no directory can be made to mount another one there.
            assert not [(a, b) for a in paths for b in paths if b.startswith(f"{a}/")]
            ports = {each["containerPort"] for each in container.get("ports", [])}
            ports |= {each["name"] for each in container.get("ports", [])}
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
            if each["name"] != "directories":  # which gives those of the node to the agent's user
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
    engines = [containers(found["vllm"])["vllm"]] if "vllm" in found else []
    if "agent" not in found and engines:
        pod = found["vllm"]
        assert pod["shareProcessNamespace"] is True
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
        assert not any("hostPath" in each for each in pod["volumes"])
        agent = containers(pod)[AGENT]
        assert agent["restartPolicy"] == "Always", "a native sidecar"
        assert "readinessProbe" not in agent, "vLLM serves without it"
        (of_agent,) = (m["name"] for m in agent["volumeMounts"] if m["mountPath"] == WHERE)
        (of_vllm,) = (m["name"] for m in engines[0]["volumeMounts"] if m["mountPath"] == WHERE)
        assert of_agent == of_vllm
        (volume,) = (each for each in pod["volumes"] if each["name"] == of_agent)
        assert volume["emptyDir"]["medium"] == "Memory"
    elif "agent" in found:
        for each in (found[name] for name in ("agent", "vllm") if name in found):
            assert each["hostPID"] is True
            assert "hostIPC" not in each
            (volume,) = (v for v in each["volumes"] if v["name"] == "lmcache-redis")
            assert volume["hostPath"]["path"] == f"{WHERE}/default/lmcache-redis"
        assert containers(found["agent"])["directories"]["command"][:9] == [
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
    found, redis = pods(text), values.get("redis", {})
    path = tmp_path / "agent.conf"
    path.write_text(find(text, "ConfigMap", "-agent")["data"][path.name])
    pod = found.get("agent") or found.get("vllm")
    if pod is None:
        config: AgentConfig = config_from(AgentConfig, {"config": str(path)})
        return
    agent = containers(pod)[AGENT]
    assert agent["args"] == ["agent", "--config", "/etc/lmcache-redis/agent.conf"]
    mounted = {each["mountPath"]: each["name"] for each in agent["volumeMounts"]}
    assert mounted["/etc/lmcache-redis"] == "lmcache-redis-settings"
    for each in agent["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    config = config_from(AgentConfig, {"config": str(path)})
    volumes = {each["name"]: each for each in pod["volumes"]}
    if redis.get("secretName") == "":
        assert config.redis_password_file is None
        assert "lmcache-redis-secrets" not in volumes
    else:
        key = redis.get("secretKey", "password")
        assert config.redis_password_file == f"/run/secrets/redis/{key}"
        assert mounted["/run/secrets/redis"] == "lmcache-redis-secrets"
        secrets = volumes["lmcache-redis-secrets"]["projected"]
        assert secrets["sources"][0] == {"secret": {"name": "lmcache-redis-auth"}}
    if secret := redis.get("sealSecretName"):
        assert config.seal_key_file == "/run/secrets/redis/seal.keys"
        (source,) = (s["secret"] for s in secrets["sources"] if s["secret"]["name"] == secret)
        assert source["items"] == [{"key": redis["sealSecretKey"], "path": "seal.keys"}]
        # What `read_seal_keys` takes: the group may read, others may not.
        assert secrets["defaultMode"] == 0o440
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert config.redis_url is not None
    own = "rediss://lmcache-redis-valkey:6379?ssl_ca_certs=/run/secrets/redis/valkey-ca.crt"
    if not values.get("valkey", {}).get("tlsSecretName"):
        own = "redis://lmcache-redis-valkey:6379"
    assert config.redis_url == redis.get("url", own)
    if "diskVolume" in values.get("agent", {}):
        assert config.disk_path is not None
        assert mounted[str(Path(config.disk_path).parent)] == "lmcache-redis-disk"
    assert config.metrics is not None
    assert agent["livenessProbe"]["httpGet"]["port"] == int(config.metrics.rpartition(":")[2])
    limits = agent["resources"]["limits"]
    assert config.pool_bytes * 1.2 < parse_size(f"{limits['memory']}B", "memory"), "beside the pool"
    assert pod["terminationGracePeriodSeconds"] > config.shutdown_deadline_s + 10


def test_sidecars_need_no_privileged_namespace() -> None:
    """The restricted standard: https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    for pod in pods(chart.render(RELEASES["sidecars"])).values():
        assert not {"hostPID", "hostIPC", "hostNetwork"} & set(pod)
        for volume in pod["volumes"]:
            assert set(volume) - {"name"} <= {"configMap", "emptyDir", "secret", "projected"}
        for each in containers(pod).values():
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not any("hostPort" in port for port in each["ports"])

# SPDX-License-Identifier: Apache-2.0
"""What values of the chart do: refusals before anything runs, and what reaches the objects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.dashboard import ALERTS, DASHBOARD
from lmcache_redis.agent.main import RELOADABLE
from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.config import AgentConfig
from lmcache_redis.sources import config_from
from tests.deploy import chart
from tests.deploy.chart import Document, containers, documents, find, pods
from tests.deploy.test_chart import AGENT, CLAIM, OPEN, OPEN_CONTAINER, RELEASES

helm_python = pytest.importorskip("helm_python", reason="its wheel is for x86-64")


def settings(**given: Any) -> Document:
    return {"agent": {"settings": {name.replace("_", "-"): each for name, each in given.items()}}}


def with_disk(volume: Document, **more: Any) -> Document:
    return {"agent": {"diskVolume": volume, **more}}


TOO_LITTLE = {
    "agent": {"settings": {"pool-bytes": "64GiB"}, "resources": {"limits": {"memory": "64Gi"}}}
}
EPHEMERAL = {"ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"mode": "both"}, "mode"),
        ({"agnet": {}}, "agnet"),
        ({"agent": {"image": "untagged"}}, "image"),
        ({"agent": {"pod": {"containers": []}}}, "containers"),
        (settings(endpoint="ipc:///elsewhere"), "endpoint"),
        (settings(poolbytes="64GiB"), "'poolbytes' not allowed"),
        (settings(pool_bytes="64 gigabytes"), "pool-bytes"),
        (settings(chunk_size_tokens="256"), "want integer"),
        (settings(log_level="loud"), "log-level"),
        ({"redis": {"url": "http://cache"}}, "url"),
        ({"redis": {"url": "redis://:secret@cache"}}, "url"),
        ({"redis": {"secretName": ""}}, "set redis.secretName, or redis.url"),
        ({"redis": {"url": "redis://a", "secretName": "", "password": "p"}}, "redis.secretName"),
        ({"valkey": {"maxmemory": "16GiB"}}, "maxmemory"),
        ({"valkey": {"resources": {"limits": {"memory": "16Gi"}}}}, "or set 20480Mi"),
        ({"gateway": {"enabled": True}}, "allowed-peers"),
        ({"gateway": {"settings": {"pool-bytes": "1GiB"}}}, "'pool-bytes' not allowed"),
        (settings(shutdown_deadline_s=120), "set at least 135"),
        (settings(shutdown_deadline_s=50) | {"mode": "daemonset"}, "agent.pod.termination"),
        (with_disk({"hostPath": {"path": "/mnt/ssd"}}), "mode daemonset"),
        (with_disk(EPHEMERAL, settings={"disk-size": "501GiB"}), "500Gi.*501GiB"),
        (with_disk({"name": "x"}), "diskVolume"),
        (TOO_LITTLE, r"is 64Gi, and agent\S+ 64GiB.*set 83968Mi"),
        (TOO_LITTLE | {"mode": "daemonset"}, r"is 64Gi, and agent\S+ 64GiB.*set 83968Mi"),
    ],
)
def test_wrong_values_are_refused(values: Document, problem: str) -> None:
    with pytest.raises(helm_python.HelmError, match=problem):
        chart.render(values)


@pytest.mark.parametrize(
    ("pool", "given", "made"),
    [
        ("8GiB", {}, "12288Mi"),
        ("64GiB", {}, "83968Mi"),
        (1 << 30, {}, "3328Mi"),
        ("64GB", {"limits": {"memory": "70Gi"}}, "70Gi"),
    ],
)
def test_memory_follows_the_host_pool(pool: str | int, given: Document, made: str) -> None:
    values = {"mode": "daemonset", "agent": {"settings": {"pool-bytes": pool}, "resources": given}}
    found = containers(pods(chart.render(values))["agent"])[AGENT]["resources"]
    assert found["limits"]["memory"] == found["requests"]["memory"] == made
    assert found["requests"]["cpu"] == "1"


def test_the_schema_has_the_settings_as_declared() -> None:
    assert chart.SCHEMA.read_text() == chart.as_text(chart.schema()) + "\n", (
        "write it again: python -m tests.deploy.chart"
    )


def test_numbers_arrive_as_they_were_written(tmp_path: Path) -> None:
    given = {"ttl-s": 10_000_000, "op-timeout-s": 0.5, "ttl-refresh": True, "slot-bytes": 8192}
    text = chart.render({"agent": {"settings": given}})
    (tmp_path / "agent.conf").write_text(find(text, "ConfigMap", "-agent")["data"]["agent.conf"])
    config: AgentConfig = config_from(AgentConfig, {"config": str(tmp_path / "agent.conf")})
    assert (config.ttl_s, config.op_timeout_s, config.ttl_refresh) == (10_000_000, 0.5, True)
    assert config.slot_bytes == 8192


@pytest.mark.parametrize("mode", ["sidecar", "daemonset"])
def test_settings_that_reload_roll_no_pod(mode: str) -> None:
    """A changed pod template makes all pods anew: vLLM would load its weights again."""

    def template(**given: Any) -> str:
        values = settings(**given) | {"mode": mode, "vllm": {"enabled": True}}
        text = chart.render(values)
        name, kind = ("vllm", "Deployment") if mode == "sidecar" else ("agent", "DaemonSet")
        return json.dumps(find(text, kind, f"-{name}")["spec"]["template"])

    other = {
        "log_level": "debug", "write_queue_bytes": "1GiB", "disk_size": "1GiB",
        "shutdown_deadline_s": 9,
    }  # fmt: skip
    assert set(other) == set(RELOADABLE)
    assert template() == template(**other)
    assert template() != template(ttl_s=60)


def test_two_releases_share_no_directory_of_a_node() -> None:
    texts = [
        chart.render({"mode": "daemonset"}, name, namespace)
        for name, namespace in (("a", "one"), ("b", "one"), ("a", "two"))
    ]
    paths = {
        volume["hostPath"]["path"]
        for text in texts
        for each in documents(text)
        if each["kind"] == "DaemonSet"
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if "hostPath" in volume
    }
    assert len(paths) == 3
    assert all(path.startswith("/run/lmcache-redis/") for path in paths)


def test_one_switch_for_gpus() -> None:
    for mode in ("sidecar", "daemonset"):
        text = chart.render(RELEASES["sidecars, no GPU"] | {"mode": mode})
        assert "nvidia" not in text.lower()
    found = pods(chart.render({"mode": "daemonset", "vllm": {"enabled": True}}))
    for pod in found["agent"], found["vllm"]:
        assert pod["runtimeClassName"] == "nvidia"
        assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert containers(found["vllm"])["vllm"]["resources"]["limits"]["nvidia.com/gpu"] == 1
    without_class = chart.render({"mode": "daemonset", "gpu": {"pod": {"runtimeClassName": None}}})
    assert "runtimeClassName" not in pods(without_class)["agent"]
    assert "nodeSelector" in pods(without_class)["agent"]


def test_what_is_open_reaches_the_pods() -> None:
    text = chart.render(RELEASES["all that is open"])
    made = [each for each in documents(text) if "template" in each.get("spec", {})]
    assert len(made) == 4
    for each in made:
        template = each["spec"]["template"]
        assert OPEN["podLabels"].items() <= template["metadata"]["labels"].items()
        assert OPEN["podAnnotations"].items() <= template["metadata"]["annotations"].items()
        pod = template["spec"]
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        for name, value in OPEN["pod"].items():
            # Valkey's affinity has more, of the chart's own.
            assert pod[name] == value or (name == "affinity" and pod[name].items() >= value.items())
        first = pod["containers"][0]
        if first["name"] in ("vllm", AGENT):
            assert OPEN_CONTAINER["env"][0] in first["env"]
            assert OPEN_CONTAINER["extraVolumes"][0] in pod["volumes"]
            assert OPEN_CONTAINER["extraVolumeMounts"][0] in first["volumeMounts"]
    budgets = {each["metadata"]["name"] for each in documents(text) if "Budget" in each["kind"]}
    assert not budgets


def test_a_full_cluster_can_roll_and_drain() -> None:
    text = chart.render({"vllm": {"enabled": True}})
    strategy = find(text, "Deployment", "-vllm")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    budgets = [each["metadata"]["name"] for each in documents(text) if "Budget" in each["kind"]]
    assert budgets == ["lmcache-redis-vllm"], "one Valkey with a budget would stop each drain"


def test_only_clients_reach_the_server() -> None:
    text = chart.render(RELEASES["all that is open"])
    policy = find(text, "NetworkPolicy", "-valkey")["spec"]
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    (rule,) = policy["ingress"]
    client = {"podSelector": {"matchLabels": {"lmcache-redis/client": "lmcache-redis"}}}
    assert rule["from"] == [client, {"namespaceSelector": {"matchLabels": {"a": "b"}}}]
    assert policy["egress"] == []
    policy = find(text, "NetworkPolicy", "-agent")["spec"]
    assert [each["port"] for rule in policy["ingress"] for each in rule["ports"]] == [9464]
    dns = policy["egress"][1]
    assert {each["port"] for each in dns["ports"]} == {53, 5353}
    assert "to" not in dns, "a DNS cache of the node is no pod"


def test_the_gateway_takes_its_settings(tmp_path: Path) -> None:
    text = chart.render(RELEASES["all that is open"])
    (tmp_path / "gateway.conf").write_text(
        find(text, "ConfigMap", "-gateway")["data"]["gateway.conf"]
    )
    config: GatewayConfig = config_from(GatewayConfig, {"config": str(tmp_path / "gateway.conf")})
    (port,) = find(text, "Service", "-gateway")["spec"]["ports"]
    assert config.listen == f"lm://0.0.0.0:{port['port']}"
    assert config.memory_bytes == 4 << 30
    (container,) = pods(text)["gateway"]["containers"]
    assert container["args"] == ["gateway", "--config", "/etc/lmcache-redis/gateway.conf"]
    assert container["env"][0]["value"] == "/run/secrets/redis/auth-token"


# ---------------------------------------------------------------- monitoring


def test_metrics_are_found_by_number() -> None:
    """https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PodMonitor"""
    text = chart.render(RELEASES["sidecars"])
    for name, number, job in (("", 9464, "lmcache-redis"), ("-vllm", 8000, "vllm")):
        monitor = find(text, "PodMonitor", name)
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints"}
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert set(endpoint) == {"portNumber", "interval", "relabelings"}
        assert endpoint["portNumber"] == number
        labels = {each["targetLabel"]: each for each in endpoint["relabelings"]}
        assert set(labels) == {"node", "job", "cache"}
        assert labels["job"]["replacement"] == job
        (template,) = (e["spec"]["template"] for e in documents(text) if e["kind"] == "Deployment")
        assert (
            monitor["spec"]["selector"]["matchLabels"].items()
            <= template["metadata"]["labels"].items()
        )
        # Prometheus finds a pod's target at a port that a container declares.
        found = containers(template["spec"]).values()
        assert number in [p["containerPort"] for each in found for p in each["ports"]]


def test_the_rules_are_the_alerts_and_lead_to_the_page() -> None:
    """Prometheus takes them: tests/monitoring/test_alerts.py."""
    text = chart.render(RELEASES["sidecars"])
    assert find(text, "PrometheusRule", "")["spec"] == yaml.safe_load(ALERTS.read_text())
    page = "https://docs.example/troubleshooting.html"
    monitored = {"prometheusRule": {"enabled": True, "troubleshooting": page}}
    text = chart.render({"monitoring": monitored})
    for each in find(text, "PrometheusRule", "")["spec"]["groups"][0]["rules"]:
        assert each["annotations"]["runbook_url"].startswith(f"{page}#"), each["alert"]


def test_a_packed_chart_has_what_its_links_point_at(tmp_path: Path) -> None:
    packed = Path(chart.loaded().save(tmp_path))
    shutil.unpack_archive(packed, tmp_path)
    files = tmp_path / "lmcache-redis" / "files"
    assert (files / "alerts.yml").read_text() == ALERTS.read_text()
    assert (files / "dashboard.json").read_text() == DASHBOARD.read_text()

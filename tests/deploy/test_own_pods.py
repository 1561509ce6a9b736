# SPDX-License-Identifier: Apache-2.0
"""Pods that are not the chart's, as docs/guides/kubernetes.md makes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lmcache_redis.config import ClientConfig
from tests.deploy import chart
from tests.deploy.chart import Document, containers, documents, pods

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")
validator = pytest.importorskip("kubernetes_validate")

PAGE = (chart.ROOT / "docs" / "guides" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
VALUES: Document = {"agent": {"settings": {"pool-bytes": "16GiB"}}}


def block(marker: str) -> str:
    (found,) = (each for each in BLOCKS if marker in each)
    return found


def of_your_chart(directory: Path, values: Document) -> list[Document]:
    """What a chart renders that has ours as a dependency, and the example's template."""
    yours = directory / "yours"
    (yours / "charts").mkdir(parents=True)
    (yours / "templates").mkdir()
    chart.loaded().save(yours / "charts")
    ours = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    needs = [
        {"name": chart.NAME, "version": ours["version"], "repository": "file://../lmcache-redis"}
    ]
    described = {"apiVersion": "v2", "name": "yours", "version": "1.0.0", "dependencies": needs}
    (yours / "Chart.yaml").write_text(yaml.safe_dump(described))
    template = (chart.ROOT / "examples" / "kubernetes.yaml").read_text()
    (yours / "templates" / "deployment.yaml").write_text(template)
    return documents(chart.render({chart.NAME: values}, "prod", chart=yours))


def test_a_chart_of_yours_includes_the_sidecar(tmp_path: Path) -> None:
    found = of_your_chart(tmp_path, VALUES)
    for each in found:
        validator.validate(each, "1.33", strict=True)
    (yours,) = (each for each in found if each["metadata"]["name"] == "engine")
    template = yours["spec"]["template"]
    pod = template["spec"]
    ours = pods(chart.render(VALUES | {"vllm": {"enabled": True}}, "prod-lmcache-redis"))
    (expected,) = (each for name, each in ours.items() if name.endswith("vllm"))
    agent, theirs = containers(pod)["lmcache-redis-agent"], containers(expected)
    assert agent == theirs["lmcache-redis-agent"], "as in the chart's own pods"
    assert agent["resources"]["limits"]["memory"] == "22528Mi", "of the values of your chart"
    assert pod["securityContext"] == expected["securityContext"]
    # Volumes, objects and policies of this release.
    objects = {(each["kind"], each["metadata"]["name"]) for each in found}
    mounted = {m["name"] for each in containers(pod).values() for m in each["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    (settings,) = (each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each)
    assert ("ConfigMap", settings) in objects
    (policy,) = (each for each in found if each["kind"] == "NetworkPolicy")
    peer = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert peer.items() <= template["metadata"]["labels"].items()
    words = containers(pod)["vllm"]["args"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    client = ClientConfig.from_extra_config(transfer["kv_connector_extra_config"])
    (config,) = (each for each in found if each["metadata"]["name"] == settings)
    assert f"endpoint = {client.endpoint}\n" in config["data"]["agent.conf"]


def test_the_values_of_the_page_are_taken() -> None:
    values = yaml.safe_load(block("# values.yaml"))
    values |= yaml.safe_load(block("prometheusRule: {"))
    found = documents(chart.render(values))
    assert {"PodMonitor", "PrometheusRule", "Deployment"} <= {each["kind"] for each in found}
    assert "StatefulSet" not in {each["kind"] for each in found}, "the server is managed"

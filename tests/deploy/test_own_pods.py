# SPDX-License-Identifier: Apache-2.0
"""Pods that are not the chart's: of other charts and operators, and as the page makes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_redis.config import ClientConfig
from tests.deploy import chart
from tests.deploy.chart import COMPONENT, Document, containers, documents, find, patches, pods

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")
validator = pytest.importorskip("kubernetes_validate")

STACK = chart.ROOT / "examples" / "production-stack"
KSERVE = chart.ROOT / "examples" / "kserve"
SERVICE = (KSERVE / "service.yaml").read_text()
LABEL = "lmcache-redis/inject"
IMAGE = "registry.example/lmcache-redis-agent"
PAGE = (chart.ROOT / "docs" / "guides" / "kubernetes.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
VALUES: Document = {"agent": {"settings": {"pool-bytes": "16GiB"}}}


# ----------------------------------------------------- sidecars by label, with Kustomize


def of_chart() -> Document:
    """The pod template with a sidecar that the chart makes."""
    template: Document = find(chart.plain("sidecar.yaml"), "Deployment", "-vllm")["spec"][
        "template"
    ]
    return template


def deployment(label: str = "command", **container: Any) -> Document:
    """As production-stack 0.1.12 makes them: all words in `command`, its own volumes."""
    (model,) = yaml.safe_load((STACK / "values.yaml").read_text())["servingEngineSpec"]["modelSpec"]
    labels = {"app": "stack"}
    vllm = {
        "name": "vllm",
        "image": f"{model['repository']}:{model['tag']}",
        "securityContext": {"runAsNonRoot": False},
        "command": ["vllm", "serve", model["modelURL"]],
        "volumeMounts": [{"name": "storage", "mountPath": "/data"}],
    } | container
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "stack", "labels": {LABEL: label}},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [vllm], "volumes": [{"name": "storage", "emptyDir": {}}]},
            },
        },
    }


def build(directory: Path, made: str, kustomization: Path = STACK) -> tuple[int, str]:
    """kustomize's status and output for one object, with the component and images of an example."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    shutil.copytree(COMPONENT, directory / "sidecar")
    (directory / "made.yaml").write_text(made)
    found = yaml.safe_load((kustomization / "kustomization.yaml").read_text())
    assert [(kustomization / each).resolve() for each in found["components"]] == [COMPONENT]
    of_test = {"resources": ["made.yaml"], "components": ["sidecar"], "images": found["images"]}
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(of_test))
    done = subprocess.run(
        [kubectl, "kustomize", directory], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def expected_agent() -> Document:
    agent = containers(of_chart()["spec"])["lmcache-redis-agent"]
    return agent | {"image": agent["image"].replace("lmcache-redis-agent", IMAGE)}


def test_the_patches_are_those_of_the_chart() -> None:
    """`python -m tests.deploy.chart` writes them."""
    for name in patches():
        assert (COMPONENT / name).read_text() == chart.patch_text(name)
    named = yaml.safe_load((COMPONENT / "kustomization.yaml").read_text())["patches"]
    assert {each["path"] for each in named if "path" in each} == {*patches()}


@pytest.mark.servers
@pytest.mark.parametrize("words", ["command", "args"])
def test_a_deployment_with_the_label_gets_a_sidecar(tmp_path: Path, words: str) -> None:
    given = deployment(words, **{words: ["serve", "Qwen/Qwen3-8B"]})
    status, text = build(tmp_path, yaml.safe_dump(given))
    assert status == 0, text
    (found,) = documents(text)
    validator.validate(found, "1.33", strict=True)
    template, expected = found["spec"]["template"], of_chart()
    (vllm,) = template["spec"]["containers"]
    (agent,) = template["spec"]["initContainers"]
    assert agent == expected_agent()
    engine = containers(expected["spec"])["vllm"]
    assert vllm[words] == ["serve", "Qwen/Qwen3-8B", *engine["args"][1:]]
    json.loads(vllm[words][-1])
    assert vllm["securityContext"].items() > engine["securityContext"].items()
    assert [each["name"] for each in vllm["volumeMounts"]] == ["lmcache-redis", "storage"]
    assert template["metadata"]["labels"]["lmcache-redis/client"] == "lmcache-redis"
    for name in ("securityContext", "shareProcessNamespace", "terminationGracePeriodSeconds"):
        assert template["spec"][name] == expected["spec"][name]
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    ours = {e["name"]: e for e in expected["spec"]["volumes"] if "lmcache" in e["name"]}
    assert volumes == ours | {"storage": {"name": "storage", "emptyDir": {}}}


@pytest.mark.servers
def test_what_has_no_label_stays(tmp_path: Path) -> None:
    given = deployment()
    del given["metadata"]["labels"]
    assert documents(build(tmp_path, yaml.safe_dump(given))[1]) == [given]


@pytest.mark.servers
@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (yaml.safe_dump(deployment("true")), "lmcache-redis~1inject"),
        (yaml.safe_dump(deployment(name="engine")), "containers/0/name"),
        (yaml.safe_dump(deployment("args")), "args"),
        (SERVICE.replace("    model:", "    volumes: [{name: mine}]\n    model:"), "volumes"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, made: str, problem: str) -> None:
    """Never a pod that starts, and has no cache."""
    status, text = build(tmp_path, made)
    assert status != 0, text
    assert problem in text


@pytest.mark.servers
def test_a_service_of_kserve_gets_a_sidecar(tmp_path: Path) -> None:
    status, text = build(tmp_path, SERVICE, KSERVE)
    assert status == 0, text
    (found,) = documents(text)
    predictor, expected = found["spec"]["predictor"], of_chart()
    assert found["metadata"]["labels"]["lmcache-redis/client"] == "lmcache-redis"
    assert predictor["initContainers"] == [expected_agent()]
    given = yaml.safe_load(SERVICE)["spec"]["predictor"]["model"]
    words = containers(expected["spec"])["vllm"]["args"][1:]
    assert predictor["model"]["args"] == [*given["args"], *words]
    assert predictor["model"].items() > {"image": given["image"]}.items()
    # The pod that KServe makes of it is valid: its model is a container.
    model = {n: v for n, v in predictor["model"].items() if n != "modelFormat"}
    spec = {n: v for n, v in predictor.items() if n != "model"}
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {**spec, "containers": [{"name": "kserve-container", **model}]},
    }  # fmt: skip
    validator.validate(pod, "1.33", strict=True)


# ------------------------------------------------------------- as the page makes them


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

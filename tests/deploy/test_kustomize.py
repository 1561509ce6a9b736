# SPDX-License-Identifier: Apache-2.0
"""Sidecars by label: the Kustomize component, over pods that other charts and operators make."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import chart
from tests.deploy.chart import COMPONENT, Document, containers, documents, find, patches

pytest.importorskip("helm_python", reason="needs helm-python-sdk, which has a wheel for x86-64")
validator = pytest.importorskip("kubernetes_validate")

STACK = chart.ROOT / "examples" / "production-stack"
KSERVE = chart.ROOT / "examples" / "kserve"
SERVICE = (KSERVE / "service.yaml").read_text()
LABEL = "lmcache-redis/inject"
IMAGE = "registry.example/lmcache-redis-agent"


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

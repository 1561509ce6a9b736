# SPDX-License-Identifier: Apache-2.0
"""The Helm chart, rendered by Helm's own library, and what is made from it and from the settings.

python -m tests.deploy.chart      writes deploy/manifests, the patches of deploy/kustomize, and the
                                  settings into the chart's schema
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lmcache_redis.compat.gateway.config import GatewayConfig
from lmcache_redis.config import AgentConfig
from lmcache_redis.settings import json_schema

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "lmcache-redis"
SCHEMA = CHART / "values.schema.json"
MANIFESTS = ROOT / "deploy" / "manifests"
COMPONENT = ROOT / "deploy" / "kustomize" / "sidecar"
NAME = "lmcache-redis"

Document = dict[str, Any]

# What each file of plain manifests is for, and the values that it is made with.
PLAIN: Mapping[str, tuple[str, Document]] = {
    "daemonset.yaml": (
        "Valkey, an agent on each GPU node, and an example of vLLM. Its namespace must admit\n"
        "# privileged pods: agents and engines share the PID namespace of their node.",
        {"mode": "daemonset", "vllm": {"enabled": True}},
    ),
    "sidecar.yaml": (
        "Valkey, and vLLM with an agent in each pod.",
        {"vllm": {"enabled": True}},
    ),
}
_BY_HELM = "app.kubernetes.io/managed-by:"
_HEAD = """\
# {what}
#
# Made from deploy/helm/lmcache-redis by `python -m tests.deploy.chart`.
# It needs a Secret with the password of Redis:
#   openssl rand -hex 32 >password
#   kubectl create secret generic lmcache-redis-auth --from-file=password
"""


# Settings that the chart decides: by `redis`, by the volumes of a pod, by its ports.
_DECIDED = {
    *("endpoint", "listen", "metrics"),
    *("redis-url", "seal-key-file", "disk-path", "embedded-memory-bytes"),
}


def schema() -> Document:
    """The schema of the values, with the settings as they are declared now."""
    found: Document = json.loads(SCHEMA.read_text())
    for name, config in (("agentSettings", AgentConfig), ("gatewaySettings", GatewayConfig)):
        made = json_schema(config)
        known = {n: each for n, each in made["properties"].items() if n not in _DECIDED}
        found["definitions"][name] = {
            "type": "object", "additionalProperties": False, "properties": known,
        }  # fmt: skip
    return found


def as_text(value: Any, indent: int = 0) -> str:
    """JSON whose parts are on one line where they have room."""
    text = json.dumps(value)
    if indent + len(text) <= 110 or not isinstance(value, dict):
        return text
    inner = " " * (indent + 2)
    parts = [f"{inner}{json.dumps(n)}: {as_text(each, indent + 2)}" for n, each in value.items()]
    return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"


@functools.cache
def loaded(chart: Path = CHART) -> Any:
    """The chart, for Helm's library."""
    import helm_python

    return helm_python.Chart.load(chart)


def render(
    values: Document | None = None,
    name: str = NAME,
    namespace: str = "default",
    chart: Path = CHART,
) -> str:
    """All objects of a release, as `helm template` prints them. Raises HelmError."""
    made = loaded(chart)
    made.validate_schema(made.merge_values(values or {}))
    files = made.render(values or {}, name=name, namespace=namespace)
    texts = [text.strip() for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return "".join(f"---\n{text.removeprefix('---').strip()}\n" for text in texts if text)


@functools.cache
def _rendered(name: str) -> str:
    what, values = PLAIN[name]
    lines = render(values).splitlines(keepends=True)
    return _HEAD.format(what=what) + "".join(line for line in lines if _BY_HELM not in line)


def plain(name: str) -> str:
    """The text of a file of plain manifests."""
    return _rendered(name)


def documents(text: str) -> list[Document]:
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def find(text: str, kind: str, name: str) -> Document:
    """The object of a kind; name: without that of the release."""
    (found,) = (
        each
        for each in documents(text)
        if each["kind"] == kind and each["metadata"]["name"] == f"{NAME}{name}"
    )
    return found


def pods(text: str) -> dict[str, Document]:
    """The specs of all pods, by the name of what makes them."""
    return {
        each["metadata"]["name"].removeprefix(f"{NAME}-"): each["spec"]["template"]["spec"]
        for each in documents(text)
        if each["kind"] in ("DaemonSet", "Deployment", "StatefulSet")
    }


def containers(pod: Document) -> dict[str, Document]:
    return {each["name"]: each for each in [*pod.get("initContainers", []), *pod["containers"]]}


def patches() -> dict[str, Any]:
    """The patches of the Kustomize component by their files: a sidecar pod of the chart's."""
    template = find(plain("sidecar.yaml"), "Deployment", "-vllm")["spec"]["template"]
    pod = template["spec"]
    (vllm,) = pod["containers"]
    labels = {n: v for n, v in template["metadata"]["labels"].items() if n.startswith(NAME)}
    start = vllm["args"].index("--kv-transfer-config")
    words = vllm["args"][start : start + 2]
    ours = {
        "shareProcessNamespace": pod["shareProcessNamespace"],
        "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "securityContext": pod["securityContext"],
        "initContainers": pod["initContainers"],
        "volumes": [each for each in pod["volumes"] if each["name"].startswith(NAME)],
    }
    of_engine = {
        "securityContext": vllm["securityContext"],
        "volumeMounts": [each for each in vllm["volumeMounts"] if each["name"].startswith(NAME)],
    }

    def appended(path: str) -> list[Document]:
        return [{"op": "add", "path": f"{path}/-", "value": word} for word in words]

    def added(path: str, values: Document) -> list[Document]:
        """Refused where such a thing is already: `add` would replace it."""
        each = [{"path": f"{path}/{name}", "value": value} for name, value in values.items()]
        absent = [{"op": "test", "path": patch["path"], "value": None} for patch in each]
        return [*absent, *({"op": "add", **patch} for patch in each)]

    container = "/spec/template/spec/containers/0"
    # Strategic merges find containers by name: another one would become a second container.
    named = {"op": "test", "path": f"{container}/name", "value": "vllm"}
    merged = {**ours, "containers": [{"name": "vllm", **of_engine}]}
    return {
        "pod.yaml": {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "any"},
            "spec": {"template": {"metadata": {"labels": labels}, "spec": merged}},
        },
        "args.yaml": [named, *appended(f"{container}/args")],
        "command.yaml": [named, *appended(f"{container}/command")],
        "kserve.yaml": [
            # KServe gives its pods the labels of the service.
            *(
                {"op": "add", "path": f"/metadata/labels/{n.replace('/', '~1')}", "value": v}
                for n, v in labels.items()
            ),
            *added("/spec/predictor", ours),
            *added("/spec/predictor/model", of_engine),
            *appended("/spec/predictor/model/args"),
        ],
    }


def patch_text(name: str) -> str:
    made = "# Made from the chart by `python -m tests.deploy.chart`.\n"
    return made + yaml.safe_dump(patches()[name], sort_keys=False, width=100)


if __name__ == "__main__":
    SCHEMA.write_text(as_text(schema()) + "\n")
    MANIFESTS.mkdir(exist_ok=True)
    for name in PLAIN:
        (MANIFESTS / name).write_text(plain(name))
    for name in patches():
        (COMPONENT / name).write_text(patch_text(name))

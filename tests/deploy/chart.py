"""The Helm chart, rendered by Helm's own library; and the plain manifests that are made from it.

python -m tests.deploy.chart      writes deploy/manifests
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "lmcache-redis"
MANIFESTS = ROOT / "deploy" / "manifests"
NAME = "lmcache-redis"

Document = dict[str, Any]

# What each file of plain manifests is for, and the values that it is made with.
PLAIN: Mapping[str, tuple[str, Document]] = {
    "daemonset.yaml": (
        "Valkey, an agent on each GPU node, and an example of vLLM. Its namespace must admit\n"
        "# privileged pods: agents and engines share the PID namespace of their node.",
        {"vllm": {"enabled": True}},
    ),
    "sidecar.yaml": (
        "Valkey, and vLLM with an agent in each pod.",
        {"mode": "sidecar", "vllm": {"enabled": True}},
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


def render(values: Document | None = None, name: str = NAME) -> str:
    """All objects of a release, as `helm template` prints them. Raises HelmError."""
    import helm_python

    chart = helm_python.Chart.load(CHART)
    chart.validate_schema(chart.merge_values(values or {}))
    files = chart.render(values or {}, name=name, namespace="default")
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
    return [each for each in yaml.safe_load_all(text) if each]


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


if __name__ == "__main__":
    MANIFESTS.mkdir(exist_ok=True)
    for name in PLAIN:
        (MANIFESTS / name).write_text(plain(name))

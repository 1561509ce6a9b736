"""Imports point one way, and what must never be imported is not. Read from the source alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "lmcache_redis"
ROOT = Path(__file__).parent.parent / PACKAGE

# From the top down. A module imports from its own layer and from those below.
LAYERS = (
    {"cli", "demo", "bench"},
    {"integrations"},
    {"client"},
    {"agent", "admin", "gateway"},
    {"messages", "transport", "codec"},
    {"storage"},
    {"device", "hostpool", "resp"},
    {"stripe"},
    {"keys", "hashing", "protocol", "lm_wire"},
    {"dtypes", "formats", "config", "embedded", "errors", "metrics", "version"}
    | {"madvise", "native", "numa"},
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

# Within what the layers would allow, these never meet.
STRANGERS = {
    "device": {"hostpool", "resp"},
    "hostpool": {"device", "resp"},
    "resp": {"device", "hostpool"},
    # Tiers are used by whoever has chunks: they know no engine and no agent.
    "storage": {"device"},
    "gateway": {"agent", "admin", "device", "messages", "transport", "codec"},
    # Tools that look at servers from outside: no agent, no engine, no memory.
    "admin": {"agent", "device", "hostpool", "messages", "transport", "codec"},
    # An engine's process has no pool and no Redis: it talks to the agent and exports memory.
    "client": {"agent", "hostpool", "resp"},
    "integrations": {"agent", "hostpool", "resp", "messages", "transport", "codec"},
}

BANNED = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}


@dataclass(frozen=True)
class Import:
    """One imported module. at_runtime: not under TYPE_CHECKING. eager: when the file is."""

    module: str
    line: int
    at_runtime: bool
    eager: bool


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports_of(path: Path) -> list[Import]:
    return list(_walk(ast.parse(path.read_text(), str(path)), at_runtime=True, eager=True))


def _walk(node: ast.AST, at_runtime: bool, eager: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, at_runtime, eager)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        assert node.module is not None
        yield Import(node.module, node.lineno, at_runtime, eager)
        # `from package import name`: the name may be a module.
        for alias in node.names:
            yield Import(f"{node.module}.{alias.name}", node.lineno, at_runtime, eager)
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            yield from _walk(child, at_runtime=False, eager=False)
        for child in node.orelse:
            yield from _walk(child, at_runtime, eager)
    else:
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, at_runtime, eager and not inside)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def component(path: Path) -> str:
    """`agent` for agent/core.py, `keys` for keys.py, and nothing for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def components_of(path: Path) -> set[tuple[str, int]]:
    """Our components that a file imports, types included, with line numbers."""
    found = set()
    for imported in imports_of(path):
        first, _, rest = imported.module.partition(".")
        name = rest.split(".")[0]
        if first == PACKAGE and name in LEVELS:
            found.add((name, imported.line))
    return found


def is_under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_module = pytest.mark.parametrize("path", modules(), ids=ids)


def test_every_component_has_a_layer() -> None:
    assert {component(path) for path in modules()} - {""} == set(LEVELS)


@every_module
def test_imports_point_downward(path: Path) -> None:
    name = component(path)
    level = LEVELS.get(name, len(LAYERS) - 1)
    upward = [
        f"{ids(path)}:{line} imports {other}"
        for other, line in components_of(path)
        if LEVELS[other] < level
    ]
    assert not upward


@every_module
def test_strangers_do_not_meet(path: Path) -> None:
    never = STRANGERS.get(component(path), set())
    met = [f"{ids(path)}:{line} imports {n}" for n, line in components_of(path) if n in never]
    assert not met


def test_components_do_not_import_each_other_in_a_circle() -> None:
    """Within a layer too. The tools at the top may borrow from one another."""
    edges = {name: set[str]() for name in set(LEVELS) - LAYERS[0]}
    for path in modules():
        if (name := component(path)) in edges:
            edges[name] |= {other for other, _ in components_of(path)} - {name}
    while free := [name for name, below in edges.items() if not below]:
        for name in free:
            del edges[name]
        for below in edges.values():
            below.difference_update(free)
    assert not edges, "these components import one another in a circle"


@every_module
def test_only_integrations_import_vllm(path: Path) -> None:
    found = [i for i in imports_of(path) if is_under(i.module, "vllm") and i.at_runtime]
    if component(path) == "integrations":
        return
    if ids(path) == "bench/engine.py":
        # Its lower half runs in an engine's process.
        found = [imported for imported in found if imported.eager]
    assert not found


@every_module
def test_torch_is_imported_late(path: Path) -> None:
    """The agent starts without torch: a second of start and 200 MB."""
    name = ids(path)
    if name.startswith(("device/cuda", "integrations/", "storage/tensors")):
        return
    heavy = ("torch", "transformers", "safetensors", "triton", "matplotlib")
    assert not [i for i in imports_of(path) if i.eager and is_under(i.module, *heavy)]


@every_module
def test_nothing_is_pickled(path: Path) -> None:
    assert not [i for i in imports_of(path) if is_under(i.module, *BANNED)]
    # torch.load, numpy.load(allow_pickle=True) and multiprocessing's connections unpickle.
    assert not [i for i in imports_of(path) if is_under(i.module, "multiprocessing")]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("np", "load")}, (
                node.lineno
            )
        if isinstance(node, ast.keyword):
            assert node.arg != "allow_pickle", node.lineno

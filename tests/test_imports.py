# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, and what must never be imported is not. Read from the source alone."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "lmcache_redis"
ROOT = Path(__file__).parent.parent / PACKAGE

# From the top down. A module imports from its own layer and from those below.
LAYERS = (
    {"__main__", "cli"},
    # A leaf: nothing below the commands needs LMCache's interfaces.
    {"compat"},
    {"kvstore"},
    {"objects"},
    {"integrations"},
    {"client"},
    {"agent", "admin", "regions"},
    {"messages", "transport", "plan"},
    {"cache"},
    {"device", "resp", "testing"},
    {"tiers", "seal"},
    {"chunks"},
    {
        "config",
        "errors",
        "metrics",
        "native",
        "processes",
        "settings",
        "sources",
        "systemd",
        "tier_kinds",
        "units",
    }
    | {"tenants"},
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}

MANY_ATTRIBUTES = 12
MOST_LETTERS = 60

# Within what the layers would allow, these never meet.
STRANGERS = {
    # They meet in the agent, through memoryviews of slots.
    "device": {"resp", "tiers"},
    "cache": {"device", "resp"},
    # What authors of tiers test with knows no other tier.
    "testing": {"device", "resp", "seal"},
    "resp": {"device"},
    # Tools that look at servers from outside: no agent, no engine, no memory.
    "admin": {"agent", "device", "cache", "messages", "transport"},
    # An engine's process has no pool and no Redis: it talks to the agent and exports memory.
    "client": {"agent", "cache", "resp", "tiers"},
    "integrations": {"agent", "cache", "resp", "tiers", "messages", "transport"},
}

# Doctor asks NVIDIA's driver what it can do.
MEETINGS = {("lmcache_redis.admin.node", "lmcache_redis.device.driver")}

UNPICKLING = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"} | {
    "multiprocessing"
}
# Asks for the parent's id, and opens no connection to it.
HARMLESS = {"multiprocessing.parent_process"}
HEAVY = ("torch", "transformers", "safetensors", "triton", "matplotlib")


@dataclass(frozen=True)
class Import:
    """One imported module. where: file and line. eager: imported when the file is.

    at_runtime: not under TYPE_CHECKING.
    """

    module: str
    where: str
    at_runtime: bool
    eager: bool

    def __str__(self) -> str:
        return f"{self.where} imports {self.module}"

    def is_of(self, *packages: str) -> bool:
        return any(f"{self.module}.".startswith(f"{package}.") for package in packages)


@dataclass(frozen=True)
class Module:
    """One file. path: relative to the package."""

    path: str
    tree: ast.Module

    @property
    def name(self) -> str:
        dotted = f"{PACKAGE}/{self.path}".removesuffix(".py").removesuffix("/__init__")
        return dotted.replace("/", ".")

    @property
    def component(self) -> str:
        """`agent` for agent/main.py, `keys` for keys.py, and nothing for the package itself."""
        return component_of(self.name)

    @functools.cached_property
    def imports(self) -> list[Import]:
        return list(self._walk(self.tree, at_runtime=True, eager=True))

    def _walk(self, node: ast.AST, at_runtime: bool, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            # The name may be a module, or lie in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for child in node.body:
                    yield from self._walk(child, at_runtime=False, eager=False)
                children: list[ast.AST] = [*node.orelse]
            else:
                children = [*ast.iter_child_nodes(node)]
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in children:
                yield from self._walk(child, at_runtime, eager and not inside)
            return
        for name in names:
            yield Import(name, f"{self.path}:{node.lineno}", at_runtime, eager)


def component_of(module: str) -> str:
    first, _, rest = module.partition(".")
    return rest.split(".")[0] if first == PACKAGE else ""


@functools.cache
def modules() -> list[Module]:
    return [
        Module(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(), str(path)))
        for path in sorted(ROOT.rglob("*.py"))
    ]


def test_every_component_has_a_layer() -> None:
    assert {module.component for module in modules()} - {""} == set(LEVELS)


def test_imports_point_downward() -> None:
    assert not [
        str(each)
        for module in modules()
        for each in module.imports
        # The package itself names what programs use, and imports it when it is asked for.
        if (module.component or each.eager)
        and (other := component_of(each.module)) in LEVELS
        and LEVELS[other] < LEVELS.get(module.component, len(LAYERS) - 1)
    ]


def test_strangers_do_not_meet() -> None:
    assert not [
        str(each)
        for module in modules()
        for each in module.imports
        if component_of(each.module) in STRANGERS.get(module.component, ())
        and (module.name, each.module) not in MEETINGS
    ]


def test_no_module_imports_itself_in_a_circle() -> None:
    """Late imports and those for types included."""
    names = {module.name for module in modules()}

    def imported(name: str) -> str:
        """The module of a name: itself, or what it is taken from."""
        return name if name in names else name.rpartition(".")[0]

    graph = {
        module.name: {imported(each.module) for each in module.imports} - {module.name}
        for module in modules()
    }
    graphlib.TopologicalSorter(graph).prepare()  # names the circle


def test_components_do_not_import_each_other_in_a_circle() -> None:
    """Within a layer too. The tools at the top may borrow from one another."""
    graph: dict[str, set[str]] = {name: set() for name in set(LEVELS) - LAYERS[0]}
    for module in modules():
        if module.component in graph:
            others = {component_of(each.module) for each in module.imports}
            graph[module.component] |= (others & set(LEVELS)) - {module.component}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_package_imports_nothing_that_is_not_in_the_wheel() -> None:
    assert not [
        str(each)
        for m in modules()
        for each in m.imports
        if each.is_of("benchmarks", "demo", "testkit", "tests")
    ]


def test_only_integrations_import_vllm() -> None:
    assert not [
        str(each)
        for module in modules()
        for each in module.imports
        if module.component != "integrations" and each.is_of("vllm") and each.at_runtime
    ]


def test_only_the_command_of_the_gateway_imports_compat() -> None:
    """LMCache's interfaces are a leaf: a reader of the core never meets them."""
    importers = {
        module.path
        for module in modules()
        for each in module.imports
        if component_of(each.module) == "compat" and module.component != "compat"
    }
    assert importers == {"cli/gateway.py"}


def test_what_an_agent_says_moves_nothing() -> None:
    """The rooms that move KV import of the reports only who starts them."""
    rooms = {
        module.path
        for module in modules()
        for each in module.imports
        if each.is_of("lmcache_redis.agent.reports")
        and module.component == "agent"
        and not module.path.startswith("agent/reports/")
    }
    assert rooms == {"agent/main.py", "agent/service.py", "agent/handlers.py"}


def test_torch_is_imported_late() -> None:
    """The agent starts without torch: a second of start and 200 MB."""
    with_torch = ("compat/", "device/kernels/source", "integrations/")
    assert not [
        str(each)
        for module in modules()
        if not module.path.startswith(with_torch)
        for each in module.imports
        if each.eager and each.is_of(*HEAVY)
    ]


def test_nothing_is_pickled() -> None:
    """Nor read by what unpickles: torch.load, numpy.load, connections of multiprocessing."""
    assert not [
        str(i)
        for m in modules()
        for i in m.imports
        if i.is_of(*UNPICKLING) and i.module not in HARMLESS
    ]
    assert not [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "np.load"))
        or (isinstance(node, ast.keyword) and node.arg == "allow_pickle")
    ]


def _attributes(node: ast.ClassDef) -> set[str]:
    """What its fields and its methods' assignments name."""
    found = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    return found | {
        each.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }


def _classes_of_the_core() -> list[tuple[Module, ast.ClassDef]]:
    """`compat` has LMCache's names."""
    return [
        (module, node)
        for module in modules()
        if module.component != "compat"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    ]


def test_one_name_is_one_class() -> None:
    """`RemoteMetadata` is LMCache's too, with the types of torch."""
    places: dict[str, list[str]] = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name != "RemoteMetadata":
                places.setdefault(node.name.lstrip("_"), []).append(module.path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


def test_few_classes_hold_many_things() -> None:
    """A warning, for whoever added the thirteenth: records of settings and rows may have more."""
    records = {"AgentConfig", "RedisOptions", "DoorSettings", "Facts", "Setting", "TierSettings"}
    records |= {"PlanRow", "Entry"}
    found = {
        f"{module.path}: {node.name}": len(_attributes(node))
        for module, node in _classes_of_the_core()
        if node.name not in records
    }
    for name, number in found.items():
        if number > MANY_ATTRIBUTES:
            warnings.warn(pytest.PytestWarning(f"{name} has {number} attributes"), stacklevel=1)
    assert max(found.values()) <= 2 * MANY_ATTRIBUTES


def test_names_of_tests_fit_a_line() -> None:
    names = [
        name
        for path in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    assert "test_names_of_tests_fit_a_line" in names
    assert not [name for name in names if len(name) > MOST_LETTERS]

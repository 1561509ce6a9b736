# SPDX-License-Identifier: Apache-2.0
"""What is needed of vLLM's insides is in one table, and vLLM's log names what is missing."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

import vllm.v1
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm import making, needs
from lmcache_redis.integrations.vllm.needed import OFF, Needed, VllmOwner
from tests.integrations.test_guard import MadeScheduler, bind, config, connector_of, manager_of

pytestmark = pytest.mark.unit

INTEGRATIONS = Path(needs.__file__).parents[1]
# They are what rows are read and wrapped with.
TOOLS = {"needed.py", "needs.py", "wrapping.py"}
# Of Python, torch, prometheus and transformers, and our own.
NOT_OF_VLLM = {
    "__closure__", "__dict__", "_collector_to_names", "_commit_hash", "_name", "_parameters",
    "rope_parameters", "rope_scaling", "to_dict", "tolist", "value",
}  # fmt: skip
STACK = {"currentframe", "_getframe", "f_back", "f_code", "f_locals"}


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(needs, "_told", set())
    return caplog


def private_touches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that read something of others by its name in text, or that has an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            if isinstance(name := node.args[1], ast.Constant):
                yield node.lineno, str(name.value)
        elif isinstance(node, ast.Attribute):
            is_private = node.attr[0] == "_" and not node.attr.endswith("__")
            # Those of the base class are named so for subclasses.
            is_own = ast.unparse(node.value) in ("self", "cls")
            if node.attr in STACK or (is_private and not is_own):
                yield node.lineno, node.attr


def test_what_is_private_is_read_through_the_table() -> None:
    found = []
    for path in [*INTEGRATIONS.glob("vllm/**/*.py"), *INTEGRATIONS.glob("vllm_tier/*.py")]:
        if path.name not in TOOLS:
            for line, name in private_touches(ast.parse(path.read_text())):
                if name not in NOT_OF_VLLM:
                    found.append(f"{path.relative_to(INTEGRATIONS)}:{line} {name}")
    assert not found, f"not in vllm/needs.py: {found}"


def test_the_scan_finds_what_it_should() -> None:
    text = "getattr(a, 'b', 0); hasattr(c, 'd'); e._f; self._g; sys._getframe(); getattr(h, i)"
    names = {name for _, name in private_touches(ast.parse(text))}
    assert names == {"b", "d", "_f", "_getframe"}


def test_every_row_says_what_happens() -> None:
    for each in needs.ALL:
        assert each.purpose
        assert each.without
    names = [(each.owner, each.name) for each in needs.ALL]
    assert len(names) == len({*names})


def test_every_row_is_used() -> None:
    text = "".join(path.read_text() for path in INTEGRATIONS.glob("vllm*/**/*.py"))
    rows = [name for name, each in vars(needs).items() if isinstance(each, Needed)]
    assert not [name for name in rows if not re.search(rf"needs\.{name}\b|[( ]{name}[,)]", text)]


def test_the_installed_vllm_lacks_nothing(log: Any) -> None:
    lacks = [f"{each} ({each.purpose}): {each.without}" for each in needs.missing(loads=True)]
    assert not lacks
    needs.require()
    assert not log.records


def test_one_line_names_what_is_missing(log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineCore, "_reset_caches")
    monkeypatch.delattr(EngineCore, "set_weight_version")
    needs.require()
    needs.require()
    (line,) = [each.getMessage() for each in log.records]
    assert "lacks EngineCore._reset_caches (a pause begins a new epoch); EngineCore.set_w" in line


def test_a_vllm_that_has_moved_its_scheduler_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("vllm.v1.core.sched.scheduler.Scheduler")
    making.watch_schedulers()
    assert connector_of(config(tmp_path))._adapter is None
    assert "the cache stays off: this vLLM has no Scheduler.__init__" in caplog.text


def test_an_engine_whose_workers_were_not_seen_is_not_asked(tmp_path: Path) -> None:
    """Without the plugin: requests with adapters are not cached, the others are."""
    settings = config(tmp_path)
    settings.lora_config = object()
    made = connector_of(settings)
    bind(made, manager_of(64))
    assert made._scheduler is not None
    made.adapters_read()
    assert made._scheduler is not None
    made.shutdown()


def test_without_what_is_necessary_the_cache_stays_off(
    log: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(EngineCore, "collective_rpc")
    made = connector_of(config(tmp_path))
    assert made._adapter is None
    assert "the cache stays off: this vLLM has no EngineCore.collective_rpc" in log.text
    with pytest.raises(Unsupported):
        needs.require()


@dataclass
class Fields:
    field: int


class Base(Fields):
    def __init__(self) -> None:
        self.made = SimpleNamespace(other=1)
        (lambda: setattr(self, "by_name", 1))()


class Example(Base):
    def method(self) -> Any:
        self.late = self.made.other  # type: ignore[attr-defined]
        return self.only_read  # type: ignore[attr-defined]


def test_attributes_are_found_without_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_present(name: str, owner: str = "v1:Example") -> bool:
        return Needed(owner, name, "", "").is_present(loads=True)

    monkeypatch.setattr(vllm.v1, "Example", Example, raising=False)
    assert all(map(is_present, ("field", "made", "late", "method")))
    assert not any(map(is_present, ("other", "only_read", "absent")))
    assert not is_present("field", "v1:Missing")
    assert not is_present("field", "no_such_module:Example")
    assert not is_present("field", "no_such_module")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("name", [True, True, True, True]),
        ("name>=0.30", [False, True, True, True]),
        ("name<0.32", [True, True, False, False]),
        ("name>=0.30<0.32", [False, True, False, False]),
    ],
)
def test_a_row_says_which_versions_have_it(row: str, expected: list[bool]) -> None:
    need = VllmOwner("v1").need(row, "", OFF)
    versions = ("0.29.9", "0.30.1rc1+cpu", "0.32.0", "dev")
    assert [need.is_expected(each) for each in versions] == expected
    assert str(need) == "v1.name"


def test_engines_of_a_process_are_told_apart(tmp_path: Path) -> None:
    """Also for a child of a MultiConnector, which has a copy of its engine's config."""

    class Executor:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

    configs = [config(tmp_path) for _ in range(2)]
    executors = [Executor(each) for each in configs]
    for each in executors:
        making.executors.add(each)
    child = copy.copy(configs[1])
    assert making.executor_of(child) is executors[1]
    assert making.executor_of(configs[0]) is executors[0]
    assert making.executor_of(config(tmp_path)) is None
    assert making.is_of_an_engine(configs[1])
    assert not making.is_of_an_engine(child)


def test_a_scheduler_is_known_while_it_is_made(tmp_path: Path) -> None:
    seen: list[Any] = []
    made = MadeScheduler(config(tmp_path), lambda: seen.append(making.scheduler()))
    assert isinstance(made, Scheduler)
    assert seen == [made]
    assert making.scheduler() is None
    with pytest.raises(ZeroDivisionError):
        MadeScheduler(config(tmp_path), lambda: print(1 // 0))
    assert making.scheduler() is None

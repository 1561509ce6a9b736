# SPDX-License-Identifier: Apache-2.0
"""Mutants of a module: its source with one small fault each. Pure, and deterministic.

comparison   one of `<`, `==`, `in`, ... by another one
bound        a whole number by the next one; `a + b` by `a - b`
condition    `if`, `while` and conditional expressions by their negation
logic        `and` by `or`, and the reverse
field        an operand left out of what is concatenated, hashed or packed
clean-up     a statement left out in `finally` or `except`, or one that closes or removes something
statement    another call, assignment or `raise` left out
answer       `True` by `False`, and the reverse

Left alone: docstrings, annotations, messages, logging, `repr`, and code for type checkers.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATORS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
_ENDS = {
    "abort", "cancel", "clear", "close", "discard", "disconnect", "join", "kill", "pop", "release",
    "remove", "stop", "unlink", "unpin", "unregister",
}  # fmt: skip
_QUIET = {"debug", "error", "exception", "info", "log", "warning", "warn"}
_NOT_TESTED = {"__repr__", "__str__", "__del__"}
# Functions whose operands decide what a name or a digest tells apart.
_NAMING = ("bytes", "digest", "fingerprint", "hash", "key", "namespace", "pack", "serialize")


@dataclass(frozen=True, order=True)
class Mutant:
    """start, end: offsets in the UTF-8 of the source; text: what stands between them instead."""

    start: int
    end: int
    text: str
    kind: str
    line: int

    def applied(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()

    def diff(self, source: str) -> str:
        """The lines that differ, each after its sign."""
        lines = difflib.ndiff(source.splitlines(), self.applied(source).splitlines())
        changed = sorted(
            (line for line in lines if line[0] in "+-"), key=lambda line: line[0] == "+"
        )
        return "\n".join(" ".join(line.split()) for line in changed)


def mutants_of(source: str) -> list[Mutant]:
    """All mutants that can be compiled, in the order of the source."""
    return sorted({m for m in _Finder(source).found() if _compiles(m.applied(source))})


def lines_of(source: str, mutant: Mutant) -> range:
    """The lines of the innermost statement that the mutant changes, without the body of a block.

    For a default of a parameter: those of the whole function.
    """
    around = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    innermost = max(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    body = getattr(innermost, "body", None)
    if body and not isinstance(innermost, ast.FunctionDef | ast.AsyncFunctionDef):
        return range(innermost.lineno, max(body[0].lineno, innermost.lineno + 1))
    return range(innermost.lineno, (innermost.end_lineno or 0) + 1)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._raw = source.encode()
        self._starts = [0]
        for line in self._raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def found(self) -> Iterator[Mutant]:
        yield from self._inside(self._tree, in_clean_up=False, function="")

    def _inside(self, node: ast.AST, in_clean_up: bool, function: str) -> Iterator[Mutant]:
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if not isinstance(child, ast.AST) or name in ("annotation", "returns"):
                    continue
                if isinstance(child, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
                    yield from self._statement(child, in_clean_up) if function else ()
                    continue
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    if child.name not in _NOT_TESTED:
                        yield from self._inside(child, False, child.name)
                    continue
                if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                    continue
                if _is_quiet(child) or name == "decorator_list":
                    continue
                ends = in_clean_up or name in ("finalbody", "handlers")
                if function:
                    yield from self._statement(child, ends)
                    yield from self._expression(child, function)
                yield from self._inside(child, ends, function)

    def _statement(self, node: ast.AST, in_clean_up: bool) -> Iterator[Mutant]:
        is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
        is_change = isinstance(node, ast.AugAssign | ast.Delete) or (
            isinstance(node, ast.Assign)
            and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
        )
        if is_call or is_change or isinstance(node, ast.Raise | ast.Break | ast.Continue):
            ends = in_clean_up or (is_call and _called(node) in _ENDS)
            yield self._mutant(node, "pass", "clean-up" if ends else "statement")

    def _expression(self, node: ast.AST, function: str) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                before, after = _OPERATORS[type(operator)]
                # Whatever parentheses are between: only the operator is replaced.
                gap = self._raw[self._end(left) : self._start(right)].decode()
                if gap.count(before) == 1:
                    at = self._end(left) + len(gap[: gap.index(before)].encode())
                    yield Mutant(at, at + len(before), after, "comparison", node.lineno)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if not isinstance(test, ast.Constant):
                    yield self._mutant(test, f"(not ({self._text(test)}))", "condition")
            case ast.BoolOp(op=operator, values=values):
                word = " or " if isinstance(operator, ast.And) else " and "
                parts = word.join(f"({self._text(value)})" for value in values)
                yield self._mutant(node, f"({parts})", "logic")
            case ast.Constant(value=bool() as value):
                yield self._mutant(node, str(not value), "answer")
            case ast.Constant(value=int() as value):
                yield self._mutant(node, str(value + 1), "bound")
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
                texts = self._text(left), self._text(right)
                if any(word in function.lower() for word in _NAMING):
                    yield from (self._mutant(node, f"({text})", "field") for text in texts)
                elif not _is_text(left) and not _is_text(right):
                    sign = "-" if isinstance(operator, ast.Add) else "+"
                    yield self._mutant(node, f"({texts[0]}) {sign} ({texts[1]})", "bound")
            case ast.Tuple(elts=[_, _, *_] as elements, ctx=ast.Load()) if any(
                word in function.lower() for word in _NAMING
            ):
                for left_out in elements:
                    kept = ", ".join(self._text(e) for e in elements if e is not left_out)
                    yield self._mutant(node, f"({kept},)", "field")

    def _mutant(self, node: ast.AST, text: str, kind: str) -> Mutant:
        line: int = node.lineno  # type: ignore[attr-defined]
        return Mutant(self._start(node), self._end(node), text, kind, line)

    def _text(self, node: ast.AST) -> str:
        return self._raw[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]


def _called(node: ast.AST) -> str:
    """The last name of what a statement calls."""
    call = node.value if isinstance(node, ast.Expr) else node
    call = call.value if isinstance(call, ast.Await) else call
    function = call.func if isinstance(call, ast.Call) else None
    return ast.unparse(function).rpartition(".")[2] if function is not None else ""


def _is_quiet(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and (
        isinstance(node.value, ast.Constant) or _called(node) in _QUIET
    )


def _is_text(node: ast.AST) -> bool:
    """Whether it is plainly no number: a difference of texts fails in any test."""
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple) or (
        isinstance(node, ast.Constant) and not isinstance(node.value, int | float)
    )

"""Finds places inside a symbol by structure: a locator matches exactly, or it is refused.

Patterns are Python source, compared as syntax trees. A name that starts with two underscores, such
as ``__`` or ``__rest``, stands for any expression; the same name twice stands for the same one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst

from hicache_guard.patches.fingerprint import canonical

Suite = cst.BaseSuite | cst.Module
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Definition = cst.FunctionDef | cst.ClassDef


class Misfit(Exception):
    """A patch cannot be made here or taken back; says where and why, in one line."""


@dataclass(frozen=True)
class Find:
    """A statement by what it is: its kind, and patterns of the expressions in it.

    ``inside`` is a statement that must stand around it, with this one in its first branch. It must
    match exactly ``times`` times; with ``first``, the first of any number of matches is meant.
    """

    kind: str
    target: str = ""
    value: str = ""
    test: str = ""
    inside: Find | None = None
    times: int = 1
    first: bool = False

    def __str__(self) -> str:
        wanted = [f"{name} `{text}`" for name, text in self._patterns() if text]
        around = f" inside {self.inside}" if self.inside else ""
        return f"{self.kind}{' with ' if wanted else ''}{' and '.join(wanted)}{around}"

    def _patterns(self) -> tuple[tuple[str, str], ...]:
        return ("target", self.target), ("value", self.value), ("test", self.test)

    def locate(self, body: Suite) -> list[Statement]:
        """The statements meant, in order. Raises Misfit where their number is not the one named."""
        found = [
            statement
            for statement, around in statements(body)
            if self._matches(statement)
            and (self.inside is None or any(map(self.inside._matches, around)))
        ]
        if self.first:
            found = found[:1]
        if len(found) != self.times:
            raise Misfit(f"{self} is there {len(found)} times, not {self.times}")
        return found

    def _matches(self, statement: Statement) -> bool:
        parts = statement.body if isinstance(statement, cst.SimpleStatementLine) else [statement]
        node_type, expressions = _KINDS[self.kind]
        return any(
            isinstance(part, node_type)
            and all(
                any(matches(pattern, found) for found in expressions(part).get(name, ()))
                for name, pattern in self._patterns()
                if pattern
            )
            for part in parts
        )


_Expressions = dict[str, Sequence[cst.CSTNode | None]]

#: Kind of statement to its node and to the expressions that a pattern may name.
_KINDS: dict[str, tuple[type[cst.CSTNode], Callable[..., _Expressions]]] = {
    "assign": (
        cst.Assign,
        lambda node: {"target": [each.target for each in node.targets], "value": [node.value]},
    ),
    "assert": (cst.Assert, lambda node: {"test": [node.test]}),
    "call": (cst.Expr, lambda node: {"value": [node.value]}),
    "for": (cst.For, lambda node: {"target": [node.target], "value": [node.iter]}),
    "if": (cst.If, lambda node: {"test": [node.test]}),
    "raise": (cst.Raise, lambda node: {"value": [node.exc]}),
    "return": (cst.Return, lambda node: {"value": [node.value]}),
    "while": (cst.While, lambda node: {"test": [node.test]}),
    "with": (cst.With, lambda node: {"value": [each.item for each in node.items]}),
}


def statements(
    body: Suite, around: tuple[Statement, ...] = ()
) -> Iterator[tuple[Statement, tuple[Statement, ...]]]:
    """Every statement below ``body`` and those whose first branch it is in, nested definitions out.

    Statements that share a line are one.
    """
    if not isinstance(body, cst.IndentedBlock | cst.Module):
        return
    for statement in body.body:
        if isinstance(statement, Statement):
            yield statement, around
        for suite, owner in _branches(statement):
            yield from statements(suite, (*around, owner) if owner else around)


def suites(body: Suite) -> Iterator[Suite]:
    """``body`` and every block below it, nested definitions left out."""
    if not isinstance(body, cst.IndentedBlock | cst.Module):
        return
    yield body
    for statement in body.body:
        for suite, _ in _branches(statement):
            yield from suites(suite)


def _branches(statement: cst.CSTNode) -> Iterator[tuple[Suite, Statement | None]]:
    """The blocks of a compound statement, each with the statement whose first branch it is."""
    if isinstance(statement, Definition | cst.SimpleStatementLine):
        return
    for child in statement.children:
        if isinstance(child, cst.IndentedBlock | cst.SimpleStatementSuite):
            yield child, statement if isinstance(statement, cst.BaseCompoundStatement) else None
        elif isinstance(child, _BRANCHES):
            yield from _branches(child)


_BRANCHES = (
    cst.If,  # an elif
    cst.Else,
    cst.ExceptHandler,
    cst.ExceptStarHandler,
    cst.Finally,
    cst.MatchCase,
)


def symbol(module: cst.Module, name: str) -> Definition:
    """The definition spelled ``name``; raises Misfit unless there is exactly one."""
    scope: Sequence[cst.CSTNode] = module.body
    for step in name.removeprefix("class ").split("."):
        found = [node for node in scope if isinstance(node, Definition) and node.name.value == step]
        if len(found) != 1:
            raise Misfit(f"{name} is defined {len(found)} times")
        scope = found[0].body.body
    return found[0]


def matches(pattern: str, node: cst.CSTNode | None) -> bool:
    """Whether an expression is one that ``pattern`` describes."""
    if node is None:
        return False
    # In brackets: a line break inside somebody else's brackets is part of the expression.
    try:
        tree = ast.parse(f"({cst.Module([]).code_for_node(node)}\n)", mode="eval").body
    except SyntaxError:
        return False
    return captures(pattern, tree) is not None


def captures(pattern: str, node: ast.AST) -> dict[str, ast.AST] | None:
    """What the wildcards of ``pattern`` stand for in ``node``; None where it does not match."""
    found: dict[str, ast.AST] = {}
    return found if _same(ast.parse(pattern, mode="eval").body, node, found) else None


def is_wildcard(name: str) -> bool:
    return name.startswith("__") and not (len(name) > 4 and name.endswith("__"))


def _same(pattern: object, node: object, found: dict[str, ast.AST]) -> bool:
    if isinstance(pattern, ast.Name) and is_wildcard(pattern.id) and isinstance(node, ast.expr):
        if pattern.id == "__":
            return True
        return canonical(found.setdefault(pattern.id, node)) == canonical(node)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _same(value, getattr(node, name), found)
            for name, value in ast.iter_fields(pattern)
            if name not in ("ctx", "kind")
        )
    if isinstance(pattern, list):
        return (
            isinstance(node, list)
            and len(pattern) == len(node)
            and all(_same(each, other, found) for each, other in zip(pattern, node, strict=True))
        )
    return type(pattern) is type(node) and pattern == node

"""The edits that a patch may make to a symbol, and how each is taken back.

Every edit leaves a comment line ``# hicache-guard: <patch>`` above what it wrote. That makes it
greppable, and it makes the edit its own record: ``undo`` finds what the comment stands above,
checks that it is what we wrote, and takes it out, whatever else has changed in the file since. No
copy of the file is needed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import libcst as cst

from hicache_guard.patches.anchors import (
    Find,
    Misfit,
    Statement,
    captures,
    is_wildcard,
    suites,
    symbol,
)
from hicache_guard.patches.fingerprint import canonical, symbols

_MARK = "# hicache-guard: "
_PRESENT = re.compile(rf"^[ \t]*{_MARK}([\w.-]+)", re.MULTILINE)


def marker(patch: str) -> str:
    """The comment above what ``patch`` writes."""
    return _MARK + patch


@functools.lru_cache(maxsize=512)
def marked(text: str) -> frozenset[str]:
    """Names of the patches whose comments are in a file."""
    return frozenset(_PRESENT.findall(text))


def _changed(patch: str, where: str) -> Misfit:
    return Misfit(
        f"what {patch} wrote {where} was changed by hand; undo that edit, or put the file back "
        "(git checkout, or SGLang installed again)"
    )


class Edit(Hashable, Protocol):
    """One change to one symbol of a file. Both ways raise Misfit where it cannot be made."""

    def apply(self, text: str, name: str, patch: str) -> str: ...

    def undo(self, text: str, name: str, patch: str) -> str: ...


@dataclass(frozen=True)
class Insert:
    """Puts our statements beside a located statement, or at an end of the body."""

    text: str
    where: Literal["before", "after", "start", "end"]
    at: Find | None = None

    def apply(self, text: str, name: str, patch: str) -> str:
        module = parse(text)
        body = _function(module, name).body
        ours = _statements(module, self.text, patch)
        if self.where == "end":
            last = body.body[-1]
            if isinstance(last, cst.SimpleStatementLine) and isinstance(
                last.body[-1], cst.Return | cst.Raise
            ):
                raise Misfit(f"{name} ends by leaving; nothing after it would run")
            return _rebuild(module, name, {id(last): ([], ours)})
        if self.where == "start":
            if len(body.body) == 1 and _is_docstring(body.body[0]):
                return _rebuild(module, name, {id(body.body[0]): ([], ours)})
            first = body.body[1 if _is_docstring(body.body[0]) else 0]
            return _rebuild(module, name, {id(first): (ours, [])})
        assert self.at is not None, "before and after need a statement"
        places = self.at.locate(body)
        if any(isinstance(p, cst.SimpleStatementLine) and len(p.body) > 1 for p in places):
            raise Misfit(f"{self.at} shares its line with another statement")
        around = (ours, []) if self.where == "before" else ([], ours)
        return _rebuild(module, name, {id(place): around for place in places})

    def undo(self, text: str, name: str, patch: str) -> str:
        module = parse(text)
        ours = _statements(module, self.text, patch)
        wanted = _plain(ours)
        runs = [
            run
            for suite in suites(_function(module, name).body)
            for start in range(len(suite.body))
            if _is_marked(suite.body[start], patch)
            and _plain(run := suite.body[start : start + len(ours)]) == wanted
        ]
        times = self.at.times if self.at else 1
        if len(runs) < times:
            raise _changed(patch, f"in {name}")
        return _rebuild(module, name, {}, remove={id(node) for run in runs[:times] for node in run})


@dataclass(frozen=True)
class AddImport:
    """Adds an import to the file, below the imports at its top; nothing where it is there."""

    statement: str

    def is_in(self, text: str) -> bool:
        """Whether a file has this import at its top level, ours or not."""
        return bool(self._places(text))

    def _places(self, text: str) -> list[ast.stmt]:
        (wanted,) = ast.parse(self.statement).body
        alike = [node for node in _read(text).body if type(node) is type(wanted)]
        return [node for node in alike if canonical(node) == canonical(wanted)]

    def apply(self, text: str, name: str, patch: str) -> str:
        if self._places(text):
            return text
        end = _end_of_the_head(_read(text))
        if not end:
            raise Misfit("it starts with neither a docstring nor an import to add one below")
        return _with_lines(text, end, "", marker(patch), self.statement)

    def undo(self, text: str, name: str, patch: str) -> str:
        lines = _lines(text)
        for node in self._places(text):
            first, last = node.lineno - 1, node.end_lineno
            *other, ours = ["", *(line.strip() for line in lines[max(0, first - 2) : first])]
            if ours == marker(patch) and not other[-1].startswith("#"):
                return "".join([*lines[: first - 1], *lines[last:]])
        return text


@dataclass(frozen=True)
class Decorate:
    """Puts a decorator of ours around a class or function, outside those that it has.

    The import that it needs is an edit of its own.
    """

    decorator: str

    def apply(self, text: str, name: str, patch: str) -> str:
        at, indent = _first_line(text, _definition(text, name), name)
        return _with_lines(text, at, indent, marker(patch), f"@{self.decorator}")

    def is_at(self, node: ast.AST) -> bool:
        """Whether a symbol has this decorator, with our comment or without."""
        wanted = canonical(ast.parse(self.decorator, mode="eval").body)
        return wanted in map(canonical, getattr(node, "decorator_list", ()))

    def undo(self, text: str, name: str, patch: str) -> str:
        at, _ = _first_line(text, _definition(text, name), name)
        lines = _lines(text)
        ours = [marker(patch), f"@{self.decorator}"]
        if at == 0 or [line.strip() for line in lines[at - 1 : at + 1]] != ours:
            raise _changed(patch, f"at {name}")
        return "".join([*lines[: at - 1], *lines[at + 1 :]])


@dataclass(frozen=True)
class Replace:
    """Puts our expression in the place of the one that ``expression`` describes.

    ``by`` may use the wildcards of ``expression``, and ``__all`` for the whole of it: a call is
    wrapped by ``Replace("its.callee", "ours(__all)")``. What stood there is kept in the comment
    above, so that ``undo`` can put it back.
    """

    expression: str
    by: str

    def apply(self, text: str, name: str, patch: str) -> str:
        found = [
            (node, owner, names)
            for node, owner in _expressions(text, name)
            if (names := captures(self.expression, node)) is not None
        ]
        if len(found) != 1:
            raise Misfit(f"`{self.expression}` is in {name} {len(found)} times, not once")
        node, owner, names = found[0]
        lines = _lines(text)
        was = _segment(lines, node)
        ours = self._filled({**names, "__all": node}, lines)
        start, stop = _span(lines, node)
        above, _ = _span(lines, owner)
        line_start = above - owner.col_offset
        raw = "".join(lines).encode()
        indent = raw[line_start:above]
        if indent.strip():
            raise Misfit(f"`{self.expression}` shares its line with another statement")
        comment = f"{marker(patch)} was {was!r}{_newline(lines)}".encode()
        return (
            raw[:line_start] + indent + comment + raw[line_start:start] + ours + raw[stop:]
        ).decode()

    def undo(self, text: str, name: str, patch: str) -> str:
        lines = _lines(text)
        for node, owner in _expressions(text, name):
            was = _kept(lines, owner.lineno - 2, patch)
            if was is None:
                continue
            names = captures(self.expression, ast.parse(f"({was}\n)", mode="eval").body)
            if names is None:
                continue
            kept = _lines(f"({was}\n)")
            inner = ast.parse("".join(kept), mode="eval").body
            ours = self._filled({**names, "__all": inner}, kept).decode()
            if canonical(ast.parse(f"({ours}\n)", mode="eval").body) != canonical(node):
                continue
            start, stop = _span(lines, node)
            comment = sum(len(line.encode()) for line in lines[: owner.lineno - 2])
            raw = text.encode()
            after = comment + len(lines[owner.lineno - 2].encode())
            return (raw[:comment] + raw[after:start] + was.encode() + raw[stop:]).decode()
        raise _changed(patch, f"in {name}")

    def _filled(self, names: Mapping[str, ast.AST], lines: Sequence[str]) -> bytes:
        def source(match: re.Match[str]) -> str:
            word = match[0]
            return _segment(lines, names[word]) if is_wildcard(word) else word

        return re.sub(r"\b__\w+", source, self.by).encode()


# ---------------------------------------------------------------- LibCST


@functools.lru_cache(maxsize=16)
def parse(text: str) -> cst.Module:
    """A module that LibCST gives back as it took it; Misfit otherwise."""
    try:
        module = cst.parse_module(text)
    except cst.ParserSyntaxError as error:
        raise Misfit(f"line {error.raw_line} is not Python that can be read") from None
    if module.code != text:
        raise Misfit("it has bytes that would not be preserved")
    return module


def _function(module: cst.Module, name: str) -> cst.FunctionDef:
    node = symbol(module, name)
    if not isinstance(node, cst.FunctionDef):
        raise Misfit(f"{name} is not a function")
    if isinstance(node.body, cst.SimpleStatementSuite):
        raise Misfit(f"{name} is written on one line")
    return node


def _statements(module: cst.Module, text: str, patch: str) -> list[Statement]:
    """Our statements as nodes for ``module``, the comment above the first."""
    text = f"{marker(patch)}\n{text.strip()}\n".replace("\n", module.default_newline)
    ours = cst.parse_module(text, config=module.config_for_parsing)
    first, *rest = ours.body
    return [first.with_changes(leading_lines=[*ours.header, *first.leading_lines]), *rest]


def _comments(lines: Sequence[cst.EmptyLine]) -> list[str]:
    return [line.comment.value for line in lines if line.comment]


def _is_marked(node: cst.CSTNode, patch: str) -> bool:
    """Whether our comment, and no other, stands above a statement."""
    return _comments(getattr(node, "leading_lines", ())) == [marker(patch)]


def _plain(nodes: Sequence[cst.CSTNode]) -> str:
    """What statements mean, without their formatting."""
    return canonical(ast.parse(cst.Module(list(nodes)).code).body)  # type: ignore[arg-type]


def _is_docstring(node: cst.CSTNode) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


_Around = tuple[Sequence[Statement], Sequence[Statement]]


def _rebuild(
    module: cst.Module, name: str, around: Mapping[int, _Around], remove: Collection[int] = ()
) -> str:
    """The text with statements put before and after others in a symbol, and others removed."""

    class Rebuild(cst.CSTTransformer):
        def on_leave(self, original: cst.CSTNode, updated: cst.CSTNode) -> object:  # type: ignore[override]
            if id(original) in remove:
                return cst.RemoveFromParent()
            if id(original) in around:
                before, after = around[id(original)]
                return cst.FlattenSentinel([*before, updated, *after])
            return updated

    node = symbol(module, name)
    return _exchange(module, name, node, node.visit(Rebuild()))


def _exchange(module: cst.Module, name: str, old: cst.CSTNode, new: object) -> str:
    """The text with a symbol's node exchanged; only the way down to it is made anew."""
    owner, _, member = name.removeprefix("class ").partition(".")
    if member:
        outer = symbol(module, owner)
        block = outer.body.with_changes(body=_swapped(outer.body.body, old, new))
        old, new = outer, outer.with_changes(body=block)
    return module.with_changes(body=_swapped(module.body, old, new)).code


def _swapped(nodes: Sequence[cst.CSTNode], old: cst.CSTNode, new: object) -> list[object]:
    return [new if node is old else node for node in nodes]


# ---------------------------------------------------------------- positions


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.lru_cache(maxsize=16)
def _read(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise Misfit(f"line {error.lineno} is not Python that can be read") from None


def _definition(text: str, name: str) -> Definition:
    """The definition spelled ``name``; raises Misfit unless there is exactly one."""
    scope: Sequence[ast.stmt] = _read(text).body
    for step in name.removeprefix("class ").split("."):
        found = [each for each in scope if isinstance(each, Definition) and each.name == step]
        if len(found) != 1:
            raise Misfit(f"{name} is defined {len(found)} times")
        scope = found[0].body
    return found[0]


def _first_line(text: str, node: Definition, name: str) -> tuple[int, str]:
    """The line (from 0) that a definition begins on, with its decorators, and its indentation."""
    first = min(each.lineno for each in (node, *node.decorator_list)) - 1
    line = _lines(text)[first]
    bare = line.lstrip(" \t")
    if not bare.startswith(("@", "def ", "class ", "async ")):
        raise Misfit(f"{name} does not begin on a line of its own")
    return first, line[: len(line) - len(bare)]


def _end_of_the_head(module: ast.Module) -> int:
    """The line (from 1) on which a module's docstring and first imports end; 0 without any."""
    end = 0
    for node in module.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (docstring or isinstance(node, ast.Import | ast.ImportFrom)):
            break
        end = node.end_lineno or 0
    return end


def _with_lines(text: str, at: int, indent: str, *added: str) -> str:
    """The text with lines put before line ``at`` (from 0)."""
    lines = [*_lines(text)]
    newline = _newline(lines) or "\n"
    if at == len(lines) and lines and not lines[-1].endswith(("\r", "\n")):
        lines[-1] += newline
    ours = [f"{indent}{line}{newline}" for line in added]
    return "".join([*lines[:at], *ours, *lines[at:]])


@functools.lru_cache(maxsize=16)
def _lines(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", text))


def _newline(lines: Sequence[str]) -> str:
    return lines[0][len(lines[0].rstrip("\r\n")) :] if lines else "\n"


def _span(lines: Sequence[str], node: ast.AST) -> tuple[int, int]:
    """Where an expression or statement starts and ends, in bytes."""
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    starts = [0]
    for line in lines[: node.end_lineno]:
        starts.append(starts[-1] + len(line.encode()))
    return (
        starts[node.lineno - 1] + node.col_offset,
        starts[node.end_lineno - 1] + node.end_col_offset,
    )


def _segment(lines: Sequence[str], node: ast.AST) -> str:
    start, stop = _span(lines, node)
    return "".join(lines).encode()[start:stop].decode()


def _expressions(text: str, name: str) -> list[tuple[ast.expr, ast.stmt]]:
    """Every expression in a symbol and the statement that it belongs to."""
    found = [node for spelled, node in symbols(_read(text)) if spelled == name]
    if len(found) != 1:
        raise Misfit(f"{name} is defined {len(found)} times")
    pairs: list[tuple[ast.expr, ast.stmt]] = []

    def walk(node: ast.AST, owner: ast.stmt) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                walk(child, child)
            else:
                if isinstance(child, ast.expr):
                    pairs.append((child, owner))
                walk(child, owner)

    (body,) = found
    for statement in getattr(body, "body", ()):
        walk(statement, statement)
    return pairs


def _kept(lines: Sequence[str], line: int, patch: str) -> str | None:
    """What our comment on ``line`` says stood below it."""
    head = f"{marker(patch)} was "
    text = lines[line].strip() if line >= 0 else ""
    if not text.startswith(head):
        return None
    try:
        kept = ast.literal_eval(text.removeprefix(head))
    except (SyntaxError, ValueError):
        return None
    return kept if isinstance(kept, str) else None

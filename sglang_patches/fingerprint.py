"""A symbol's fingerprint: what its syntax tree says, whatever its formatting.

Comments, blank lines, line breaks, quotes and docstrings do not count; every name and the structure
do. Symbols are spelled ``function``, ``Class``, ``Class.method``, and ``class Class`` for a class
without its body.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import hashlib
import symtable
from collections.abc import Iterator

#: Says how a name is used, or how it was spelled; neither is part of what the code means.
_IGNORED = frozenset({"ctx", "kind", "type_comment"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def canonical(node: object) -> str:
    """The tree as text, the same on every Python: empty fields, which come and go, are left out."""
    if isinstance(node, ast.AST):
        fields = ",".join(
            f"{name}={canonical(_meat(node, name, value))}"
            for name, value in ast.iter_fields(node)
            if name not in _IGNORED and value is not None and value != []
        )
        return f"{type(node).__name__}({fields})"
    if isinstance(node, list):
        return f"[{','.join(map(canonical, node))}]"
    return repr(node)


def _meat(node: ast.AST, name: str, value: object) -> object:
    """A field's value; a definition's body comes without its docstring."""
    if name == "body" and isinstance(node, _DEFINITIONS) and ast.get_docstring(node) is not None:
        return node.body[1:]
    return value


def fingerprint(node: ast.AST) -> str:
    return hashlib.sha256(canonical(node).encode()).hexdigest()[:16]


def symbols(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Every symbol of a module by its spelling; a name defined twice comes twice."""
    for node in tree.body:
        if isinstance(node, _DEFINITIONS):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield f"class {node.name}", _header(node)
            for member in node.body:
                if isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{node.name}.{member.name}", member


def _header(node: ast.ClassDef) -> ast.ClassDef:
    return ast.ClassDef(
        name=node.name,
        bases=node.bases,
        keywords=node.keywords,
        body=[ast.Pass()],
        decorator_list=node.decorator_list,
        **({"type_params": node.type_params} if hasattr(node, "type_params") else {}),
    )


def unbound(text: str) -> set[str]:
    """Global names that a module's functions use and its top level does not define."""
    top = symtable.symtable(text, "a module", "exec")
    bound = {
        each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()
    }
    used: set[str] = set()
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return used - bound - set(dir(builtins))


def difference(expected: ast.AST, found: ast.AST, names: tuple[str, str]) -> str:
    """A unified diff of two symbols, both normalised."""
    before, after = (_normalised(node).splitlines() for node in (expected, found))
    return "\n".join(difflib.unified_diff(before, after, *names, lineterm=""))


def _normalised(node: ast.AST) -> str:
    class WithoutDocstrings(ast.NodeTransformer):
        def generic_visit(self, inner: ast.AST) -> ast.AST:
            super().generic_visit(inner)
            if isinstance(inner, _DEFINITIONS) and ast.get_docstring(inner) is not None:
                inner.body = inner.body[1:] or [ast.Pass()]
            return inner

    copied = ast.parse(ast.unparse(node))
    return ast.unparse(WithoutDocstrings().visit(copied))

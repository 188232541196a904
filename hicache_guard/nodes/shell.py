"""What the shell scripts have in common: quoting with addresses in it, and the templates.

A word may hold the address of a node as ``${HOST_…}``, which the shell is to put in; everything
else in it is to be left alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

import jinja2

_PLACE = re.compile(r"\$\{[A-Z0-9_]+\}")
_SPECIAL = re.compile(r'(["\\$`])')

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("hicache_guard.nodes"),
    undefined=jinja2.StrictUndefined,
    keep_trailing_newline=True,
    autoescape=False,  # shell, not HTML: words come from ``quoted``
)


def quoted(word: str) -> str:
    """A word for bash, where ``${HOST_…}`` and the folder of a run are still expanded."""
    if not _PLACE.search(word):
        return shlex.quote(word)
    kept = _PLACE.findall(word)
    rest = [_SPECIAL.sub(r"\\\1", part) for part in _PLACE.split(word)]
    return '"' + "".join(a + b for a, b in zip(rest, [*kept, ""], strict=True)) + '"'


def lines(words: Iterable[str]) -> list[str]:
    """A command line as lines of bash: a flag and its values on each."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(quoted(word))
    return [" ".join(line) for line in found]


def places(words: Iterable[str]) -> list[str]:
    """The variables that words need, once each."""
    return list(dict.fromkeys(name[2:-1] for word in words for name in _PLACE.findall(word)))


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: quoted(value) for name, value in variables.items()}


def filled(template: str, **facts: Any) -> str:
    """A template of this package, filled in."""
    return _TEMPLATES.get_template(template).render(**facts)


def text(name: str) -> str:
    """A template that has nothing to fill in."""
    return filled(PurePath(name).name)

"""What each patch means for one tree, and what the files would become. Reads; writes nothing.

A file's state is read off the file: which patches are in it, its text without them, and whether
that text is one that a patch was written for. So it makes no difference who applied a patch, this
tool or ``git am``.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from hicache_guard import checkouts
from hicache_guard.core.errors import ConfigError
from hicache_guard.patches import catalogue, table
from hicache_guard.patches.anchors import Misfit
from hicache_guard.patches.edits import AddImport, Decorate, Edit, marked, marker
from hicache_guard.patches.fingerprint import difference, fingerprint, symbols, unbound
from hicache_guard.patches.layout import Layout
from hicache_guard.patches.patch import Patch
from hicache_guard.patches.transaction import Change

#: What some editors put before the first line; Python takes it in a file, ``ast`` not in a text.
_BYTE_ORDER_MARK = "\ufeff"
_T = TypeVar("_T")
_Asked = TypeVarTuple("_Asked")


class State(enum.Enum):
    """What a patch is to a tree."""

    APPLIES = "applies"
    APPLIED = "applied"
    NOT_NEEDED = "not needed here"
    MISFIT = "does not fit"


@dataclass(frozen=True)
class Anchor:
    """A symbol that a patch relies on, as it was found."""

    symbol: str
    module: str
    found: str
    accepted: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return self.found in self.accepted


@dataclass(frozen=True)
class Verdict:
    """A patch's state on a tree, why, and where it does not fit what differs."""

    patch: Patch
    state: State
    why: str
    anchors: tuple[Anchor, ...] = ()
    difference: str = ""


@dataclass(frozen=True)
class Recognition:
    """Which release a tree is: what it says, the nearest known one, and what differs from that."""

    says: str | None
    nearest: str
    differs: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        return self.says in table.releases()

    @property
    def is_unknown_release(self) -> bool:
        """Whether it says it is a release that is not in our table; a checkout says nothing."""
        return self.says is not None and "dev" not in self.says and not self.is_known

    def __str__(self) -> str:
        counted = f"{len(self.differs)} symbols differ" if self.differs else "no symbol differs"
        if self.says == self.nearest:
            return f"SGLang {self.says}, {counted}"
        claim = f"says SGLang {self.says}" if self.says else "says no release"
        return f"{claim}; nearest to SGLang {self.nearest}, {counted}"


@functools.lru_cache(maxsize=512)  # what is applied is taken out again, and both more than once
def _edited(text: str, edit: Edit, symbol: str, patch: str, undo: bool) -> str:
    return (edit.undo if undo else edit.apply)(text, symbol, patch)


def _kept(method: Callable[[Tree, *_Asked], _T]) -> Callable[[Tree, *_Asked], _T]:
    """As ``functools.cache``, but the answers go with the tree: they hold its syntax trees."""

    @functools.wraps(method)
    def asked(tree: Tree, *args: *_Asked) -> _T:
        key = (method.__name__, *args)
        if key not in tree.answers:
            tree.answers[key] = method(tree, *args)
        found: _T = tree.answers[key]
        return found

    return asked


class Tree:
    """One tree and what is read of it; each file is read once."""

    def __init__(self, layout: Layout, patches: tuple[Patch, ...] = catalogue.PATCHES) -> None:
        self.layout = layout
        self.patches = patches
        self.answers: dict[tuple[object, ...], Any] = {}

    def text(self, module: str) -> str | None:
        """A module's source as it is, but for a byte order mark; None where there is none."""
        raw = self._raw(module)
        return None if raw is None else raw.removeprefix(_BYTE_ORDER_MARK)

    def content(self, module: str, names: Collection[str]) -> bytes:
        """What the file holds with exactly the patches named; a byte order mark stays."""
        raw = self._raw(module) or ""
        mark = _BYTE_ORDER_MARK if raw.startswith(_BYTE_ORDER_MARK) else ""
        return (mark + self.compose(module, names)).encode()

    @_kept
    def _raw(self, module: str) -> str | None:
        file = self.layout.file_of(module)
        try:
            if not stat.S_ISREG(file.stat().st_mode) and not file.is_dir():
                raise ConfigError(f"{file} is not a file")  # reading a pipe would never end
            return file.read_bytes().decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise ConfigError(f"{file} is a folder, not a file") from None
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{file} is not UTF-8; it is not touched") from None

    @_kept
    def base(self, module: str) -> str:
        """A module's source with our patches taken out. Raises Misfit where one cannot be."""
        text = self.text(module)
        assert text is not None
        here = marked(text)
        strangers = here - {patch.name for patch in self.patches}
        if strangers:
            raise Misfit(
                f"{self.name(module)} carries {sorted(strangers)[0]}, "
                "a patch that this version does not know; reverse it with the one that applied it"
            )
        for patch in reversed(self.patches):
            if patch.name in here:
                text = self._each_edit(patch, module, text, undo=True)
        return text

    def compose(self, module: str, names: Collection[str]) -> str:
        """A module's source with exactly the patches named, whatever is in it now."""
        concern = [
            patch
            for patch in self.patches
            if patch.name in names
            and any(self.home(target.symbol) == module for target in patch.targets)
        ]
        return self._compose(module, tuple(concern))

    @_kept
    def _compose(self, module: str, chosen: tuple[Patch, ...]) -> str:
        text = base = self.base(module)
        for patch in chosen:
            text = self._each_edit(patch, module, text)
        back = text
        for patch in reversed(chosen):
            back = self._each_edit(patch, module, back, undo=True)
        if back != base:
            raise Misfit(f"{self.name(module)} could not be restored exactly afterwards")
        return text

    def _each_edit(self, patch: Patch, module: str, text: str, *, undo: bool = False) -> str:
        edits = [pair for pair in patch.edits() if self.home(pair[0]) == module]
        for symbol, edit in reversed(edits) if undo else edits:
            try:
                text = _edited(text, edit, symbol, patch.name, undo)
            except Misfit as misfit:
                raise Misfit(f"{self.name(module)}: {misfit}") from None
        return text

    def home(self, symbol: str) -> str:
        """The module that defines a symbol. Raises Misfit unless there is exactly one."""
        where = self._where(symbol)
        if len(where) != 1:
            raise Misfit(
                f"{symbol} is in {' and '.join(where)}" if where else f"{symbol} is missing"
            )
        return where[0]

    @_kept
    def _where(self, symbol: str) -> list[str]:
        return [
            module
            for module in table.modules_of(symbol)
            if self.text(module) is not None
            and any(name == symbol for name, _ in self._symbols(module, self.text(module) or ""))
        ]

    def name(self, module: str) -> str:
        """What messages and patches call a module's file."""
        return self.layout.name(self.layout.file_of(module))

    @_kept
    def _symbols(self, module: str, text: str) -> tuple[tuple[str, ast.AST], ...]:
        try:
            return tuple(symbols(ast.parse(text)))
        except (SyntaxError, ValueError):
            raise Misfit(
                f"{self.name(module)} is not Python that can be read; repair it first"
            ) from None

    def symbol(self, symbol: str) -> ast.AST:
        """A symbol's syntax tree without our patches. Raises Misfit unless there is exactly one."""
        module = self.home(symbol)
        found = [node for name, node in self._symbols(module, self.base(module)) if name == symbol]
        if len(found) != 1:
            raise Misfit(f"{symbol} is defined {len(found)} times in {self.name(module)}")
        return found[0]

    def modules(self, patches: Iterable[Patch]) -> list[str]:
        """The modules that these patches edit."""
        found = (self.home(target.symbol) for patch in patches for target in patch.targets)
        return list(dict.fromkeys(found))

    # ------------------------------------------------------------ verdicts

    @functools.cached_property
    def recognition(self) -> Recognition:
        found = {}
        for module in table.MODULES:
            if self.text(module) is not None:
                with contextlib.suppress(Misfit):  # its symbols are then missing, and named as such
                    found[module] = self._symbols(module, self.base(module))
        says = table.version_of(self.layout)
        nearest, differs = table.nearest(table.measure(found), says)
        return Recognition(says, nearest, tuple(differs))

    def survey(self) -> list[Verdict]:
        """The verdict of every patch, but one of a family."""
        found: dict[str, Verdict] = {}
        for patch in self.patches:
            name = patch.family or patch.name
            verdict = self.verdict(patch)
            if name not in found or self._rank(verdict) < self._rank(found[name]):
                found[name] = verdict
        return list(found.values())

    def _rank(self, verdict: Verdict) -> tuple[bool, bool, bool]:
        """Of a family: the patch in the tree, else one that fits, else the nearest release's."""
        return (
            verdict.patch.name not in self.traces(),
            verdict.state is not State.APPLIES,
            self.recognition.nearest not in verdict.patch.affects,
        )

    def verdict(self, patch: Patch) -> Verdict:
        """What ``patch`` is to this tree."""
        try:
            anchors = tuple(self._anchor(patch, symbol) for symbol in patch.anchors)
            return self._judge(patch, anchors)
        except Misfit as misfit:
            return Verdict(patch, State.MISFIT, str(misfit))

    def _judge(self, patch: Patch, anchors: tuple[Anchor, ...]) -> Verdict:
        here = self.present()
        broken = [anchor for anchor in anchors if not anchor.holds]
        if patch.name in self.unmarked:
            return Verdict(patch, State.MISFIT, self.unmarked[patch.name], anchors)
        if patch.name in here:
            for module in self.modules([patch]):
                if patch.name not in self._marks(module):
                    why = f"half applied: {self.name(module)} lacks it; reverse it first"
                    return Verdict(patch, State.MISFIT, why, anchors)
                if not self._has_imports(patch, module):
                    why = f"half applied: {self.name(module)} lacks its import; reverse it first"
                    return Verdict(patch, State.MISFIT, why, anchors)
            if broken and patch.kind == "guard":
                why = f"{broken[0].symbol} is not what it was made for; reverse it and apply again"
                return Verdict(
                    patch, State.MISFIT, why, anchors, self._difference(patch, broken[0])
                )
            return Verdict(patch, State.APPLIED, "", anchors)
        if not broken:
            for module in self.modules([patch]):
                lost = unbound(self.compose(module, {patch.name})) - unbound(self.base(module))
                if lost:
                    why = f"{self.name(module)} has no {sorted(lost)[0]}, which it uses"
                    return Verdict(patch, State.MISFIT, why, anchors)
            alike = self._alike(patch.affects, anchors)
            return Verdict(patch, State.APPLIES, f"as in {alike}" if alike else "", anchors)
        alike = self._alike(patch.clear, anchors)
        if alike:
            return Verdict(patch, State.NOT_NEEDED, f"as in {alike}", anchors)
        worst = broken[0]
        if not worst.found:
            why = f"{worst.symbol} is nowhere to be found"
            return Verdict(patch, State.MISFIT, why, anchors)
        why = (
            f"{worst.symbol} in {worst.module} differs: fingerprint {worst.found}, "
            f"expected {' or '.join(worst.accepted)}"
        )
        return Verdict(patch, State.MISFIT, why, anchors, self._difference(patch, worst))

    def _has_imports(self, patch: Patch, module: str) -> bool:
        """Whether what ``patch`` imports in a module is imported there, by whomever."""
        text = self.text(module) or ""
        return all(
            edit.is_in(text)
            for symbol, edit in patch.edits()
            if isinstance(edit, AddImport) and self.home(symbol) == module
        )

    def _anchor(self, patch: Patch, symbol: str) -> Anchor:
        known = [table.releases()[version].get(symbol) for version in patch.affects]
        accepted = tuple(dict.fromkeys(mark for mark in known if mark is not None))
        where = self._where(symbol)
        if not where:
            return Anchor(symbol, table.modules_of(symbol)[0], "", accepted)
        return Anchor(symbol, self.home(symbol), fingerprint(self.symbol(symbol)), accepted)

    def _alike(self, versions: tuple[str, ...], anchors: tuple[Anchor, ...]) -> str:
        """One of these releases that has all anchors as they are here, the nearest first."""
        nearest = self.recognition.nearest
        for version in sorted(versions, key=lambda each: each != nearest):
            known = table.releases()[version]
            if all(known.get(anchor.symbol, "") == anchor.found for anchor in anchors):
                return version
        return ""

    def _difference(self, patch: Patch, anchor: Anchor) -> str:
        """The symbol here against that of a release on this machine that the patch was made for."""
        for version in (self.recognition.nearest, *patch.affects):
            if version not in checkouts.SUPPORTED or version not in patch.affects:
                continue
            if checkouts.is_fetched(version):
                place = checkouts.place_of(version)
                reference = Tree(Layout("wheel", place, place / "sglang"), self.patches)
                return difference(
                    reference.symbol(anchor.symbol),
                    self.symbol(anchor.symbol),
                    (f"{anchor.symbol} in {version}", f"{anchor.symbol} here"),
                )
        return ""

    # ------------------------------------------------------------ plans

    def present(self) -> set[str]:
        """Names of the patches in the tree."""
        modules = dict.fromkeys(
            module
            for patch in self.patches
            for target in patch.targets
            for module in table.modules_of(target.symbol)
        )
        return set().union(*(self._marks(module) for module in modules))

    def traces(self) -> set[str]:
        """Names of the patches of which there is anything in the tree, with our comment or not."""
        return self.present() | self.unmarked.keys()

    @functools.cached_property
    def unmarked(self) -> dict[str, str]:
        """Guards of which something is left that no comment of ours stands above, and what.

        Only a decorator of ours, and the import for it, are known without their comment. What a
        backport writes could be somebody's own correction; there the symbol differs, and says so.
        """
        found: dict[str, str] = {}
        for patch in self.patches:
            for symbol, edit in patch.edits():
                for module in table.modules_of(symbol):
                    with contextlib.suppress(Misfit):
                        if self.text(module) is not None and self._is_left(
                            patch, symbol, edit, module
                        ):
                            found[patch.name] = (
                                f"half applied: {self.name(module)} has what {patch.name} wrote, "
                                f"without the comments `{marker(patch.name)}` above it; put the "
                                "file back (git checkout, or SGLang installed again), or take "
                                "decorators and import out by hand"
                            )
        return found

    def _is_left(self, patch: Patch, symbol: str, edit: Edit, module: str) -> bool:
        if isinstance(edit, Decorate):
            pairs = self._symbols(module, self.base(module))
            return any(edit.is_at(node) for name, node in pairs if name == symbol)
        return (
            isinstance(edit, AddImport)
            and patch.name in self.present()
            and bool(self._symbols(module, self.base(module)))  # it can be read
            and edit.is_in(self.base(module))
        )

    def _marks(self, module: str) -> frozenset[str]:
        text = self.text(module)
        return marked(text) if text is not None else frozenset()

    def changes(self, names: Collection[str]) -> dict[Path, Change]:
        """What to write so that the tree carries exactly the patches named."""
        concerned = [p for p in self.patches if p.name in names or p.name in self.present()]
        found = {}
        try:
            for module in self.modules(concerned):
                raw = self._raw(module)
                assert raw is not None
                change = Change(raw.encode(), self.content(module, names))
                if change.before != change.after:
                    found[self.layout.file_of(module)] = change
        except Misfit as misfit:
            raise ConfigError(str(misfit)) from None
        return found


def choose(
    tree: Tree, only: Collection[str], without: Collection[str], *, force_unknown: bool
) -> list[Patch]:
    """The patches that ``apply`` is to add. Raises ConfigError where one does not fit."""
    catalogue.named([*only, *without])
    recognition = tree.recognition
    if recognition.is_unknown_release and not force_unknown:
        raise ConfigError(
            f"SGLang {recognition.says} is not a release that these patches were made for; see "
            "`hicache-guard patch check`, then use --force-unknown"
        )
    verdicts = [
        verdict
        for verdict in tree.survey()
        if (not only or verdict.patch.is_named(only)) and not verdict.patch.is_named(without)
    ]
    _refuse_other_members(tree, only)
    for verdict in verdicts:
        if verdict.state is State.MISFIT:
            raise ConfigError(
                f"{verdict.patch.name} does not fit: {verdict.why}; nothing was changed "
                f"({_way_out(tree, verdicts)})"
            )
    return [verdict.patch for verdict in verdicts if verdict.state is State.APPLIES]


def _refuse_other_members(tree: Tree, only: Collection[str]) -> None:
    """Of a family one patch is for this tree; to name another by itself would do nothing."""
    for patch in tree.patches:
        if patch.name in only and patch.family and patch.family not in only:
            (here,) = (v.patch.name for v in tree.survey() if v.patch.family == patch.family)
            if here != patch.name and here not in only:
                raise ConfigError(
                    f"{patch.name} is not for this release, {here} is; "
                    f"`--only {patch.family}` finds the one that fits"
                )


def _way_out(tree: Tree, verdicts: Collection[Verdict]) -> str:
    """What helps where some of these do not fit: to leave them out, if the others then go in."""
    misfits = [verdict.patch.name for verdict in verdicts if verdict.state is State.MISFIT]
    others = {verdict.patch.name for verdict in verdicts if verdict.state is State.APPLIES}
    if others:
        with contextlib.suppress(ConfigError):
            tree.changes({*tree.present(), *others})
            them = "it" if len(misfits) == 1 else f"the {len(misfits)} that do not fit"
            return f"--without {','.join(misfits)} leaves {them} out"
    return f"`hicache-guard patch check {tree.layout.root}` shows what differs"

"""What the command line does to a tree: open it, apply, reverse, export."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from hicache_guard.core.errors import ConfigError
from hicache_guard.patches import git, layout, transaction
from hicache_guard.patches.edits import marked
from hicache_guard.patches.patch import Patch
from hicache_guard.patches.plan import State, Tree
from hicache_guard.patches.transaction import Change


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Tree, str]]:
    """A tree that is whole and that only we work on, and what was done to make it so."""
    found = layout.find(path)
    with transaction.locked(found.root):
        yield Tree(found), transaction.recover(found.root)


def apply(tree: Tree, patches: Sequence[Patch], *, commit: bool = False) -> Mapping[Path, Change]:
    """Add the patches to those that are there; returns what was written.

    The tree may be all of a git work tree, or a folder in one. What git does not track, as a
    site-packages folder that a project ignores, has no uncommitted changes and cannot be committed.
    """
    root = tree.layout.root
    changes = tree.changes({*tree.present(), *(patch.name for patch in patches)})
    names = {file: tree.layout.name(file) for file in changes}
    if not commit:
        _refuse_dirty(root, changes, names)
        transaction.write(root, changes)
        return changes
    top = git.top_of(root)
    if top is None:
        raise ConfigError(f"{root} is not a git checkout; apply without --commit")
    strangers = git.untracked(root, names.values())
    if strangers:
        raise ConfigError(f"{root / strangers[0]} is not in git ({top}); apply without --commit")
    unclean = git.dirty(root)
    if unclean:
        raise ConfigError(
            f"{unclean[0]} has uncommitted changes; commit or stash them before --commit"
        )
    if changes:
        git.refuse_locked(top)
        before = git.head(top)
        way_down = "".join(f"{step}/" for step in root.relative_to(top).parts)
        after = git.commits(top, before, steps(tree, patches, tree.present(), way_down))
        move = git.MoveHead(root, before, after, tuple(names.values()))
        transaction.write(root, changes, move)
    return changes


def _refuse_dirty(root: Path, changes: Mapping[Path, Change], names: Mapping[Path, str]) -> None:
    """Uncommitted work of the user's is not mixed with ours; our own is what may be there."""
    plain = [names[file] for file, change in changes.items() if not marked(change.before.decode())]
    if plain and git.top_of(root):
        unclean = git.dirty(root, *plain)
        if unclean:
            raise ConfigError(f"{unclean[0]} has uncommitted changes; commit or stash them first")


def steps(
    tree: Tree, patches: Sequence[Patch], carried: Collection[str] = (), prefix: str = ""
) -> list[git.Step]:
    """One commit a patch, on top of the patches that are ``carried`` already."""
    found = []
    for patch in patches:
        carried = {*carried, patch.name}
        files = {
            prefix + tree.name(module): tree.content(module, carried)
            for module in tree.modules([patch])
        }
        found.append(git.Step(patch.message(), files))
    return found


def reverse(tree: Tree, patches: Sequence[Patch]) -> Mapping[Path, Change]:
    """Take the patches out and leave the others; returns what was written.

    Raises ConfigError where the tree would keep something of theirs that has lost its comment.
    """
    for patch in patches:
        if patch.name in tree.unmarked:
            raise ConfigError(f"{patch.name} is {tree.unmarked[patch.name]}; nothing was changed")
    kept = tree.present() - {patch.name for patch in patches}
    changes = tree.changes(kept)
    transaction.write(tree.layout.root, changes)
    return changes


def exportable(tree: Tree, only: Sequence[str], without: Sequence[str]) -> list[Patch]:
    """The patches that fit this tree, in it or not."""
    verdicts = [
        verdict
        for verdict in tree.survey()
        if (not only or verdict.patch.is_named(only)) and not verdict.patch.is_named(without)
    ]
    for verdict in verdicts:
        if verdict.state is State.MISFIT:
            raise ConfigError(f"{verdict.patch.name} does not fit: {verdict.why}")
    return [v.patch for v in verdicts if v.state in (State.APPLIES, State.APPLIED)]


def export(tree: Tree, patches: Sequence[Patch], folder: Path) -> list[str]:
    """Write a file a patch for ``git am`` on a clean checkout; returns their names.

    The folder comes into being whole: it must not exist, or be empty.
    """
    prefix = "" if tree.layout.kind == "checkout" else "python/"
    base = {
        prefix + tree.name(module): tree.content(module, ()) for module in tree.modules(patches)
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".hicache-guard-", dir=folder.parent) as scratch:
            place = Path(scratch) / "patches"
            place.mkdir()
            files = git.mails(base, steps(tree, patches, prefix=prefix), place) if patches else []
            os.replace(place, folder)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; name a folder that is new or empty"
        ) from None
    return [file.name for file in files]


def diff(tree: Tree, changes: Mapping[Path, Change]) -> str:
    """The changes as a unified diff."""
    return "".join(
        _unified(change, tree.layout.name(file)) for file, change in sorted(changes.items())
    )


def _unified(change: Change, name: str) -> str:
    before, after = (
        # not splitlines, which also breaks at a form feed
        re.findall(r"[^\n]*\n|[^\n]+", text.decode())
        for text in (change.before, change.after)
    )
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )

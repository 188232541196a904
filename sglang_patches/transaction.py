"""All or nothing: many files are replaced together, whatever happens on the way.

Everything is written and synced below ``.hicache-guard`` first, old contents and new, then a
manifest; only then are files renamed into place, one after the other. Whoever comes next and finds
a manifest puts the old contents back, unless every file had been replaced. So the moment in which
the tree is neither before nor after is that between the first rename and the last, and a kill in it
is repaired by the next command. The lock is the system's own, on the root folder: it goes with its
process and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_guard.core.errors import ConfigError
from hicache_guard.patches.git import MoveHead
from hicache_guard.patches.layout import refuse_links

STATE = ".hicache-guard"


@dataclass(frozen=True)
class Change:
    """A file's contents before and after."""

    before: bytes
    after: bytes


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other processes of ours away from a tree. Raises ConfigError where one is at work."""
    try:
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot open {root}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is patching {root}; try again when it is done"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot lock {root}: {error.strerror}") from None
        yield
    finally:
        os.close(handle)


def recover(root: Path) -> str:
    """Settle what an interrupted ``write`` left; says what was done, "" for nothing to do."""
    state = root / STATE
    manifest = state / "manifest"
    refuse_links(root, manifest)
    if not manifest.exists():
        with _explained(root):
            _clear(state)  # nothing had been replaced yet
        return ""
    with _explained(root):
        kept = _load(manifest)
    for name in kept["files"]:
        refuse_links(root, root / name)
    with _explained(root):
        hashes = {name: _hash(_read(root / name)) for name in kept["files"]}
    for name, entry in kept["files"].items():
        if hashes[name] not in (entry["before"], entry["after"]):
            raise ConfigError(
                f"an interrupted run left {root} half-way, and {name} was changed since; put back "
                f"{state / entry['old']} in its place, or delete {state} to keep all as it is"
            )
    commit = kept["commit"] and MoveHead(
        root, kept["commit"]["before"], kept["commit"]["after"], tuple(kept["files"])
    )
    replaced = all(hashes[name] == entry["after"] for name, entry in kept["files"].items())
    with _explained(root):
        if commit.is_done() if commit else replaced:
            if commit:
                commit.finish()
            _clear(state)
            return "an interrupted run was completed"
        _roll_back(root, state, kept["files"])
    return "an interrupted run was rolled back"


def _load(manifest: Path) -> dict[str, Any]:
    """A manifest as we write it; ValueError otherwise, for it may have come with the tree."""
    kept: dict[str, Any] = json.loads(manifest.read_bytes())
    try:
        entries = kept["files"].values()
        names = [entry[kind] for entry in entries for kind in ("old", "new")]
        hashes = [entry[kind] for entry in entries for kind in ("before", "after")]
        if kept["commit"]:  # both go to git's command line
            hashes += [kept["commit"]["before"], kept["commit"]["after"]]
        is_ours = all(re.fullmatch(r"\d+\.(old|new)", name) for name in names) and all(
            re.fullmatch(r"[0-9a-f]{40,64}", each) for each in hashes
        )
    except (AttributeError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError("not a manifest of ours")
    return kept


def write(root: Path, changes: Mapping[Path, Change], commit: MoveHead | None = None) -> None:
    """Make all the changes, or none. Raises ConfigError, with the tree as before, where one fails.

    With ``commit``, they count once HEAD has moved. The caller holds the lock and has called
    ``recover``.
    """
    if not changes:
        return
    state = root / STATE
    manifest = state / "manifest"
    files: dict[str, dict[str, str]] = {}
    try:
        with _explained(root):
            state.mkdir(exist_ok=True)
            # Git then does not see the folder, itself included.
            (state / ".gitignore").write_text("*\n")
            for number, (file, change) in enumerate(sorted(changes.items())):
                _check(root, file, change)
                names = {"old": f"{number}.old", "new": f"{number}.new"}
                _stage(state / names["old"], change.before, file)
                _stage(state / names["new"], change.after, file)
                files[file.relative_to(root).as_posix()] = {
                    **names, "before": _hash(change.before), "after": _hash(change.after)
                }  # fmt: skip
            move = commit and {"before": commit.before, "after": commit.after}
            record = {"files": files, "commit": move}
            _put(state / "draft", json.dumps(record).encode())
            os.replace(state / "draft", manifest)
            _sync(state)
            _sync(root)
            for file, change in sorted(changes.items()):
                _check(root, file, change)
                os.replace(state / files[file.relative_to(root).as_posix()]["new"], file)
                _sync(file.parent)
            if commit:
                commit.move()
                commit.finish()
    except BaseException:
        with _explained(root):
            if not (commit and commit.is_done()):
                _roll_back(root, state, files)
        raise
    with _explained(root):
        _clear(state)


def _roll_back(root: Path, state: Path, files: Mapping[str, Mapping[str, str]]) -> None:
    """Put back each file that was replaced, and no other."""
    for name, entry in files.items():
        file, old = root / name, state / entry["old"]
        if old.exists() and _hash(_read(file)) == entry["after"]:
            os.replace(old, file)
            _sync(file.parent)
    _clear(state)


def _clear(state: Path) -> None:
    """Forget the transaction: first the manifest, which says that there is one."""
    if not state.is_dir():
        return
    (state / "manifest").unlink(missing_ok=True)
    _sync(state)
    for place in (
        *state.glob("*.old"),
        *state.glob("*.new"),
        state / "draft",
        state / ".gitignore",
    ):
        place.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # what is not ours stays
        state.rmdir()


def _check(root: Path, file: Path, change: Change) -> None:
    refuse_links(root, file)
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{file} is not a file")
    if not status.st_mode & stat.S_IWUSR or not os.access(file, os.W_OK):
        raise ConfigError(f"{file} is read-only; nothing was changed")
    if file.read_bytes() != change.before:
        raise ConfigError(f"{file} was changed while it was being patched; run again")


def _stage(place: Path, content: bytes, like: Path) -> None:
    """Write a file that can take the place of ``like``: same mode, same owner."""
    _put(place, content)
    status = like.stat()
    mine = place.stat()
    if (mine.st_uid, mine.st_gid) != (status.st_uid, status.st_gid):
        os.chown(place, status.st_uid, status.st_gid)
    os.chmod(place, stat.S_IMODE(status.st_mode))


def _put(place: Path, content: bytes) -> None:
    with place.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return b"\0 not a file"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Say in one line what the system refused."""
    try:
        yield
    except OSError as error:
        where = error.filename or root
        raise ConfigError(f"cannot write {where}: {error.strerror}; nothing was changed") from None
    except ValueError as error:
        raise ConfigError(f"{root / STATE} is damaged ({error}); delete it") from None

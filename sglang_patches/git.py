"""What is asked of git: which files are dirty, commits beside the tree, files for ``git am``."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hicache_guard.core.errors import ConfigError

#: Would turn git to another repository than the one that its folder names.
_ELSEWHERE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
#: For a scratch repository: nobody's settings, and the same bytes each time.
ALONE = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "hicache-guard",
    "GIT_AUTHOR_EMAIL": "hicache-guard@localhost",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "hicache-guard",
    "GIT_COMMITTER_EMAIL": "hicache-guard@localhost",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
}


@dataclass(frozen=True)
class Step:
    """One commit to be: its message, and whole new contents of files by their names."""

    message: str
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class MoveHead:
    """Makes prepared commits count: HEAD goes from ``before`` to ``after``.

    Until it has, nothing of the tree is final. ``root`` is somewhere in the work tree, and
    ``files`` are named from there.
    """

    root: Path
    before: str
    after: str
    files: tuple[str, ...]

    def move(self) -> None:
        reason = "hicache-guard patch apply --commit"
        run(self.root, "update-ref", "-m", reason, "HEAD", self.after, self.before)

    def is_done(self) -> bool:
        return head(self.root) == self.after

    def finish(self) -> None:
        """Bring the index to the new HEAD; safe to repeat."""
        run(self.root, "reset", "--quiet", "--", *self.files)


def run(
    root: Path, *arguments: str, content: bytes = b"", environment: Mapping[str, str] | None = None
) -> bytes:
    """Git's output. Raises ConfigError with the last line of its complaint."""
    try:
        done = _started(root, arguments, content, environment)
    except FileNotFoundError:
        raise ConfigError("git is needed for this and is not installed") from None
    if done.returncode:
        raise _failure(root, arguments, done)
    return done.stdout


def _started(
    root: Path,
    arguments: Sequence[str],
    content: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    kept = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    return subprocess.run(
        ["git", "-C", str(root), *arguments],
        input=content,
        capture_output=True,
        env={**kept, "LC_ALL": "C", **(environment or {})},
    )


def _failure(
    root: Path, arguments: Sequence[str], done: subprocess.CompletedProcess[bytes]
) -> ConfigError:
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
    return ConfigError(f"git {arguments[0]} failed in {root}: {lines[-1]}")


def top_of(root: Path) -> Path | None:
    """The top of the work tree that ``root`` lies in, be it further up; None where there is none.

    That says nothing about what is in the repository: a site-packages folder can lie in somebody's
    project that ignores it. ``dirty`` and ``commits`` look at tracked files only. Raises
    ConfigError where git cannot say.
    """
    question = ("rev-parse", "--is-inside-work-tree", "--show-toplevel")
    try:
        done = _started(root, question)
    except FileNotFoundError:
        if (root / ".git").exists():
            raise ConfigError("git is needed for this and is not installed") from None
        return None
    if done.returncode:
        if b"not a git repository" in done.stderr or done.stdout.startswith(b"false"):
            return None
        raise _failure(root, question, done)
    inside, _, top = os.fsdecode(done.stdout).removesuffix("\n").partition("\n")
    return Path(top) if inside == "true" else None


def refuse_locked(root: Path) -> None:
    """Raise ConfigError where git's index is locked: a commit could not be finished."""
    lock = root / os.fsdecode(run(root, "rev-parse", "--git-path", "index.lock").strip())
    if lock.exists():
        raise ConfigError(
            f"{lock} is there: another git is at work, or one was killed and the file may go"
        )


def head(root: Path) -> str:
    return run(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").decode().strip()


def dirty(root: Path, *files: str) -> list[str]:
    """Tracked files that differ from HEAD, of ``files`` below ``root``, else of the whole tree.

    They are called by their names from the top of the work tree.
    """
    listed = run(
        root, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=no", "--", *files
    )
    return [entry[3:] for entry in listed.decode(errors="surrogateescape").split("\0") if entry]


def untracked(root: Path, files: Iterable[str]) -> list[str]:
    """Those of ``files``, named from ``root``, that are in no commit to be made."""
    names = list(files)
    listed = run(root, "ls-files", "-z", "--", *names) if names else b""  # no names would mean all
    tracked = set(listed.decode(errors="surrogateescape").split("\0"))
    return [name for name in names if name not in tracked]


def commits(
    root: Path, parent: str, steps: Sequence[Step], environment: Mapping[str, str] | None = None
) -> str:
    """Commits on top of ``parent``, one a step; neither the tree nor the index nor HEAD moves."""
    with tempfile.TemporaryDirectory() as scratch:
        # The index of nobody: what is staged by the user is neither seen nor changed.
        aside = {**(environment or {}), "GIT_INDEX_FILE": str(Path(scratch) / "index")}
        run(root, "read-tree", parent, environment=aside)
        for step in steps:
            for name, content in step.files.items():
                blob = run(
                    root, "hash-object", "-w", "--stdin", "--path", name,
                    content=content, environment=aside,
                ).decode().strip()  # fmt: skip
                mode = run(root, "ls-files", "--stage", "--", name, environment=aside).split()
                if not mode:
                    raise ConfigError(f"{name} is not in git; it cannot be committed")
                entry = f"{mode[0].decode()},{blob},{name}"
                run(root, "update-index", "--cacheinfo", entry, environment=aside)
            tree = run(root, "write-tree", environment=aside).decode().strip()
            parent = (
                run(
                    root, "commit-tree", tree, "-p", parent,
                    content=step.message.encode(), environment=aside,
                )
                .decode()
                .strip()
            )  # fmt: skip
    return parent


def mails(base: Mapping[str, bytes], steps: Sequence[Step], folder: Path) -> list[Path]:
    """Write into an empty ``folder`` one file a step that ``git am`` takes where ``base`` is."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for name, content in base.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        run(root, "init", "--quiet", environment=ALONE)
        run(root, "add", "--force", ".", environment=ALONE)
        run(root, "commit", "--quiet", "-m", "base", environment=ALONE)
        start = head(root)
        tip = commits(root, start, steps, ALONE)
        run(
            root, "format-patch", "--quiet", "--no-signature", "--zero-commit", "--full-index",
            "-o", str(folder), f"{start}..{tip}", environment=ALONE,
        )  # fmt: skip
    return sorted(folder.glob("*.patch"))

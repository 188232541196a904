"""Trees for the tests of patches: of a fetched release, only the files that patches look at."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from programs import fetched

from hicache_guard.patches import table


def small_tree(version: str, place: Path, package: str = "sglang") -> Path:
    """A copy of a release with only the files in question; skips where it is not fetched."""
    source = fetched(version) / "sglang"
    (place / package / "srt").mkdir(parents=True)
    for module in ("sglang.version", "sglang._version", *table.MODULES):
        name = "/".join(module.split(".")[1:]) + ".py"
        if (source / name).is_file():
            copy = place / package / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((source / name).read_bytes())
    return place


def checkout(version: str, place: Path) -> Path:
    """The same as a git checkout: no version is written down, everything is committed."""
    small_tree(version, place, "python/sglang")
    (place / "python" / "sglang" / "_version.py").unlink()
    make_repository(place)
    return place


def make_repository(place: Path) -> None:
    """A repository of a user's at ``place``, with all that is there in its first commit."""
    git(place, "init", "--quiet", "--initial-branch=main")
    git(place, "config", "user.name", "A User")
    git(place, "config", "user.email", "user@example.org")
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", "base")


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull},
    )
    return done.stdout


def snapshot(root: Path) -> dict[str, tuple[str, int]]:
    """Name to content and mode of everything below ``root``, git's own folder left out."""
    return {
        path.relative_to(root).as_posix(): (
            "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mode,
        )
        for path in sorted(root.rglob("*"))
        if ".git" not in path.relative_to(root).parts
    }

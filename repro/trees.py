"""Where a release comes from when the catalogue is run on it, and how the hooks get into it.

``install`` and ``plugin`` run the release as it was fetched. ``patch`` applies the guard patches to
a copy. ``git-am`` makes a clean git checkout of it, without the version that a build writes down,
and lets git apply the patches exported from there. The backports stay out: the matrix is about the
faults that they end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache_guard import checkouts
from hicache_guard.patches import git, plan, work

ROUTES = ("install", "plugin", "patch", "git-am")


@contextmanager
def tree(release: str, route: str) -> Iterator[Path]:
    """The folder that goes on the path. Raises ConfigError where the release is not here."""
    source = checkouts.require(release)
    if route in ("install", "plugin"):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix=f"hicache-guard-{release}-") as scratch:
        root = Path(scratch).resolve()
        if route == "patch":
            _copy(source, root)
            with work.opened(root) as (opened, _):
                work.apply(opened, plan.choose(opened, ["guards"], [], force_unknown=False))
            yield root
        else:
            checkout = root / "checkout"
            _copy(source, checkout / "python")
            _by_mail(checkout, root / "patches")
            yield checkout / "python"


def _copy(source: Path, place: Path) -> None:
    shutil.copytree(source / "sglang", place / "sglang")


def _by_mail(checkout: Path, patches: Path) -> None:
    """Commit a checkout as it is, export the guard patches from it, and have git apply them."""
    (checkout / "python" / "sglang" / "_version.py").unlink(missing_ok=True)
    git.run(checkout, "init", "--quiet", environment=git.ALONE)
    git.run(checkout, "-c", "core.compression=0", "add", "--all", environment=git.ALONE)
    git.run(checkout, "commit", "--quiet", "-m", "as released", environment=git.ALONE)
    with work.opened(checkout) as (opened, _):
        names = work.export(opened, work.exportable(opened, ["guards"], []), patches)
    mails = [str(patches / name) for name in names]
    git.run(checkout, "am", "--quiet", *mails, environment=git.ALONE)

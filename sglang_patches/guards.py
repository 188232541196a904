"""The hooks of the adapters as visible edits of a checkout, so that no plugin need be loaded.

Each class, or function, that the table of releases names as a seam is decorated; the decorator puts
the hooks of that table in place. There is one patch for each row of the table. It fits where every
method that it hooks is as in a release of its row, and it writes down which row that is, since a
git checkout does not know its version when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache_guard.adapters.releases import MADE, STAND_INS, Release, rows
from hicache_guard.patches import table
from hicache_guard.patches.edits import AddImport, Decorate
from hicache_guard.patches.patch import Patch, Target

_IMPORT = AddImport("from hicache_guard.adapters.patched import guarded")


def _guard(row: Sequence[Release]) -> Patch:
    """The patch for the releases of one row, whose seams are the same."""
    first = row[0]
    versions = tuple(release.version for release in row)
    decorate = Decorate(f'guarded("{first.version}")')
    return Patch(
        name=f"guards-{first.version}",
        kind="guard",
        reports=(),
        summary="Hook the seams of hicache-guard",
        reason=(
            "The classes that hand out, map and read KV pages get hooks that keep an independent\n"
            "record of who owns each page. HICACHE_GUARD chooses what they do: off (nothing, the\n"
            "classes are as without this patch), observe, enforce or strict."
        ),
        targets=tuple(
            Target(symbol, (_IMPORT, decorate))
            for symbol in dict.fromkeys(
                f"class {name}" if seam.cls else name for seam in first.seams for name in seam.names
            )
        ),
        affects=versions,
        clear=tuple(version for version in table.releases() if version not in versions),
        needs=tuple(
            seam.symbol(method)
            for seam in first.seams
            for method in seam.methods
            if method not in STAND_INS and seam.symbol(method) not in MADE
        ),
        family="guards",
    )


GUARDS: tuple[Patch, ...] = tuple(_guard(row) for row in rows())

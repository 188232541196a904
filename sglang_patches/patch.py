"""What a patch is: a name, a reason, the symbols that it edits, and what must be true there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from hicache_guard.patches.edits import AddImport, Edit


@dataclass(frozen=True)
class Target:
    """Edits of one symbol; ``fingerprint``'s module says how symbols are spelled."""

    symbol: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Patch:
    """A guard, or a backport of the correction of a known fault.

    ``affects`` are the releases whose code has the fault: the patch is made where the symbols that
    it edits, and the ``needs`` that it builds on, are as in one of them. ``clear`` are the releases
    that were read and need nothing. A release in neither has not been looked at. Of the patches of
    one ``family`` a tree can carry one, that for its release; people may name the family instead.
    ``fault`` is what goes wrong without a backport, and ``cases`` name what shows it: rows of the
    fault catalogue, or functions of ``tests/backport_faults.py``.
    """

    name: str
    kind: Literal["guard", "backport"]
    reports: tuple[int, ...]
    summary: str
    reason: str
    targets: tuple[Target, ...]
    affects: tuple[str, ...]
    clear: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    family: str = ""
    fault: str = ""
    cases: tuple[str, ...] = ()

    def is_named(self, names: Collection[str]) -> bool:
        return self.name in names or (bool(self.family) and self.family in names)

    @property
    def anchors(self) -> tuple[str, ...]:
        """Every symbol that must be as it was when the patch was written."""
        return tuple(dict.fromkeys((*(target.symbol for target in self.targets), *self.needs)))

    def edits(self) -> Iterator[tuple[str, Edit]]:
        """Each symbol to edit with its edit, imports first."""
        pairs = [(target.symbol, edit) for target in self.targets for edit in target.edits]
        yield from sorted(pairs, key=lambda pair: not isinstance(pair[1], AddImport))

    def message(self) -> str:
        """The commit message: what, which report, why."""
        reports = ", ".join(f"#{number}" for number in self.reports)
        title = f"{self.summary} ({reports})" if reports else self.summary
        return f"{title}\n\n{self.reason}\n\nApplied-by: hicache-guard patch {self.name}\n"

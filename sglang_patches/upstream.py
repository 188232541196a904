"""The table of ``docs/upstream-issues.md``: what each report is about and what we do about it."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_guard.patches import table as releases
from hicache_guard.patches.patch import Patch

_HEAD = "| report | what goes wrong | patch | releases affected | shown by | can be dropped |"


def table(patches: Sequence[Patch]) -> str:
    """One row a report of a backport, in Markdown."""
    rows = [_HEAD, "|" + "---|" * _HEAD.count(" | ") + "---|"]
    for patch in patches:
        if patch.kind == "backport":
            shown = ", ".join(f"`{case}`" for case in patch.cases)
            rest = (
                f"{patch.fault} | `{patch.name}` | {_releases(patch)} | {shown} | {_end(patch)} |"
            )
            rows += [f"| {report} | {rest}" for report in _reports(patch)]
    return "\n".join(rows)


def _reports(patch: Patch) -> list[str]:
    url = "https://github.com/sgl-project/sglang/issues"
    return [f"[#{number}]({url}/{number})" for number in patch.reports] or ["none known"]


def _releases(patch: Patch) -> str:
    """The releases as ranges of those that there are."""
    known = list(releases.releases())
    runs: list[list[str]] = []
    for version in sorted(patch.affects, key=known.index):
        if runs and known.index(version) == known.index(runs[-1][-1]) + 1:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def _end(patch: Patch) -> str:
    known = list(releases.releases())
    after = known[max(map(known.index, patch.affects)) + 1 :]
    return f"from {after[0]}" if after else f"open in {known[-1]}, the newest"

"""Each backport on the releases that it is for: the fault is there without it and gone with it.

No guard is installed for that; the audit of ``repro/audit.py`` judges. What a release did rightly
it still does, unguarded and under the guard in strict, with all its patches in. Mutations seen to
fail here: each patch left out.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import fetched

from hicache_guard import checkouts
from hicache_guard.patches import catalogue, layout, plan, table, upstream, work
from hicache_guard.patches.backports import BACKPORTS
from hicache_guard.patches.patch import Patch
from hicache_guard.patches.plan import State, Tree
from hicache_guard.repro.catalogue import UNGUARDED

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "upstream-issues.md"

#: Good outcomes: correct, and "the call is not in this release".
GOOD = ("ok", "-")

#: Rows of the catalogue that no patch can end, or whose seam is not the allocator: they stay.
LEFT = {"C5", "C8", "C11", "C14", "C14b", "C14c", "S1"}


def _of(version: str) -> list[Patch]:
    return [patch for patch in BACKPORTS if version in patch.affects]


def _run(tree: Path, script: str, *arguments: str) -> list[Any]:
    """The JSON lines that one of our scripts prints on a tree."""
    environment = checkouts.environment(tree)
    environment["PYTHONPATH"] += f":{HERE}"
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "{["]


def _outcomes(tree: Path, *cases: str) -> dict[str, str]:
    return {row["case"]: row["outcome"] for row in _run(tree, "backport_faults.py", *cases)}


@functools.cache
def _unpatched(version: str) -> dict[str, str]:
    return _outcomes(fetched(version))


@pytest.fixture(scope="module", params=table.releases())
def patched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A release and a copy of its whole tree that carries all its patches; gone afterwards."""
    version = str(request.param)
    place = tmp_path_factory.mktemp("trees") / version
    yield version, _copy(version, place)
    shutil.rmtree(place)


def _copy(version: str, place: Path, *names: str) -> Path:
    subprocess.run(["cp", "-r", f"{fetched(version)}/", str(place)], check=True)
    wanted = names or tuple(patch.name for patch in _of(version))
    with work.opened(place) as (tree, _):
        work.apply(tree, plan.choose(tree, wanted, [], force_unknown=False))
    states = {each.patch.name: each.state for each in Tree(layout.find(place)).survey()}
    assert {name for name, state in states.items() if state is State.APPLIED} == set(wanted)
    return place


@pytest.mark.slow
@pytest.mark.sglang
def test_faults_are_there_without_the_patches_and_gone_with_them(patched: tuple[str, Path]) -> None:
    """And what was right stays right, whatever it is."""
    version, tree = patched
    before, after = _unpatched(version), _outcomes(tree)
    for patch in _of(version):
        shown = [case for case in patch.cases if before[case] not in GOOD]
        assert shown, f"nothing shows what {patch.name} is for"
    ended = {case for patch in _of(version) for case in patch.cases}
    bad = {case for case, outcome in after.items() if outcome not in GOOD}
    assert not bad & ended
    assert bad <= {case for case, outcome in before.items() if outcome not in GOOD} & LEFT
    assert {case: before[case] for case in UNGUARDED} == {
        case: row[version] for case, row in UNGUARDED.items()
    }


@pytest.mark.sglang
@pytest.mark.parametrize("patch", BACKPORTS, ids=lambda patch: patch.name)
def test_a_patch_does_it_alone(patch: Patch, tmp_path: Path) -> None:
    # Of releases whose faults others look at, too: that takes half a minute a release.
    version = next((one for one in ("0.5.12", "0.5.18") if one in patch.affects), patch.affects[0])
    before = _unpatched(version)
    faulty = [case for case in patch.cases if before[case] not in GOOD]
    after = _outcomes(_copy(version, tmp_path / "tree", patch.name), *faulty)
    assert after == dict.fromkeys(faulty, "ok")


@pytest.mark.slow
@pytest.mark.sglang
def test_legal_sequences_on_the_patched_release(patched: tuple[str, Path]) -> None:
    """No alarm in any mode, the audit clean, observe bit for bit the patched release without it."""
    _, tree = patched
    rows = _run(tree, "legal_sequences.py")
    assert len(rows) == 11 * 2 * 3
    for name, page_size, mode, faults, counted, same, _ in rows:
        assert (faults, counted, same) == ([], {}, True), (name, page_size, mode)


@pytest.mark.slow
@pytest.mark.sglang
def test_long_legal_traffic_on_the_patched_release(patched: tuple[str, Path]) -> None:
    _, tree = patched
    rows = _run(tree, "long_legal.py", "--operations", "3000", "--modes", "off", "strict")
    assert [row["mode"] for row in rows] == ["off", "strict"]
    assert sum(row["operations"] for row in rows) >= 2_990  # shares are rounded down
    assert all(row["counted"] == {} for row in rows), rows


def test_every_backport_says_what_goes_wrong_and_what_shows_it() -> None:
    for patch in BACKPORTS:
        assert patch.fault, patch.name
        assert "\n" not in patch.fault
        assert patch.cases, patch.name


def test_no_catalogue_row_is_forgotten() -> None:
    """C13 is a control; C16, not the allocator's, is ended by functions of ours."""
    ended = {case for patch in BACKPORTS for case in patch.cases}
    assert ended.isdisjoint(LEFT)
    assert {*UNGUARDED} - ended - LEFT == {"C13"}


def test_the_document_is_up_to_date() -> None:
    """``hicache-guard patch list --markdown`` prints the table in docs/upstream-issues.md."""
    assert f"\n{upstream.table(catalogue.PATCHES)}\n" in DOCUMENT.read_text()

"""The whole catalogue on every release that is here, in every mode, against the known outcomes.

Each cell is a fault that the unguarded release was seen to have (independent scripts, before this
project), so a guard that does nothing fails here, and so does one that alarms where nothing is
wrong. What each single check contributes is shown in test_mutations.
"""

from __future__ import annotations

import pytest
from programs import in_ci

from hicache_guard import checkouts
from hicache_guard.adapters.releases import RELEASES
from hicache_guard.repro import matrix, trees
from hicache_guard.repro.catalogue import UNGUARDED
from hicache_guard.repro.titles import TITLES


@pytest.mark.sglang
@pytest.mark.parametrize("release", in_ci("0.5.12", "0.5.15", "0.5.23", of=checkouts.SUPPORTED))
def test_every_case_on(release: str) -> None:
    if not checkouts.is_fetched(release):
        pytest.skip(f"SGLang {release} is not fetched; run hicache-guard releases fetch {release}")
    cells = matrix.run([release])
    assert {cell.case for cell in cells} == set(UNGUARDED)
    assert all(set(cell.results) == set(matrix.MODES) for cell in cells)
    assert [f"{cell.case}: {problem}" for cell in cells for problem in cell.wrong()] == []


#: Cases with every outcome: faulty, correct, and a call that is not there.
SOME = {"0.5.12": ["C1", "C2", "C6", "C13"], "0.5.23": ["C1", "C2", "C6", "C13"]}


@pytest.mark.sglang
@pytest.mark.parametrize("release", in_ci("0.5.23", of=SOME))
def test_every_route_to_the_hooks_has_the_same_verdicts(release: str) -> None:
    """A worker refuses to judge hooks that came by another route, so none is taken for another.

    Mutation seen: applying no patch in ``trees.tree`` fails this.
    """
    if not checkouts.is_fetched(release):
        pytest.skip(f"SGLang {release} is not fetched; run hicache-guard releases fetch {release}")
    by_call = matrix.run([release], SOME[release])
    assert {cell.outcome("enforce") for cell in by_call} == {"ok", "-"}
    for route in trees.ROUTES[1:]:
        cells = matrix.run([release], SOME[release], route=route)
        assert [problem for cell in cells for problem in cell.wrong()] == []
        for one, other in zip(
            sorted(by_call, key=lambda cell: cell.case),
            sorted(cells, key=lambda cell: cell.case),
            strict=True,
        ):
            assert other.route == route
            assert one.differs(other) == [], (route, one.case)


def test_verdicts_that_differ_are_told() -> None:
    one, other = (matrix.Cell("C8", "0.5.12", results={"strict": {"count": n}}) for n in (1, 2))
    assert one.differs(one) == []
    assert one.differs(other) == ["strict"]
    assert one.differs(matrix.Cell("C8", "0.5.12")) == ["strict"]


def test_every_case_has_a_title_and_an_expectation_for_every_release() -> None:
    assert set(TITLES) == set(UNGUARDED)
    assert all(set(row) == set(checkouts.SUPPORTED) for row in UNGUARDED.values())
    assert tuple(RELEASES) == checkouts.SUPPORTED


def test_matrix_calls_a_cell_wrong() -> None:
    """The judge itself: each way of failing is seen (mutation of results instead of code)."""
    good = {"outcome": "S", "count": 0, "states": ["a"]}
    cell = matrix.Cell("C8", "0.5.12")
    cell.results = {
        "off": good,
        "observe": {**good, "count": 1},
        "enforce": {"outcome": "ok", "count": 1},
        "strict": {"outcome": "raised", "whole": True, "told": True, "count": 1},
    }
    assert cell.wrong() == []
    for mode, key, value, says in (
        ("off", "outcome", "ok", "known is S"),
        ("observe", "count", 0, "not detected"),
        ("observe", "states", ["b"], "differs"),
        ("enforce", "count", 0, "not counted"),
        ("enforce", "outcome", "S", "not contained"),
        ("strict", "outcome", "ok", "instead of an error"),
        ("strict", "whole", False, "state changed"),
        ("strict", "told", False, "did not report"),
    ):
        broken = matrix.Cell("C8", "0.5.12")
        broken.results = {name: dict(result) for name, result in cell.results.items()}
        broken.results[mode][key] = value
        assert any(says in problem for problem in broken.wrong()), (mode, key)
    quiet = matrix.Cell("C13", "0.5.12")
    quiet.results = {"enforce": {"outcome": "ok", "count": 1}}
    assert any("false alarm" in problem for problem in quiet.wrong())

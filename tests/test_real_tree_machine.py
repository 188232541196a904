"""Random prefix trees on real allocators, with faults behind them, against what each slot holds.

The machine is ``real/tree_machine.py``; ``python -P tests/real/tree_machine.py --mode enforce
--seed 1000000 --minimize`` with a release on the path goes on with new worlds.
"""

from __future__ import annotations

from typing import Any

import programs
import pytest

TREES = {
    "0.5.12": ("legacy", "unified"),
    "0.5.12.post1": ("legacy", "unified"),
    "0.5.15": ("legacy", "unified"),
    "0.5.18": ("legacy", "unified"),
    "0.5.23": ("unified", "unified-rust"),
}
#: Guarded steps a release, in enforce, with faults.
STEPS = 50_000
#: Steps within which the drive must come upon a pseudo-hit without the guard.
SOON = 400
#: Mutations by what the machine must find; the last needs a tree that moves window slots.
MUTANTS = {
    "proof skipped": "pseudo-hit",
    "stamps not compared": "pseudo-hit",
    "full pages not compared": "not reported",
    "one token too few": "pseudo-hit",
    "one token too few at once": "pseudo-hit",
    "one token too few found": "pseudo-hit",
    "insertions not checked": "not reported",
    "nothing vouched for": "lost hit",
    "renewals not seen": "lost hit",
}
#: The same of lives with a host tier. ``--mutant "all on a loaded path vouched for" --hosted 1
#: --mutant-steps 40000`` is one more, which takes thousands of steps on 0.5.23 and is not found by
#: then on 0.5.12.
HOST_MUTANTS = {
    "prints not asked": ("not reported",),
    "host pages handed out unseen": ("not reported",),
    "loads not vouched for": ("lost load",),
    # Whether the first of them that is loaded is right or wrong.
    "window copies not followed": ("lost load", "not reported"),
}
#: Steps with a host tier a release, in enforce, with faults; CI has time for more on two of them.
HOST_STEPS = {"0.5.12": 5000, "0.5.23": 5000}
FEWER_HOST_STEPS = 3000
#: Steps within which a load-back must bring foreign KV without the guard.
SOON_FOREIGN = 500
#: Releases whose trees never move window slots to full slots that they keep.
NEVER_RENEW = ("0.5.12", "0.5.12.post1")
#: "robbed": up to 0.5.21 the match after an insertion may stop short of it (#27770), and pages of a
#: running request are the tree's without a lock; and the entries of one may be re-pointed by hand.
TOLERATED: tuple[str, ...] = ("robbed",)
#: Seconds that one release may take.
LIMIT = 400


def rows_of(version: str, job: str) -> list[dict[str, Any]]:
    """The rows of one job; all of them are driven on a release in one process."""
    host = HOST_STEPS.get(version, FEWER_HOST_STEPS)
    options = (
        "--suite",
        "--steps",
        str(STEPS),
        "--host-steps",
        str(host),
        "--tolerate",
        *TOLERATED,
    )
    driven = programs.rows_of(
        version, "real/tree_machine.py", *options, limit=LIMIT, statuses=(0, 1)
    )
    rows = [row for row in driven if row["job"] == job]
    assert rows, f"no {job}"
    return rows


pytestmark = pytest.mark.sglang
#: Where CI has time for all of it; on the others for the drive alone.
WHOLE = "0.5.23"
on_each = pytest.mark.parametrize("version", programs.in_ci(WHOLE, of=TREES))
on_others = pytest.mark.parametrize(
    "version", programs.in_ci("0.5.12", "0.5.18", of=[other for other in TREES if other != WHOLE])
)


@on_each
def test_no_wrong_hit_and_none_lost(version: str) -> None:
    """Enforce, with faults: each match is the longest that is right."""
    _none_wrong(version, rows_of(version, "drive"))


@on_others
def test_no_wrong_hit_and_none_lost_on_others(version: str) -> None:
    options = ("--mode", "enforce", "--steps", str(STEPS), "--tolerate", *TOLERATED)
    _none_wrong(
        version,
        programs.rows_of(version, "real/tree_machine.py", *options, limit=LIMIT, statuses=(0, 1)),
    )


def _none_wrong(version: str, driven: list[dict[str, Any]]) -> None:
    rows = [row for row in driven if row["mode"] == "enforce"]
    assert {row["tree"] for row in rows} == set(TREES[version])
    for row in rows:
        assert not row["failure"], row["failure"]
    assert sum(row["steps"] for row in rows if not row["collected"]) >= STEPS
    # Not an empty run.
    for name in (
        "hit tokens", "clipped", "slid", "window freed behind", "full freed behind",
        "entry zeroed behind", "entry re-pointed behind", "entry re-pointed through the seam",
        "inserted without window", "inserted freed slots", "guarded operations", "reports",
    ):  # fmt: skip
        assert all(row["seen"].get(name) for row in rows), f"no {name}"


@on_each
def test_strict_refuses_what_is_wrong_and_nothing_else(version: str) -> None:
    rows = [row for row in rows_of(version, "drive") if row["mode"] == "strict"]
    assert {row["tree"] for row in rows} == set(TREES[version])
    for row in rows:
        assert not row["failure"], row["failure"]
        assert row["seen"]["refused"] >= 10


@on_each
def test_pseudo_hits_without_the_guard(version: str) -> None:
    rows = [row for row in rows_of(version, "drive") if row["mode"] == "off"]
    assert {row["tree"] for row in rows} == set(TREES[version])
    for row in rows:
        assert 0 < row["first pseudo-hit"] <= SOON, row


@on_each
def test_as_without_the_guard(version: str) -> None:
    """Observe bit for bit, with faults, too; every mode where there are none, and no report."""
    rows = rows_of(version, "compare")
    assert {(row["mode"], row["faults"]) for row in rows} == {
        ("observe", False), ("observe", True), ("enforce", False), ("strict", False),
    }  # fmt: skip
    for row in rows:
        assert not row["failure"], row["failure"]
        assert row["faults"] == bool(row["seen"]["reports"])


@on_each
def test_short_examples(version: str) -> None:
    """Hypothesis, which shrinks a failure."""
    for row in rows_of(version, "shrink"):
        assert not row["failure"], row["failure"]
        assert row["seen"]["worlds"] >= 10


@on_each
def test_each_mutation_is_found(version: str) -> None:
    rows = {row["mutant"]: row for row in rows_of(version, "mutant")}
    here = set(MUTANTS) - ({"renewals not seen"} if version in NEVER_RENEW else set())
    assert set(rows) == here
    for name, row in rows.items():
        assert row["kind"] == MUTANTS[name], f"{name}: {row['kind']} {row['failure']}"


@on_each
def test_no_foreign_load_and_none_lost(version: str) -> None:
    """Enforce, with faults, with a host tier: all that is loaded is right, and what is right is."""
    rows = [row for row in rows_of(version, "host drive") if row["mode"] == "enforce"]
    assert {row["tree"] for row in rows} == set(TREES[version]) - {"legacy"}
    for row in rows:
        assert not row["failure"], row["failure"]
        # Not an empty run.
        for name in (
            "load-backs compared", "refused load-backs", "backed up", "retracted",
            "given up before the load", "aborted before the load", "host page handed on, full",
            "host page handed on, window", "tombstone freed behind",
            "entry of any page re-pointed behind", "with write_through", "with write_back",
            "with write_through_selective",
        ):  # fmt: skip
            assert row["seen"].get(name), f"no {name}"


@on_each
def test_strict_refuses_load_backs_that_are_wrong_and_nothing_else(version: str) -> None:
    rows = [row for row in rows_of(version, "host drive") if row["mode"] == "strict"]
    assert rows
    for row in rows:
        assert not row["failure"], row["failure"]
        assert row["seen"]["raised"] >= 5


@on_each
def test_foreign_loads_without_the_guard(version: str) -> None:
    rows = [row for row in rows_of(version, "host drive") if row["mode"] == "off"]
    assert rows
    for row in rows:
        assert 0 < row["first foreign load"] <= SOON_FOREIGN, row


@on_each
def test_host_tier_as_without_the_guard(version: str) -> None:
    rows = rows_of(version, "host compare")
    assert {(row["mode"], row["faults"]) for row in rows} == {
        ("observe", False), ("observe", True), ("enforce", False), ("strict", False),
    }  # fmt: skip
    for row in rows:
        assert not row["failure"], row["failure"]
        assert row["faults"] == bool(row["seen"]["reports"])
        assert row["seen"]["load-backs asked" if row["faults"] else "load-backs compared"]


@on_each
def test_short_examples_with_a_host_tier(version: str) -> None:
    for row in rows_of(version, "host shrink"):
        assert not row["failure"], row["failure"]
        assert row["seen"]["load-backs asked"]


@on_each
def test_each_mutation_of_the_host_tier_is_found(version: str) -> None:
    rows = {row["mutant"]: row for row in rows_of(version, "host mutant")}
    assert set(rows) == set(HOST_MUTANTS)
    for name, row in rows.items():
        assert row["kind"] in HOST_MUTANTS[name], f"{name}: {row['kind']} {row['failure']}"

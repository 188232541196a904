"""The programs that explain a report: that they judge rightly, and what their shortcuts are worth.

A program is run once on a release with ``--json``, in a process of its own that imports SGLang; run
as a script in such a process, this file compares the programs with what they stand in for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hicache_guard import checkouts
from hicache_guard.repro import churn_25805, repro_25805, repro_25889
from hicache_guard.repro.audit import audit
from hicache_guard.repro.matrix import MODES

#: Run to (program, arguments). Few requests: the whole churn is for the command line.
RUNS: dict[str, tuple[str, list[str]]] = {
    "25805": ("repro_25805", []),
    "churn": ("churn_25805", ["--requests", "240"]),
    "churn of large pages": ("churn_25805", ["--requests", "90", "--page", "64", "--seed", "1"]),
    "short churn": ("churn_25805", ["--requests", "80"]),
    "25889": ("repro_25889", []),
}

#: Release to what is run on it, all in one process: importing SGLang is what takes the time.
ON = {
    "0.5.12": ("25805", "churn", "churn of large pages", "25889", "left by A", "slots"),
    "0.5.12.post1": ("25805", "short churn", "25889", "slots"),
    "0.5.23": ("25805", "short churn", "25889"),
}


def _python(release: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if not checkouts.is_fetched(release):
        pytest.skip(f"SGLang {release} is not fetched; run hicache-guard releases fetch {release}")
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=checkouts.environment(checkouts.require(release)),
        capture_output=True,
        text=True,
        timeout=300,
    )


@functools.cache
def _ran(release: str) -> dict[str, Any]:
    """What every program said on a release, and what the comparisons found there."""
    done = _python(release, __file__, *ON[release])
    assert done.returncode == 0, done.stderr[-2000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


# -- on real releases --------------------------------------------------------------------------


@pytest.mark.sglang
def test_the_double_free_as_a_story() -> None:
    result = _ran("0.5.12")["25805"]
    assert result["status"] == 0, result
    modes = result["modes"]
    off, observe, enforce, strict = (modes[mode] for mode in MODES)
    assert off["ended"] == "asserted"
    assert "swa_attn_allocator.available_size()" in off["end"]
    assert off["first_fault_after"] < off["operations"]
    assert {
        "window: page 4 has two owners, C and B",
        "window: page 4 has two owners, C and D",
        "window: page 4 of C is in the free list",
    } <= set(off["faults"])
    assert observe["operations"] == off["operations"]
    assert observe["faults"] == off["faults"]
    assert observe["violations"] >= 1
    assert (enforce["ended"], enforce["faults"]) == ("completed", [])
    assert enforce["violations"] >= 1
    assert (strict["ended"], strict["state_unchanged"]) == ("raised", True)
    assert strict["operations"] == off["first_fault_after"] - 1
    assert "alloc_extend_swa_tail for B" in strict["end"]


@pytest.mark.sglang
@pytest.mark.parametrize("churn", ["churn", "churn of large pages"])
def test_the_double_free_under_traffic(churn: str) -> None:
    result = _ran("0.5.12")[churn]
    assert result["status"] == 0, result
    off, observe, enforce, strict = (result["modes"][mode] for mode in MODES)
    assert off["ended"] == observe["ended"] == "asserted"
    assert off["fault"]["operation"] <= off["owners"]["operation"] < off["operations"]
    for what in ("finished", "operations", "states"):
        assert observe[what] == off[what]
    assert (enforce["finished"], enforce["fault"]) == (result["requests"], None)
    assert set(enforce["violations"]) == {"stale-mapping"}
    assert strict["operations"] == off["fault"]["operation"] - 1
    # The traffic has all the ways in which a request can end.
    assert min(enforce["aborted"], enforce["lost"]) > 0


@pytest.mark.sglang
def test_the_traffic_makes_requests_give_way() -> None:
    assert _ran("0.5.12")["churn"]["modes"]["enforce"]["retracted"] > 0


@pytest.mark.sglang
@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.23"])
def test_no_alarm_where_the_double_free_is_corrected(release: str) -> None:
    for run in ("25805", "short churn"):
        result = _ran(release)[run]
        assert result["status"] == 0, result
        for outcome in result["modes"].values():
            assert outcome["ended"] == "completed"
            assert not outcome["violations"]


@pytest.mark.sglang
def test_the_stale_translation_as_a_story() -> None:
    scenes = _ran("0.5.12")["25889"]["scenes"]
    assert _ran("0.5.12")["25889"]["status"] == 0, scenes
    off = {scene: modes["off"]["outcome"] for scene, modes in scenes.items()}
    wrong = "wrong rows"
    assert off == {"C2": wrong, "C2b": "out of range", "C3": wrong, "C3b": wrong}
    for modes in scenes.values():
        assert modes["observe"]["outcome"] == modes["off"]["outcome"]
        assert modes["enforce"]["outcome"] == "right"
        assert modes["strict"]["outcome"] == "raised"
        assert [modes[mode]["violations"] for mode in MODES] == [0, 1, 1, 1]


@pytest.mark.sglang
def test_what_the_correction_of_the_stale_translation_left() -> None:
    result = _ran("0.5.12.post1")["25889"]
    assert result["status"] == 0, result
    off = {scene: modes["off"]["outcome"] for scene, modes in result["scenes"].items()}
    assert off == {"C2": "right", "C2b": "right", "C3": "wrong rows", "C3b": "wrong rows"}
    for scene in ("C2", "C2b"):
        assert all(not modes["violations"] for modes in result["scenes"][scene].values())


@pytest.mark.sglang
def test_later_releases_have_no_stale_translation() -> None:
    result = _ran("0.5.23")["25889"]
    assert (result["status"], result["here"]) == (0, False)


@pytest.mark.sglang
def test_a_program_is_read_without_colour_in_96_columns() -> None:
    done = _python("0.5.12", "-m", "hicache_guard.repro.repro_25805", "--modes", "off", "strict")
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(len, done.stdout.splitlines())) <= 96
    assert "\x1b" not in done.stdout
    for said in (
        "[C+D]",
        "TWO OWNERS, C and D",
        "managers/schedule_batch.py:_evict_swa",
        "assert self.swa_attn_allocator.available_size() <= self.swa_attn_allocator.size",
        "crashed in operation 33",
        "raised in operation 17",
    ):
        assert said in done.stdout, said


@pytest.mark.sglang
def test_entries_left_behind_are_those_of_the_real_callers() -> None:
    """Seen with SGLang's own decode server on 0.5.12: prompt 21, 3 of 4 drafts accepted."""
    assert _ran("0.5.12")["left by A"] == {"7": [[29, 17], [30, 18], [31, 19]]}


@pytest.mark.sglang
@pytest.mark.parametrize("release", ["0.5.12", "0.5.12.post1"])
def test_slots_computed_without_triton_are_the_same(release: str) -> None:
    compared = _ran(release)["slots"]
    assert compared["different"] == []
    assert compared["calls"] == CALLS


# -- the fast audit ----------------------------------------------------------------------------


def _pools(draw: random.Random) -> tuple[Any, dict[str, torch.Tensor]]:
    """Pools in order: every page free or held, in no order; some entries without a window slot."""
    page, full, window = draw.choice((1, 4)), draw.randint(8, 20), draw.randint(6, 12)
    full_pages = draw.sample(range(1, full + 1), full)
    window_pages = draw.sample(range(1, window + 1), window)
    mapping = torch.zeros((full + 1) * page + 1, dtype=torch.int64)
    mapping[-1] = -1
    books = {}
    for name in "ABC"[: draw.randint(0, 3)]:
        held = [full_pages.pop() for _ in range(draw.randint(1, 2))]
        slots = torch.tensor([number * page + i for number in held for i in range(page)])
        for number in held:
            if draw.random() < 0.7 and window_pages:
                start = window_pages.pop() * page
                mapping[number * page : (number + 1) * page] = torch.arange(start, start + page)
        books[name] = slots[: len(slots) - draw.randrange(page)]

    def pool(count: int, free: list[int]) -> Any:
        cut = draw.randint(0, len(free))
        return SimpleNamespace(
            size=count * page,
            free_pages=torch.tensor(free[:cut], dtype=torch.int64),
            release_pages=torch.tensor(free[cut:], dtype=torch.int64),
        )

    allocator = SimpleNamespace(
        page_size=page,
        full_to_swa_index_mapping=mapping,
        full_attn_allocator=pool(full, full_pages),
        swa_attn_allocator=pool(window, window_pages),
    )
    return allocator, books


def _free_again(draw: random.Random, allocator: Any, books: dict[str, torch.Tensor]) -> None:
    pool = draw.choice((allocator.full_attn_allocator, allocator.swa_attn_allocator))
    number = draw.randint(1, pool.size // allocator.page_size)
    pool.release_pages = torch.cat((pool.release_pages, torch.tensor([number])))


def _lose(draw: random.Random, allocator: Any, books: dict[str, torch.Tensor]) -> None:
    pool = draw.choice((allocator.full_attn_allocator, allocator.swa_attn_allocator))
    name = "free_pages" if len(pool.free_pages) else "release_pages"
    setattr(pool, name, getattr(pool, name)[1:])


def _free_padding(draw: random.Random, allocator: Any, books: dict[str, torch.Tensor]) -> None:
    pool = draw.choice((allocator.full_attn_allocator, allocator.swa_attn_allocator))
    pool.free_pages = torch.cat((pool.free_pages, torch.tensor([0])))


def _free_beyond(draw: random.Random, allocator: Any, books: dict[str, torch.Tensor]) -> None:
    pool = draw.choice((allocator.full_attn_allocator, allocator.swa_attn_allocator))
    beyond = pool.size // allocator.page_size + draw.choice((1, 2, 99))
    wrong = torch.tensor([draw.choice((beyond, -1))])
    pool.release_pages = torch.cat((wrong, pool.release_pages))


def _share(draw: random.Random, allocator: Any, books: dict[str, torch.Tensor]) -> None:
    if books:
        name = draw.choice(sorted(books))
        books["Z"] = books[name][:1]


def _map_to_another(draw: random.Random, allocator: Any, books: dict[str, torch.Tensor]) -> None:
    if books:
        row = books[draw.choice(sorted(books))][0]
        highest = allocator.swa_attn_allocator.size
        allocator.full_to_swa_index_mapping[row] = draw.randint(0, highest)


def _overwrite_sentinel(
    draw: random.Random, allocator: Any, books: dict[str, torch.Tensor]
) -> None:
    allocator.full_to_swa_index_mapping[-1] = 0


BREAKS: tuple[Callable[[random.Random, Any, dict[str, torch.Tensor]], None], ...] = (
    _free_again,
    _lose,
    _free_padding,
    _free_beyond,
    _share,
    _map_to_another,
    _overwrite_sentinel,
)


@pytest.mark.parametrize("break_it", [None, *BREAKS], ids=lambda f: f.__name__ if f else "whole")
def test_the_fast_audit_says_what_the_plain_one_says(break_it: Any) -> None:
    faulty = 0
    for seed in range(200):
        draw = random.Random(seed)
        allocator, books = _pools(draw)
        if break_it is not None:
            break_it(draw, allocator, books)
        held = [slots.numpy() for slots in books.values()]
        clean = churn_25805.WholePoolAudit(allocator).clean(held)
        found = audit(allocator, books)
        assert clean == (not found), (seed, found)
        faulty += not clean
    assert faulty == 0 if break_it is None else faulty > 60


# -- the judges --------------------------------------------------------------------------------


def test_the_judge_of_the_churn_sees_each_failure() -> None:
    moment = churn_25805.Moment(3, 20, "a fault")
    off = churn_25805.Outcome(
        "off", finished=9, operations=50, fault=moment, owners=moment, ended="asserted", states="s"
    )
    seen = {"stale-mapping": 1}
    good = {
        "off": off,
        "observe": replace(off, mode="observe", violations=seen),
        "enforce": churn_25805.Outcome("enforce", finished=40, violations=seen),
        "strict": churn_25805.Outcome("strict", finished=3, violations=seen, ended="raised"),
    }
    for outcome in good.values():
        assert churn_25805.problems(outcome, off, 40, "0.5.12") == []
    for mode, change in (
        ("off", {"ended": "completed"}),
        ("off", {"owners": None}),
        ("observe", {"violations": {}}),
        ("observe", {"states": "t"}),
        ("observe", {"operations": 51}),
        ("enforce", {"fault": moment}),
        ("enforce", {"finished": 39}),
        ("enforce", {"violations": {}}),
        ("enforce", {"ended": "asserted"}),
        ("strict", {"ended": "completed"}),
        ("strict", {"whole": False}),
    ):
        broken = replace(good[mode], **change)
        assert churn_25805.problems(broken, off, 40, "0.5.12"), (mode, change)
    assert churn_25805.problems(good["enforce"], None, 40, "0.5.12.post1")
    quiet = churn_25805.Outcome("enforce", finished=40)
    assert churn_25805.problems(quiet, None, 40, "0.5.12.post1") == []


def test_the_judge_of_the_story_sees_each_failure() -> None:
    def story(mode: str, ended: str, *faults: str, reported: str = "") -> repro_25805.Telling:
        view = repro_25805.View({}, {}, ([], []), {}, {})
        step = repro_25805.Step(1, ("grow", "A"), "", "", list(faults), "state", view)
        reports: list[Any] = [
            (1, SimpleNamespace(operation=reported, fault=SimpleNamespace(value="stale-mapping")))
        ]
        return repro_25805.Telling(mode, [step], reports if reported else [], ended)

    shared, where = "window: page 4 has two owners, C and B", "#1 alloc_extend_swa_tail for B"
    off = story("off", "asserted", shared)
    good = {
        "off": off,
        "observe": story("observe", "asserted", shared, reported=where),
        "enforce": story("enforce", "completed", reported=where),
        "strict": story("strict", "raised", reported=where),
    }
    for telling in good.values():
        assert repro_25805.problems(telling, off, "0.5.12") == []
    for broken in (
        story("off", "completed", shared),
        story("off", "asserted"),
        story("observe", "asserted", shared),
        story("observe", "completed", shared, reported=where),
        replace(good["observe"], steps=[*off.steps, *off.steps]),
        story("enforce", "completed"),
        story("enforce", "completed", shared, reported=where),
        story("enforce", "asserted", reported=where),
        story("strict", "completed", reported=where),
        story("strict", "raised", reported="#1 free for B"),
        replace(good["strict"], whole=False),
    ):
        assert repro_25805.problems(broken, off, "0.5.12"), broken
    quiet = story("enforce", "completed")
    assert repro_25805.problems(quiet, quiet, "0.5.13") == []
    assert repro_25805.problems(good["enforce"], quiet, "0.5.13")


def test_the_judge_of_the_translations_sees_each_failure() -> None:
    def scene(mode: str, outcome: str, reports: int = 1) -> repro_25889.Telling:
        seen: list[Any] = [SimpleNamespace(fault=SimpleNamespace(value="stale-translation"))]
        return repro_25889.Telling("C3", mode, [], seen * reports, outcome)

    off = scene("off", "wrong rows", 0)
    good = [
        off,
        scene("observe", "wrong rows"),
        scene("enforce", "right"),
        scene("strict", "raised"),
    ]
    for telling in good:
        assert repro_25889.problems(telling, off, "0.5.12") == []
        fixed = replace(telling, scene="C2")
        assert bool(repro_25889.problems(fixed, off, "0.5.12.post1"))
    for broken in (
        scene("off", "right", 0),
        scene("observe", "wrong rows", 0),
        scene("observe", "right"),
        replace(good[1], written={1: {8: "X"}}),
        scene("enforce", "right", 0),
        scene("enforce", "wrong rows"),
        scene("strict", "right"),
        replace(good[3], untouched=False),
    ):
        assert repro_25889.problems(broken, off, "0.5.12"), broken


# -- what runs in a process with SGLang --------------------------------------------------------

#: Random allocations that are computed both by the release's kernel and by what replaces it.
CALLS = 200


def _compare_slots() -> dict[str, Any]:
    """Launch the allocation kernel of the release, and what ``churn_25805`` puts in its place."""
    module = churn_25805._home_of_page_allocator()
    kernel = module.alloc_extend_kernel
    calls = []
    for seed in range(CALLS):
        draw = random.Random(seed)
        page = draw.choice((4, 16, 64))
        dtype = draw.choice((torch.int32, torch.int64))
        count = draw.randint(1, 8)
        before = [draw.choice((0, draw.randint(1, 5 * page))) for _ in range(count)]
        grown = [draw.randint(1, 3 * page) for _ in range(count)]
        after = [old + more for old, more in zip(before, grown, strict=True)]
        last = [draw.randint(1, 40) * page + (old - 1) % page if old else -1 for old in before]
        pages = sum(
            -(-new // page) - -(-old // page) for old, new in zip(before, after, strict=True)
        )
        free = torch.tensor(draw.sample(range(50, 50 + pages + 9), pages + 3), dtype=torch.int64)
        calls.append((before, after, last, dtype, free, sum(grown), page))
    answers = []
    for launcher in (kernel, None):
        if launcher is None:
            churn_25805.compute_slots_without_triton()
            launcher = module.alloc_extend_kernel
            assert launcher is not kernel
        slots = []
        for before, after, last, dtype, free, total, page in calls:
            out = torch.full((total,), -7, dtype=torch.int64)
            prefix, lengths, ends = (torch.tensor(x, dtype=dtype) for x in (before, after, last))
            width = 1 << (len(before) - 1).bit_length()
            launcher[(len(before),)](prefix, lengths, ends, free, out, width, page)
            slots.append(out.tolist())
        answers.append(slots)
    module.alloc_extend_kernel = kernel
    different = [seed for seed in range(CALLS) if answers[0][seed] != answers[1][seed]]
    return {"calls": len(answers[0]), "different": different}


def _run(name: str) -> Any:
    if name == "left by A":
        return repro_25805.tell("off").steps[6].view.left
    if name == "slots":
        return _compare_slots()
    program, arguments = RUNS[name]
    module = importlib.import_module(f"hicache_guard.repro.{program}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = module.main([*arguments, "--json"])
    return {"status": status, **json.loads(printed.getvalue())}


if __name__ == "__main__":
    print(json.dumps({name: _run(name) for name in sys.argv[1:]}))

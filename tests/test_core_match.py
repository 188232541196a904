"""The match rules against their definitions: every resume point tried, every position looked at.

The oracle below is the definition in plain Python; it shares nothing with ``core/match.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_guard.core.match import Chunked, Full, Paths, Rule, State, Window, match
from hicache_guard.core.syncs import SyncCounter
from hicache_guard.repro import ring

#: Which positions a computed token at ``r`` reads back, by kind of group.
Reads = Callable[[int], Sequence[int]]


def reads_full(r: int) -> Sequence[int]:
    return range(r)


def reads_window(width: int) -> Reads:
    """A token at r attends to the ``width`` positions that end at itself."""
    return lambda r: [p for p in range(r) if r - p < width]


def reads_chunk(size: int) -> Reads:
    """A token attends to those before it in the chunk that it is in."""
    return lambda r: [p for p in range(r) if p // size == r // size]


def usable(
    length: int,
    page_size: int,
    groups: Sequence[tuple[Reads | None, Sequence[bool]]],
    *,
    drop_last: bool = False,
) -> int:
    """By definition; None stands for the recurrent group, which needs its state at r."""
    for r in range(length - 1 if drop_last else length, 0, -1):
        if r % page_size:
            continue
        fits = [
            kept[r - 1] if reads is None else all(kept[p] for p in reads(r))
            for reads, kept in groups
        ]
        if all(fits):
            return r
    return 0


@st.composite
def masks(draw: st.DrawFn, length: int) -> list[bool]:
    """Liveness as it comes about: runs of live and of dead tokens, and here and there a speck."""
    found: list[bool] = []
    while len(found) < length:
        found += [draw(st.booleans())] * draw(st.integers(1, 40))
    for speck in draw(st.lists(st.integers(0, max(0, length - 1)), max_size=3)):
        if length:
            found[speck] = not found[speck]
    return found[:length]


@st.composite
def problems(draw: st.DrawFn) -> dict[str, object]:
    page = draw(st.sampled_from([1, 3, 4, 16]))
    lengths = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    width = draw(st.one_of(st.integers(1, 40), st.sampled_from([1, 64, 128, 4096])))
    chunk = draw(st.integers(1, 40))
    kept = {
        name: [draw(masks(length)) for length in lengths]
        for name in draw(
            st.lists(st.sampled_from(["full", "window", "chunk", "state"]), unique=True)
        )
    }
    return {
        "page": page,
        "lengths": lengths,
        "width": width,
        "chunk": chunk,
        "kept": kept,
        "drop": draw(st.booleans()),
    }


@given(problems())
def test_rules_agree_with_their_definitions(problem: dict[str, object]) -> None:
    """Mutations seen: need = W or W - 2, a run that reaches into the path before, the smallest of
    the groups' lengths in place of the intersection, and a chunk counted from r - 1 each fail.
    """
    page, lengths, drop = problem["page"], problem["lengths"], problem["drop"]
    width, chunk, kept = problem["width"], problem["chunk"], problem["kept"]
    assert isinstance(page, int)
    assert isinstance(lengths, list)
    assert isinstance(width, int)
    assert isinstance(chunk, int)
    assert isinstance(kept, dict)
    rules: dict[str, tuple[Rule, Reads | None]] = {
        "full": (Full(), reads_full),
        "window": (Window(width - 1), reads_window(width)),
        "chunk": (Chunked(chunk), reads_chunk(chunk)),
        "state": (State(), None),
    }
    groups = {
        name: (rules[name][0], torch.tensor(list(itertools.chain(*parts)), dtype=torch.bool))
        for name, parts in kept.items()
    }
    paths = Paths.plan(lengths, page, drop_last=bool(drop))
    found = match(paths, groups)
    for at, length in enumerate(lengths):
        asked = [(rules[name][1], parts[at]) for name, parts in kept.items()]
        assert found.usable[at] == usable(length, page, asked, drop_last=bool(drop))
        for (name, lengths_of), one in zip(found.by_group.items(), asked, strict=True):
            assert lengths_of[at] == usable(length, page, [one], drop_last=bool(drop)), name


@pytest.mark.parametrize("width", [1, 2, 3, 64, 128, 129, 4096])
def test_a_window_needs_one_token_less_than_its_width(width: int) -> None:
    """The token that is computed is the last of its own window.

    Mutations seen: need = W - 2 accepts one dead token too many, need = W one too few.
    """
    length = width + 10
    for live in range(width + 1):
        kept = torch.zeros(length, dtype=torch.bool)
        kept[length - live :] = True
        found = match(Paths.plan([length], length), {"swa": (Window(width - 1), kept)})
        assert found.usable.tolist() == [length if live >= width - 1 else 0]


def test_the_engines_own_limit_is_kept() -> None:
    """Mutation seen: without ``at_most`` in ``match`` this fails."""
    paths = Paths.plan([64, 64], 16)
    live = torch.ones(128, dtype=torch.bool)
    found = match(paths, {"full": (Full(), live)}, at_most=[40, 64])
    assert found.usable.tolist() == [32, 64]


def test_a_window_that_is_whole_twice_is_intersected_and_not_cut() -> None:
    """Full reaches 96, the window is whole at 128 and at 32, and at nothing between."""
    full = torch.zeros(128, dtype=torch.bool)
    full[:96] = True
    window = torch.zeros(128, dtype=torch.bool)
    window[:32] = window[112:] = True
    found = match(Paths.plan([128], 16), {"full": (Full(), full), "swa": (Window(15), window)})
    assert {name: int(length) for name, length in found.by_group.items()} == {
        "full": 96,
        "swa": 128,
    }
    assert found.usable.tolist() == [32], "the smaller of 96 and 128 would read dead slots"


def test_eagle_proves_the_window_where_it_resumes() -> None:
    """vLLM #17398: the last block was dropped after the window had been proved behind it."""
    window = torch.zeros(32, dtype=torch.bool)
    window[25:] = True  # whole for a resume at 32, not for one at 24
    groups = {"swa": (Window(7), window)}
    assert match(Paths.plan([32], 8), groups).usable.tolist() == [32]
    assert match(Paths.plan([32], 8, drop_last=True), groups).usable.tolist() == [0]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [0, 5, 0]])
def test_nothing_and_next_to_nothing(lengths: list[int]) -> None:
    paths = Paths.plan(lengths, 4)
    none = torch.zeros(sum(lengths), dtype=torch.bool)
    every: dict[str, tuple[Rule, torch.Tensor]] = {
        "full": (Full(), none),
        "swa": (Window(3), none),
        "chunk": (Chunked(4), none),
        "state": (State(), none),
    }
    assert match(paths, every).usable.tolist() == [0] * len(lengths)


@pytest.mark.parametrize(("lengths", "page"), [([-1], 4), ([3], 0)])
def test_impossible_paths_are_refused(lengths: list[int], page: int) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Paths.plan(lengths, page)


def test_judging_reads_no_device() -> None:
    paths = Paths.plan([300, 200], 16)
    live = torch.ones(500, dtype=torch.bool)
    with SyncCounter() as counter:
        match(
            paths,
            {"full": (Full(), live), "swa": (Window(127), live), "state": (State(), live)},
        )
    assert counter.total == 0


class RoundRobin:
    """A window buffer of ``width`` places that a request writes round and round."""

    def __init__(self, width: int) -> None:
        self.holds = [-1] * width

    def write(self, position: int) -> None:
        self.holds[position % len(self.holds)] = position

    def read(self, position: int) -> int:
        return self.holds[position % len(self.holds)]


class Paged:
    """Each position in a place of its own, which is freed when the window has left it behind."""

    def __init__(self) -> None:
        self.holds: dict[int, int] = {}

    def write(self, position: int) -> None:
        self.holds[position] = position

    def read(self, position: int) -> int:
        return self.holds.get(position, -1)


@pytest.mark.parametrize("width", [2, 7, 128])
def test_why_a_round_robin_buffer_cannot_be_reused(width: int) -> None:
    """Its addresses stay good and their content moves on: nothing short of the end can be resumed.

    With pages, what is needed at an earlier point may be kept, and whether it was can be asked.
    """
    end = 4 * width
    ring, paged = RoundRobin(width), Paged()
    for position in range(end):
        ring.write(position)
        paged.write(position)

    def resumes(buffer: RoundRobin | Paged) -> list[int]:
        return [
            r for r in range(1, end + 1) if all(buffer.read(p) == p for p in reads_window(width)(r))
        ]

    # One place is to spare: of W positions a resume reads W - 1.
    assert resumes(ring) == [end - 1, end] if width > 2 else resumes(ring)[-1] == end
    assert resumes(paged) == list(range(1, end + 1))


@pytest.mark.parametrize("window", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_a_ring_serves_no_prefix_but_the_last_few_tokens(window: int, spare: int) -> None:
    """Closed form: a ring of C slots keeps the tokens from n - C on, and r needs W - 1 before it.

    The check that fails without proof: a match by tokens allows every r, and all but these read
    another token's KV.
    """
    capacity = window + spare
    for tokens in range(1, 3 * capacity + 2):
        held = ring.filled(capacity, tokens)
        sound = {r for r in range(tokens + 1) if not ring.wrong_reads(held, r, window)}
        kept_from = max(0, tokens - capacity)
        expected = {
            r for r in range(tokens + 1)
            if window == 1 or r == 0 or max(0, r - window + 1) >= kept_from
        }  # fmt: skip
        assert sound == expected
        assert ring.proved(held, tokens, window) == max(expected)
        if window > 1 and tokens > capacity + 1:
            pseudo_hits = set(range(tokens + 1)) - sound
            assert tokens - capacity in pseudo_hits
            # Nothing but the end can be resumed: the last 1 + spare + 1 points.
            assert len(sound - {0}) == spare + 2

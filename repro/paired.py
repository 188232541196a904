"""Paired timing: the same work with the guard in each mode and without, round by round in one run.

Rounds alternate between the modes, so that all see the same machine; a cell is the median of its
rounds, and a ratio that of the rounds' own ratios. One thread: what is compared is work, not luck
with cores. What the work is, is a benchmark's own.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, uninstall
from hicache_guard.repro import pools

MODES = ("observe", "enforce", "strict")
#: Rounds at the start that are not counted.
_WARMING = 2


class Subject(Protocol):
    """What is timed: work on an allocator that was built with the hooks in place, or without."""

    @property
    def allocator(self) -> Any: ...

    def timed(self) -> dict[str, float]:
        """Do the work once; returns the seconds of each part, the same parts every time."""


def report(
    description: str | None, build: Callable[[int, int], Subject], whole: str, rounds: int
) -> dict[str, Any]:
    """Time what ``build`` makes for each page size and batch, as the command line asks.

    ``whole`` names the sum of all parts; ``rounds`` is how many there are by default.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    options = parser.parse_args()
    pools.quiet()
    torch.set_num_threads(1)
    times = []
    for page_size in (1, 64):
        for batch in (1, 64, 1024):
            print(f"page {page_size}, batch {batch}", file=sys.stderr)
            times += _times(page_size, batch, build, whole, options.rounds)
    device = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    return {"device": device, "times": times}


def _times(
    page_size: int, batch: int, build: Callable[[int, int], Subject], whole: str, rounds: int
) -> list[dict[str, Any]]:
    subjects: dict[str, Subject] = {}
    for mode in ("off", *MODES):
        hooks(mode)
        subjects[mode] = build(page_size, batch)
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_ in range(rounds + _WARMING):
        for mode, subject in subjects.items():
            hooks(mode)
            spent = subject.timed()
            if round_ >= _WARMING:
                for part, seconds in (*spent.items(), (whole, sum(spent.values()))):
                    taken[mode, part].append(seconds)
    for mode in MODES:
        tally = guard_of(subjects[mode].allocator).tally
        assert not tally.total, f"false alarm while measuring: {tally.violations}"
    middle = {key: statistics.median(seconds) for key, seconds in taken.items()}
    return [
        {
            "page_size": page_size,
            "batch": batch,
            "mode": mode,
            "what": part,
            "unguarded_us": middle["off", part] * 1e6,
            "guarded_us": middle[mode, part] * 1e6,
            "ratio": statistics.median(
                guarded / bare
                for guarded, bare in zip(taken[mode, part], taken["off", part], strict=True)
            ),
        }
        for mode, part in taken
        if mode != "off"
    ]


def hooks(mode: str) -> None:
    """Put the hooks in or take them out; guarded allocators keep their guards."""
    if mode == "off":
        uninstall()
    else:
        install(mode)

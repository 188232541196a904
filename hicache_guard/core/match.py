"""How long a cached prefix may be used: one rule for each attention group, and their intersection.

A *resume point* r says that the first r tokens of a path are taken from the cache and the token at
position r is computed next. Every group of layers asks something else of it:

    Full      tokens 0 .. r-1 are resident
    Window    the last min(need, r) tokens before r are live; attention reads need = W - 1 of them,
              an engine may ask for more (SGLang's trees and ShadowRadix count W)
    Chunked   the tokens of r's own chunk that lie before r are live
    State     a recurrent state was kept at depth r exactly

The usable prefix is the longest page-aligned r that all groups accept; 0 is always accepted. That
is not the smallest of the groups' own longest answers: a window may be whole at 512 and at 64 and
broken between, so each group marks every candidate and the marks are intersected (the project's
match rule; vLLM's hybrid coordinator and the seed article intersect lengths for the same reason).

Many paths are laid end to end and judged in one go. ``Paths`` is planned by the host, which knows
all lengths; judging reads no device, and costs what the paths are long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Paths:
    """Token paths laid end to end, and the resume points that are asked about.

    ``starts`` (int64, one a path) is where each path begins in the concatenation of ``tokens``
    tokens. A candidate is a path (``path``, int64) and a resume point in it (``resume``, int64);
    every path has 0 as its first.
    """

    tokens: int
    starts: torch.Tensor
    path: torch.Tensor
    resume: torch.Tensor

    @classmethod
    def plan(
        cls,
        lengths: Sequence[int],
        page_size: int,
        device: torch.device | str = "cpu",
        *,
        drop_last: bool = False,
    ) -> Paths:
        """Ask about every page-aligned resume point of paths of these ``lengths`` in tokens.

        ``drop_last`` for EAGLE, whose draft layers cannot resume right at the end of what is
        cached: the last token is given up *before* anything is judged, so that the window is proved
        at the point that is used and not at a later one. Raises ValueError for a negative length or
        a page size below 1.
        """
        if page_size < 1 or any(length < 0 for length in lengths):
            raise ValueError("lengths must not be negative, and a page has at least one slot")
        given = torch.tensor(lengths, dtype=torch.int64)
        usable = (given - 1).clamp_(min=0) if drop_last else given
        counts = usable // page_size + 1
        path = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        first = counts.cumsum(0) - counts
        resume = (torch.arange(path.shape[0]) - first[path]) * page_size
        starts = given.cumsum(0) - given
        return cls(int(given.sum()), starts.to(device), path.to(device), resume.to(device))

    def since_dead(self, live: torch.Tensor) -> torch.Tensor:
        """Live tokens (int64, one a candidate) that lie without a gap right before it.

        ``live`` is bool, one a token.
        """
        position = torch.arange(1, self.tokens + 1, device=live.device)
        # One place more, so that a candidate before the first token has something to look at.
        after_dead = torch.zeros(self.tokens + 1, dtype=torch.int64, device=live.device)
        after_dead[1:] = torch.where(live, 0, position).cummax(0).values
        start = self.starts.index_select(0, self.path)
        here = start + self.resume
        # What is dead in the path before is none of this path's business.
        return here - torch.maximum(after_dead.index_select(0, here), start)


class Rule(Protocol):
    """One attention group's condition on a resume point."""

    def accepts(self, paths: Paths, kept: torch.Tensor) -> torch.Tensor:
        """Mask (bool) of the candidates that the group accepts.

        ``kept`` is bool, one a token: whether this group still has what the token left behind.
        """


@dataclass(frozen=True)
class Full:
    """Every token before the resume point is resident."""

    def accepts(self, paths: Paths, kept: torch.Tensor) -> torch.Tensor:
        return paths.since_dead(kept) == paths.resume


@dataclass(frozen=True)
class Window:
    """The last ``need`` tokens before the resume point are live, or all where there are fewer."""

    need: int

    def accepts(self, paths: Paths, kept: torch.Tensor) -> torch.Tensor:
        return paths.since_dead(kept) >= paths.resume.clamp(max=self.need)


@dataclass(frozen=True)
class Chunked:
    """Chunked local attention: a token sees its own chunk of ``size`` tokens, up to itself."""

    size: int

    def accepts(self, paths: Paths, kept: torch.Tensor) -> torch.Tensor:
        return paths.since_dead(kept) >= paths.resume % self.size


@dataclass(frozen=True)
class State:
    """A recurrent state was kept after exactly the tokens before the resume point."""

    def accepts(self, paths: Paths, kept: torch.Tensor) -> torch.Tensor:
        last = paths.starts.index_select(0, paths.path) + paths.resume - 1
        if not paths.tokens:
            return paths.resume == 0
        return (paths.resume == 0) | kept.index_select(0, last.clamp(min=0))


@dataclass(frozen=True)
class Match:
    """How many tokens of each path may be used (int64, one a path), together and by group."""

    usable: torch.Tensor
    by_group: Mapping[str, torch.Tensor]


def match(
    paths: Paths, groups: Mapping[str, tuple[Rule, torch.Tensor]], *, at_most: Sequence[int] = ()
) -> Match:
    """The longest resume point of each path that every group accepts.

    ``groups`` gives each group's rule and what it has kept (bool, one a token). ``at_most``: points
    of the engine's own that are not to be exceeded, one a path.
    """
    device = paths.starts.device
    allowed = torch.ones_like(paths.resume, dtype=torch.bool)
    if at_most:
        limits = torch.tensor(at_most, dtype=torch.int64, device=device)
        allowed = paths.resume <= limits.index_select(0, paths.path)
    together = allowed
    by_group = {}
    for name, (rule, kept) in groups.items():
        accepted = rule.accepts(paths, kept) & allowed
        by_group[name] = _longest(paths, accepted)
        together = together & accepted
    return Match(_longest(paths, together), by_group)


def _longest(paths: Paths, accepted: torch.Tensor) -> torch.Tensor:
    longest = torch.zeros_like(paths.starts)
    found = torch.where(accepted, paths.resume, 0)
    return longest.scatter_reduce_(0, paths.path, found, "amax")

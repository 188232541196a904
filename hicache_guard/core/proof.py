"""What a proof of a prefix, or the check of an insertion, says to whoever asked.

The rules themselves are ``match``; what they are asked about is ``witness``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hicache_guard.core.match import Paths, Rule


@dataclass(frozen=True)
class Adopted:
    """How much of a row a tree may take over: ``row[:end]``, window KV from ``evicted`` on."""

    end: int
    evicted: int


@dataclass(frozen=True)
class Proved:
    """The resume points of one path that were proved, in tokens, and by group the longest one.

    ``points`` ascend and begin with 0.
    """

    points: tuple[int, ...]
    by_group: Mapping[str, int]

    @classmethod
    def whole(cls, length: int) -> Proved:
        """Nothing is wrong with a path of ``length`` tokens."""
        return cls((0, length), {})

    @classmethod
    def of(cls, paths: Paths, groups: Mapping[str, tuple[Rule, torch.Tensor]]) -> list[Proved]:
        """Ask every group about every resume point. Reads the device once."""
        accepted = torch.stack([rule.accepts(paths, kept) for rule, kept in groups.values()])
        table = torch.cat((paths.path[None], paths.resume[None], accepted.long())).tolist()
        points: list[list[int]] = [[] for _ in paths.starts]
        longest = [dict.fromkeys(groups, 0) for _ in paths.starts]
        for path, resume, *by_group in zip(*table, strict=True):
            if all(by_group):
                points[path].append(resume)
            for name, yes in zip(groups, by_group, strict=True):
                if yes:
                    longest[path][name] = resume
        return [cls(tuple(p), b) for p, b in zip(points, longest, strict=True)]

    def longest(self, at_most: int) -> int:
        """The longest proved resume point that does not exceed ``at_most`` tokens."""
        return max(point for point in self.points if point <= at_most)

"""Why a round-robin window buffer cannot serve prefix reuse: a model, and the check that fails.

A layer that attends to W tokens needs no more than W slots a request, so it is tempting to give
each request a ring and to write token t to slot t % W. That is sound while one request goes
forward. Reuse goes back: a second request that shares r tokens resumes at r, and needs the W - 1
tokens before it, but the ring has gone on to its owner's end. What lies there under the right slot
numbers is some other token's KV: a match that trusts tokens alone cannot tell.

Source: the seed article's account of window reuse; the model is ours.
Run: ``python -m hicache_guard.repro.ring``.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from hicache_guard.core.match import Paths, Window, match


class Ring:
    """``capacity`` slots that one request writes round-robin; each holds a token's KV, -1 none."""

    def __init__(self, capacity: int) -> None:
        self.slots = [-1] * capacity

    def write(self, position: int) -> None:
        self.slots[position % len(self.slots)] = position

    def read(self, position: int) -> int:
        """The position whose KV attention finds where that of ``position`` ought to be."""
        return self.slots[position % len(self.slots)]


def filled(capacity: int, tokens: int) -> Ring:
    """The ring of a request that has computed ``tokens`` tokens."""
    ring = Ring(capacity)
    for position in range(tokens):
        ring.write(position)
    return ring


def wrong_reads(ring: Ring, resume: int, window: int) -> list[tuple[int, int]]:
    """What the token at ``resume`` would read wrongly: (position wanted, position found)."""
    wanted = range(max(0, resume - (window - 1)), resume)
    found = ((position, ring.read(position)) for position in wanted)
    return [(position, there) for position, there in found if position != there]


def proved(ring: Ring, tokens: int, window: int) -> int:
    """The longest resume point that a match with proof allows on this ring."""
    kept = torch.tensor([ring.read(position) == position for position in range(tokens)])
    found = match(Paths.plan([tokens], 1), {"window": (Window(window - 1), kept)})
    return int(found.usable[0])


def main() -> None:
    window, tokens = 8, 40
    table = Table(
        title=f"A request of {tokens} tokens in a ring, window {window}; another shares r"
    )
    for column in ("ring", "r", "a match by tokens says", "reads wrongly", "for example"):
        table.add_column(column)
    for capacity in (window, 2 * window):
        ring = filled(capacity, tokens)
        for resume in (16, 32, 38, 39, 40):
            wrong = wrong_reads(ring, resume, window)
            example = f"token {wrong[0][0]}, finds {wrong[0][1]}" if wrong else ""
            style = "red" if wrong else "green"
            row = (
                str(capacity),
                str(resume),
                str(resume),
                f"{len(wrong)} of {window - 1}",
                example,
            )
            table.add_row(*row, style=style)
    Console().print(table)


if __name__ == "__main__":
    main()

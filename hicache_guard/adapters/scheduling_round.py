"""The seam of a scheduling round: what all waiting requests were matched to is proved together.

On a device each proof of a match is a handful of kernels and one wait. A scheduler matches its
whole queue before it sorts it, and again each request that it admits. Here the first pass is let
run as the release does it, then all that was found is looked at in one go
(``PoolGuard.whole_prefixes``). Where all of it is whole, that was the round. Else the round is run
again: what is whole is known by now, and the rest is judged, clipped and reported match by match.
What was found holds for as long as nothing is allocated or freed, so the requests that are
admitted next cost no further wait.

On a CPU a match is proved at once, and in observe nothing waits; there a round is nothing special.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hicache_guard.adapters.tree_link import book_of


def calc_priority(
    original: Callable[..., Any], policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any
) -> Any:
    book = book_of(policy.tree_cache)
    if book is None or not book.waits():
        return original(policy, waiting_queue, *args, **kwargs)
    came = [*waiting_queue]
    with book.gathering():
        found = original(policy, waiting_queue, *args, **kwargs)
    if book.settle():
        return found
    waiting_queue[:] = came  # among equals, who came first goes first
    return original(policy, waiting_queue, *args, **kwargs)

"""Host copies that are somebody else's by the time they are loaded back.

The stories are those of ``host_tier.py``: a request runs, its KV is backed up, the device gives it
up. Then a host slot of the backup is handed on behind the tree and filled by its new owner, and the
prefix is asked for again. Unguarded, foreign KV is loaded; in enforce nothing is, and the request
computes its prefix; in strict the load-back raises; in observe all is as unguarded, and reported.

"no prints" is the proof by mutation: enforce, with the prints not asked.

Prints one JSON line a tree, page size, scene and mode. Run: ``python -P stale_copies.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters import host_copies
from hicache_guard.core import contents
from hicache_guard.repro import scheduling
from real import tales
from real.host_tier import Story


def take(story: Story, side: int) -> torch.Tensor:
    """The host pool of the full (0) or window (1) KV takes its slots back, and another gets them."""
    pool = story.tier.host_pools()[side]
    free = {int(slot) for slot in pool.free_slots}
    for name in ("release_slots", "_release_slots"):
        for part in getattr(pool, name, None) or ():
            free |= {int(slot) for slot in torch.as_tensor(part).reshape(-1)}
    used = torch.tensor(sorted(set(range(int(pool.size))) - free), dtype=torch.int64)
    pool.free(used)
    everything = pool.alloc(pool.available_size())
    ours = torch.isin(everything, used)
    if not ours.all():
        pool.free(everything[~ours])
    taken: torch.Tensor = everything[ours]
    return taken


def fill(story: Story, side: int, taken: torch.Tensor) -> None:
    """The new owner writes what is his."""
    story.tier.host_pools()[side].kv_buffer.view(torch.uint8)[:, :, taken] = 7


def hand_on(side: int) -> Callable[[Story], None]:
    def spoil(story: Story) -> None:
        fill(story, side, take(story, side))

    return spoil


SCENES = {"full copy handed on": hand_on(0), "window copy handed on": hand_on(1)}


def tell(story: Story, spoil: Callable[[Story], None]) -> dict[str, Any]:
    prompt = [10 + number for number in range(5 * story.unit)]
    known = story.run("first", prompt, 3 * story.unit + 1)
    known = story.whole_pages(known)
    story.tier.flush_writes()
    story.empty_the_device()
    spoil(story)
    job = story.match("again", [*known, 3, 3, 3])
    asked = int(job.req.host_hit_length)
    story.tier.admit(job.req)
    length = story.server.prefix_length(job.req)
    story.tier.start_loads()
    story.prefill(job)
    story.bytes_of(story.server.row(job.req), job.tokens)
    return {"host hit": asked, "loaded": length}


# The mutation: prints are asked neither before a load-back nor after it.
_WRONG_PAGES: Any = contents.wrong_pages
_LOADED: Any = host_copies.HostTier.loaded


def _all_right(*asked: Any) -> int:
    return 0


def _all_loaded(tier: Any, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    yes = torch.ones_like(path, dtype=torch.bool)
    return yes, yes


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    reports = tales.guarded(mode)
    asked = mode != "no prints"
    setattr(host_copies, "wrong_pages", _WRONG_PAGES if asked else _all_right)  # noqa: B010
    setattr(host_copies.HostTier, "loaded", _LOADED if asked else _all_loaded)  # noqa: B010
    story = Story(release, tree, page, "write_through")
    told = tales.outcome(lambda: tell(story, SCENES[scene]))
    return {**told, "faults": tales.faults(reports)}


def main() -> int:
    return tales.print_all(__doc__, play, dict.fromkeys(SCENES, ("no prints",)))


if __name__ == "__main__":
    sys.exit(main())

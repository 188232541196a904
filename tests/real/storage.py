"""KV that comes back from a storage backend, the release's own file backend in a folder.

A request runs and is written through to the host and to the storage; device and host give all of it
up. Another request for the same prefix has it fetched, which puts it into the tree's host tier, and
loaded back. Legal, all of that must raise no alarm:

    from the start      everything is fetched
    goes on             a shorter prefix was fetched before, and the fetch goes on from there
    for nobody known    another request was matched between: only the storage vouches

And what a guard must see: a host slot of the fetch is handed on behind the tree, and filled by its
new owner, when all is fetched (*later*) or while the fetch is under way (*meanwhile*). Unguarded,
foreign KV is loaded; in enforce nothing is, and the request computes its prefix; in strict the
load-back raises; in observe all is as unguarded, and reported.

    overwritten         the storage itself gives other bytes for a key: nobody sees that

Proofs by mutation, in enforce: "no prints", they are not asked; "excused", a page of which nothing
is known is taken for one that the storage vouches for; "wrong place", a fetch is taken to begin one
page later, and what is legal is refused.

Prints one JSON line a tree, page size, scene and mode. Run: ``python -P storage.py``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hicache_guard.adapters import host_copies, host_pool, tree_link
from hicache_guard.core import contents
from hicache_guard.repro import scheduling
from real import tales
from real.host_tier import Job, Story, must
from real.stale_copies import _LOADED, _WRONG_PAGES, _all_loaded, _all_right, fill, hand_on, take

LEGAL = ("from the start", "goes on", "for nobody known")


def give_up(story: Story) -> None:
    """Neither the device nor the host has anything any more."""
    story.empty_the_device()
    story.tier.evict_host(*(pool.size for pool in story.tier.host_pools()))
    must(story.tier.host_used() == (0, 0), f"{story.tier.host_used()} left on the host")


def stored(story: Story) -> list[int]:
    """A prefix that only the storage has."""
    known = story.run("first", [10 + number for number in range(6 * story.unit)], 3 * story.unit)
    story.tier.flush_writes()
    story.tier.settle_storage()
    give_up(story)
    return story.whole_pages(known)


def fetch(story: Story, name: str, tokens: list[int], count: int) -> Job:
    """A request comes in, and what the storage has of it is fetched; matched again, it waits."""
    job = story.match(name, tokens)
    story.tier.finish_prefetch(story.tier.prefetch(job.req))
    story.server.match(job.req)
    found = story.server.prefix_length(job.req) + int(job.req.host_hit_length)
    must(found == count, f"{name}: {found} of {count} tokens fetched")
    return job


def load(story: Story, job: Job) -> dict[str, int]:
    """The request is admitted, loaded as far as that goes, and computes the rest."""
    story.tier.admit(job.req)
    length = story.server.prefix_length(job.req)
    story.tier.start_loads()
    story.prefill(job)
    story.tier.finish_loads()
    story.bytes_of(story.server.row(job.req), job.tokens)
    return {"loaded": length}


def from_the_start(story: Story) -> dict[str, int]:
    known = stored(story)
    return load(story, fetch(story, "again", [*known, 3, 3, 3], len(known)))


def goes_on(story: Story) -> dict[str, int]:
    known = stored(story)
    half = 6 * story.unit  # the prompt: its window was stored, too
    load(story, fetch(story, "short", [*known[:half], 3, 3, 3], half))
    return load(story, fetch(story, "long", [*known, 3, 3, 3], len(known)))


def for_nobody_known(story: Story) -> dict[str, int]:
    known = stored(story)
    job = story.match("again", [*known, 3, 3, 3])
    story.match("other", [900 + number for number in range(3 * story.unit)])
    story.tier.finish_prefetch(story.tier.prefetch(job.req))
    story.server.match(job.req)
    must(job.req.host_hit_length == len(known), f"{job.req.host_hit_length} fetched")
    return load(story, job)


def handed_on(side: int) -> Callable[[Story], dict[str, int]]:
    def later(story: Story) -> dict[str, int]:
        known = stored(story)
        job = fetch(story, "again", [*known, 3, 3, 3], len(known))
        hand_on(side)(story)
        return load(story, job)

    return later


def handed_on_meanwhile(side: int) -> Callable[[Story], dict[str, int]]:
    def meanwhile(story: Story) -> dict[str, int]:
        known = stored(story)
        controller = story.server.tree.cache_controller
        asked, over = threading.Event(), threading.Event()
        bring = controller._page_transfer

        def bring_to_another(operation: Any) -> Any:
            asked.wait()
            taken = take(story, side)
            try:
                return bring(operation)
            finally:
                fill(story, side, taken)
                over.set()

        controller._page_transfer = bring_to_another
        job = story.match("again", [*known, 3, 3, 3])
        name = story.tier.prefetch(job.req)
        asked.set()
        story.tier.until(over.is_set)
        story.tier.finish_prefetch(name)
        story.server.match(job.req)
        must(job.req.host_hit_length == len(known), f"{job.req.host_hit_length} fetched")
        return load(story, job)

    return meanwhile


def overwritten(story: Story) -> dict[str, int]:
    known = stored(story)
    assert story.storage is not None
    for file in Path(story.storage).iterdir():
        file.write_bytes(b"\7" * file.stat().st_size)
    return load(story, fetch(story, "again", [*known, 3, 3, 3], len(known)))


SCENES: dict[str, Callable[[Story], dict[str, int]]] = {
    "from the start": from_the_start,
    "goes on": goes_on,
    "for nobody known": for_nobody_known,
    "full copy handed on later": handed_on(0),
    "window copy handed on later": handed_on(1),
    "full copy handed on meanwhile": handed_on_meanwhile(0),
    "window copy handed on meanwhile": handed_on_meanwhile(1),
    "overwritten": overwritten,
}


# -- proof by mutation ------------------------------------------------------------------------------

_PRINTS_FOR: Any = host_copies.HostTier._prints_for


def _excused(found: Any) -> Any:
    return np.where(found == contents.UNKNOWN, contents.VOUCHED, found)


def _excusing(full: Any, windows: Any, known: Any) -> Any:
    return _WRONG_PAGES(_excused(full), [_excused(found) for found in windows], known)


def _one_page_later(tier: Any, name: Any, key: Any) -> Any:
    found = _PRINTS_FOR(tier, name, key)
    return None if found is None else np.roll(found, 1)


#: What stands in the guard in each mutation, and in which scenes it must be noticed.
HANDED_ON = tuple(scene for scene in SCENES if "handed on" in scene)
MUTATIONS: dict[str, tuple[tuple[Any, Any, Any], tuple[str, ...]]] = {
    "no prints": ((_all_right, _all_loaded, _PRINTS_FOR), HANDED_ON),
    "excused": ((_excusing, _all_loaded, _PRINTS_FOR), HANDED_ON),
    "wrong place": ((_WRONG_PAGES, _LOADED, _one_page_later), LEGAL[:2]),
}


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    reports = tales.guarded(mode)
    whole = (_WRONG_PAGES, _LOADED, _PRINTS_FOR)
    parts = MUTATIONS[mode][0] if mode in MUTATIONS else whole
    setattr(host_copies, "wrong_pages", parts[0])  # noqa: B010
    setattr(host_copies.HostTier, "loaded", parts[1])  # noqa: B010
    setattr(host_copies.HostTier, "_prints_for", parts[2])  # noqa: B010
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        story = Story(release, tree, page, "write_through", storage=folder)
        try:
            row = tales.outcome(lambda: SCENES[scene](story))
        finally:
            story.tier.close()
        if mode is not None:
            tier = vars(story.server.tree)[tree_link.ATTRIBUTE].tier
            row["vouched"] = sum(
                int((host_pool.contents_of(pool)._prints == contents.VOUCHED).sum())
                for pool in story.tier.host_pools()
            )
            row["under way"] = len(tier.fetches)
    return {**row, "faults": tales.faults(reports)}


def main() -> int:
    noticed = {
        scene: [name for name, (_, scenes) in MUTATIONS.items() if scene in scenes]
        for scene in SCENES
    }
    return tales.print_all(__doc__, play, noticed)


if __name__ == "__main__":
    sys.exit(main())

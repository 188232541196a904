"""Host pages that are handed on behind the tree while a copy to or from them is under way.

The bytes move after a copy was queued and its prints were looked at; so in between

    load, full / load, window   the pages that a queued load-back reads are freed, and filled by
                                their new owner
    backup, full / backup, window   those that a queued backup writes are (since 0.5.21 a backup
                                waits for the next poll; before, it is submitted at once)
    store, full / store, window those that a thread copies to the storage backend are (since 0.5.13)

Unguarded, foreign KV is loaded, or the new owner's bytes are overwritten. In enforce the pages are
kept until the copy is over; in strict the free raises; in observe all is as unguarded, and reported.

    backup, device              the tree itself lets go of device pages that a queued backup waits
                                for, and they are another's when it is submitted: unguarded, the
                                copy is taken for the tree's; guarded, it bears no print

Proofs by mutation, in enforce: "not kept", a page under a copy is freed as any; "not looked at
again", a backup keeps the prints that it was queued with.

Prints one JSON line a tree, page size, scene and mode. Run: ``python -P in_flight.py``.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from hicache_guard.adapters import host_pool, tree_link
from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.host_flights import Flights
from hicache_guard.adapters.link import link_of
from hicache_guard.core import contents
from hicache_guard.repro import host_tier, scheduling
from real import tales
from real.host_tier import Finding, Job, Story, must
from real.stale_copies import fill, take
from real.storage import fetch

MUTATIONS = ("not kept", "not looked at again")


class NotHere(Finding):
    """The release has no such gap."""


def prompt(story: Story) -> list[int]:
    return [10 + number for number in range(6 * story.unit)]


def load(side: int) -> Callable[[Story], None]:
    def scene(story: Story) -> None:
        known = story.whole_pages(story.run("first", prompt(story), 3 * story.unit))
        story.tier.flush_writes()
        story.empty_the_device()
        job = story.match("again", [*known, 3, 3, 3])
        story.tier.admit(job.req)
        slots = story.server.prefix(job.req)
        must(len(slots) == len(known), f"{len(slots)} of {len(known)} tokens loaded")
        fill(story, side, take(story, side))
        story.tier.start_loads()
        story.bytes_of(slots, known)

    return scene


def backup(side: int) -> Callable[[Story], None]:
    def scene(story: Story) -> None:
        first = queue_a_backup(story)
        known = story.whole_pages(first.tokens)
        taken = take(story, side)
        fill(story, side, taken)
        story.tier.flush_writes()
        story.end(first)
        rows = story.tier.host_pools()[side].kv_buffer.view(torch.uint8)[:, :, taken]
        must(bool((rows == 7).all()), "the new owner's bytes are not what was written")
        story.empty_the_device()
        job = story.match("again", [*known, 3, 3, 3])
        story.tier.admit(job.req)
        must(story.server.prefix_length(job.req) == len(known), "not loaded")
        story.tier.start_loads()
        story.bytes_of(story.server.prefix(job.req), known)

    return scene


def queue_a_backup(story: Story) -> Job:
    """A request runs, and what it cached waits to be backed up."""
    job = story.match("first", prompt(story))
    story.tier.admit(job.req)
    story.prefill(job)
    if not story.server.tree.cache_controller.write_queue:
        raise NotHere("submitted at once")
    return job


def store(side: int) -> Callable[[Story], None]:
    def scene(story: Story) -> None:
        controller = story.server.tree.cache_controller
        if not getattr(controller, "storage_backend", None):
            raise NotHere("no storage")
        go_on, put = threading.Event(), controller._page_backup

        def put_late(operation: Any) -> Any:
            go_on.wait()
            return put(operation)

        controller._page_backup = put_late
        try:
            known = story.whole_pages(story.run("first", prompt(story), 3 * story.unit))
            story.tier.flush_writes()
            must(bool(story.server.tree.ongoing_backup), "nothing is being stored")
            fill(story, side, take(story, side))
        finally:
            go_on.set()
        story.tier.settle_storage()
        story.empty_the_device()
        for pool in story.tier.host_pools():
            pool.clear()  # whoever has what of it
        story.server.flush()
        job = fetch(story, "again", [*known, 3, 3, 3], len(known))
        story.tier.admit(job.req)
        story.tier.start_loads()
        story.bytes_of(story.server.prefix(job.req), known)

    return scene


def backup_device(story: Story) -> None:
    known = story.whole_pages(queue_a_backup(story).tokens)
    allocator, guard = story.server.allocator, link_of(story.server.allocator)
    slots = story.server.tree_slots()[: len(known)]
    # As where a lock was lost: the tree's own eviction, and nobody else's free.
    with guard_of(allocator).tree_working() if guard else nullcontext():
        allocator.free(slots)
    unit, room = story.unit, story.room()
    other = story.match("other", [500 + number for number in range(min(*room, 19 * unit))])
    story.tier.admit(other.req)
    story.server.extend([other.req], [story.server.plan(other.req, len(other.tokens))])
    host_tier.write(story.server, story.server.row(other.req), other.tokens, 0)
    must(bool(torch.isin(slots, story.server.row(other.req)).any()), "it took other slots")
    queued = [op.host_indices for op in story.server.tree.cache_controller.write_queue]
    story.tier.flush_writes()
    copies = torch.cat(queued)[: len(known)]
    pool = story.tier.host_pools()[0]
    layer = next(layer for layer, window in host_tier.layers(story.server).items() if not window)
    got = torch.stack([pool.kv_buffer[side, 0][copies] for side in range(2)], dim=1)
    right = host_tier.pattern(known, 0, layer, got[0, 0].numel() // 4)
    foreign = (got.flatten(2).view(torch.int64) != right).flatten(1).any(1).numpy()
    must(bool(foreign.any()), "the copies are right")
    if guard is not None:
        bear = host_pool.contents_of(pool).read(copies).numpy() != contents.UNKNOWN
        foreign &= np.repeat(bear, story.page)
    if foreign.any():
        raise Finding("foreign copies are not what was written")


SCENES: dict[str, Callable[[Story], None]] = {
    "load, full": load(0),
    "load, window": load(1),
    "backup, full": backup(0),
    "backup, window": backup(1),
    "store, full": store(0),
    "store, window": store(1),
    "backup, device": backup_device,
}


# -- proof by mutation ------------------------------------------------------------------------------

_BUSY: Any = Flights._busy
_LOOK_AGAIN: Any = Flights._look_again


def _never(flights: Any, pool: Any, slots: torch.Tensor, **terms: Any) -> Any:
    return np.zeros(len(slots), dtype=bool)


def _blind(flights: Any) -> None:
    return None


def mutate(mode: str | None) -> None:
    """Break the guard as a mutation says; mend it for every other mode."""
    setattr(Flights, "_busy", _never if mode == "not kept" else _BUSY)  # noqa: B010
    blind = mode == "not looked at again"
    setattr(Flights, "_look_again", _blind if blind else _LOOK_AGAIN)  # noqa: B010


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    reports = tales.guarded(mode)
    mutate(mode)
    storing = scene.startswith("store") and hasattr(
        scheduling._first("mem_cache.unified_radix_cache:UnifiedRadixCache"),
        "prefetch_from_storage",
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        story = Story(release, tree, page, "write_through", storage=folder if storing else None)
        try:
            row = tales.outcome(lambda: SCENES[scene](story))
        finally:
            if storing:
                story.tier.close()
    if mode is not None:
        flights = vars(story.server.tree)[tree_link.ATTRIBUTE].tier.flights
        flights.settle()
        row["kept"] = len(flights._held)
    return {**row, "faults": tales.faults(reports)}


def main() -> int:
    last = {scene: MUTATIONS[scene == "backup, device"] for scene in SCENES}
    return tales.print_all(__doc__, play, {scene: (name,) for scene, name in last.items()})


if __name__ == "__main__":
    sys.exit(main())

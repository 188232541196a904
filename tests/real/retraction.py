"""A retracted request's KV goes to the host and comes back (since 0.5.21), byte for byte.

The scenes call what a decode server calls when it retracts a request and takes it up again: the
tree's ``backup_kv_cache``, ``release_req``, a new row, ``restore_kv_cache``. Between, the device is
overwritten.

    legal           nothing else happens: no alarm
    handed on, full / window    host pages of the backup are freed behind its back, and filled by
                                their new owner
    row handed on   full slots of the request are freed behind it, and another computes in them,
                    before it is backed up: nobody sees that

Unguarded, the request goes on with foreign KV. In enforce it has its own; in strict the free of its
pages raises; in observe all is as unguarded, and reported.

Proofs by mutation, in enforce: "not kept", its pages are freed as any; that is seen when it is
restored. "not kept, no ticket", nor is that.

Prints one JSON line a tree, page size, scene and mode. Run: ``python -P retraction.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hicache_guard.adapters.host_flights import Flights
from hicache_guard.adapters.retraction import Retraction
from hicache_guard.repro import host_tier, scheduling
from real import tales
from real.host_tier import Job, Story, must
from real.in_flight import _never
from real.stale_copies import fill, take

SCENES = {
    "legal": (),
    "handed on, full": ("not kept", "not kept, no ticket"),
    "handed on, window": ("not kept", "not kept, no ticket"),
    "row handed on": (),
}


def run(story: Story) -> Job:
    job = story.match("retracted", [10 + number for number in range(6 * story.unit)])
    story.tier.admit(job.req)
    story.prefill(job)
    story.decode(job, 3 * story.unit + 1)
    return job


def retract(story: Story, job: Job) -> Any:
    """Back up and release; returns the backup, None where there is none."""
    backup = story.server.tree.backup_kv_cache(job.req)
    story.server.retract([job.req], 0)
    return backup


def take_up(story: Story, job: Job, backup: Any) -> None:
    """A new row of as many tokens, whose KV comes from the backup."""
    request = story.server.request("again", job.tokens)
    story.server.match(request)
    must(not story.server.prefix_length(request), "a prefix was found")
    story.server.lock(request)
    story.server.extend([request], [story.server.plan(request, job.written)])
    host_tier.scrub(story.server)
    must(request.seqlen - 1 == job.written, f"{request.seqlen} tokens for {job.written}")
    story.server.tree.restore_kv_cache(request, backup)
    row = story.server.row(request)
    layers = host_tier.layers(story.server)
    for layer, window in layers.items():
        places = row[-story.window :] if window else row
        start = len(row) - len(places)
        got = host_tier.read(story.server, layer, places)
        right = host_tier.pattern(job.tokens[start : len(row)], start, layer, got.shape[2])
        must(bool((got == right).all()), f"layer {layer} is not what was written")


def tell(story: Story, scene: str) -> None:
    job = run(story)
    if scene == "row handed on":
        # Before its window, after what is the tree's.
        unit, allocator = story.unit, story.server.allocator
        lost = story.server.row(job.req)[6 * unit : 7 * unit]
        must(story.server.protected(job.req) <= 6 * unit, "those are the tree's")
        allocator.free(lost)
        others = allocator.full_attn_allocator.alloc(story.room()[0])
        must(bool(torch.isin(lost, others).all()), "others have other slots")
        host_tier.write(story.server, others, [500] * len(others), 0)
        backup = story.server.tree.backup_kv_cache(job.req)
        layer = next(n for n, window in host_tier.layers(story.server).items() if not window)
        pool = story.tier.host_pools()[0]
        copies = backup.host_indices[: job.written]
        got = torch.stack([pool.kv_buffer[side, 0][copies] for side in range(2)], dim=1)
        got = got.flatten(2).view(torch.int64)
        right = host_tier.pattern(job.tokens[: job.written], 0, layer, got.shape[2])
        must(bool((got == right).all()), "what was backed up is not what was written")
        return
    backup = retract(story, job)
    must(backup is not None, "not backed up")
    story.tier.flush_writes()
    story.empty_the_device()
    if scene.startswith("handed on"):
        side = 1 if scene.endswith("window") else 0
        fill(story, side, take(story, side))
    take_up(story, job, backup)


_BUSY: Any = Flights._busy
_LOOK: Any = Retraction._look


def _blind(*asked: Any) -> None:
    return None


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    reports = tales.guarded(mode)
    kept = mode is None or not mode.startswith("not kept")
    setattr(Flights, "_busy", _BUSY if kept else _never)  # noqa: B010
    blind = mode is not None and mode.endswith("no ticket")
    setattr(Retraction, "_look", _blind if blind else _LOOK)  # noqa: B010
    story = Story(release, tree, page, "write_through")
    told = tales.outcome(lambda: tell(story, scene))
    return {**told, "faults": tales.faults(reports)}


def main() -> int:
    return tales.print_all(__doc__, play, SCENES)


if __name__ == "__main__":
    sys.exit(main())

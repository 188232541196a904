"""The load-back race: the mapping is rebuilt by a load-back between a translation and its write.

PR #25889's kind, with the release's own host tier. A forward pass reads the window slots of a batch
once; a later layer stores by them. Two scenes in which a load-back comes between:

    slots reloaded      the request's early window slots are let go, and the load-back takes them
    mapping rebuilt     the request's prompt lost its window and gets another by the load-back; the
                        old slots are a neighbour's by now

Unguarded, the late write lands on KV of somebody else, in every release: where the pool remembers
the translation (up to 0.5.12.post1), and where the backend passes it along (since). In enforce it
goes where the mapping leads now, in strict it raises before a byte is written; in observe all is as
unguarded, and reported.

The proofs by mutation enforce, too. "no comparison": a translation is not compared with the
mapping. "no epoch": one that was in order once is taken to be so for ever.

Here only the pass in question is a pass: up to 0.5.12.post1 the pool remembers one at a time, and
the KV of all others comes from elsewhere (another server).

Prints one JSON line a tree, page size, scene and mode. Run: ``python -P load_race.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters import cached_translation, passed_translation
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.translation import Remembered
from hicache_guard.repro import host_tier, scheduling
from real import tales
from real.host_tier import Job, Story, must

MUTATIONS = ("no comparison", "no epoch")


def begin(story: Story, name: str, tokens: list[int]) -> tuple[Job, host_tier.ForwardPass]:
    """A request is admitted and gets its slots; its forward pass has read the mapping."""
    job = story.match(name, tokens)
    story.tier.admit(job.req)
    must(not story.server.prefix_length(job.req), f"{name} shares a prefix")
    story.server.extend([job.req], [story.server.plan(job.req, len(tokens))])
    slots = story.server.row(job.req)
    return job, host_tier.ForwardPass(story.server, slots, tokens, 0)


def on_the_host(story: Story) -> list[int]:
    """A prefix whose KV is on the host alone."""
    known = story.run("first", [10 + number for number in range(5 * story.unit)], story.unit + 1)
    story.tier.flush_writes()
    story.empty_the_device()
    return story.whole_pages(known)


def neighbour(story: Story, count: int) -> Job:
    """A request whose KV came from elsewhere."""
    job = story.match("neighbour", [500 + number for number in range(count)])
    story.tier.admit(job.req)
    story.server.extend([job.req], [story.server.plan(job.req, count)])
    story.store(story.server.row(job.req), job.tokens, 0)
    return job


def reload(story: Story, known: list[int]) -> Job:
    """Another request has a prefix loaded back."""
    job = story.match("again", [*known, 3])
    must(story.tier.wants_load(job.req), "nothing to load")
    story.tier.admit(job.req)
    slots = story.server.prefix(job.req)
    must(len(slots) == len(known), f"{len(slots)} of {len(known)} tokens loaded")
    story.tier.start_loads()
    story.bytes_of(slots, known)
    return job


def store_late(story: Story, forward: host_tier.ForwardPass) -> None:
    """The window layer of a pass stores; where that raises, not a byte of it."""
    buffers = host_tier.words(story.server, story.window_layer())
    before = [buffer.clone() for buffer in buffers]
    try:
        forward.store(story.window_layer())
    except GuardViolation:
        must(all(map(torch.equal, buffers, before)), "it raised after it had written")
        raise


def slots_reloaded(story: Story) -> dict[str, int]:
    unit, known = story.unit, on_the_host(story)
    neighbour(story, 10 * unit)
    # Nothing is left of the window pool but what the request lets go of.
    _, forward = begin(story, "late", [800 + number for number in range(14 * unit)])
    story.server.allocator.free_swa(forward.slots[: 12 * unit])
    reader = reload(story, known)
    slots = story.server.prefix(reader.req)
    taken = story.server.allocator.translate_loc_from_full_to_swa(slots)
    must(bool(torch.isin(taken[taken > 0], forward.translation).any()), "it took other slots")
    store_late(story, forward)
    return story.bytes_of(slots, known)


def mapping_rebuilt(story: Story) -> dict[str, int]:
    unit, prompt = story.unit, [10 + number for number in range(8 * story.unit)]
    late, forward = begin(story, "late", prompt)
    for layer in host_tier.layers(story.server):
        forward.store(layer)
    story.server.cache_unfinished(late.req, chunked=False)
    story.server.finish(late.req)
    # Who goes on from there locks the full side of all, and the window of its own end.
    longer = story.match("longer", [*prompt, *range(300, 300 + 4 * unit)])
    story.tier.admit(longer.req)
    story.prefill(longer)
    story.run("cached", [700 + number for number in range(6 * unit)], 1)
    story.tier.flush_writes()
    story.server.evict(0, story.idle[1])
    story.tier.flush_writes()
    other = neighbour(story, 10 * unit)
    reader = reload(story, prompt)
    slots = story.server.prefix(reader.req)
    must(torch.equal(slots, forward.slots), "the full side was not the one on the device")
    store_late(story, forward)
    found = story.bytes_of(slots, prompt)
    story.bytes_of(story.server.row(other.req), other.tokens)
    return found


SCENES: dict[str, Callable[[Story], dict[str, int]]] = {
    "slots reloaded": slots_reloaded,
    "mapping rebuilt": mapping_rebuilt,
}


_COMPARED: Any = cached_translation.compared
_IN_EPOCH: Any = Remembered.in_epoch


def _trusted(pool: Any, remembered: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return remembered


def _same(known: Any, translation: torch.Tensor, mapping: torch.Tensor) -> bool:
    return known._translation() is translation


def mutate(mode: str | None) -> None:
    """Break the guard as a mutation says; mend it for every other mode."""
    for module in (cached_translation, passed_translation):
        setattr(module, "compared", _trusted if mode == "no comparison" else _COMPARED)  # noqa: B010
    setattr(Remembered, "in_epoch", _same if mode == "no epoch" else _IN_EPOCH)  # noqa: B010


def play(
    release: scheduling.Release, tree: str, page: int, scene: str, mode: str | None
) -> dict[str, Any]:
    reports = tales.guarded(mode)
    mutate(mode)
    story = Story(release, tree, page, "write_through", passes=False)
    told = tales.outcome(lambda: SCENES[scene](story))
    return {**told, "faults": tales.faults(reports)}


def main() -> int:
    return tales.print_all(__doc__, play, dict.fromkeys(SCENES, MUTATIONS))


if __name__ == "__main__":
    sys.exit(main())

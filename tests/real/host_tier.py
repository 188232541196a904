"""KV goes from the device to the host and back through the release's own HiCache, byte for byte.

One story a tree, page size and write policy, by ``repro.host_tier``: a request runs and its KV is
known; it is backed up; the device gives everything up and is overwritten; another request finds the
same prefix on the host, and what is loaded for it, into other slots, is read through the layers and
compared. Then once more with the window gone alone. At the end nothing is lost, neither on the
device (``repro.audit``, the tree's ``sanity_check``) nor on the host.

Proof by mutation: ``--break`` does one thing wrong in the middle of each story, see ``BREAKS``; that
each is noticed is tested. Run: ``python -P host_tier.py --break``.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hicache_guard.adapters import tree_link
from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install
from hicache_guard.repro import host_tier, pools, scheduling
from hicache_guard.repro.audit import audit

PAGE_SIZES = (1, 16, 64)


class Finding(AssertionError):
    """Something that must not be."""


def must(true: bool, what: str) -> None:
    if not true:
        raise Finding(what)


@dataclass
class Job:
    """A request and its tokens; those that have KV come first."""

    req: Any
    tokens: list[int]
    written: int = 0


@dataclass
class Story:
    """A server with a host tier, and what is done to it."""

    release: scheduling.Release
    tree: str
    page: int
    policy: str
    breaking: Callable[[Story], None] | None = None
    storage: str | None = None  # a folder for the third tier
    passes: bool = True  # whether KV is stored by forward passes, or comes from elsewhere
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unit = max(self.page, 4)
        self.window = 2 * unit
        self.server = scheduling.Server(
            self.release,
            self.tree,
            page_size=self.page,
            window=self.window,
            full_pages=40 * unit // self.page,
            window_pages=24 * unit // self.page,
            longest=20 * unit,
        )
        self.unit = unit
        self.tier = host_tier.HostTier(self.server, self.policy, storage=self.storage)
        self.idle = self.room()

    def whole_pages(self, tokens: list[int]) -> list[int]:
        """As many tokens as a tree caches of these."""
        return tokens[: len(tokens) // self.page * self.page]

    # --- what a scheduler does -----------------------------------------------------------------

    def room(self) -> tuple[int, int]:
        allocator = self.server.allocator
        return int(allocator.full_available_size()), int(allocator.swa_available_size())

    def match(self, name: str, tokens: list[int]) -> Job:
        job = Job(self.server.request(name, tokens), list(tokens))
        self.server.match(job.req)
        return job

    def store(self, slots: torch.Tensor, tokens: list[int], start: int) -> None:
        """The KV of tokens, by all layers."""
        if not self.passes:
            host_tier.write(self.server, slots, tokens, start)
            return
        forward = host_tier.ForwardPass(self.server, slots, tokens, start)
        for layer in host_tier.layers(self.server):
            forward.store(layer)

    def prefill(self, job: Job) -> None:
        """What is left of a prompt whose prefix is matched and locked."""
        start = self.server.prefix_length(job.req)
        count = self.server.plan(job.req, len(job.tokens))
        self.server.extend([job.req], [count])
        self.store(self.server.row(job.req)[start:], job.tokens[start:], start)
        job.written = len(job.tokens)
        self.server.cache_unfinished(job.req, chunked=False)

    def decode(self, job: Job, count: int) -> None:
        for _ in range(count):
            job.tokens.append(1000 + len(job.tokens))
            job.req.output_ids.append(job.tokens[-1])
            self.server.decode([job.req])
            self.store(self.server.row(job.req)[-1:], job.tokens[-1:], job.written)
            job.written += 1
        job.tokens.append(7)
        job.req.output_ids.append(7)

    def run(self, name: str, tokens: list[int], output: int) -> list[int]:
        """A request from its match to its end; returns the tokens that have KV."""
        job = self.match(name, tokens)
        self.tier.admit(job.req)
        self.tier.start_loads()
        self.prefill(job)
        self.decode(job, output)
        self.server.finish(job.req)
        self.tier.poll()
        return job.tokens[: job.written]

    def overwrite_window(self) -> None:
        for buffer in host_tier.words(self.server, self.window_layer()):
            buffer.fill_(-1)

    def empty_the_device(self) -> None:
        self.server.evict(*self.idle)
        self.tier.flush_writes()
        must(self.room() == self.idle, f"evicted everything, and {self.room()} of {self.idle} free")
        host_tier.scrub(self.server)

    # --- what must hold ------------------------------------------------------------------------

    def bytes_of(self, slots: torch.Tensor, tokens: list[int]) -> dict[str, int]:
        """Compare each layer with what was written; returns how many tokens each kind has."""
        translate = self.server.allocator.translate_loc_from_full_to_swa
        mapped = (translate(slots) > 0).nonzero().flatten()
        least = min(self.window, len(slots))
        inside = int((mapped >= len(slots) - least).sum())
        must(inside == least, f"window KV of {inside} tokens of the last {least}")
        for layer, window in host_tier.layers(self.server).items():
            places = mapped if window else torch.arange(len(slots))
            got = host_tier.read(self.server, layer, slots[places])
            known = host_tier.pattern(tokens[: len(slots)], 0, layer, got.shape[2])[places]
            wrong = places[(got != known).flatten(1).any(1)]
            must(not len(wrong), f"layer {layer}: tokens {wrong.tolist()} are not what was written")
        return {"full": len(slots), "window": len(mapped)}

    def load(self, name: str, known: list[int], more: int) -> Job:
        """Admit a request that finds ``known``, not wholly on the device; ``more`` tokens follow.

        A host hit counts from where the device alone could serve, so from the start here.
        """
        job = self.match(name, known + [len(name)] * more)
        must(job.req.host_hit_length == len(known), f"{name}: host hit {job.req.host_hit_length}")
        must(self.tier.wants_load(job.req), f"{name}: nothing to load")
        self.tier.admit(job.req)
        slots = self.server.prefix(job.req)
        must(len(slots) == len(known), f"{name}: prefix of {len(slots)} tokens for {len(known)}")
        # The mapping names the window slots before anything is in them.
        tail = host_tier.read(self.server, self.window_layer(), slots[-self.window :])
        must(bool((tail == -1).all()), f"{name}: loaded before the load was submitted")
        if self.breaking is not None:
            self.breaking(self)
        self.tier.start_loads()
        for kind, count in self.bytes_of(slots, known).items():
            self.seen[f"{name}, {kind}"] = count
        return job

    def window_layer(self) -> int:
        return next(layer for layer, window in host_tier.layers(self.server).items() if window)

    def start(self, job: Job) -> None:
        """Prefill a loaded request; its row is read once more."""
        self.prefill(job)
        self.tier.finish_loads()
        must(self.tier.in_flight()[1] == 0, "a load is never done")
        self.bytes_of(self.server.row(job.req), job.tokens)

    def end(self, job: Job) -> None:
        self.decode(job, 1)
        self.server.finish(job.req)
        self.tier.flush_writes()

    def nothing_is_lost(self) -> None:
        """When nothing runs: the tree says so of itself, and the audit of the device's pages."""
        must(self.tier.in_flight() == (0, 0), f"{self.tier.in_flight()} never done")
        self.server.tree.sanity_check()
        faults = audit(self.server.allocator, {"the tree": self.server.tree_slots()})
        must(not faults, "; ".join(faults[:3]))

    # --- the story -----------------------------------------------------------------------------

    def tell(self) -> None:
        prompt = [10 + number for number in range(5 * self.unit)]
        for name in ("first", "again")[: 2 if self.policy == "write_through_selective" else 1]:
            known = self.run(name, prompt, 3 * self.unit + 1)
        known = known[: len(known) // self.page * self.page]
        self.tier.flush_writes()
        self.empty_the_device()
        must(self.tier.host_used()[0] >= len(known), f"{self.tier.host_used()} on the host")

        # A neighbour takes slots, so that the load must go elsewhere.
        neighbour = self.match("neighbour", [500 + number for number in range(3 * self.unit)])
        self.tier.admit(neighbour.req)
        self.prefill(neighbour)
        self.server.finish(neighbour.req)
        host_tier.scrub(self.server)
        reader = self.load("all", known, 4 * self.unit)
        self.start(reader)

        # The window of what both share goes alone: the reader locks the full side of its whole
        # prefix, and the window of its own last tokens only. A backup under way locks more.
        self.tier.flush_writes()
        self.server.evict(0, self.idle[1])
        self.tier.flush_writes()
        self.overwrite_window()
        sharer = self.load("window", known, self.unit)
        both = [self.server.row(reader.req)[: len(known)], self.server.prefix(sharer.req)]
        must(torch.equal(*both), "the full side was not the one on the device")
        self.start(sharer)
        self.end(sharer)
        self.end(reader)
        self.nothing_is_lost()

        self.empty_the_device()
        self.tier.evict_host(*(pool.size for pool in self.tier.host_pools()))
        must(self.tier.host_used() == (0, 0), f"{self.tier.host_used()} lost on the host")


# --- proof by mutation -----------------------------------------------------------------------------


def spoil_host(story: Story, side: int) -> None:
    """One byte of every host copy is another: of the full KV, or of the window's."""
    pool = story.tier.host_pools()[side]
    pool.kv_buffer.view(torch.uint8)[..., 0] ^= 1


def shift_loads(story: Story) -> None:
    """Each load reads its host slots one page late."""
    module: Any = host_tier.host_pool_module()

    def shifted(src_indices: torch.Tensor, **others: Any) -> None:
        module.transfer_kv_direct = host_tier.copy_rows
        host_tier.copy_rows(src_indices=src_indices.roll(story.page), **others)

    module.transfer_kv_direct = shifted


def forget_loads(story: Story) -> None:
    """The load is taken for done, and nothing was copied."""
    story.server.tree.cache_controller.load_queue.clear()


def remap(story: Story) -> None:
    """The rebuilt mapping is turned by one slot."""
    mapping = story.server.allocator.full_to_swa_index_mapping
    there = (mapping > 0).nonzero().flatten()
    mapping[there] = mapping[there].roll(1)


BREAKS: dict[str, Callable[[Story], None]] = {
    "host byte, full": lambda story: spoil_host(story, 0),
    "host byte, window": lambda story: spoil_host(story, 1),
    "load shifted by a page": shift_loads,
    "load forgotten": forget_loads,
    "mapping turned": remap,
}


def tell(story: Story) -> str:
    """What was found in a story; empty if nothing."""
    try:
        story.tell()
    except Finding as finding:
        return str(finding)
    except Exception:
        return traceback.format_exc(limit=-4)
    return ""


def said_by_guard(story: Story) -> dict[str, Any]:
    """What the guard counted in a story, and of how many load-backs it approved."""
    counted = vars(story.server.tree)[tree_link.ATTRIBUTE].record.tally
    faults = guard_of(story.server.allocator).tally.violations
    return {
        "faults": [fault.value for fault in faults],
        "load backs": counted.load_backs,
        "refused": counted.load_backs_refused,
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--break", dest="breaking", action="store_true", help="break each story")
    options.add_argument("--page-sizes", type=int, nargs="*", default=PAGE_SIZES)
    options.add_argument("--mode", help="of the guard; without, there is none")
    chosen = options.parse_args()
    pools.quiet()
    release = scheduling.Release()
    failed = False
    for tree in scheduling.trees():
        if tree == "legacy":
            continue  # it has no host tier
        for page in chosen.page_sizes:
            for policy in host_tier.POLICIES:
                if chosen.mode:
                    install(chosen.mode)
                story = Story(release, tree, page, policy)
                row: dict[str, Any] = {"tree": tree, "page_size": page, "policy": policy}
                found = tell(story)
                if chosen.mode:
                    row["guard"] = said_by_guard(story)
                print(json.dumps({**row, "found": found, "seen": story.seen}), flush=True)
                failed |= bool(found)
                for name, breaking in BREAKS.items() if chosen.breaking else ():
                    found = tell(Story(release, tree, page, policy, breaking))
                    print(json.dumps({**row, "broken": name, "found": found}), flush=True)
                    failed |= not found
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

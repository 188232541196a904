"""A little of the churn at scale on the release on the path, and mutations that its judges must see.

Prints one JSON line a scene. *served*: the same traffic unguarded and in enforce, and where the tree has
a host tier, with load-backs. *crossed*: the mapping of what the tree holds is turned by a page behind its
back; every page is still in one place, only content is wrong. *freed*: a page that the tree holds is
freed. *agreed*: on clean and on broken pools, what ``churn_oracle`` counts and what ``audit`` says. *step*:
slots of decode steps, computed in torch and by the release's kernel in Triton's interpreter.

Run: ``python -P churn_scale.py`` with a release on the path.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import torch

from hicache_guard.repro import churn_25805, churn_oracle, churn_scale, scheduling
from hicache_guard.repro.audit import audit

REQUESTS = 700
#: Sizes at which pools are full and evict after some hundred requests. Many remote prompts are longer
#: than the window: what they leave without window KV is what #25805 needs.
SMALL = {"slots": 40_000, "page_size": 64, "window": 128, "longest": 2048}
PAGE = SMALL["page_size"]


def run_of(mode: str, tree: str, **changes: Any) -> churn_scale.Run:
    kinds = churn_scale.guarded(mode)
    return churn_scale.Run(mode, churn_scale.Scale(tree, **{**SMALL, **changes}), 7, kinds)


def tell(scene: str, **facts: Any) -> None:
    print(json.dumps({"scene": scene, **facts}), flush=True)


def served(tree: str, mode: str, host: float) -> None:
    run = run_of(mode, tree, host=host)
    tell("served", host=host, counts=run.slice(REQUESTS))


def crossed(tree: str, by: int) -> None:
    """Turn the mapping of the tree's window slots by a page (or by none), and go on."""
    run = run_of("off", tree)
    before = run.slice(REQUESTS // 2)
    node = run.node
    slots = node.server.tree_slots()
    mapping = node.allocator.full_to_swa_index_mapping
    held = slots[mapping[slots] > 0].sort().values
    mapping[held] = torch.roll(mapping[held], by * PAGE)
    moved = churn_oracle.misplaced(node.allocator, node.holders())
    after = run.slice(60)
    wrong = after["wrong_hits"] - before["wrong_hits"]
    tell("crossed", tree=tree, by=by, moved=moved, wrong_hits=wrong)


def freed(tree: str) -> None:
    """Free a full page that the tree holds, and what both audits say before and after."""
    run = run_of("off", tree)
    run.slice(REQUESTS // 2)
    node = run.node
    agreed("clean", tree, node)
    slot = int(node.server.tree_slots()[0]) // PAGE * PAGE
    mapping = node.allocator.full_to_swa_index_mapping
    peers = mapping[slot : slot + PAGE].clone()
    mapping[slot : slot + PAGE] = 0
    node.allocator.full_attn_allocator.free(torch.arange(slot, slot + PAGE))
    mapping[slot : slot + PAGE] = peers
    agreed("freed", tree, node)


def agreed(what: str, tree: str, node: churn_scale.Node) -> None:
    """Both audits of the same pools: pages by kind, and the sentences that say the same."""
    holders = node.holders()
    books = {holder.name: torch.from_numpy(holder.slots) for holder in holders}
    said = Counter[str]()
    for sentence in audit(node.allocator, books):
        if "two owners" in sentence:
            said["two owners"] += 1
        elif " of " in sentence and "free list" in sentence:
            said["owned and free"] += 1
        elif "times in the free list" in sentence:
            said["twice free"] += 1
        elif "lost pages" in sentence:
            said["lost"] += len(re.findall(r"\d+", sentence))
        else:
            said[sentence] += 1
    counted = churn_oracle.misplaced(node.allocator, holders)
    tell("agreed", what=what, tree=tree, said=dict(said), counted=counted)


def steps(kernel: Any) -> None:
    """Decode steps of batches around page ends, by the kernel and by us."""
    dice = torch.Generator().manual_seed(3)
    for batch in (1, 2, 5, 16):
        for page_size in (1, 4, 64):
            lengths = torch.randint(1, 4 * page_size + 2, (batch,), generator=dice)
            free = torch.randperm(200, generator=dice)[: batch + 1] + 1
            last = torch.randint(page_size, 9 * page_size, (batch,), generator=dice)
            answers = []
            for compute in (kernel[(batch,)], churn_scale.slots_of_a_step):
                out = torch.full((batch,), -7, dtype=torch.int64)
                compute(lengths, last, free, out, 1 << (batch - 1).bit_length(), page_size)
                answers.append(out.tolist())
            tell("step", batch=batch, page_size=page_size, kernel=answers[0], ours=answers[1])


def main() -> None:
    kernel = getattr(churn_25805._home_of_page_allocator(), "alloc_decode_kernel", None)
    churn_scale.prepare()
    # Only where it can be interpreted at all; on others it is not what a CPU runs.
    if kernel is not None and "--steps" in sys.argv:
        steps(kernel)
    tree = scheduling.trees()[-1]
    for mode in ("off", "enforce"):
        served(tree, mode, 0.0)
    if "--host" in sys.argv:
        for mode in ("off", "enforce"):
            served(tree, mode, 2.0)
    if "--mutants" in sys.argv:
        crossed(tree, 0)
        crossed(tree, 1)
        freed(tree)


if __name__ == "__main__":
    main()

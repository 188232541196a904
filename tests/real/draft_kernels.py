"""What is computed of drafts on a CPU beside the release's own Triton kernels, which are interpreted.

Prints one JSON object: by name, the largest difference between the two over random trees.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from typing import Any

import torch

from hicache_guard.embedded import replacements, speculation

#: Drafts of a tree (node 0 is no draft), trees of a batch, tokens before them, and the window.
NODES, BATCH, KNOWN, WINDOW = 7, 3, 40, 16
HEADS, WIDTH = 2, 16


def tree(dice: random.Random) -> torch.Tensor:
    """Who sees whom: bool (NODES, NODES), each node its ancestors and itself.

    The last is nobody's child, as a node may be where there are fewer drafts.
    """
    seen = torch.eye(NODES, dtype=torch.bool)
    for node in range(1, NODES - 1):
        seen[node] |= seen[dice.randrange(node)]
    return seen


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def links(trees: torch.Tensor, lengths: torch.Tensor, by: Any) -> list[torch.Tensor]:
    """Positions, indices, first children and next siblings, as ``by`` tells them."""
    made = [torch.zeros(BATCH * NODES, dtype=torch.int64)]
    made += [torch.zeros(BATCH, NODES, dtype=torch.int64) for _ in range(3)]
    by(trees.flatten(), lengths, *made, BATCH, NODES)
    return made


def verified(known: list[torch.Tensor], drafts: Any, told: Any, by: Any) -> list[torch.Tensor]:
    _, index, child, sibling = known
    predicts = torch.zeros(BATCH * NODES, dtype=torch.int32)
    accepted = torch.full((BATCH, NODES), -1, dtype=torch.int32)
    count = torch.zeros(BATCH, dtype=torch.int32)
    by(
        predicts=predicts, accept_index=accepted, accept_token_num=count, candidates=drafts,
        retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling,
        target_predict=told,
    )  # fmt: skip
    return [predicts, accepted, count]


def attended(trees: torch.Tensor, window: int, by: Any) -> torch.Tensor:
    """What nodes of each tree attend to, with all that is known before them in a pool."""
    dice = torch.Generator().manual_seed(7)

    def drawn(count: int) -> torch.Tensor:
        return torch.randn(count, HEADS, WIDTH, generator=dice)

    q, new_k, new_v = (drawn(BATCH * NODES) for _ in range(3))
    k, v = drawn(BATCH * KNOWN + 1), drawn(BATCH * KNOWN + 1)
    out = torch.zeros_like(q)
    # Of a window only what it can hold is gathered, and the mask has a line of the whole text.
    kept = KNOWN if window < 0 else min(KNOWN, window)
    offsets = torch.full((BATCH,), KNOWN - kept, dtype=torch.int64)
    slots = [1 + row * KNOWN + torch.arange(KNOWN - kept, KNOWN) for row in range(BATCH)]
    ones = torch.ones(BATCH, NODES, KNOWN, dtype=torch.bool)
    mask = torch.cat([ones, trees], dim=2).flatten()
    steps = torch.arange(BATCH + 1, dtype=torch.int32)
    by(
        q, new_k, new_v, out, k, v, steps * NODES, steps * kept, torch.cat(slots), mask, True,
        steps.long() * NODES * (KNOWN + NODES), NODES, 1.0, 1.0,
        sliding_window_size=window, window_kv_offsets=offsets,
    )  # fmt: skip
    return out


def main() -> None:
    sys.meta_path.append(replacements.Empty())  # one of the modules asks for the compiled operation
    vars(importlib.import_module("sgl_kernel.speculative")).update(speculation.OPERATIONS)
    spec_tree: Any = importlib.import_module("sglang.kernels.ops.speculative.spec_tree")
    rebuilt: Any = importlib.import_module("sglang.kernels.ops.speculative.reconstruct_tree")
    moves: Any = importlib.import_module("sglang.kernels.ops.speculative.cache_locs")
    eagle: Any = importlib.import_module("sglang.kernels.ops.speculative.eagle")
    pool: Any = importlib.import_module("sglang.srt.mem_cache.allocation")
    copies: Any = importlib.import_module("sglang.kernels.ops.kvcache.cache_move")
    attention: Any = importlib.import_module("sglang.kernels.ops.attention.extend_attention")
    found: dict[str, float] = {}

    def differ(name: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
        most = max(apart(one, other) for one, other in zip(ours, theirs, strict=True))
        found[name] = max(found.get(name, 0.0), most)

    def their_verify(**given: Any) -> None:
        spec_tree.verify_tree_greedy_triton(
            **{name.replace("retrive", "retrieve"): value for name, value in given.items()}
        )

    for seed in range(3):
        dice = random.Random(seed)
        torch.manual_seed(seed)
        trees = torch.stack([tree(dice) for _ in range(BATCH)])
        lengths = torch.randint(10, KNOWN, (BATCH,))
        known = links(trees, lengths, rebuilt.reconstruct_indices_from_tree_mask_triton)
        differ("tree", links(trees, lengths, speculation.tree_of_mask), known)

        # Of two tokens, so that drafts are right now and then.
        drafts, told = torch.randint(0, 2, (2, BATCH, NODES))
        theirs = verified(known, drafts, told, their_verify)
        ours = verified(known, drafts, told, speculation.verify_greedily)
        differ("verify", ours, theirs)
        found["accepted"] = found.get("accepted", 0.0) + float(theirs[2].sum())

        slots = torch.randperm(BATCH * NODES) + 1
        index, size = theirs[1], theirs[1].numel()
        mine, other = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        speculation.slots_of_accepted(index, slots, mine)
        width = 1 << (size - 1).bit_length()
        eagle.fill_accept_out_cache_loc[(size,)](index, slots, other, width)
        differ("accepted slots", [mine], [other])

        table = torch.randint(1, 99, (BATCH + 2, KNOWN), dtype=torch.int32)
        rows = torch.randperm(BATCH + 2)[:BATCH]
        starts = torch.randint(0, 10, (BATCH,))
        ends = starts + torch.randint(0, 12, (BATCH,))
        total = int((ends - starts).sum())
        mine, other = torch.zeros(total, dtype=torch.int64), torch.zeros(total, dtype=torch.int64)
        speculation.slots_of_rows(rows, table, starts, ends, mine, KNOWN)
        moves.assign_extend_cache_locs[(BATCH,)](rows, table, starts, ends, other, KNOWN, 4)
        differ("slots of rows", [mine], [other])
        mine, other = table.clone(), table.clone()
        given = torch.randint(100, 199, (total,))
        speculation.slots_to_rows(rows, mine, starts, ends, given, KNOWN)
        pool.assign_req_to_token_pool[(BATCH,)](rows, other, starts, ends, given, KNOWN, 4)
        differ("slots to rows", [mine], [other])

        mine, other = torch.randn(2, 20, HEADS, WIDTH), torch.zeros(2, 20, HEADS, WIDTH)
        other.copy_(mine)
        to, source = torch.randperm(20)[:10].view(2, 5)
        width = HEADS * WIDTH * 4
        widths = torch.full((2,), width)
        for by, memory in ((speculation.rows_moved, mine), (None, other)):
            at = torch.tensor([layer.data_ptr() for layer in memory], dtype=torch.uint64)
            if by is not None:
                by(at, widths, to, source)
            else:
                copies.copy_all_layer_kv_cache_tiled[(2, 1)](
                    at, widths, to, source, 5, 8, BYTES_PER_TILE=width
                )
        differ("moved", [mine], [other])

        for window in (-1, WINDOW):
            theirs_out = attended(trees, window, attention.extend_attention_fwd)
            ours_out = attended(trees, window, replacements.extend_attention)
            differ(f"attention {window}", [ours_out], [theirs_out])
    print(json.dumps(found))


if __name__ == "__main__":
    main()

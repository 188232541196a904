"""What a tree counts as evictable and another has freed: an eviction brings what was asked for.

Two prefixes of 16 tokens are cached. The window KV of the second half of the older one is freed
behind the tree's back, and 16 window slots are asked for: the older one brings 8 of them. Prints one
JSON line a tree, with and without that fault. Run: ``python -P betrayed_evictions.py``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from hicache_guard.adapters.hooks import install
from hicache_guard.repro import pools
from hicache_guard.repro.outcomes import NotInThisRelease
from hicache_guard.repro.pools import Bench
from hicache_guard.repro.prefix_tree import PrefixTree

TREES: dict[str, dict[str, Any]] = {
    "legacy": {"unified": False},
    "python": {"unified": True},
    "rust": {"unified": True, "core": "rust"},
}


def play(betrayed: bool, options: dict[str, Any]) -> dict[str, int]:
    bench = Bench(pools.build(64, 64))
    tree = PrefixTree(bench, **options)
    older, newer = range(16), range(100, 116)
    for name, tokens in (("older", older), ("newer", newer)):
        tree.insert(tokens, bench.take(name, 16))
    if betrayed:
        bench.allocator.free_swa(bench.holds["older"][8:])
    hits = [len(tree.match(older)), len(tree.match(newer))]
    pool = bench.allocator.swa_attn_allocator
    before = pool.available_size()
    tree.evict(0, 16)
    return {
        "older": hits[0],
        "newer": hits[1],
        "came": pool.available_size() - before,
        "newer after": len(tree.match(newer)),
    }


def main() -> int:
    pools.quiet()
    install("enforce")
    for name, options in TREES.items():
        for betrayed in (False, True):
            try:
                found = play(betrayed, options)
            except NotInThisRelease:
                continue
            print(json.dumps({"tree": name, "betrayed": betrayed, **found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

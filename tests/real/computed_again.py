"""Requests that read a dead window are retracted, on the release's own batch, rows and tree.

A long prompt is cached while its next chunk is computed; what that chunk computed turns out wrong
only when it is in the tree already, and another request has taken it over. Both must be retracted;
nobody may be given it any more, nor the requests anything at all. What came before it stays a hit.

Prints one JSON line a tree and page size. Run: ``python -P computed_again.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any

from hicache_guard.adapters import steps
from hicache_guard.adapters.hooks import install, running_version
from hicache_guard.adapters.prefix_tree import protected
from hicache_guard.repro import pools, scheduling

WINDOW, RIGHT, ALL = 8, 64, 128


def _admitted(server: scheduling.Server, name: str, tokens: list[int]) -> Any:
    req = server.request(name, tokens)
    server.match(req)
    server.lock(req)
    server.extend([req], [server.plan(req, len(tokens))])
    server.cache_unfinished(req, chunked=False)
    return req


def _hit(server: scheduling.Server, name: str, tokens: list[int]) -> int:
    """How much of a prompt somebody new is given."""
    req = server.request(name, tokens)
    server.match(req)
    return server.prefix_length(req)


def play(release: scheduling.Release, tree: str, page: int) -> dict[str, Any]:
    server = scheduling.Server(
        release, tree, page_size=page, window=WINDOW,
        full_pages=640 // page, window_pages=640 // page, longest=256,
    )  # fmt: skip
    tokens = list(range(ALL))
    wrong = _admitted(server, "wrong", tokens)
    sharing = _admitted(server, "sharing", [*tokens, *range(1000, 1000 + page)])
    apart = _admitted(server, "apart", list(range(2000, 2000 + ALL)))
    before = _hit(server, "before", [*tokens, 7])
    batch = server._batch([wrong, sharing], "DECODE")
    scheduler = SimpleNamespace(
        tree_cache=server.tree,
        req_to_token_pool=server.rows,
        chunked_req=wrong,
        server_args=server.arguments,
    )
    alone = server._batch([apart], "DECODE")
    wrong.is_retracted = True
    held = steps._row(scheduler, wrong)[RIGHT : protected(wrong)]
    doomed = [steps.Again(wrong, batch, held)]
    retracted = steps._retract(scheduler, doomed, [batch, alone])
    return {
        "before": before,
        "retracted": [req.rid for req in retracted],
        "left": [len(batch.reqs), len(alone.reqs)],
        "chunked": scheduler.chunked_req is not None,
        "hit": _hit(server, "after", [*tokens, 7]),
        "hit apart": _hit(server, "after", [*range(2000, 2000 + ALL), 7]),
        "cold": [_cold(server, req) for req in retracted],
        "rows": [scheduling.field(req, "req_pool_idx") for req in retracted],
    }


def _cold(server: scheduling.Server, req: Any) -> int:
    """What a request that is computed again is given of the tree."""
    server.match(req)
    return server.prefix_length(req)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--page-sizes", type=int, nargs="*", default=(1, 16))
    chosen = options.parse_args()
    pools.quiet()
    release = scheduling.Release()
    # Window KV is kept for all that is cached, so that there is something left to hit.
    kept = "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS"
    release.choose(dict.fromkeys(release.options().keys() & {kept}, False))
    install("enforce")
    for tree in scheduling.trees():
        for page in chosen.page_sizes:
            row = {"version": running_version(), "tree": tree, "page_size": page}
            print(json.dumps({**row, **play(release, tree, page)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A server's metrics as SGLang lays them out: a directory, two schedulers, and its ``/metrics``.

Run as a script on a release. The parent does what SGLang's engine and HTTP server do with
``--enable-metrics``; each child, what a scheduler does, with a real prefix tree. Prints what a
scrape gets.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import types
from typing import Any


def scheduler(rank: int, title: str) -> None:
    # What SGLang's schedulers have imported; ours is without the library.
    sys.modules["setproctitle"] = types.ModuleType("setproctitle")
    vars(sys.modules["setproctitle"])["getproctitle"] = lambda: title
    from hicache_guard.adapters.metrics import publisher_for
    from hicache_guard.core.faults import Fault
    from hicache_guard.core.matches import MatchTally
    from hicache_guard.core.tally import Tally

    matches, faults = MatchTally(), Tally()
    _publish_ranks()
    assert publisher_for(tree(enable_metrics=False), [matches], [faults]) is None
    publisher = publisher_for(tree(enable_metrics=True), [matches], [faults])
    assert publisher is not None
    matches.proved(600, 512 + rank)
    faults.violations[Fault.DOUBLE_FREE] += 1
    publisher.publish()


def _publish_ranks() -> None:
    """Later releases ask for them, as a server's launcher leaves them."""
    try:
        from sglang.srt.runtime_context import get_parallel

        get_parallel().override_permanently(tp_rank=0, pp_rank=0)
    except (ImportError, AttributeError):
        pass


def tree(*, enable_metrics: bool) -> Any:
    """A real prefix tree over real pools."""
    from sglang.srt.mem_cache import cache_init_params

    from hicache_guard.repro.pools import build
    from hicache_guard.repro.prefix_tree import PrefixTree

    plain = cache_init_params.CacheInitParams

    class Params(plain):  # type: ignore[misc, valid-type]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given, enable_metrics=enable_metrics)

    cache_init_params.CacheInitParams = Params
    try:
        pools: Any = types.SimpleNamespace(allocator=build(page_size=PrefixTree.PAGE))
        return PrefixTree(pools, unified=True).cache
    finally:
        cache_init_params.CacheInitParams = plain


def scrape(app: Any) -> str:
    """The body of GET /metrics."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "GET", "path": "/metrics", "raw_path": b"/metrics",
        "root_path": "", "query_string": b"", "headers": [], "scheme": "http",
        "http_version": "1.1", "server": ("localhost", 80), "client": ("localhost", 1),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 200, sent
    return b"".join(message.get("body", b"") for message in sent[1:]).decode()


if __name__ == "__main__":
    from sglang.srt.utils import common

    common.set_prometheus_multiproc_dir()
    # SGLang spawns; a fork has all that was imported, and prometheus_client was not.
    assert "prometheus_client" not in sys.modules
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(
            target=scheduler, args=(rank, f"sglang::scheduler_DP{rank}_MOE_DP7_TP3_EP3")
        )
        for rank in range(2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        sys.exit("a scheduler failed")
    from starlette.applications import Starlette

    app = Starlette()
    common.add_prometheus_middleware(app)
    print(scrape(app))

"""Trees that are not as the others: such that nobody hooked, and those over a single pool.

A tree whose methods are not hooked reuses nothing over a guarded allocator, and says so once; the
environment can allow it; observe only says so. A pure window model's tree clips a prefix whose page
was recycled. Prints one JSON line a scene and mode. Run: ``python -P tree_seams.py``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

import torch

from hicache_guard.adapters import tree_params
from hicache_guard.adapters.hooks import install, running_version, uninstall
from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.report import Violation
from hicache_guard.repro import pools, scheduling
from real import driver

PAGE, WINDOW = 4, 8


class Listening(logging.Handler):
    """What the guard's logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Server(scheduling.Server):
    """A server whose unified tree is one of ``kind``."""

    kind: type | None = None

    def _tree(self, name: str) -> Any:
        from sglang.srt.mem_cache import unified_radix_cache as home

        original = home.UnifiedRadixCache
        try:
            home.UnifiedRadixCache = self.kind or original
            return super()._tree(name)
        finally:
            home.UnifiedRadixCache = original


def server_with(release: scheduling.Release, kind: type | None) -> Server:
    Server.kind = kind
    return Server(
        release,
        "unified",
        page_size=PAGE,
        window=WINDOW,
        full_pages=20,
        window_pages=20,
        longest=80,
    )


def hit(server: scheduling.Server) -> int:
    """A request runs; how many tokens of it the same request is given afterwards."""
    tokens = list(range(1, 25))
    for _ in range(2):
        req = server.request("R", tokens)
        server.match(req)
        length = server.prefix_length(req)
        server.lock(req)
        server.extend([req], [server.plan(req, 100)])
        server.cache_unfinished(req, chunked=False)
        req.output_ids.append(5)
        server.finish(req)
    return length


def closed(release: scheduling.Release) -> None:
    """A subclass that matches in its own way is not hooked."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    class OwnWay(UnifiedRadixCache):  # type: ignore[misc]
        def match_prefix(self, params: Any) -> Any:
            return super().match_prefix(params)

    logger = logging.getLogger("hicache_guard")
    logging.disable(logging.NOTSET)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for mode in (None, "observe", "enforce", "strict", "allowed"):
        uninstall()
        listening = Listening()
        logger.addHandler(listening)
        os.environ.pop(tree_params.SWITCH, None)
        if mode == "allowed":
            os.environ[tree_params.SWITCH] = "allow"
        if mode is not None:
            install("enforce" if mode == "allowed" else mode)
        found = {"hit": hit(server_with(release, OwnWay)), "usual": 0}
        said = [line for line in listening.lines if "OwnWay" in line]
        found["usual"] = hit(server_with(release, None))
        logger.removeHandler(listening)
        row = {"version": running_version(), "scene": "unhooked tree", "mode": mode, **found}
        print(json.dumps({**row, "said": said}), flush=True)


def single_pool() -> None:
    """A page of a cached prefix is recycled in a model whose every layer is a window layer."""
    try:
        from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
    except ImportError:
        return
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    for mode in (None, "observe", "enforce", "strict"):
        uninstall()
        reports: list[Violation] = []
        if mode is not None:
            install(mode, on_report=reports.append)
        pool = pools.build(64, 64, 1)
        allocator = PureSWATokenToKVPoolAllocator(
            64, 1, torch.float32, "cpu", pool.get_kvcache(), need_sort=False
        )
        tree = PureSWARadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=allocator,
                page_size=1,
                sliding_window_size=WINDOW,
            )
        )

        def key(count: int) -> Any:
            ids = list(range(count))
            try:
                from array import array

                return RadixKey(array("q", ids), None)
            except (AssertionError, TypeError):
                return RadixKey(ids, None)

        slots = allocator.alloc(24)
        tree.insert(InsertParams(key=key(24), value=slots.clone()))
        lengths = []
        ended = "returned"
        try:
            for _ in range(2):
                result = tree.match_prefix(MatchPrefixParams(key=key(24)))
                found = getattr(result, "device_indices", None)
                lengths.append(len(found) if found is not None else result.device_prefix_len)
                if len(lengths) == 1:
                    allocator.free(slots[8:12])
                    allocator.alloc(40)  # all there is: the page is somebody else's now
        except GuardViolation:
            ended = "raised"
        row = {"version": running_version(), "scene": "single pool", "mode": mode, "ended": ended}
        faults = [report.fault.value for report in reports]
        print(json.dumps({**row, "lengths": lengths, "faults": faults}), flush=True)


def main() -> int:
    driver.prepare()
    closed(scheduling.Release())
    single_pool()
    return 0


if __name__ == "__main__":
    sys.exit(main())

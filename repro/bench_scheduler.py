"""Paired timing of all that a scheduler does with its pools, with the guard and without.

Where ``bench_allocator`` times bare calls, this times the release's own functions that make them:
admission (match and lock), ``alloc_for_extend`` and ``alloc_for_decode`` (window eviction, rows of
the request table), caching a prompt in the tree, the release of finished requests into the tree,
and eviction from it. That is the work whose ratio the project's contract bounds. Requests have 512
tokens of prompt, their own each, and 128 of output. Checks that were put off are run where they
were noted last, and counted there. Rounds with and without the guard alternate; one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from hicache_guard.adapters.allocator import guard_of
from hicache_guard.adapters.hooks import install, uninstall
from hicache_guard.repro import pools, scheduling

MODES = ("observe", "enforce", "strict")
PROMPT, STEPS, WINDOW = 512, 128, 128
#: What is timed: our names for the release's functions, in the order of a request's life.
PARTS = ("admit", "extend", "cache", "decode", "finish", "evict")


class Rounds:
    """One server, and the seconds that its parts took in the present round."""

    def __init__(self, page_size: int, batch: int) -> None:
        self.batch = batch
        self.spent: dict[str, float] = defaultdict(float)
        self.count = 0
        release = scheduling.Release()
        for part, names in (
            ("extend", ["extend"]), ("decode", ["decode"]), ("finish", ["release"]),
            ("cache", ["checkpoint", "keep"]),
        ):  # fmt: skip
            for name in names:
                if getattr(release, name) is not None:
                    setattr(release, name, self._timed(part, getattr(release, name)))
        pages = 2 * batch * (PROMPT + STEPS + 2 * page_size) // page_size
        self.server = scheduling.Server(
            release,
            scheduling.trees()[-1],
            page_size=page_size,
            window=WINDOW,
            full_pages=pages,
            window_pages=pages,
            longest=PROMPT + STEPS + page_size,
            rows=batch + 1,
        )

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.spent[part] += time.perf_counter() - start
            return result

        return timed

    def _settled(self, part: str) -> None:
        self._timed(part, pools.settle)(self.server.allocator)

    def _admit(self, reqs: list[Any]) -> None:
        for req in reqs:
            self.server.match(req)
            self.server.plan(req, PROMPT)
            self.server.lock(req)

    def run(self) -> dict[str, float]:
        """The life of one batch; returns the seconds of each part."""
        server = self.server
        self.spent = defaultdict(float)
        self.count += 1
        first = [self.count * self.batch + at for at in range(self.batch)]
        reqs = [server.request(str(each), [each, *range(1, PROMPT)]) for each in first]
        self._timed("admit", self._admit)(reqs)
        server.extend(reqs, [PROMPT] * self.batch)
        for req in reqs:
            req.output_ids.append(1)
            server.cache_unfinished(req, chunked=False)
        self._settled("cache")
        for _ in range(STEPS - 1):
            server.decode(reqs)
            for req in reqs:
                req.output_ids.append(1)
        self._settled("decode")
        for req in reqs:
            server.finish(req)
        self._settled("finish")
        held = self.batch * (PROMPT + STEPS)
        self._timed("evict", server.evict)(held, held)
        self._settled("evict")
        return dict(self.spent)


def _times(page_size: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    servers: dict[str, Rounds] = {}
    for mode in ("off", *MODES):
        _hooks(mode)
        servers[mode] = Rounds(page_size, batch)
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_ in range(rounds + 2):
        for mode, server in servers.items():
            _hooks(mode)
            spent = server.run()
            if round_ >= 2:
                for part, seconds in spent.items():
                    taken[mode, part].append(seconds)
                taken[mode, "all"].append(sum(spent.values()))
    for mode in MODES:
        tally = guard_of(servers[mode].server.allocator).tally
        assert not tally.total, f"false alarm while measuring: {tally.violations}"
    middle = {key: statistics.median(seconds) for key, seconds in taken.items()}
    return [
        {
            "page_size": page_size,
            "batch": batch,
            "mode": mode,
            "what": part,
            "unguarded_us": middle["off", part] * 1e6,
            "guarded_us": middle[mode, part] * 1e6,
            "ratio": statistics.median(
                guarded / bare
                for guarded, bare in zip(taken[mode, part], taken["off", part], strict=True)
            ),
        }
        for mode in MODES
        for part in (*PARTS, "all")
    ]


def _hooks(mode: str) -> None:
    if mode == "off":
        uninstall()
    else:
        install(mode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    pools.quiet()
    torch.set_num_threads(1)
    times = []
    for page_size in (1, 64):
        for batch in (1, 64, 1024):
            print(f"page {page_size}, batch {batch}", file=sys.stderr)
            times += _times(page_size, batch, options.rounds)
    device = f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"
    print(json.dumps({"device": device, "times": times}))


if __name__ == "__main__":
    main()

"""Paired timing of all that a scheduler does with its pools, with the guard and without.

Where ``bench_allocator`` times bare calls, this times the release's own functions that make them:
admission (match and lock), ``alloc_for_extend`` and ``alloc_for_decode`` (window eviction, rows of
the request table), caching a prompt in the tree, the release of finished requests into the tree,
and eviction from it. That is the work whose ratio the project's contract bounds. Requests have 512
tokens of prompt, their own each, and 128 of output. Checks that were put off are run where they
were noted last, and counted there.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hicache_guard.repro import paired, pools, scheduling

PROMPT, STEPS, WINDOW = 512, 128, 128


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
                    setattr(release, name, self._clocked(part, getattr(release, name)))
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

    def _clocked(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.spent[part] += time.perf_counter() - start
            return result

        return timed

    def _settled(self, part: str) -> None:
        self._clocked(part, pools.settle)(self.allocator)

    def _admit(self, reqs: list[Any]) -> None:
        for req in reqs:
            self.server.match(req)
            self.server.plan(req, PROMPT)
            self.server.lock(req)

    @property
    def allocator(self) -> Any:
        return self.server.allocator

    def timed(self) -> dict[str, float]:
        """The life of one batch; returns the seconds of each part."""
        server = self.server
        self.spent = defaultdict(float)
        self.count += 1
        first = [self.count * self.batch + at for at in range(self.batch)]
        reqs = [server.request(str(each), [each, *range(1, PROMPT)]) for each in first]
        self._clocked("admit", self._admit)(reqs)
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
        self._clocked("evict", server.evict)(held, held)
        self._settled("evict")
        return dict(self.spent)


def main() -> None:
    print(json.dumps(paired.report(__doc__, Rounds, "all", rounds=7)))


if __name__ == "__main__":
    main()

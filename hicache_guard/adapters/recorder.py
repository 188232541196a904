"""Writing down what becomes of matches: the tally, and where asked for the trace and the metrics.

The numbers are ``core/matches``; how they reach SGLang's ``/metrics`` is ``metrics``. A match that
is proved costs two additions, unless somebody asked for a trace.
"""

from __future__ import annotations

import time
from typing import Any

from hicache_guard.adapters.metrics import publisher_for
from hicache_guard.adapters.state import settings
from hicache_guard.core.guard import PoolGuard
from hicache_guard.core.matches import MatchRecord, MatchTally, process_trace
from hicache_guard.core.modes import Mode
from hicache_guard.core.occupancy import Occupancy
from hicache_guard.core.proof import Proved


class Recorder:
    """What is known of the matches of one prefix tree."""

    def __init__(self, tree: Any, guard: PoolGuard) -> None:
        self.guard = guard
        self.tally = MatchTally()
        self.trace = process_trace()
        self.pages = Occupancy(guard)
        self.publisher = publisher_for(tree, [self.tally], [guard.tally, settings().tally])
        #: Whether a match that is proved leaves more than two additions.
        self.told = self.trace is not None or self.publisher is not None

    def proved(self, params: Any, length: int) -> None:
        """All ``length`` tokens of a match were proved."""
        asked = len(params.key)
        self.tally.proved(asked, length)
        if self.trace is not None:
            both = {"full": length, "window": length}
            self.trace.match(self._record(params, asked, both, both, length, None))
        self._publish()

    def clipped(self, params: Any, length: int, proved: Proved, used: int) -> None:
        """Of ``length`` tokens that the release matched only ``used`` are taken from the cache."""
        groups = proved.by_group
        lost_full = groups.get("full", length) < length
        clip = "full-not-resident" if lost_full else "window-unproved"
        used = length if self.guard.mode is Mode.OBSERVE else used
        matched = dict.fromkeys(groups, length)
        record = self._record(params, len(params.key), matched, groups, used, clip)
        self.tally.clipped(record)
        if self.trace is not None:
            self.trace.match(record)
        self._publish()

    def evicted(self, result: Any) -> None:
        """The tree evicted what an ``EvictResult`` says."""
        for group, tokens in (
            ("full", result.num_tokens_evicted),
            ("window", result.swa_num_tokens_evicted),
        ):
            if tokens:
                self.tally.evicted(group, tokens)
                if self.trace is not None:
                    self.trace.evict(group, tokens, **self._now())
        self._publish()

    def loaded_back(self, request: str | None, tokens: int, refused: str | None = None) -> None:
        """A load-back of ``tokens`` was made, or was not; ``refused`` says why."""
        if refused:
            self.tally.load_backs_refused += 1
        else:
            self.tally.loaded_back(tokens)
        if self.trace is not None:
            self.trace.load_back(request, tokens, refused=refused, **self._now())
        self._publish()

    def cut(self, request: str | None, tokens: int, kept: int, why: str) -> None:
        """Of an insertion of ``tokens`` the tree takes over ``kept`` only."""
        self.tally.insert_cuts += 1
        if self.trace is not None:
            self.trace.insert(request, tokens, kept, cut=why, **self._now())
        self._publish()

    def _record(
        self,
        params: Any,
        asked: int,
        matched: dict[str, int],
        proved: Any,
        used: int,
        clip: str | None,
    ) -> MatchRecord:
        return MatchRecord(
            time=time.time(),
            request=request_of(params),
            asked=asked,
            matched=matched,
            host=0,
            proved=proved,
            used=used,
            clip=clip,
            **self._now(),
        )

    def _now(self) -> dict[str, int]:
        """The moment, by the mapping's version and the guard's last operation."""
        return {"epoch": self.guard.map.epoch, "serial": self.guard.serial}

    def _publish(self) -> None:
        if self.trace is not None and (look := self.pages.look(time.time())) is not None:
            self.trace.pages(*look)
        if self.publisher is not None:
            self.publisher.maybe_publish()


def request_of(params: Any) -> str | None:
    """The id of the request that a match is for, where the release says so."""
    req = getattr(params, "req", None)
    return None if req is None else str(req.rid)


def length_of(result: Any) -> int:
    """Tokens of a match that are on the device."""
    found = getattr(result, "device_indices", None)
    return int(result.device_prefix_len if found is None else found.shape[0])

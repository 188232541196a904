"""The guard's counters in SGLang's own ``/metrics``.

A server with ``--enable-metrics`` sets ``PROMETHEUS_MULTIPROC_DIR`` before it starts schedulers,
and its HTTP process adds up what every process wrote there (``add_prometheus_middleware``). So
plain prometheus_client counters in a scheduler process are enough, if prometheus_client is imported
after that: it looks at the variable once. Nothing here imports it before a publisher is made.

Hot paths raise the plain integers of a ``MatchTally`` and a ``Tally``; what they grew by is added
to the counters by a thread, within a second, and no thread wakes where nothing happens.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_guard.core.faults import Fault
from hicache_guard.core.matches import CLIPS, MatchTally
from hicache_guard.core.tally import Tally

if TYPE_CHECKING:
    from prometheus_client import Counter

logger = logging.getLogger("hicache_guard")

#: Seconds from a change to its publication.
EVERY = 1.0
_PREFIX = "hicache_guard_"
#: The process title of SGLang's schedulers, and the ranks in it: "sglang::scheduler_DP0_PP1_TP3". A
#: rank is left out where there is one only. "ATTN_CP" and "MOE_DP" are other ranks.
_SCHEDULER = "sglang::scheduler"
_RANK = re.compile(r"(?<!MOE)_(DP|PP|TP)(\d+)")


@dataclass(frozen=True, slots=True)
class Metric:
    """One counter: what it counts, and its own label, if it has one, with the known values."""

    says: str
    label: str | None = None
    known: tuple[str, ...] = ()


#: By the names that ``MatchTally.snapshot`` and ``_faults`` give them.
METRICS = {
    "matches": Metric("prefix matches that the guard judged"),
    "hits": Metric("matches that used cached tokens"),
    "asked_tokens": Metric("tokens that were looked up"),
    "hit_tokens": Metric("cached tokens that requests used"),
    "proved_tokens": Metric("tokens that an attention group could prove", "group"),
    "clips": Metric("matches that could not be proved whole", "reason", tuple(CLIPS)),
    "false_hit_tokens_avoided": Metric("tokens that the release would have used without proof"),
    "recomputed_tokens": Metric("tokens computed again although some group still had them"),
    "evictions": Metric("evictions from the tree", "group"),
    "evicted_tokens": Metric("tokens evicted from the tree", "group"),
    "load_backs": Metric("load-backs from the host that were made"),
    "load_back_tokens": Metric("tokens loaded back from the host"),
    "load_backs_refused": Metric("load-backs that were refused"),
    "insert_cuts": Metric("insertions into the tree that were cut short"),
    "violations": Metric("violations", "fault", tuple(fault.value for fault in Fault)),
    "host_waits": Metric("times the host had to wait for the device"),
    "unhooked_writes": Metric("times pool state was found changed although no seam was used"),
    "recomputed_requests": Metric("requests computed again since they had read a dead window"),
}


def full_name(name: str) -> str:
    """The name of one of ``METRICS`` in ``/metrics``."""
    return f"{_PREFIX}{name}_total"


class Publisher:
    """Adds what some tallies grew by to this process's counters.

    A tally belongs to one publisher. Publishers with the same ``labels`` add to the same counters;
    all of a process have labels of the same names. Raises ImportError without prometheus_client,
    and ValueError for labels that it does not accept.
    """

    def __init__(
        self,
        matches: Sequence[MatchTally],
        faults: Sequence[Tally],
        labels: Mapping[str, str],
        every: float = EVERY,
    ) -> None:
        self._matches = matches
        self._faults = faults
        self._labels = dict(labels)
        self._counters = _counters(tuple(self._labels))
        self._every = every
        self._published: dict[str, int] = {}
        self._due = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        for name, metric in METRICS.items():
            # At 0 from the start: a rate cannot see a series that begins with its first event.
            for value in metric.known if metric.label else (None,):
                self._child(name, value)
        self.publish()

    def maybe_publish(self) -> None:
        """Have what was counted published within a second; costs next to nothing."""
        if not self._due:
            self._ask()

    def publish(self) -> None:
        """Publish now. Never raises: the first error is logged, and nothing is published again."""
        with self._lock:
            try:
                for key, count in self._counts().items():
                    grown = count - self._published.get(key, 0)
                    if grown > 0 or key not in self._published:
                        name, _, value = key.partition(".")
                        self._child(name, value or None).inc(grown)
                        self._published[key] = count
            except Exception:
                logger.exception("metrics are no longer published")
                self._due = True
                self._matches = self._faults = ()

    def _ask(self) -> None:
        self._due = True
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_publishing, name="hicache-guard-metrics", daemon=True
            )
            self._thread.start()
        self._wake.set()

    def _keep_publishing(self) -> None:
        pause = threading.Event()
        while True:
            self._wake.wait()
            self._wake.clear()
            pause.wait(self._every)
            # Before the counts are read: what is counted from here on asks again.
            self._due = False
            self.publish()

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        parts = [tally.snapshot() for tally in self._matches]
        parts += [_fault_counts(tally) for tally in self._faults]
        for part in parts:
            for key, count in part.items():
                counts[key] = counts.get(key, 0) + count
        return counts

    def _child(self, name: str, value: str | None) -> Counter:
        own = METRICS[name].label
        labels = self._labels if own is None else {**self._labels, own: value or ""}
        return self._counters[name].labels(**labels)


def publisher_for(
    tree: Any, matches: Sequence[MatchTally], faults: Sequence[Tally]
) -> Publisher | None:
    """A publisher for an SGLang prefix tree; None where the server has no ``--enable-metrics``.

    To be called after the tree's own ``__init__``, which makes ``metrics_collector`` if it is told
    ``enable_metrics``; all supported releases do. Never raises: without metrics a server can live.
    """
    collector = getattr(tree, "metrics_collector", None)
    if collector is None:
        return None
    try:
        return Publisher(matches, faults, labels_of(collector))
    except Exception:
        logger.exception("the guard's counters do not come to /metrics")
        return None


def labels_of(collector: Any) -> dict[str, str]:
    """The ranks, and what else is in the labels of a tree's own metrics, but for the tree's class.

    Those may be of ``--extra-metric-labels``. Up to 0.5.20 no ranks are there, and from 0.5.21 on 0
    for every replica; so the ranks are those of the scheduler's own metrics where it is one.
    """
    own = {metric.label for metric in METRICS.values()} | {"cache_type"}
    theirs = getattr(collector, "labels", None) or {}
    labels = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}
    given = {name: str(value) for name, value in theirs.items() if name not in own}
    title = _process_title()
    if title.startswith(_SCHEDULER):
        ranks = {f"{kind.lower()}_rank": rank for kind, rank in _RANK.findall(title)}
        return given | labels | ranks
    return labels | given


def _process_title() -> str:
    setproctitle = sys.modules.get("setproctitle")  # SGLang's schedulers have it
    return "" if setproctitle is None else str(setproctitle.getproctitle())


def _fault_counts(tally: Tally) -> dict[str, int]:
    counts = {f"violations.{fault.value}": n for fault, n in list(tally.violations.items())}
    return counts | {
        "host_waits": tally.waits,
        "unhooked_writes": tally.unhooked_writes,
        "recomputed_requests": tally.recomputed,
    }


@functools.cache
def _counters(labels: tuple[str, ...]) -> dict[str, Counter]:
    # Once a process: two counters of one name would overwrite each other's values.
    from prometheus_client import Counter

    return {
        name: Counter(
            full_name(name),
            f"hicache-guard: {metric.says}.",
            labels if metric.label is None else (*labels, metric.label),
        )
        for name, metric in METRICS.items()
    }

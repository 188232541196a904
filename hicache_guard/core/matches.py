"""What became of prefix matches: counters for all of them, and one trace line each when asked.

A match that is proved whole costs a few integer additions and nothing else (``MatchTally.proved``).
The facts of one match, a ``MatchRecord``, are put together only where it is clipped or a trace is
written. A trace is lines of JSON in a ``BoundedFile``.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_guard.core.bounded import (
    BoundedFile,
    asked_for,
    begins_with,
    reading,
    require_place,
    rotated,
)
from hicache_guard.core.errors import ConfigError

if TYPE_CHECKING:
    from hicache_guard.core.compiled import Look
    from hicache_guard.core.report import Violation

TRACE_VAR = "HICACHE_GUARD_TRACE"
BYTES_VAR = "HICACHE_GUARD_TRACE_BYTES"
DEFAULT_BYTES = 64 << 20
#: A bound below this would keep a few records only.
MIN_BYTES = 4096
#: The version of the trace's format: raised when a line no longer means what it meant.
FORMAT = 1
#: Stands for the process id in a trace's path.
_PID = "{pid}"
#: How every trace begins, with a digit after it.
_BEGINNING = b'{"v":'

#: Why a match is clipped, as machine words, and what each means. A word is a label of a metric, so
#: there are few; what is special to one match follows it in ``MatchRecord.clip``, after a colon.
CLIPS = {
    "window-unproved": "the window tail at the resume point is not live, current and this path's",
    "full-not-resident": "full KV on the path was freed since it was cached",
    "host-copy-stale": "the host copy that would be loaded back is not that of this path",
    "chunk-unproved": "the local chunk at the resume point is not live and current",
    "state-missing": "no recurrent state was kept at the resume point",
}


@dataclass(frozen=True, slots=True)
class MatchRecord:
    """The facts of one match.

    ``asked`` is the length of the key in tokens; ``matched`` what the release's match claimed on
    the device, by group; ``host`` what it would load back on top of that; ``proved`` the longest
    resume point that each group accepts; ``used`` what the request takes from the cache, load-back
    included. ``clip`` is one of ``CLIPS``, with ": " and more text where there is any to say, or
    None where the whole match was proved. ``epoch`` is the mapping's, ``serial`` that of the
    guard's operation. ``slot`` and ``page`` are the first offender, where there is one.
    """

    time: float
    request: str | None
    asked: int
    matched: Mapping[str, int]
    host: int
    proved: Mapping[str, int]
    used: int
    clip: str | None
    epoch: int
    serial: int
    slot: int | None = None
    page: int | None = None

    @classmethod
    def from_trace(cls, record: Mapping[str, Any]) -> MatchRecord:
        """What ``TraceFile.match`` wrote. Raises TypeError where it is not that."""
        return cls(**{name: record[name] for name in cls.__slots__ if name in record})

    @property
    def claimed(self) -> int:
        """The tokens that the release would use: what all groups claim, and the load-back."""
        return min(self.matched.values(), default=0) + self.host

    @property
    def reason(self) -> str | None:
        """The machine word of the clip."""
        return None if self.clip is None else self.clip.partition(":")[0]


class Whole:
    """Counts of matches: ``hits`` used ``hit_tokens``, and ``misses`` none."""

    __slots__ = ("asked_tokens", "hit_tokens", "hits", "misses")

    def __init__(self) -> None:
        self.hits = self.misses = self.asked_tokens = self.hit_tokens = 0


class MatchTally:
    """Counts of matches and of what happens to cached tokens; all in tokens where not said else.

    Plain attributes, to be raised in place, but for those that count matches. Whole ones are
    counted by ``wholes``: the tally's own, and whatever else counts such.
    ``false_hit_tokens_avoided`` were claimed by the release and not used (none in observe, where
    only ``clips`` counts); ``recomputed_tokens`` are computed again although some group still had
    them. ``load_backs_refused`` and ``insert_cuts`` count calls, as ``load_backs`` does.
    """

    __slots__ = (
        "_clipped",
        "_clipped_proved",
        "_whole",
        "clips",
        "evicted_tokens",
        "evictions",
        "false_hit_tokens_avoided",
        "insert_cuts",
        "load_back_tokens",
        "load_backs",
        "load_backs_refused",
        "recomputed_tokens",
        "wholes",
    )

    def __init__(self, groups: Sequence[str] = ("full", "window")) -> None:
        self._whole = Whole()
        self.wholes: list[Whole | Look] = [self._whole]
        self._clipped = Whole()
        self.clips: Counter[str] = Counter()
        self.false_hit_tokens_avoided = 0
        self.recomputed_tokens = 0
        self.evictions = dict.fromkeys(groups, 0)
        self.evicted_tokens = dict.fromkeys(groups, 0)
        self.load_backs = 0
        self.load_back_tokens = 0
        self.load_backs_refused = 0
        self.insert_cuts = 0
        self._clipped_proved = dict.fromkeys(groups, 0)

    def _sum(self, name: str) -> int:
        return sum(getattr(counts, name) for counts in (*self.wholes, self._clipped))

    @property
    def matches(self) -> int:
        """All matches."""
        return self._sum("hits") + self._sum("misses")

    @property
    def hits(self) -> int:
        """Matches that used any token."""
        return self._sum("hits")

    @property
    def hit_tokens(self) -> int:
        """Tokens that they used."""
        return self._sum("hit_tokens")

    @property
    def asked_tokens(self) -> int:
        """Tokens of all keys."""
        return self._sum("asked_tokens")

    @property
    def proved_tokens(self) -> dict[str, int]:
        """Tokens that each group proved; of a match that is proved whole they all proved it."""
        whole = sum(counts.hit_tokens for counts in self.wholes)
        return {name: whole + n for name, n in list(self._clipped_proved.items())}

    def proved(self, asked: int, used: int) -> None:
        """A match of a key of ``asked`` tokens gave ``used``, and every group proved them all."""
        whole = self._whole
        whole.asked_tokens += asked
        if used:
            whole.hits += 1
            whole.hit_tokens += used
        else:
            whole.misses += 1

    def clipped(self, record: MatchRecord) -> None:
        """A match was not proved whole. Raises ValueError for a record without a reason."""
        if record.reason is None:
            raise ValueError("a match without a clip is proved")
        avoided = max(0, record.claimed - record.used)
        deepest = max(record.matched.values(), default=0) + record.host
        clipped = self._clipped
        clipped.asked_tokens += record.asked
        clipped.hits += record.used > 0
        clipped.misses += record.used <= 0
        clipped.hit_tokens += record.used
        self.clips[record.reason] += 1
        self.false_hit_tokens_avoided += avoided
        self.recomputed_tokens += max(0, deepest - record.used)
        for name, tokens in record.proved.items():
            self._clipped_proved[name] = self._clipped_proved.get(name, 0) + tokens

    def evicted(self, group: str, tokens: int) -> None:
        """One eviction took ``tokens`` from ``group``."""
        self.evicted_tokens[group] = self.evicted_tokens.get(group, 0) + tokens
        self.evictions[group] = self.evictions.get(group, 0) + 1

    def loaded_back(self, tokens: int) -> None:
        """One load-back of ``tokens`` was proved and made."""
        self.load_backs += 1
        self.load_back_tokens += tokens

    def snapshot(self) -> dict[str, int]:
        """All counts under flat names; of those by group or reason, ``name.label``.

        May be called from another thread.
        """
        counts = {
            name: getattr(self, name)
            for name in (
                "matches",
                "hits",
                "hit_tokens",
                "asked_tokens",
                "false_hit_tokens_avoided",
                "recomputed_tokens",
                "load_backs",
                "load_back_tokens",
                "load_backs_refused",
                "insert_cuts",
            )
        }
        for name in ("proved_tokens", "clips", "evictions", "evicted_tokens"):
            for label, count in list(getattr(self, name).items()):
                counts[f"{name}.{label}"] = count
        return counts


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Where a trace goes and how large it may become; ``{pid}`` in ``path`` is the process id."""

    path: str
    max_bytes: int = DEFAULT_BYTES

    @classmethod
    def from_environment(cls) -> TraceOptions | None:
        """What the two variables ask for, or None where they ask for no trace.

        Opens nothing, so that every process can look whether they make sense. Raises ConfigError
        where they do not.
        """
        asked = asked_for(TRACE_VAR, BYTES_VAR, DEFAULT_BYTES, MIN_BYTES)
        if asked is None:
            return None
        options = cls(*asked)
        require_place(options.place, TRACE_VAR, options.path)
        return options

    @property
    def place(self) -> Path:
        """The file of this process."""
        return Path(os.path.expanduser(self.path.replace(_PID, str(os.getpid()))))


class TraceFile(BoundedFile):
    """A trace: each line is one object with "v" (the format), "kind", "time" and the facts."""

    def __init__(self, path: str | Path, max_bytes: int = DEFAULT_BYTES) -> None:
        """Raises ConfigError where the file cannot be written or is something else than a trace."""
        place = TraceOptions(str(path)).place
        super().__init__(place, max_bytes, beginning=_BEGINNING, what="trace", doing="tracing")

    @classmethod
    def from_environment(cls) -> TraceFile | None:
        """The trace that the environment asks for, opened; see ``TraceOptions``."""
        options = TraceOptions.from_environment()
        return None if options is None else cls(options.path, options.max_bytes)

    def match(self, record: MatchRecord) -> None:
        """One match, proved whole or clipped."""
        facts = {
            "request": record.request,
            "asked": record.asked,
            "matched": dict(record.matched),
            "host": record.host,
            "proved": dict(record.proved),
            "used": record.used,
            "clip": record.clip,
            "epoch": record.epoch,
            "serial": record.serial,
            "slot": record.slot,
            "page": record.page,
        }
        self._write("match", record.time, facts)

    def evict(self, group: str, tokens: int, *, epoch: int, serial: int) -> None:
        """An eviction took ``tokens`` from ``group``."""
        facts = {"group": group, "tokens": tokens, "epoch": epoch, "serial": serial}
        self._write("evict", time.time(), facts)

    def load_back(
        self, request: str | None, tokens: int, *, refused: str | None, epoch: int, serial: int
    ) -> None:
        """``tokens`` were loaded back, or were not: ``refused`` says why."""
        facts = {"request": request, "tokens": tokens, "refused": refused}
        self._write("load-back", time.time(), facts | {"epoch": epoch, "serial": serial})

    def insert(
        self,
        request: str | None,
        tokens: int,
        kept: int,
        *,
        cut: str | None,
        epoch: int,
        serial: int,
    ) -> None:
        """Of ``tokens`` that were to be cached the tree got ``kept``; ``cut`` says why not all."""
        facts = {"request": request, "tokens": tokens, "kept": kept, "cut": cut}
        self._write("insert", time.time(), facts | {"epoch": epoch, "serial": serial})

    def pages(self, when: float, facts: Mapping[str, object]) -> None:
        """Whose the pages were; see ``occupancy``."""
        self._write("pages", when, facts)

    def violation(self, violation: Violation) -> None:
        """A violation, with all its facts; it can be a ``Report``."""
        facts = {
            "fault": violation.fault.value,
            "pool": violation.pool,
            "slot": violation.slot,
            "page": violation.page,
            "slots": violation.slots,
            "operation": violation.operation,
            "request": violation.request,
            "expected": violation.expected,
            "found": violation.found,
            "other": violation.other,
            "history": violation.history,
        }
        self._write("violation", time.time(), facts)

    def _write(self, kind: str, when: float, facts: Mapping[str, object]) -> None:
        try:
            head = {"v": FORMAT, "kind": kind, "time": round(when, 6)}
            text = json.dumps({**head, **facts}, separators=(",", ":"), default=str)
            line = text.encode() + b"\n"
        except Exception:  # facts that are no data; the next record may be
            self.drop(f"a record of kind {kind!r} cannot be written as JSON")
            return
        self.write(line)


@functools.cache
def process_trace() -> TraceFile | None:
    """The trace of this process, opened at the first call; see ``TraceFile.from_environment``."""
    return TraceFile.from_environment()


class Trace:
    """The records of one trace, oldest first: those of ``<path>.1``, then those of ``path``.

    ``unreadable`` counts, after iterating, lines that are no records: a torn one where a process
    died. Raises ConfigError where there is no file, or one that holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0
        with reading(path) as lines:
            if not begins_with(lines.read(len(_BEGINNING)), _BEGINNING):
                raise ConfigError(f"{str(path)!r} is not a trace")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        older = rotated(self.path)
        for path in (older, self.path) if older.is_file() else (self.path,):
            with reading(path) as lines:
                for line in lines:
                    record = self._parse(line)
                    if record is not None:
                        yield record

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
            version = record["v"]
        except (ValueError, TypeError, LookupError, RecursionError):
            self.unreadable += 1
            return None
        if version != FORMAT:
            raise ConfigError(
                f"{str(self.path)!r} is a trace of format {version!r}; this reads {FORMAT}"
            )
        return dict(record)


def read_trace(path: str | Path) -> Trace:
    """The trace at ``path``; see ``Trace``."""
    return Trace(Path(path))

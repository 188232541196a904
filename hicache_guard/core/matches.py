"""What became of prefix matches: counters for all of them, and one trace line each when asked.

A match that is proved whole costs a few integer additions and nothing else (``MatchTally.proved``).
The facts of one match, a ``MatchRecord``, are put together only where it is clipped or a trace is
written. A trace is lines of JSON, bounded in bytes, readable up to the last line after any crash;
writing it can fail, and then tracing stops and the server goes on.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hicache_guard.core.errors import ConfigError

if TYPE_CHECKING:
    from hicache_guard.core.compiled import Look
    from hicache_guard.core.report import Violation

logger = logging.getLogger("hicache_guard")

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
_HEAD = len(_BEGINNING)

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
        text = os.environ.get(BYTES_VAR, "").strip()
        if text and (not (text.isascii() and text.isdigit()) or int(text) < MIN_BYTES):
            raise ConfigError(f"{BYTES_VAR}={text!r} is not a number of bytes from {MIN_BYTES} on")
        path = os.environ.get(TRACE_VAR, "").strip()
        if not path:
            return None
        options = cls(path, int(text) if text else DEFAULT_BYTES)
        place = options.place
        if place.is_dir():
            raise ConfigError(f"{TRACE_VAR}={path!r} is a folder; name a file in it")
        if not place.parent.is_dir():
            raise ConfigError(f"{TRACE_VAR}={path!r}: there is no folder {str(place.parent)!r}")
        return options

    @property
    def place(self) -> Path:
        """The file of this process."""
        return Path(os.path.expanduser(self.path.replace(_PID, str(os.getpid()))))


class TraceFile:
    """Appends to one trace, at most ``max_bytes`` of it, and as much again in ``<path>.1``.

    Each line is one object with "v" (the format), "kind", "time" and the facts. It is written with
    one system call, so that nothing but the last line can be torn, and only by a crash. A path that
    another process writes to gets ``.pid<its id>`` added. Nothing raises but the constructor: after
    an error one line is logged, tracing stops, and ``dropped`` counts what was not written.
    """

    def __init__(self, path: str | Path, max_bytes: int = DEFAULT_BYTES) -> None:
        """Raises ConfigError where the file cannot be written or is something else than a trace."""
        self.path = TraceOptions(str(path)).place
        self.max_bytes = max_bytes
        self.dropped = 0
        self._file = -1
        self._size = 0
        # HiCache moves pages in threads of its own.
        self._lock = threading.Lock()
        try:
            if not self._open():
                self.path = self.path.with_name(f"{self.path.name}.pid{os.getpid()}")
                if not self._open():
                    raise ConfigError(f"{str(self.path)!r} is being written already")
        except OSError as error:
            raise ConfigError(f"cannot write a trace to {str(self.path)!r}: {error}") from None

    @classmethod
    def from_environment(cls) -> TraceFile | None:
        """The trace that the environment asks for, opened; see ``TraceOptions``."""
        options = TraceOptions.from_environment()
        return None if options is None else cls(options.path, options.max_bytes)

    @property
    def stopped(self) -> bool:
        """Whether records are no longer written."""
        return self._file < 0

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

    def close(self) -> None:
        """Stop; what comes after is dropped."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _open(self) -> bool:
        """Open ``path`` to append to; whether it is free. What is there must be a trace."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if not _lock(file):
                os.close(file)
                return False
            size = os.fstat(file).st_size
            if not _begins_a_trace(os.pread(file, _HEAD, 0)):
                raise ConfigError(f"{str(self.path)!r} is not a trace; name another file")
            if size and os.pread(file, 1, size - 1) != b"\n":
                size += os.write(file, b"\n")  # behind the torn line of a crash
        except BaseException:
            os.close(file)
            raise
        self._file, self._size = file, size
        return True

    def _write(self, kind: str, when: float, facts: Mapping[str, object]) -> None:
        try:
            head = {"v": FORMAT, "kind": kind, "time": round(when, 6)}
            text = json.dumps({**head, **facts}, separators=(",", ":"), default=str)
            line = text.encode() + b"\n"
        except Exception:  # facts that are no data; the next record may be
            self._drop(f"a record of kind {kind!r} cannot be written as JSON")
            return
        with self._lock:
            if self._file < 0:
                self.dropped += 1
                return
            if len(line) > self.max_bytes:
                self._drop(f"a record of {len(line)} bytes is more than the whole bound")
                return
            try:
                if self._size + len(line) > self.max_bytes:
                    self._rotate()
                written = os.write(self._file, line)
                if written < len(line):
                    raise OSError("the disk is full")
                self._size += written
            except (OSError, ConfigError) as error:
                if self._file >= 0:
                    os.close(self._file)
                    self._file = -1
                self.dropped += 1
                logger.error("trace %s: %s; tracing stops", self.path, error)

    def _rotate(self) -> None:
        os.close(self._file)
        self._file = -1
        self.path.replace(rotated(self.path))
        if not self._open():
            raise OSError("another process writes to it")

    def _drop(self, why: str) -> None:
        if not self.dropped:
            logger.error("trace %s: %s", self.path, why)
        self.dropped += 1


@functools.cache
def process_trace() -> TraceFile | None:
    """The trace of this process, opened at the first call; see ``TraceFile.from_environment``."""
    return TraceFile.from_environment()


def _lock(file: int) -> bool:
    """Whether this file is ours alone to write to."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def rotated(path: Path) -> Path:
    """Where the older half of a trace lies."""
    return path.with_name(path.name + ".1")


def _begins_a_trace(start: bytes) -> bool:
    """Whether the first bytes of a file are ours; a process can die in its very first line."""
    return start == _BEGINNING[: len(start)]


class Trace:
    """The records of one trace, oldest first: those of ``<path>.1``, then those of ``path``.

    ``unreadable`` counts, after iterating, lines that are no records: a torn one where a process
    died. Raises ConfigError where there is no file, or one that holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable = 0
        with _reading(path) as lines:
            if not _begins_a_trace(lines.read(_HEAD)):
                raise ConfigError(f"{str(path)!r} is not a trace")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        older = rotated(self.path)
        for path in (older, self.path) if older.is_file() else (self.path,):
            with _reading(path) as lines:
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


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("rb") as lines:
            yield lines
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None


def read_trace(path: str | Path) -> Trace:
    """The trace at ``path``; see ``Trace``."""
    return Trace(Path(path))

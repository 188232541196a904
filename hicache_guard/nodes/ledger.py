"""The journal of a run on nodes: what was asked and what became of it, on disk before it is needed.

Lines of JSON, each written with one system call, so that a client that is killed at any point
tears at most the last; that one is dropped, and the run goes on behind it. A request is ``begun``
under an id of its own before it is sent, and closed once: ``ended``, ``lost`` (nobody knows how far
it came) or ``refused`` (it was never accepted). What was begun and not closed when a run is taken
up again is lost. A disk that is full ends the run, and the file stays whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_guard.core.errors import ConfigError, GuardError

Record = dict[str, Any]

FORMAT = 1
#: Records, and seconds, after which the disk is asked to have them.
SYNC_RECORDS, SYNC_SECONDS = 64, 1.0
#: How a request is closed.
CLOSED = ("ended", "lost", "refused")


class JournalError(GuardError):
    """The journal cannot be written any more."""


class Ledger:
    """The journal at ``path``, and what it says. May be used by several threads.

    ``run`` is the id of the run. ``outcomes`` has, by number, the record that a request ended or
    was lost with for good; ``tries`` how often each was begun; ``reads`` what it was when it was
    read again; ``notes`` all other records.
    """

    def __init__(self, path: Path, config: Mapping[str, Any], *, resume: bool) -> None:
        """Raises ConfigError where it cannot be written, is somebody else's, or of another run."""
        self.path = path
        self.outcomes: dict[int, Record] = {}
        self.tries: Counter[int] = Counter()
        self.notes: list[Record] = []
        self.reads: dict[int, Record] = {}
        self.closings: Counter[str] = Counter()
        self.orphans: list[Record] = []
        self._open: dict[str, Record] = {}
        self._lock = threading.RLock()
        self._unsynced, self._synced = 0, time.monotonic()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write the journal {path}: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):  # a device may never end
                raise ConfigError(f"{path} is not a regular file; choose another --out")
            _lock(self._file, path)
            head, records = self._read()
            if head is None:
                self.run = uuid.uuid4().hex[:12]
                head = {"v": FORMAT, "kind": "run", "run": self.run, "config": dict(config)}
                self._write(head)
            else:
                if not resume:
                    raise ConfigError(
                        f"{path} is the journal of a run: add --resume to go on with it, "
                        "or choose another --out"
                    )
                self.run = str(head["run"])
                _same(head["config"], config)
            for record in records:
                self._took(record)
            #: What had an outcome before this client began.
            self.before = frozenset(self.outcomes)
            # Whoever asked them is gone, and nobody heard the answers.
            self.orphans = [*self._open.values()]
            for record in self.orphans:
                why = "the client ended before it was answered"
                self.close(record["rid"], "lost", error=why, again=True)
        except JournalError as error:
            self.end()
            raise ConfigError(str(error)) from None
        except BaseException:
            self.end()
            raise

    # -- what happened ---------------------------------------------------------------------------

    def begin(self, number: int, rid: str, url: str) -> None:
        """A request is about to be sent. Raises JournalError, and then it must not be."""
        self._add({"kind": "begun", "n": number, "rid": rid, "url": url})

    def close(self, rid: str, kind: str, **facts: Any) -> bool:
        """What became of a request; the first word on it counts, and whether this was it.

        ``lost`` with ``again`` is asked once more, as ``refused`` is.
        """
        with self._lock:
            begun = self._open.get(rid)
            if begun is None:
                return False
            self._add({"kind": kind, "n": begun["n"], "rid": rid, "url": begun["url"], **facts})
            return True

    def note(self, kind: str, **facts: Any) -> None:
        """Something else to be remembered."""
        self._add({"kind": kind, **facts})

    def noted(self, kind: str) -> list[Record]:
        with self._lock:
            return [record for record in self.notes if record["kind"] == kind]

    def under_way(self) -> dict[str, str]:
        """Ids of requests that are not closed, and whom they were sent to."""
        with self._lock:
            return {rid: record["url"] for rid, record in self._open.items()}

    def end(self) -> None:
        """Nothing is written any more."""
        with self._lock:
            if self._file >= 0:
                try:
                    if self._unsynced:
                        os.fsync(self._file)
                finally:
                    os.close(self._file)
                    self._file = -1

    # -- how it is kept --------------------------------------------------------------------------

    def _add(self, record: Record) -> None:
        record = {"time": round(time.time(), 6), **record}
        with self._lock:
            self._write(record)
            self._took(record)

    def _took(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "begun":
            self.tries[record["n"]] += 1
            self._open[record["rid"]] = record
        elif kind in CLOSED:
            begun = self._open.pop(record["rid"], None)
            self.closings[kind] += 1
            record["begun"] = begun["time"] if begun else record["time"]
            if kind == "ended" or (kind == "lost" and not record.get("again")):
                self.outcomes[record["n"]] = record
        if kind == "read":
            self.reads[record["n"]] = record
        elif kind not in ("begun", "ended"):
            self.notes.append(record)

    def _write(self, record: Record) -> None:
        if self._file < 0:
            raise JournalError(f"{self.path} is closed")
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("the disk is full")
            self._unsynced += 1
            if self._unsynced >= SYNC_RECORDS or time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(self._file)
                self._unsynced, self._synced = 0, time.monotonic()
        except OSError as error:
            if os.fstat(self._file).st_size > size:
                os.ftruncate(self._file, size)
            raise JournalError(
                f"the journal {self.path} cannot be written: {error.strerror or error}"
            ) from None

    def _read(self) -> tuple[Record | None, list[Record]]:
        """The head and what follows it; what a crash tore off the end is cut away."""
        found: list[Record] = []
        whole = 0
        torn: int | None = None
        with open(os.dup(self._file), "rb") as lines:
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                record = _parse(line)
                if record is None:
                    torn = torn or number
                    continue
                if torn is not None:
                    raise ConfigError(f"line {torn} of {self.path} is no record of a journal")
                found.append(record)
                whole += len(line)
        if torn is not None:
            if torn == 1 and not _ours(self._file):
                raise ConfigError(f"{self.path} is not a journal; choose another --out")
            os.ftruncate(self._file, whole)
        if not found:
            return None, []
        if found[0].get("v") != FORMAT or found[0].get("kind") != "run":
            raise ConfigError(f"{self.path} is not a journal of format {FORMAT}")
        return found[0], found[1:]


#: How every journal begins.
_BEGINNING = b'{"v":'


def _ours(file: int) -> bool:
    start = os.pread(file, len(_BEGINNING), 0)
    return start == _BEGINNING[: len(start)]


def _parse(line: bytes) -> Record | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another run writes to {path}; wait for it or choose another --out"
        ) from None
    except OSError:
        pass  # a file system without locks


def _same(was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first thing in which two configurations differ."""
    now = json.loads(json.dumps(now))  # as the journal has it
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) != now.get(name):
            raise ConfigError(
                f"--resume: the journal is of a run with {name} {was.get(name)!r}, and this one "
                f"has {now.get(name)!r}; choose the same, or another --out"
            )

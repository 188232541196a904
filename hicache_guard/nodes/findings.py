"""What servers wrote while a run went on: their logs, and the traces of the guards in them.

Of a log only what was written since the run began is read, and only what says that something broke
is kept, with the rank that SGLang puts at the head of a line. Of a trace only violations, and what
concerns our own requests. All is joined by request id, and put in the order of time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hicache_guard.audit.play import OURS
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.faults import FACTS
from hicache_guard.core.matches import read_trace

#: How many lines a traceback may have, and how much is kept of a line.
DEEP, WIDE = 200, 400
#: Most findings of one log: a server that breaks says so many times.
MOST = 1000

_REQUEST = re.compile(re.escape(OURS) + r"[0-9a-f]{12}-(\d+)\.\d+")
#: "[2026-11-30 12:00:00 DP0 TP1] ...", in the server's own time of day.
_HEAD = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d+)?((?: [A-Z]+\d+)*)\]")
_VIOLATION = re.compile(
    "|".join(re.escape(f"{fault.value}: {facts.says}") for fault, facts in FACTS.items())
)
#: What says that something broke, but for tracebacks.
_BROKEN = re.compile(
    r"AssertionError|Assertion .*failed|device-side assert|CUDA error|illegal memory access"
    r"|Segmentation fault|Fatal Python error|memory leak detected|SIGQUIT|crashed with|core dumped",
    re.IGNORECASE,
)
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class LogFile:
    """A server's log: its name in reports, where it is, and from which byte on it concerns us."""

    name: str
    path: Path
    start: int = 0

    @classmethod
    def parse(cls, spelled: str) -> LogFile:
        """``NAME=FILE``, from its present end on. Raises ConfigError where it cannot be read."""
        name, separator, file = spelled.partition("=")
        if not separator or not name or not file:
            raise ConfigError(f"--log {spelled}: it should be NAME=FILE")
        path = Path(file)
        try:
            with path.open("rb"):
                return cls(name, path, path.stat().st_size)
        except OSError as error:
            raise ConfigError(f"--log {spelled}: {error.strerror}") from None


def visible(text: str) -> str:
    """One line that neither a terminal nor a page takes for more than text."""
    shown = (c if c.isprintable() else " " if c in "\n\t\r" else f"\\u{ord(c):04x}" for c in text)
    return "".join(shown)[:WIDE]


def request_of(text: str) -> tuple[str | None, int | None]:
    """The first request of ours that a text names: its id and its number."""
    found = _REQUEST.search(text)
    return (found[0], int(found[1])) if found else (None, None)


def logged(log: LogFile, begun: float) -> list[dict[str, Any]]:
    """What broke according to a log. Lines without a time have that of the last that has one."""
    found: list[dict[str, Any]] = []
    try:
        with log.path.open("rb") as lines:
            size = log.path.stat().st_size
            lines.seek(log.start if size >= log.start else 0)  # else it was begun anew
            for event in _events(line.decode("utf-8", "replace") for line in lines):
                found.append(event)
                if len(found) == MOST:
                    break
    except OSError as error:
        raise ConfigError(f"--log {log.path}: {error.strerror}") from None
    for event in found:
        event["time"] = event["time"] or begun
        event["source"] = f"log:{log.name}"
    return found


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    when: float | None = None
    rank = ""
    for line in lines:
        if head := _HEAD.match(line):
            with suppress(ValueError):
                when = datetime.strptime(head[1], "%Y-%m-%d %H:%M:%S").timestamp()
            rank = head[2].strip()
        if TRACEBACK in line:
            kind, text = "traceback", _raised(lines)
        elif _VIOLATION.search(line):
            kind, text = "violation", line
        elif _BROKEN.search(line):
            kind, text = "broken", line
        else:
            continue
        rid, number = request_of(text)
        yield {
            "time": when, "kind": kind, "rank": rank, "rid": rid, "n": number,
            "text": visible(text.strip()),
        }  # fmt: skip


def _raised(lines: Iterator[str]) -> str:
    """The exception at the end of a traceback: its first line that is not set in."""
    for _, line in zip(range(DEEP), lines, strict=False):
        if line.strip() and not line.startswith((" ", "\t")) and not _HEAD.match(line):
            return line
    return "a traceback without an end"


def traced(files: Iterable[Path], begun: float) -> Iterator[dict[str, Any]]:
    """Violations since a run began, and what became of our own requests."""
    for file in files:
        for record in read_trace(file):
            with suppress(LookupError, TypeError, ValueError):  # not what we write
                if float(record["time"]) < begun:
                    continue
                rid, number = request_of(str(record.get("request")))
                if record["kind"] == "violation":
                    text = f"{record['fault']}: {record['pool']} slot {record['slot']}, "
                    text += f"page {record['page']}, in {record['operation']}"
                elif rid is None:
                    continue
                else:
                    text = _told(record)
                yield {
                    "time": float(record["time"]), "kind": record["kind"],
                    "source": f"trace:{file.name}", "rank": "", "rid": rid, "n": number,
                    "text": visible(text), "facts": record,
                }  # fmt: skip


def _told(record: Mapping[str, Any]) -> str:
    """A record of a trace in a few words."""
    match record["kind"]:
        case "match":
            clip = f", clipped: {record['clip']}" if record["clip"] else ""
            return f"{record['used']} of {record['asked']} tokens from the cache{clip}"
        case "load-back":
            refused = f", refused: {record['refused']}" if record["refused"] else ""
            return f"{record['tokens']} tokens from the host{refused}"
        case "insert":
            return f"{record['kept']} of {record['tokens']} tokens cached: {record['cut']}"
    return str(record["kind"])

"""The calls that an allocator received, in a file from which they can be made again.

A *record* is lines of JSON in a ``BoundedFile``: what the allocator was built as, then each call of
one of its methods before it is made, and what it returned, in a line of its own. So the call that
ends a process is there although it never returned. Index tensors are written as runs. When the file
is full the next one begins with the state of every allocator, so that it can be replayed alone.
``docs/record-format.md`` describes each line. Reading takes the lines up to the first that is none.

The adapters write it (``adapters/recording.py``), ``hicache_guard.replay`` plays it.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from hicache_guard import __version__
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
    from hicache_guard.core.report import Violation

RECORD_VAR = "HICACHE_GUARD_RECORD"
BYTES_VAR = "HICACHE_GUARD_RECORD_BYTES"
DEFAULT_BYTES = 256 << 20
#: A bound below this would hold little more than the state that each file begins with.
MIN_BYTES = 64 << 10
#: The version of the format: raised when a line no longer means what it meant.
FORMAT = 1
#: How every record begins, with the version after it.
_BEGINNING = b'{"record":'

Facts = Mapping[str, Any]


#: Most indices in one list: more than any pool has slots.
MOST = 1 << 26

# -- values ----------------------------------------------------------------------------------------

#: Types of tensors that are written as runs, by the key under which their runs stand.
_TYPES = {"q": torch.int64, "i": torch.int32}
_KEYS = {kind: key for key, kind in _TYPES.items()}


#: Fewer numbers than this are written faster one by one.
_FEW = 48


def runs(values: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
    """Integers as text: ``8+3 5`` is 8, 9, 10, 5."""
    if len(values) < _FEW:
        return " ".join(_few_runs(map(int, values)))
    numbers = np.asarray(values, dtype=np.int64)
    begins = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(begins, append=numbers.size)
    pairs = zip(numbers[begins].tolist(), counts.tolist(), strict=True)
    return " ".join(f"{first}+{count}" if count > 1 else str(first) for first, count in pairs)


def _few_runs(values: Iterable[int]) -> Iterator[str]:
    first = count = 0
    for value in values:
        if count and value == first + count:
            count += 1
            continue
        if count:
            yield f"{first}+{count}" if count > 1 else str(first)
        first, count = value, 1
    if count:
        yield f"{first}+{count}" if count > 1 else str(first)


def from_runs(text: str) -> list[int]:
    """What ``runs`` wrote. Raises ValueError for anything else."""
    found: list[int] = []
    for run in text.split():
        first, _, count = run.partition("+")
        begin, number = int(first), int(count or 1)
        if not 0 < number <= MOST - len(found):
            raise ValueError(f"a run of {number}: more than {MOST:,} in one list")
        found.extend(range(begin, begin + number))
    return found


def encode(value: Any) -> Any:
    """An argument or a result as JSON; what cannot be made again is named by its type.

    Index tensors of one dimension are written whole: those of a device are waited for.
    """
    if isinstance(value, torch.Tensor):
        key = _KEYS.get(value.dtype)
        if key is None or value.dim() != 1:
            return {"?": f"tensor of {value.dtype}, {value.dim()} dimensions"}
        return {key: runs(value.tolist() if value.shape[0] < _FEW else value.cpu().numpy())}
    if value is None or isinstance(value, (bool, int)):
        return value
    return {"?": type(value).__name__}


def decode(value: Any) -> Any:
    """What ``encode`` wrote, on the CPU. Raises ValueError for what cannot be made again."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, dict) and len(value) == 1:
        (key, content), *_ = value.items()
        if key in _TYPES and isinstance(content, str):
            return torch.tensor(from_runs(content), dtype=_TYPES[key])
        if key == "?":
            raise ValueError(f"a {content} cannot be made again")
    raise ValueError(f"no value: {value!r}")


def pack(tensor: torch.Tensor) -> dict[str, Any]:
    """A whole tensor of integers as JSON: its differences, compressed."""
    numbers = tensor.detach().cpu().to(torch.int64).numpy()
    steps = np.diff(numbers, prepend=np.int64(0)).astype("<i8")
    data = base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode()
    return {"type": str(tensor.dtype).removeprefix("torch."), "zlib": data}


def unpack(packed: Facts) -> torch.Tensor:
    """What ``pack`` wrote, on the CPU. Raises ValueError for anything else."""
    try:
        # Not more than a pool can have, whatever the file promises.
        opener = zlib.decompressobj()
        opened = opener.decompress(base64.b64decode(packed["zlib"]), 8 * MOST)
        if not opener.eof:
            raise ValueError("a packed tensor is cut short, or too long")
        steps = np.frombuffer(opened, dtype="<i8")
        kind = getattr(torch, packed["type"])
    except (zlib.error, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no packed tensor: {error}") from None
    return torch.from_numpy(np.cumsum(steps)).to(kind)


# -- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Where a record goes and how large it may become.

    In ``path``, ``{pid}`` is the process id and ``{rank}`` the rank of ``torch.distributed``, 0
    where there is none.
    """

    path: str
    max_bytes: int = DEFAULT_BYTES

    @classmethod
    def from_environment(cls) -> RecordOptions | None:
        """What the two variables ask for, or None where they ask for no record; opens nothing.

        Raises ConfigError where they make no sense.
        """
        asked = asked_for(RECORD_VAR, BYTES_VAR, DEFAULT_BYTES, MIN_BYTES)
        if asked is None:
            return None
        options = cls(*asked)
        require_place(options.place, RECORD_VAR, options.path)
        return options

    @property
    def place(self) -> Path:
        """The file of this process."""
        named = self.path.replace("{pid}", str(os.getpid())).replace("{rank}", str(_rank()))
        return Path(os.path.expanduser(named))


def _rank() -> int:
    distributed = torch.distributed
    here = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if here else 0


class RecordFile(BoundedFile):
    """Writes one record; see ``BoundedFile`` for what happens when that fails.

    ``facts`` go into the first line of each file: the release and the mode. What an earlier process
    left at the path becomes ``<path>.1``.
    """

    def __init__(self, options: RecordOptions, facts: Facts) -> None:
        """Raises ConfigError where the file cannot be written or is something else."""
        super().__init__(
            options.place,
            options.max_bytes,
            beginning=_BEGINNING,
            what="record",
            doing="recording",
        )
        self._facts = facts
        self._id = uuid.uuid4().hex
        self._part = 0
        self._next = 0
        #: The call that runs, by its number.
        self.running: int | None = None
        if self.size:
            self.rotate()
        self.write(self._head(), beyond=True)

    def lacks_room(self) -> bool:
        """Whether the next call should begin a new file."""
        return self.size >= self.max_bytes

    def begin_anew(self, states: Sequence[Facts]) -> None:
        """Begin a new file with ``states``: the lines about each allocator, with its state."""
        self._part += 1
        lines = [self._head(), *map(_line, states)]
        if sum(map(len, lines)) > self.max_bytes // 2:
            self.stop(f"the state alone takes more than half of {self.max_bytes} bytes")
            return
        self.rotate(lines)

    def allocator(self, facts: Facts) -> None:
        """An allocator was built."""
        self.write(_line(facts), beyond=True)

    def call(self, facts: Facts) -> int:
        """A call is about to be made; its number."""
        number = self._next
        self._next += 1
        self.running = number
        self.write(_line({"k": "call", "n": number, **facts}), beyond=True)
        return number

    def returned(self, number: int, facts: Facts) -> None:
        """What a call returned or raised."""
        self.running = None
        self.write(_line({"k": "return", "n": number, **facts}), beyond=True)

    def written(self, facts: Facts) -> None:
        """Something was written around the methods."""
        self.write(_line({"k": "write", **facts}), beyond=True)

    def violation(self, allocator: int, violation: Violation) -> None:
        """A violation; it belongs to the operation whose serial its text begins with."""
        self.write(
            _line(
                {
                    "k": "violation",
                    "a": allocator,
                    "n": self.running,
                    "fault": violation.fault.value,
                    "pool": violation.pool,
                    "slot": violation.slot,
                    "page": violation.page,
                    "slots": violation.slots,
                    "operation": violation.operation,
                    "request": violation.request,
                    "text": str(violation),
                }
            ),
            beyond=True,
        )

    def _head(self) -> bytes:
        facts = {
            "record": FORMAT,
            "id": self._id,
            "part": self._part,
            "next": self._next,
            "guard": __version__,
            **self._facts,
            "rank": _rank(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": round(time.time(), 6),
        }
        return _line(facts)


_as_json = json.JSONEncoder(separators=(",", ":"), default=str).encode


def _line(facts: Facts) -> bytes:
    return _as_json(facts).encode() + b"\n"


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Allocator:
    """An allocator of a record: ``facts`` as they were written, ``state`` where it was not new."""

    number: int
    facts: Facts
    state: Facts | None

    @property
    def text(self) -> str:
        """In a few words."""
        facts = self.facts
        return (
            f"{facts['class']}, {facts['full']} full and {facts['window']} window slots, pages of "
            f"{facts['page']}"
        )


@dataclass(slots=True)
class Call:
    """One call: ``on`` the pair or the full or window sub-allocator of an allocator.

    ``group``: whether frees on the pair were being queued. ``ended`` once the return was read: then
    ``gave`` is the encoded result, or ``raised`` the type and text of the exception. ``serials``:
    the guard's serials of the operations in it.
    """

    number: int
    allocator: int
    on: str
    do: str
    args: Sequence[Any]
    named: Facts
    group: bool
    request: str | None
    at: str
    time: float
    ended: bool = False
    gave: Any = None
    raised: Facts | None = None
    serials: range = range(0)


@dataclass(frozen=True, slots=True)
class Write:
    """Something that was written around the methods before the next call; see the format."""

    allocator: int
    facts: Facts


@dataclass(frozen=True, slots=True)
class Violated:
    """A violation that was recorded, with the number of its call; None where it was in no call."""

    allocator: int
    call: int | None
    facts: Facts

    @property
    def fault(self) -> str:
        return str(self.facts["fault"])


@dataclass
class Record:
    """What a record says. ``events`` are calls and writes in their order.

    ``unreadable`` counts the bytes behind the last line that could be read. ``whole`` says that it
    begins where the process did, and not with a state.
    """

    head: Facts
    allocators: dict[int, Allocator] = field(default_factory=dict)
    events: list[Call | Write] = field(default_factory=list)
    violations: list[Violated] = field(default_factory=list)
    unreadable: int = 0

    @property
    def release(self) -> str:
        return str(self.head["sglang"])

    @property
    def mode(self) -> str:
        return str(self.head["mode"])

    @property
    def whole(self) -> bool:
        return not self.head["part"]

    @property
    def calls(self) -> Iterator[Call]:
        return (event for event in self.events if isinstance(event, Call))


def read_record(path: Path) -> Record:
    """The record at ``path``, with the older half of it where that lies beside and goes before it.

    Raises ConfigError where there is none, or it is of another format.
    """
    older = rotated(path)
    parts = [_Part(path)]
    if parts[0].head["part"] and older.is_file():
        try:
            before = _Part(older)
        except ConfigError:
            before = parts[0]
        follows = before.head["id"] == parts[0].head["id"]
        if follows and before.head["part"] == parts[0].head["part"] - 1 and not before.torn:
            parts.insert(0, before)
    record = Record(parts[0].head)
    reader = _Reader(record)
    for part in parts:
        try:
            for end, facts in part.lines:
                reader.take(facts)
                part.read = end
        except (LookupError, TypeError, ValueError):
            pass  # JSON, and not what we write: nothing behind it can be trusted
        record.unreadable = part.unread
        if record.unreadable:
            break
    reader.assign()
    return record


class _Part:
    """One file of a record, as lines of JSON up to the first that is none."""

    def __init__(self, path: Path) -> None:
        with reading(path) as file:
            content = file.read()
        if not content or not begins_with(content[: len(_BEGINNING)], _BEGINNING):
            raise ConfigError(f"{str(path)!r} is not a record")
        self.size = len(content)
        self.lines: list[tuple[int, Facts]] = []
        place = 0
        for text in content.splitlines(keepends=True):
            place += len(text)
            if not text.endswith(b"\n"):
                break
            try:
                facts = json.loads(text)
            except (ValueError, RecursionError):
                break
            if not isinstance(facts, dict):
                break
            self.lines.append((place, facts))
        if not self.lines:
            raise ConfigError(f"{str(path)!r} ends within its first line: there is nothing in it")
        self.read, self.head = self.lines.pop(0)
        version = self.head.get("record")
        if version != FORMAT:
            raise ConfigError(
                f"{str(path)!r} is a record of format {version!r}; this reads {FORMAT}"
            )
        if not {"id", "part", "next", "sglang", "mode"} <= self.head.keys():
            raise ConfigError(f"{str(path)!r} is a record whose first line lacks facts")

    @property
    def torn(self) -> bool:
        """Whether there is more in the file than lines."""
        return self.size > (self.lines[-1][0] if self.lines else self.read)

    @property
    def unread(self) -> int:
        """Bytes behind the last line that was taken."""
        return self.size - self.read


class _Reader:
    """Puts lines together to events."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._running: dict[int, Call] = {}
        self._next = int(record.head["next"])
        self._serials: dict[int, int] = {}
        self._unassigned: list[tuple[int, int | None, Facts]] = []

    def take(self, facts: Facts) -> None:
        """One line. Raises LookupError, TypeError or ValueError where it is not one of ours."""
        kind = facts["k"]
        if kind == "call":
            self._call(facts)
        elif kind == "return":
            self._return(facts)
        elif kind == "write":
            self.record.events.append(Write(int(facts["a"]), facts))
        elif kind == "violation":
            self._unassigned.append((int(facts["a"]), facts["n"], facts))
            str(facts["fault"]), int(facts["slot"]), int(facts["page"]), str(facts["pool"])
        elif kind == "allocator":
            self._allocator(facts)
        else:
            raise ValueError(f"no such kind: {kind}")

    def _allocator(self, facts: Facts) -> None:
        number = int(facts["a"])
        if number not in self.record.allocators:
            self.record.allocators[number] = Allocator(number, facts, facts["state"])
            self._serials[number] = int(facts["serial"])

    def _call(self, facts: Facts) -> None:
        number = int(facts["n"])
        if number != self._next:
            raise ValueError(f"call {number} where {self._next} was due")
        self._next += 1
        call = Call(
            number,
            int(facts["a"]),
            facts["on"],
            facts["do"],
            list(facts["args"]),
            dict(facts.get("named", {})),
            bool(facts.get("group", False)),
            facts.get("for"),
            facts["at"],
            float(facts["time"]),
        )
        if call.allocator not in self.record.allocators:
            raise ValueError(f"a call of allocator {call.allocator}, which was not built")
        self._running[number] = call
        self.record.events.append(call)

    def _return(self, facts: Facts) -> None:
        call = self._running.pop(int(facts["n"]))
        serial = int(facts["serial"])
        call.ended, call.gave, call.raised = True, facts.get("gave"), facts.get("raised")
        call.serials = range(self._serials[call.allocator] + 1, serial + 1)
        self._serials[call.allocator] = serial

    def assign(self) -> None:
        """Find the call of each violation: by its serial, or it is the one that ran."""
        starts = [(c.allocator, c.serials, c.number) for c in self.record.calls if c.ended]
        by_serial = {(a, serial): n for a, serials, n in starts for serial in serials}
        for allocator, running, facts in self._unassigned:
            number = by_serial.get((allocator, _serial_of(str(facts.get("operation")))))
            if number is None and running in self._running:
                number = running  # it never returned
            self.record.violations.append(Violated(allocator, number, facts))


def _serial_of(operation: str) -> int:
    """The serial in the text of an operation, ``#12 free for r1 at …``; -1 without one."""
    text = operation.partition(" ")[0].removeprefix("#")
    return int(text) if text.isdigit() else -1

"""Feeding a record: each call of an allocator or sub-allocator method, as its hook receives it.

``around`` stands around a hook, and is put there only where ``HICACHE_GUARD_RECORD`` asks for a
record when hooks are put in place: without one nothing of this runs. A call that is made inside
another is a part of it and not written. What is written around the methods, to the mapping or a
free list, is seen before the next call, as the guard sees it, and written down whole.

A record is of what the caller passed and got, so that it can be made again under any mode of the
guard. On a device its indices are waited for at every call, which costs what the guard otherwise
takes care not to. What prefix trees tell the guard is not recorded.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hicache_guard.adapters.link import (
    ATTRIBUTE,
    AllocatorLink,
    PoolLink,
    caller,
    in_free_group,
)
from hicache_guard.adapters.state import settings
from hicache_guard.core.journal import ACTING_FOR
from hicache_guard.core.record import RecordFile, RecordOptions, encode, pack, unpack
from hicache_guard.core.report import Report, Violation

if TYPE_CHECKING:
    from hicache_guard.core.guard import PoolGuard

logger = logging.getLogger("hicache_guard")

#: The modules of hooks whose methods change an allocator.
HANDLERS = frozenset({"allocator", "page_pool"})
#: Attributes that hold the free pages of a sub-allocator, as far as a release has them.
LISTS = ("free_pages", "release_pages", "staged_pages", "num_staged_pages")
#: What a new size is told by.
SIZES = ("full_max_total_num_tokens", "swa_max_total_num_tokens")

Method = Callable[..., Any]


def wanted() -> bool:
    """Whether the environment asks for a record. Raises ConfigError where it makes no sense."""
    return RecordOptions.from_environment() is not None


@functools.cache
def _file_of(pid: int) -> RecordFile:
    options = RecordOptions.from_environment()
    assert options is not None, "a record is wanted"
    current = settings()
    from hicache_guard.adapters.hooks import running_version  # which imports this module

    facts = {
        "sglang": running_version(),
        "row": current.release.version,
        "mode": current.mode.value,
        "route": current.route,
    }
    return RecordFile(options, facts)


#: What is recorded in this process, by number; a number is not used twice.
_taping: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()
_built = 0


class Tape:
    """The record of one allocator. ``begin`` when its guard is linked to it."""

    def __init__(self) -> None:
        """Raises ConfigError where the record that is asked for cannot be written."""
        global _built
        self.file = _file_of(os.getpid())
        self.number = _built
        _built += 1
        self._link: weakref.ref[AllocatorLink] | None = None
        self._busy = False
        self._mapping: tuple[torch.Tensor, int] | None = None
        self._lists: list[torch.Tensor] = []
        self._backups: dict[int, tuple[Any, int]] = {}

    def listening(self, listener: Report | None) -> Report:
        """Who is to hear of violations: the record, and then ``listener``."""

        def told(violation: Violation) -> None:
            self.file.violation(self.number, violation)
            if listener is not None:
                listener(violation)

        return told

    def begin(self, link: AllocatorLink) -> None:
        """An allocator was built and linked."""
        self._link = weakref.ref(link)
        link.tape = self
        _taping[self.number] = self
        self.file.allocator(self._facts(link, None))
        self._see(link)

    @property
    def runs(self) -> bool:
        """Whether a call made now is to be written: not inside another, or after a failure."""
        return not self._busy and not self.file.stopped

    def take(self, hooked: Method, on: str, holder: Any, args: Any, named: Any) -> Any:
        """Write a call down, make it, and write down what came of it."""
        link = self._link() if self._link is not None else None
        if link is None:
            return hooked(holder, *args, **named)
        self._busy = True
        try:
            number = self._called(link, hooked.__name__, on, args, named)
            try:
                result = hooked(holder, *args, **named)
            except BaseException as error:
                self._returned(link, number, {"raised": place_of(error)})
                raise
            self._returned(link, number, {"gave": self._result(result, number)})
            return result
        finally:
            self._see(link)
            self._busy = False

    def _called(self, link: AllocatorLink, do: str, on: str, args: Any, named: Any) -> int:
        try:
            group = in_free_group(link.allocator())
            if self.file.lacks_room():
                self._begin_anew(group)
            self._write_unseen(link)
            facts: dict[str, Any] = {
                "a": self.number,
                "on": on,
                "do": do,
                "args": [self._argument(value) for value in args],
            }
            if named:
                facts["named"] = {name: encode(value) for name, value in named.items()}
            if group:
                facts["group"] = True
            request = ACTING_FOR.get()
            if request is not None:
                facts["for"] = request
            frame = caller()
            facts["at"] = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
            facts["time"] = round(time.time(), 4)
            return self.file.call(facts)
        except Exception as error:  # a record is never worth a server
            self.file.stop(f"{type(error).__name__}: {error}")
            return -1

    def _returned(self, link: AllocatorLink, number: int, facts: dict[str, Any]) -> None:
        if not self.file.stopped:
            self.file.returned(number, {"serial": link.guard.serial, **facts})

    def _argument(self, value: Any) -> Any:
        known = self._backups.get(id(value))
        if known is not None and known[0] is value:
            return {"state of": known[1]}
        if all(hasattr(value, name) for name in SIZES):
            return {"sizes": [int(getattr(value, name)) for name in SIZES]}
        return encode(value)

    def _result(self, result: Any, number: int) -> Any:
        if isinstance(result, (list, tuple)):
            # A state that can be restored; SGLang keeps one at a time.
            self._backups = {id(result): (result, number)}
            return None
        try:
            return encode(result)
        except Exception as error:
            self.file.stop(f"{type(error).__name__}: {error}")
            return None

    # -- what no method shows --------------------------------------------------------------------

    def _see(self, link: AllocatorLink) -> None:
        """Everything that was written until now was written by a call."""
        mapping = link.state["full_to_swa_index_mapping"]
        self._mapping = (mapping, mapping._version)
        self._lists = [pool.listed for pool in link.pools]

    def _write_unseen(self, link: AllocatorLink) -> None:
        mapping = link.state["full_to_swa_index_mapping"]
        assert self._mapping is not None, "the tape was begun"
        known, version = self._mapping
        if mapping is not known or mapping._version != version:
            # A writer that the guard knows writes zeros, and is not looked after.
            trusted = not link.guard.map.unseen_writes(mapping)
            facts = {"a": self.number, "what": "mapping", "to": pack(mapping)}
            self.file.written({**facts, "trusted": trusted or link.trusted_writer})
        for pool, listed in zip(link.pools, self._lists, strict=True):
            if pool.listed is not listed:
                facts = {"a": self.number, "what": "list", "on": pool.ledger.name}
                self.file.written({**facts, "to": _lists_of(pool)})

    # -- a new file ------------------------------------------------------------------------------

    def _begin_anew(self, group: bool) -> None:
        """The file is full. In an open group frees are queued, which no state tells: wait."""
        tapes = [(tape, link) for tape in _taping.values() if (link := tape.link) is not None]
        if group or any(in_free_group(link.allocator()) for _, link in tapes):
            if self.file.size > 2 * self.file.max_bytes:
                self.file.stop("a group of frees that never ends")
            return
        for tape, link in tapes:
            tape._write_unseen(link)  # the file that ends can be played up to its end
            link.drain()
            tape._see(link)
        self.file.begin_anew([tape._facts(link, state_of(link)) for tape, link in tapes])

    @property
    def link(self) -> AllocatorLink | None:
        """What it is the record of, while that is alive."""
        link = self._link() if self._link is not None else None
        return link if link is not None and link.allocator() is not None else None

    def _facts(self, link: AllocatorLink, state: dict[str, Any] | None) -> dict[str, Any]:
        allocator: Any = link.allocator()
        return {
            "k": "allocator",
            "a": self.number,
            "class": type(allocator).__name__,
            "full": int(allocator.full_attn_allocator.size),
            "window": int(allocator.swa_attn_allocator.size),
            "page": int(allocator.page_size),
            "dtype": str(allocator.dtype).removeprefix("torch."),
            "device": str(allocator.device),
            "sort": bool(allocator.need_sort),
            "serial": link.guard.serial,
            "state": state,
        }


def around(hooked: Method) -> Method:
    """A hook with each call of it written down."""

    @functools.wraps(hooked)
    def recorded(holder: Any, *args: Any, **named: Any) -> Any:
        link = vars(holder).get(ATTRIBUTE)
        if type(link) is AllocatorLink:
            tape, on = link.tape, "pair"
        elif type(link) is PoolLink:
            tape, on = link.owner.tape, link.ledger.name
        else:
            return hooked(holder, *args, **named)
        if tape is None or not tape.runs:
            return hooked(holder, *args, **named)
        return tape.take(hooked, on, holder, args, named)

    return recorded


def place_of(error: BaseException) -> dict[str, str]:
    """An exception, with the innermost place that it came from: an assertion has no text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        place = f"{_short(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
    return {"type": type(error).__name__, "text": str(error).split("\n")[0], "at": place}


@functools.cache
def _short(file: str) -> str:
    """A source file by its folder and name."""
    return "/".join(file.split("/")[-2:])


# -- states ----------------------------------------------------------------------------------------


def _lists_of(pool: PoolLink) -> dict[str, Any]:
    """The free list of a sub-allocator, in all its containers."""
    found: dict[str, Any] = {}
    for name in LISTS:
        value = pool.listed if name == "free_pages" else pool.state.get(name)
        if isinstance(value, torch.Tensor):
            found[name] = pack(value)
        elif isinstance(value, list):
            found[name] = [pack(each) for each in value]
        elif value is not None:
            found[name] = int(value)
    return found


def write_lists(pool: PoolLink, lists: dict[str, Any]) -> None:
    """Give a sub-allocator the free list that was written down."""
    for name, value in lists.items():
        if isinstance(value, dict):
            pool.state[name] = unpack(value)
        elif isinstance(value, list):
            pool.state[name] = [unpack(each) for each in value]
        else:
            pool.state[name] = value


def _books(guard: PoolGuard) -> dict[str, torch.Tensor]:
    return {
        "full.born": guard.full.born,
        "full.named": guard.full.named,
        "window.born": guard.window.born,
        "window.named": guard.window.named,
        "stamp": guard.map.stamp,
        "owner": guard.map.owner,
        "since": guard.witness.since,
    }


def state_of(link: AllocatorLink) -> dict[str, Any]:
    """All that decides what an allocator and its guard do next, outside an operation or group."""
    guard = link.guard
    return {
        "mapping": pack(link.state["full_to_swa_index_mapping"]),
        "pools": {pool.ledger.name: _lists_of(pool) for pool in link.pools},
        "books": {name: pack(tensor) for name, tensor in _books(guard).items()},
        "suspect": [guard.mapping_suspect, guard.trees_suspect],
    }


def put_back(link: AllocatorLink, state: dict[str, Any], serial: int) -> None:
    """Bring a new allocator of the same sizes, on a CPU, into a state that was written down.

    Raises ValueError or LookupError where it is none of this allocator.
    """
    guard = link.guard
    mapping: torch.Tensor = link.state["full_to_swa_index_mapping"]
    kept = {"mapping": mapping, **_books(guard)}
    packed = {"mapping": state["mapping"], **state["books"]}
    for name, tensor in kept.items():
        found = unpack(packed[name])
        if found.shape != tensor.shape:
            raise ValueError(f"{name} has {found.numel()} entries, and not {tensor.numel()}")
        tensor.copy_(found)
    for pool in link.pools:
        write_lists(pool, state["pools"][pool.ledger.name])
    guard.mapping_suspect, guard.trees_suspect = state["suspect"]
    guard.serial = serial
    link.close()

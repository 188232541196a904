"""A record played again, call by call, and compared with what was recorded.

Each call is made with the arguments that were recorded, on an allocator of the same sizes, in the
state that the record begins with. The first call that returns something else ends the play: from
there on the arguments mean other pages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hicache_guard.adapters.link import AllocatorLink, in_free_group, link_of
from hicache_guard.adapters.recording import SIZES, place_of, put_back, write_lists
from hicache_guard.core.errors import ConfigError, GuardViolation
from hicache_guard.core.journal import acting_for
from hicache_guard.core.record import (
    Allocator,
    Call,
    Record,
    Violated,
    Write,
    decode,
    encode,
    unpack,
)
from hicache_guard.core.report import Violation
from hicache_guard.replay.stage import Stage

#: Told each event and the allocator: before it, and a call once more with its result.
Watcher = Callable[[Call | Write, Any, Any], None]


@dataclass(frozen=True)
class Found:
    """A violation that the replay found, in a call."""

    call: int
    fault: str
    pool: str
    slot: int
    page: int
    slots: int
    text: str

    @classmethod
    def of(cls, call: int, violation: Violation) -> Found:
        return cls(
            call,
            violation.fault.value,
            violation.pool,
            violation.slot,
            violation.page,
            violation.slots,
            str(violation),
        )

    def is_of(self, recorded: Violated) -> bool:
        """Whether this is what was recorded: kind, call, pool, page, slot and count."""
        facts = recorded.facts
        return (self.call, self.fault, self.pool, self.slot, self.page, self.slots) == (
            recorded.call,
            *(facts[name] for name in ("fault", "pool", "slot", "page", "slots")),
        )


@dataclass(frozen=True)
class Differs:
    """A call that did not do what was recorded of it."""

    call: int
    do: str
    at: str
    recorded: str
    now: str


@dataclass
class Played:
    """What a play came to. ``verdict``: reproduced, clean, not reproduced, diverged or empty."""

    verdict: str = ""
    made: int = 0
    target: dict[str, Any] | None = None
    found: list[Found] = field(default_factory=list)
    alike: int = 0
    recorded: int = 0
    elsewhere: dict[str, int] = field(default_factory=dict)
    differs: Differs | None = None
    raised: dict[str, Any] | None = None
    stopped: bool = False
    seconds: float = 0.0


def choose(record: Record, number: int | None) -> Allocator:
    """The allocator to be played: that of the first violation, where none is named.

    Raises ConfigError where the record has no such allocator.
    """
    if not record.allocators:
        raise ConfigError("the record has no allocator: nothing was recorded but its first line")
    if number is None:
        number = next((v.allocator for v in record.violations if v.call is not None), None)
    if number is None:
        calls = Counter(call.allocator for call in record.calls)
        number = calls.most_common(1)[0][0] if calls else min(record.allocators)
    if number not in record.allocators:
        known = ", ".join(map(str, sorted(record.allocators)))
        raise ConfigError(f"the record has no allocator {number}; it has {known}")
    return record.allocators[number]


def play(
    record: Record, allocator: Allocator, stage: Stage, mode: str, watch: Watcher | None = None
) -> Played:
    """Make every call of one allocator again.

    Under another ``mode`` than the recorded one the play ends with the first violation: what comes
    after it is another story. Raises ConfigError where the record asks for what cannot be made.
    """
    return _Play(record, allocator, stage, mode, watch).run()


class _Play:
    def __init__(
        self,
        record: Record,
        allocator: Allocator,
        stage: Stage,
        mode: str,
        watch: Watcher | None,
    ) -> None:
        facts = allocator.facts
        self._stage = stage
        self._number = allocator.number
        self._record = record
        self._watch = watch or (lambda event, allocator, result: None)
        self._goes_on = mode == record.mode
        self.allocator = stage.build(
            int(facts["full"]), int(facts["window"]), int(facts["page"]), sort=bool(facts["sort"])
        )
        link = link_of(self.allocator)
        assert isinstance(link, AllocatorLink), "the hooks are in place"
        self._link = link
        if type(self.allocator).__name__ != facts["class"]:
            raise ConfigError(f"allocators of the class {facts['class']} cannot be replayed")
        if allocator.state is not None:
            try:
                put_back(link, dict(allocator.state), int(facts["serial"]))
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"the state that the record begins with is not one: {error}"
                ) from None
        self._states: dict[int, Any] = {}
        self._played = Played()

    def run(self) -> Played:
        began = time.monotonic()
        played = self._played
        ours = [v for v in self._record.violations if v.allocator == self._number]
        expected = [v for v in ours if v.call is not None]
        played.recorded = len(expected)
        played.elsewhere = dict(Counter(v.fault for v in ours if v.call is None))
        for event in self._record.events:
            if event.allocator != self._number:
                continue
            if isinstance(event, Write):
                self._watch(event, self.allocator, None)
                self._write(event)
                continue
            before = len(self._stage.heard)
            differs = self._call(event)
            played.made += 1
            news = self._stage.heard[before:]
            played.found += [Found.of(event.number, violation) for violation in news]
            played.differs = differs
            if differs is not None or (news and not self._goes_on):
                played.stopped = differs is None
                break
        played.seconds = time.monotonic() - began
        played.alike = sum(
            found.is_of(recorded) for found, recorded in zip(played.found, expected, strict=False)
        )
        played.verdict = self._verdict(expected)
        return played

    def _verdict(self, expected: list[Violated]) -> str:
        played = self._played
        if not played.made:
            return "empty"
        if expected:
            played.target = {**expected[0].facts, "n": expected[0].call}
            if played.found and played.found[0].is_of(expected[0]):
                return "reproduced"
        elif not played.found and played.differs is None:
            ended = [c for c in self._record.calls if c.allocator == self._number and c.raised]
            if not ended:
                return "clean"
            played.target = {"raised": ended[-1].raised, "n": ended[-1].number}
            return "reproduced" if played.raised else "not reproduced"
        return "diverged" if played.differs is not None else "not reproduced"

    # -- one event -------------------------------------------------------------------------------

    def _write(self, write: Write) -> None:
        facts = write.facts
        try:
            if facts["what"] == "mapping":
                mapping = self.allocator.full_to_swa_index_mapping
                mapping.copy_(unpack(facts["to"]))
                if facts["trusted"]:
                    self._link.guard.map.acknowledge()
                return
            for pool in self._link.pools:
                if pool.ledger.name == facts["on"]:
                    write_lists(pool, facts["to"])
        except (ValueError, LookupError, RuntimeError) as error:
            raise ConfigError(f"a write of the record cannot be made again: {error}") from None

    def _call(self, call: Call) -> Differs | None:
        """Make a call; what differs from what was recorded."""
        if call.group and not in_free_group(self.allocator):
            self.allocator.free_group_begin()
        elif not call.group and in_free_group(self.allocator):
            return self._differs(call, "frees took effect at once", "a group of frees is open")
        holder = {
            "pair": self.allocator,
            "full": self.allocator.full_attn_allocator,
            "window": self.allocator.swa_attn_allocator,
        }.get(call.on)
        method = None if call.do.startswith("_") else getattr(holder, call.do, None)
        if method is None:
            raise ConfigError(f"call {call.number}: there is no {call.do} on {call.on}")
        try:
            args = [self._argument(call, value) for value in call.args]
            named = {name: decode(value) for name, value in call.named.items()}
        except ValueError as error:
            raise ConfigError(f"call {call.number}, {call.do}: {error}") from None
        self._watch(call, self.allocator, None)
        self._played.raised = None
        with acting_for(call.request):
            try:
                result = method(*args, **named)
            except Exception as error:
                return self._compare_raised(call, error)
        if self._link.guard.lazy:
            self._link.drain()  # what it put off belongs to this call
        if result is not None:
            self._watch(call, self.allocator, result)
        if isinstance(result, (list, tuple)):
            self._states[call.number] = result
            result = None
        if not call.ended:
            return None  # the process died in it
        if call.raised is not None:
            return self._compare_guard(call, _words(encode(result)))
        gave = encode(result)
        return None if gave == call.gave else self._differs(call, _words(call.gave), _words(gave))

    def _argument(self, call: Call, value: Any) -> Any:
        if isinstance(value, dict) and "state of" in value:
            if value["state of"] not in self._states:
                raise ConfigError(
                    f"call {call.number} restores a state that was kept before the record begins"
                )
            return self._states[value["state of"]]
        if isinstance(value, dict) and "sizes" in value:
            return SimpleNamespace(**dict(zip(SIZES, value["sizes"], strict=True)))
        return decode(value)

    def _compare_raised(self, call: Call, error: Exception) -> Differs | None:
        self._played.raised = raised = place_of(error)
        if not call.ended or raised == call.raised:
            return None
        if call.raised is None:
            return self._differs(call, _words(call.gave), _of_error(raised))
        if isinstance(error, GuardViolation) and call.raised["type"] == GuardViolation.__name__:
            return None  # its text names serials
        return self._compare_guard(call, _of_error(raised))

    def _compare_guard(self, call: Call, now: str) -> Differs | None:
        """Strict raised where another mode goes on: that is no difference of the allocator."""
        assert call.raised is not None, "it raised"
        strict = call.raised["type"] == GuardViolation.__name__ and not self._goes_on
        return None if strict else self._differs(call, _of_error(call.raised), now)

    def _differs(self, call: Call, recorded: str, now: str) -> Differs:
        return Differs(call.number, call.do, call.at, recorded, now)


def _words(value: Any) -> str:
    """A result in words, not too long."""
    if isinstance(value, dict) and len(value) == 1:
        text = f"slots {next(iter(value.values()))}"
        return text if len(text) <= 120 else f"{text[:120]} …"
    return "nothing" if value is None else str(value)


def _of_error(raised: Any) -> str:
    text = f": {raised['text']}" if raised.get("text") else ""
    return f"{raised['type']}{text} at {raised.get('at')}"

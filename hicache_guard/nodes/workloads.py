"""What a run on nodes asks, made from a seed and a number: so that it can be taken up anywhere.

``Recycling`` has the shape of #25805: prompts and answers of any length, some left, some with a
prefix in common, so that pages change hands all the time. ``Cycles`` has that of #25889: prompts
are written, evicted from the device by others, asked again (from the host), and gone on with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from hicache_guard.audit.facts import Facts
from hicache_guard.audit.plan import SHORT, Answer, Ask, Leave, Tokens
from hicache_guard.audit.scenarios import FIRST_TOKEN
from hicache_guard.core.errors import ConfigError

#: Whether a request, by its number, was answered since the run was last taken up. A server can
#: have been started anew before that.
Fresh = Callable[[int], bool]
#: Prefixes that requests have in common.
PREFIXES = 8
#: How much of the full pool is written over what was written before: nothing of it stays there.
OVER = 1.1
#: Prompts that a cycle brings back.
OLDS = 3
#: Part of the host's pool that a cycle may use, for its prompts to be there still.
ROOM = 0.95
#: Cycles with more requests than this are none that anybody waits for.
MOST = 20_000


def _dice(*of: object) -> random.Random:
    return random.Random(" ".join(map(str, of)))


def _tokens(dice: random.Random, facts: Facts, count: int) -> Tokens:
    return tuple(dice.choices(range(FIRST_TOKEN, facts.vocabulary), k=max(1, count)))


@dataclass(frozen=True)
class Recycling:
    """``requests`` that wait for nobody.

    Lengths are from and to, in tokens; ``abort``, ``disconnect`` and ``share`` are parts of all
    requests. Of ``check`` answers cold readings are made.
    """

    facts: Facts
    seed: int
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    abort: float
    disconnect: float
    share: float
    check: int

    @property
    def rounds(self) -> Iterator[list[range]]:
        """What is asked at once, step by step, and after each round read again."""
        yield [range(self.requests)]

    def kind(self, number: int) -> tuple[Leave | None, bool]:
        """Whether a request is left, and whether it shares a prefix."""
        draw, shares = _dice(self.seed, number, "kind").random(), _dice(self.seed, number, "share")
        leave = None
        if draw < self.abort + self.disconnect:
            leave = Leave.ABORT if draw < self.abort else Leave.DISCONNECT
        return leave, shares.random() < self.share

    @cached_property
    def checked(self) -> frozenset[int]:
        """The numbers of those that are read again."""
        stay = [number for number in range(self.requests) if self.kind(number)[0] is None]
        return frozenset(_dice(self.seed, "check").sample(stay, min(self.check, len(stay))))

    def ask(self, number: int, answers: Mapping[int, Answer], fresh: Fresh) -> Ask:
        del answers, fresh  # no request is a turn of another
        dice = _dice(self.seed, number)
        leave, shares = self.kind(number)
        length, tokens = dice.randint(*self.prompt), dice.randint(*self.output)
        prompt = _tokens(dice, self.facts, length)
        if shares:
            known = _prefix(self, dice.randrange(PREFIXES))[: length - 1]
            prompt = known + prompt[len(known) :]
        return Ask(
            str(number),
            prompt,
            tokens,
            leave=leave,
            leaves=dice.randint(0, min(tokens, SHORT)) if leave else 0,
            logprobs=number in self.checked,
        )

    @property
    def config(self) -> dict[str, Any]:
        found = asdict(self)
        del found["facts"]
        return {"workload": "25805", **found}


@lru_cache(maxsize=PREFIXES)
def _prefix(of: Recycling, index: int) -> Tokens:
    dice = _dice(of.seed, "prefix", index)
    return _tokens(dice, of.facts, dice.randint(1, of.prompt[1]))


def recycling(
    facts: Facts,
    seed: int,
    requests: int,
    prompt: tuple[int, int] | None,
    output: tuple[int, int] | None,
    *,
    abort: float,
    disconnect: float,
    share: float,
    check: int,
) -> Recycling:
    """The workload of #25805 for a server. Raises ConfigError where it does not fit."""
    room = facts.context - SHORT
    output = output or (1, max(1, min(2 * facts.window, room // 4)))
    prompt = prompt or (1, max(1, min(4 * facts.window, room - output[1], facts.full_pool // 2)))
    if prompt[1] + output[1] > facts.context:
        raise ConfigError(
            f"a prompt of {prompt[1]:,} tokens and an answer of {output[1]:,} are more than the "
            f"server takes ({facts.context:,}): lower --prompt or --output"
        )
    if abort + disconnect > 1:
        raise ConfigError("--abort and --disconnect are more than all requests together")
    return Recycling(facts, seed, requests, prompt, output, abort, disconnect, share, check)


#: What a request of a cycle is for. Those of a phase but "evict" come one after the other or two
#: at a time, so that something is known of what is cached.
PHASES = ("write", "evict", "load-back", "rewrite")


@dataclass(frozen=True)
class Place:
    """Where a request is in a run: of the ``item``-th old prompt, or the ``item``-th of others."""

    cycle: int
    phase: str
    item: int
    part: int


@dataclass(frozen=True)
class Cycles:
    """``cycles`` of writing, evicting, loading back and going on. Lengths are in tokens."""

    facts: Facts
    seed: int
    cycles: int
    length: int
    fill: int
    fills: int

    @property
    def requests(self) -> int:
        return self.cycles * len(self._cycle)

    @property
    def checked(self) -> range:
        """All of them are read again."""
        return range(self.requests)

    @cached_property
    def _cycle(self) -> list[tuple[str, int, int]]:
        """Phase, item and part of each request of a cycle."""
        found = [("write", item, part) for part in range(2) for item in range(OLDS)]
        found += [("evict", item, 0) for item in range(self.fills)]
        # Beside another that is written, as each is read.
        found += [("load-back", item, part) for item in range(OLDS) for part in range(2)]
        found += [("rewrite", item, part) for item in range(OLDS) for part in range(2)]
        return found

    def place(self, number: int) -> Place:
        cycle, index = divmod(number, len(self._cycle))
        return Place(cycle, *self._cycle[index])

    @property
    def rounds(self) -> Iterator[list[range]]:
        """What is asked at once, step by step, and after each round read again."""
        for cycle in range(self.cycles):
            steps = []
            for index, (phase, _, part) in enumerate(self._cycle):
                number = cycle * len(self._cycle) + index
                if phase in ("write", "evict"):
                    steps.append(range(number, number + 1))
                elif part == 0:
                    steps.append(range(number, number + 2))
            yield steps

    def number(self, cycle: int, phase: str, item: int, part: int) -> int:
        return cycle * len(self._cycle) + self._cycle.index((phase, item, part))

    def ask(self, number: int, answers: Mapping[int, Answer], fresh: Fresh) -> Ask:
        """The request; something is due only after what is ``fresh``."""
        place = self.place(number)
        cycle, item, part = place.cycle, place.item, place.part
        old = self._old(cycle, item)
        dice = _dice(self.seed, number)
        more = _tokens(dice, self.facts, dice.randint(1, self.facts.page + 3))
        made = Ask(str(number), old, SHORT)
        if place.phase == "evict":
            return replace(made, prompt=_tokens(dice, self.facts, self.fill), tokens=1)
        if place.phase == "write":
            known = self.number(cycle, "write", item, 0) if part else None
            return self._due(made, known, answers, fresh)
        if part:  # what is written beside a load-back, and a branch inside of what came back
            if place.phase == "load-back":
                return replace(made, prompt=_tokens(dice, self.facts, self.length))
            cut = dice.randint(1, self.length)
            return replace(made, prompt=old[:cut] + _tokens(dice, self.facts, self.facts.window))
        if place.phase == "load-back":
            made = replace(made, prompt=old + _load_back_tail(self, cycle, item))
            known = self.number(cycle, "write", item, 1) if self.stays else None
            return self._due(made, known, answers, fresh)
        before = self.number(cycle, "load-back", item, 0)
        history = old + _load_back_tail(self, cycle, item)
        if before in answers:
            history += answers[before].output
        return self._due(replace(made, prompt=history + more), before, answers, fresh)

    def _due(self, ask: Ask, known: int | None, answers: Mapping[int, Answer], fresh: Fresh) -> Ask:
        """``ask`` after request ``known``, the prompt of which should be cached."""
        if known is None or known not in answers or not fresh(known):
            return ask
        before = answers[known]
        if not before.whole:
            return ask
        shared = min(len(before.ask.prompt), len(ask.prompt) - 1)
        return replace(ask, due=shared - shared % self.facts.page)

    @property
    def stays(self) -> bool:
        """Whether the host has room for all that a cycle writes until it is asked again."""
        return _written(self.length, self.fill, self.fills) <= ROOM * self.facts.host_tokens

    def _old(self, cycle: int, item: int) -> Tokens:
        dice = _dice(self.seed, "old", cycle, item)
        return _tokens(dice, self.facts, self.length + item)

    @property
    def config(self) -> dict[str, Any]:
        found = asdict(self)
        del found["facts"]
        return {"workload": "25889", **found}


def _load_back_tail(of: Cycles, cycle: int, item: int) -> Tokens:
    return _tokens(_dice(of.seed, "tail", cycle, item), of.facts, 3)


def _written(length: int, fill: int, fills: int) -> int:
    """Tokens that a cycle writes until all its prompts have been asked again."""
    return 2 * OLDS * (length + OLDS + SHORT) + fills * (fill + 1)


def cycles(facts: Facts, seed: int, count: int) -> Cycles:
    """The workload of #25889 for a server. Raises ConfigError where it cannot be tried."""
    if facts.hierarchical == "no":
        raise ConfigError(
            "25889 needs a host tier, and the server has none: start it with "
            "--enable-hierarchical-cache"
        )
    longest = min(facts.context - 8 * SHORT, facts.full_pool // 8)
    length = min(longest, max(2 * facts.window, facts.full_pool // 12))
    length = min(length, longest - facts.page - SHORT)
    if length < 2 * facts.page:
        raise ConfigError(f"the server's pool of {facts.full_pool:,} tokens is too small for 25889")
    fills = int(OVER * facts.full_pool / longest) + 1
    if fills > MOST:
        raise ConfigError(
            f"it takes {fills:,} requests to fill a pool of {facts.full_pool:,} tokens: start the "
            "server with a longer --context-length, or a smaller --max-total-tokens"
        )
    return Cycles(facts, seed, count, length, longest, fills)

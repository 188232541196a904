"""Plays a plan on a server, and reads what it answered again where nothing is cached.

A cold reading computes the prompt and the very tokens that were answered as one prompt, in a part
of the cache of its own. So every position of an answer can be compared, sampled or greedy, also
behind a token that cold would have been another.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from hicache_guard.audit.plan import Answer, Ask, Plan
from hicache_guard.audit.wire import Wire, WireError

_numbers = itertools.count(1)
#: How the names of our requests, and of our parts of the cache, begin.
OURS = "hicache-guard-"
#: Told apart from whatever else is in the cache of a running server.
_RUN = uuid.uuid4().hex[:12]


def space(what: str) -> str:
    """A part of the cache that nobody used before."""
    return f"{OURS}{_RUN}-{what}-{next(_numbers)}"


def play(wire: Wire, plan: Plan, told: Callable[[], None] = lambda: None) -> list[Answer]:
    """The answers of a plan, in its order; ``told`` hears of each."""
    here = space(plan.scenario)
    answers: dict[str, Answer] = {}
    found: list[Answer] = []
    with ThreadPoolExecutor(max_workers=max((len(step) for step in plan.steps), default=1)) as pool:
        for step in plan.steps:
            asks = [_whole(ask, answers) for ask in step]
            asked = [
                pool.submit(wire.generate, ask, rid=f"{here}-{ask.name}", space=here)
                for ask in asks
            ]
            for future in asked:
                answer = future.result()
                answers[answer.ask.name] = answer
                found.append(answer)
                told()
    return found


def _whole(ask: Ask, answers: dict[str, Answer]) -> Ask:
    """With what comes before it, as it was answered."""
    before = answers.get(ask.after)
    if before is None:
        return ask
    prompt = before.ask.prompt + before.output + ask.prompt
    known = len(before.ask.prompt) + max(0, len(before.output) - 1)
    return replace(ask, prompt=prompt, due=ask.due and known)


class ColdError(WireError):
    """A reading that should be cold was not."""


def reread(wire: Wire, answer: Answer) -> Answer:
    """A cold reading of what was answered."""
    found = wire.reread(answer.ask.prompt, answer.output, space=space("cold"))
    if found.cached:
        raise ColdError(
            f"{wire.url}: {found.cached} tokens of a part of the cache that is new were cached: "
            "this server does not tell extra keys apart, so nothing can be compared"
        )
    return found


def read_all(
    wire: Wire, answers: Iterable[Answer], told: Callable[[], None] = lambda: None
) -> list[tuple[Answer, Answer]]:
    """Each whole answer with its cold reading."""
    pairs = []
    for answer in answers:
        if answer.whole:
            pairs.append((answer, reread(wire, answer)))
            told()
    return pairs

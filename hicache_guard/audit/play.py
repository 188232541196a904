"""Plays a plan on a server, and reads what it answered again where nothing is cached.

A cold reading computes the prompt and the very tokens that were answered as one prompt, in a part
of the cache of its own. So every position of an answer can be compared, sampled or greedy, also
behind a token that cold would have been another.
"""

from __future__ import annotations

import itertools
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from hicache_guard.audit.plan import OTHER_HISTORY, Answer, Ask, Plan
from hicache_guard.audit.wire import Wire, WireError, session_id

_numbers = itertools.count(1)
#: How the names of our requests, and of our parts of the cache, begin.
OURS = "hicache-guard-"
#: Told apart from whatever else is in the cache of a running server.
_RUN = uuid.uuid4().hex[:12]


def space(what: str) -> str:
    """A part of the cache that nobody used before."""
    return f"{OURS}{_RUN}-{what}-{next(_numbers)}"


def play(wire: Wire, plan: Plan) -> Iterator[Answer]:
    """The answers of a plan, as they come."""
    here = space(plan.scenario)
    answers: dict[str, Answer] = {}
    with _sessions(wire, plan, here):
        for step in plan.steps:
            asks = [_whole(ask, answers) for ask in step]
            for answer in _together([partial(wire.generate, ask, space=here) for ask in asks]):
                checked = _checked(answer, answers)
                answers[checked.ask.name] = checked
                yield checked


def _together(calls: Sequence[Callable[[], Answer]]) -> Iterator[Answer]:
    """What some calls return, at the same time, as it comes.

    Nobody waits for them who is interrupted: a server that hangs can keep them for minutes.
    """
    found: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()

    def make(call: Callable[[], Answer]) -> None:
        try:
            found.put(call())
        except BaseException as error:
            found.put(error)

    for call in calls:
        threading.Thread(target=make, args=(call,), daemon=True).start()
    for _ in calls:
        one = found.get()
        if isinstance(one, BaseException):
            raise one
        yield one


@contextmanager
def _sessions(wire: Wire, plan: Plan, here: str) -> Iterator[None]:
    """All sessions of a plan are open meanwhile."""
    names = {}
    for ask in plan.asks():
        if ask.session is not None:
            names[session_id(ask.session, here)] = ask.session.streaming
    try:
        for name, streaming in names.items():
            wire.open_session(name, streaming=streaming)
        yield
    finally:
        for name in names:
            wire.close_session(name)


def _checked(answer: Answer, before: dict[str, Answer]) -> Answer:
    """A turn whose session had another history than it was given is no answer to it.

    Unless a turn was left in that session: nobody can say from outside how far it had come.
    """
    ask = answer.ask
    if not ask.carried or not answer.whole or answer.prompt_tokens == len(ask.prompt):
        return answer
    left = any(each.ask.session == ask.session and each.ask.leave for each in before.values())
    said = f"the session had {answer.prompt_tokens} tokens, not {len(ask.prompt)}"
    return Answer(ask, finish=OTHER_HISTORY, error="" if left else said)


def _whole(ask: Ask, answers: dict[str, Answer]) -> Ask:
    """With what comes before it, as it was answered."""
    before = answers.get(ask.after)
    if before is None:
        return ask
    history = before.ask.prompt + before.output
    known = len(history) - bool(before.output)
    carried = len(history) if ask.session is not None else 0
    return replace(ask, prompt=history + ask.prompt, due=ask.due and known, carried=carried)


class ColdError(WireError):
    """A reading that should be cold was not."""


def reread(wire: Wire, answer: Answer, *, rid: str = "") -> Answer:
    """A cold reading of what was answered; ``rid`` is the name it goes by, if it needs one."""
    found = wire.reread(answer.ask.prompt, answer.output, space=space("cold"), rid=rid)
    if found.cached:
        raise ColdError(
            f"{wire.url}: {found.cached} tokens of a part of the cache that is new were cached: "
            "this server does not tell extra keys apart, so nothing can be compared"
        )
    return found


def read_again(wire: Wire, answer: Answer, most: int) -> Iterator[Answer]:
    """More cold readings of an answer: one alone, two together, and so on up to so many."""
    for count in range(1, most + 1):
        yield from _together([partial(reread, wire, answer)] * count)


def read_all(wire: Wire, answers: Iterable[Answer]) -> Iterator[tuple[Answer, Answer]]:
    """Each whole answer with its cold reading, as it comes; but such as nothing was told of."""
    for answer in answers:
        if answer.whole:
            cold = reread(wire, answer)
            if len(cold.unread) < len(cold.output):
                yield answer, cold

"""The smallest plan that still shows a fault, by delta debugging.

Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input (2002): halves, then
smaller parts are left out for as long as the fault stays. Here requests first, then the ends of
their prompts, then tokens that are generated. Each try is a whole play; there is a budget of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hicache_guard.audit.plan import Plan

Shows = Callable[[Plan], bool]


class _SpentError(Exception):
    """No more tries."""


def shrink(plan: Plan, shows: Shows, *, tries: int) -> Plan:
    """A plan that ``shows`` said yes to, as small as so many tries can make it."""
    left = tries

    def tried(candidate: Plan) -> bool:
        nonlocal left
        if not left:
            raise _SpentError
        left -= 1
        return shows(candidate)

    try:
        for smaller in (_fewer, _shorter, _briefer):
            for found in smaller(plan, tried):
                plan = found
    except _SpentError as spent:
        spent.__traceback__ = None
    return plan


def without(plan: Plan, names: frozenset[str]) -> Plan:
    """A plan without some requests, and those that go on after them."""
    steps = []
    gone = set(names)
    for step in plan.steps:
        gone |= {ask.name for ask in step if ask.after in gone}
        kept = tuple(ask for ask in step if ask.name not in gone)
        if kept:
            steps.append(kept)
    return replace(plan, steps=tuple(steps))


def _fewer(plan: Plan, shows: Shows) -> Iterator[Plan]:
    parts = 2
    while (names := [ask.name for ask in plan.asks()]) and parts <= 2 * len(names):
        size = max(1, len(names) // parts)
        for start in range(0, len(names), size):
            candidate = without(plan, frozenset(names[start : start + size]))
            if candidate.steps and shows(candidate):
                plan, parts = candidate, max(2, parts - 1)
                yield plan
                break
        else:
            if size == 1:
                return
            parts *= 2


def _changed(plan: Plan, name: str, **changes: object) -> Plan:
    return replace(
        plan,
        steps=tuple(
            tuple(replace(ask, **changes) if ask.name == name else ask for ask in step)  # type: ignore[arg-type]
            for step in plan.steps
        ),
    )


def _shorter(plan: Plan, shows: Shows) -> Iterator[Plan]:
    for ask in list(plan.asks()):
        prompt = ask.prompt
        cut = len(prompt) // 2
        while cut and len(prompt) > 1:
            candidate = _changed(plan, ask.name, prompt=prompt[:-cut], due=0)
            if shows(candidate):
                plan, prompt = candidate, prompt[:-cut]
                yield plan
            cut = min(cut // 2, len(prompt) - 1)


def _briefer(plan: Plan, shows: Shows) -> Iterator[Plan]:
    for ask in list(plan.asks()):
        for tokens in (1, ask.tokens // 2):
            if 0 < tokens < ask.tokens and shows(
                candidate := _changed(plan, ask.name, tokens=tokens)
            ):
                plan = candidate
                yield plan
                break

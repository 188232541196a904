"""A plan is made as small as what shows its fault, and no smaller.

What shows it is a made-up rule with a known smallest plan. Mutations seen to fail: ``_fewer`` that
stops after halves, ``_shorter`` left out, ``without`` that keeps requests whose start is gone.
"""

from __future__ import annotations

import ast
import random

from hicache_guard.audit.plan import Ask, Leave, Plan
from hicache_guard.audit.script import program
from hicache_guard.audit.shrink import shrink, without


def plan(count: int, length: int = 64) -> Plan:
    dice = random.Random(count)
    asks = [Ask(f"r{n}", tuple(dice.choices(range(9), k=length)), 16) for n in range(count)]
    return Plan("made up", 0, tuple(tuple(asks[at : at + 3]) for at in range(0, count, 3)))


def test_two_requests_and_nine_tokens_are_left() -> None:
    whole, plays = plan(24), 0

    def shows(candidate: Plan) -> bool:
        nonlocal plays
        plays += 1
        kept = {ask.name: ask for ask in candidate.asks()}
        return "r4" in kept and "r17" in kept and len(kept["r17"].prompt) >= 9

    small = shrink(whole, shows, tries=500)
    assert {ask.name: (len(ask.prompt), ask.tokens) for ask in small.asks()} == {
        "r4": (1, 1),
        "r17": (9, 1),
    }
    assert plays <= 500


def test_tries_are_an_end() -> None:
    plays = 0

    def shows(candidate: Plan) -> bool:
        nonlocal plays
        plays += 1
        return True

    small = shrink(plan(24), shows, tries=3)
    assert plays == 3
    assert 0 < sum(1 for _ in small.asks()) < 24


def test_who_goes_on_leaves_with_who_was_before() -> None:
    first, second, third = (
        Ask("a", (1,), 1),
        Ask("b", (2,), 1, after="a"),
        Ask("c", (3,), 1, after="b"),
    )
    chain = Plan("chain", 0, ((first,), (second,), (third,), (Ask("d", (4,), 1),)))
    assert [ask.name for ask in without(chain, frozenset({"a"})).asks()] == ["d"]
    assert [ask.name for ask in without(chain, frozenset({"b"})).asks()] == ["a", "d"]


def test_program_is_one_whatever_it_is_called() -> None:
    asks = (Ask("a", (1, 2), 3, leave=Leave.ABORT, leaves=2), Ask("b", (3,), 1, after="a"))
    text = program(
        Plan("p", 1, (asks,)), name="p.py", url="http://x", limit=1e-4,
        title='"""quoted""" \\ {braces}',
    )  # fmt: skip
    tree = ast.parse(text)
    steps = next(node for node in tree.body if isinstance(node, ast.Assign)
                 and ast.unparse(node.targets[0]) == "STEPS")  # fmt: skip
    assert ast.literal_eval(steps.value)[0][0]["leave"] == "abort"

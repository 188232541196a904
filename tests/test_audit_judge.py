"""Rounding is not called a fault more often than is said, and a fault is not called rounding.

The false-alarm rate is counted on numbers drawn from the distribution that the judge assumes; the
quantiles of Student's t are those of printed tables. Mutations, each seen to fail here: the limit
without its prediction term, without ``SLACK``, without the Bonferroni share (``comparisons``), the
implausible samples kept, hits not asked for, failed requests ignored.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from hicache_guard.audit import judge
from hicache_guard.audit.judge import Verdict
from hicache_guard.audit.plan import OTHER_HISTORY, Answer, Ask, Leave

ASK = Ask("one", (1, 2, 3), 4)


def answer(*logprobs: float, cached: int = 0, due: int = 0, **more: object) -> Answer:
    ask = replace(ASK, due=due, tokens=len(logprobs))
    output = tuple(range(len(logprobs)))
    made = Answer(ask, output, logprobs, cached=cached, finish="length")
    return replace(made, **more)  # type: ignore[arg-type]


def compared(delta: float, **more: object) -> judge.Comparison:
    return judge.compare(answer(-1.0, -2.0 + delta, **more), answer(-1.0, -2.0))  # type: ignore[arg-type]


QUIET = 1e-4


@pytest.mark.parametrize(
    ("probability", "freedom", "printed"),
    [
        (0.95, 10, 1.812),
        (0.99, 20, 2.528),
        (0.999, 30, 3.385),
        (0.9995, 40, 3.551),
        (0.999, 120, 3.160),
    ],
)
def test_quantiles_are_those_of_printed_tables(
    probability: float, freedom: int, printed: float
) -> None:
    assert judge.t_quantile(probability, freedom) == pytest.approx(printed, abs=2e-3)


def readings(*deltas: float) -> list[Answer]:
    """Cold ones of two tokens, of which the second is off."""
    return [answer(-1.0, -2.0 + delta) for delta in deltas]


def test_what_cold_readings_waver_by_is_noise() -> None:
    """At its position only; a reading alone is no noise, and what is implausible stays a fault.

    Mutations: the largest for the second largest; all positions alike; no bound.
    """
    first, limit = answer(-1.0, -2.0), 1e-5
    often = judge.wavers(first, readings(0, 0, 2e-4, 0, -2e-4), plausible=1e-3)
    assert often == pytest.approx((0.0, 2e-4))
    assert judge.wavers(first, readings(0, 0, 2e-4, 0, 0), plausible=1e-3) == (0.0, 0.0)
    assert not replace(compared(7e-4), wavers=often).beyond(limit)
    assert replace(compared(9e-4), wavers=often).beyond(limit), "four times what is usual"
    assert compared(7e-4).beyond(limit)
    elsewhere = judge.compare(answer(-1.0 + 7e-4, -2.0), first)
    assert replace(elsewhere, wavers=often).beyond(limit)
    wild = judge.wavers(first, readings(0.5, -0.5, math.nan, 0.5), plausible=1e-3)
    assert replace(compared(2e-3), wavers=wild).beyond(limit)
    assert replace(compared(math.nan), wavers=wild).beyond(limit)
    found = judge.judge([], [replace(compared(7e-4), wavers=often)], limit, warm=False)
    assert found.verdict is Verdict.NOISE
    assert "1 by as much as their cold readings do" in found.why


def test_false_alarms_are_no_more_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate that can be counted, and without the slack that comes on top."""
    monkeypatch.setattr(judge, "FALSE_ALARMS", 0.05)
    monkeypatch.setattr(judge, "SLACK", 0.0)
    dice, audits, compared = random.Random(1), 2000, 20

    def drawn() -> float:
        return math.exp(dice.gauss(-11.5, 0.6))

    alarms = 0
    for _ in range(audits):
        noise = judge.noise([drawn() for _ in range(48)], dtype="float32", comparisons=compared)
        alarms += any(drawn() > noise.limit for _ in range(compared))
    # Half of the rate is the other test's. Bonferroni is an upper bound, at 4 sigma.
    assert 0.01 < alarms / audits < 0.025 + 4 * math.sqrt(0.025 * 0.975 / audits)


@pytest.mark.parametrize(
    ("some", "others", "expected"), [(4, 0, 1 / 70), (3, 1, 17 / 70), (2, 2, 53 / 70), (0, 4, 1.0)]
)
def test_chance_is_that_of_the_lady_who_tastes_tea(some: int, others: int, expected: float) -> None:
    """Fisher, The Design of Experiments: four cups of each kind."""
    assert judge.by_chance(some, 4, others, 4) == pytest.approx(expected)


def _long_tailed(dice: random.Random) -> float:
    return dice.uniform(0.3, 1.0) if dice.random() < 0.06 else math.exp(dice.gauss(-4.5, 0.5))


def test_long_tails_hide_no_fault_that_is_not_as_rare() -> None:
    """Noise with a long tail: no answer is beyond its limit. Mutation: ``unusual`` not asked."""
    dice = random.Random(2)
    samples = [_long_tailed(dice) for _ in range(48)]
    noise = judge.noise(samples, dtype="bfloat16", comparisons=100)
    assert noise.limit == 1.0
    for kept, verdict in ((100, Verdict.NOISE), (50, Verdict.FAULT)):
        pairs = [compared(min(_long_tailed(dice), 0.9), cached=1) for _ in range(kept)]
        pairs += [compared(0.4, cached=1)] * (100 - kept)
        assert judge.judge([], pairs, noise.limit, noise=noise).verdict is verdict
        assert judge.judge([], pairs, noise.limit).verdict is Verdict.NOISE


def test_what_is_unusual_is_no_more_than_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate that can be counted, and without slack; of noise with a long tail, too."""
    monkeypatch.setattr(judge, "FALSE_ALARMS", 0.2)
    monkeypatch.setattr(judge, "SCENARIOS", 1)
    monkeypatch.setattr(judge, "SLACK", 2.0)
    dice, audits, alarms = random.Random(3), 1000, 0
    for _ in range(audits):
        samples, warm = ([_long_tailed(dice) for _ in range(count)] for count in (48, 60))
        noise = judge.noise(samples, dtype="float32", comparisons=1)
        alarms += judge.unusual(noise, warm) is not None
    assert alarms / audits < 0.1


@pytest.mark.parametrize(("dtype", "step"), [("bfloat16", 1 / 16), ("float16", 1 / 128)])
def test_steps_of_a_type_are_no_spread(dtype: str, step: float) -> None:
    """Logits of 8 to 16 are multiples of 2**-4, with 8 bits, or of 2**-7, with 11: most cold
    answers differ by nothing, some by a step. Mutation: the least of float32 for all types.
    """
    samples = [0.0] * 36 + [step] * 12
    noise = judge.noise(samples, dtype=dtype, comparisons=500)
    assert 4 * step <= noise.limit < 16 * step
    assert not compared(2 * step).beyond(noise.limit)
    assert compared(16 * step).beyond(noise.limit)


def test_slack_is_kept_of_even_noise() -> None:
    noise = judge.noise([2e-5] * 48, dtype="float32", comparisons=100)
    assert noise.limit == pytest.approx(8e-5)


def test_noise_that_is_no_rounding_makes_no_limit() -> None:
    """Cold runs of a broken engine differ by whole units: that must not excuse anything."""
    noise = judge.noise([1e-5] * 20 + [1.9] * 28, dtype="float32", comparisons=100)
    assert noise.limit < 1e-3
    assert noise.implausible == 28
    assert judge.noise([1.9] * 48, dtype="float32", comparisons=1).limit == 1e-3


def test_a_difference_beyond_noise_is_a_fault() -> None:
    found = judge.judge([answer(-1.0)], [compared(5e-5), compared(0.5)], QUIET)
    assert found.verdict is Verdict.FAULT
    assert "1 of 2" in found.why
    assert "position 1" in found.why
    assert judge.judge([], [compared(5e-5, cached=2)], QUIET).verdict is Verdict.NOISE
    assert judge.judge([], [compared(0.0, cached=2)], QUIET).verdict is Verdict.EQUAL


def test_without_a_hit_nothing_is_known() -> None:
    assert judge.judge([], [compared(0.0)], QUIET).verdict is Verdict.NOT_TESTED
    assert judge.judge([], [compared(0.0)], QUIET, warm=False).verdict is Verdict.EQUAL


def test_not_a_number_is_a_fault() -> None:
    """Also where cold and warm agree in it: a token that was drawn has a log-probability.

    Mutation: two that are alike differ by nothing.
    """
    for one, other in itertools.product((math.nan, -math.inf, math.inf, -1.0), repeat=2):
        found = judge.compare(answer(one), answer(other))
        assert found.largest == (0 if one == other == -1.0 else math.inf)


def test_no_hit_where_hits_were_due_is_said_as_loudly() -> None:
    missed, hit = answer(-1.0, due=64), answer(-1.0, due=64, cached=64)
    found = judge.judge([missed, missed], [compared(0.0)], QUIET)
    assert found.verdict is Verdict.NO_HITS
    assert found.verdict.bad
    assert "128 tokens" in found.why
    assert judge.judge([missed, hit], [compared(0.0, cached=64)], QUIET).verdict is Verdict.EQUAL


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        ([64, 0, 0], "1 of 3 requests found 64 of the 192 tokens"),  # most found nothing
        ([1, 1, 1], "3 of 3 requests found 3 of the 192 tokens"),  # all found next to nothing
        ([64, 1000, 0], None),  # what is found beyond what is due makes nothing good
        ([1000, 0, 0], "1 of 3 requests found 64 of"),
    ],
)
def test_few_hits_are_no_hits(cached: list[int], said: str | None) -> None:
    """Mutations: any hit is enough; tokens not counted."""
    answers = [answer(-1.0, due=64, cached=count) for count in cached]
    found = judge.judge(answers, [compared(0.0, cached=1)], QUIET)
    assert (found.verdict is Verdict.NO_HITS) == (said is not None)
    assert said is None or said in found.why


def test_one_long_hit_makes_no_others_good() -> None:
    """Most of the tokens that were due were found, by one of three. Mutation: only tokens count."""
    answers = [answer(-1.0, due=1000, cached=1000), *[answer(-1.0, due=64)] * 2]
    found = judge.judge(answers, [compared(0.0, cached=1)], QUIET)
    assert found.verdict is Verdict.NO_HITS
    assert "1 of 3 requests found 1,000 of the 1,128 tokens" in found.why


@pytest.mark.parametrize(
    ("output", "finish", "more", "short"),
    [
        ((1, 2, 3, 4), "length", {}, False),
        ((1, 2, 3), "length", {}, True),
        ((1,), "stop", {}, True),  # it was not to stop
        ((), "stop", {}, True),
        ((1,), "stop", {"ignore_eos": False}, False),
        ((), "stop", {"ignore_eos": False}, True),
        ((1,), "length", {"ignore_eos": False}, True),
        ((), "abort", {"leave": Leave.ABORT}, False),
        ((), OTHER_HISTORY, {}, False),
    ],
)
def test_an_answer_that_is_cut_short_is_a_fault(
    output: tuple[int, ...], finish: str, more: dict[str, Any], short: bool
) -> None:
    """What was not answered cannot be compared, so it must not go unsaid.

    Mutations: only empty answers, or none, are short; an answer that stops may always do so.
    """
    cut = Answer(replace(ASK, **more), output, (-1.0,) * len(output), finish=finish)
    found = judge.judge([answer(-1.0), cut], [compared(0.0, cached=1)], QUIET)
    assert (found.verdict is Verdict.FAULT) == short
    assert not short or f"one has {len(output)} of 4 tokens" in found.why


def test_requests_that_fail_are_a_fault() -> None:
    failed = Answer(ASK, error="status 500: boom")
    found = judge.judge([answer(-1.0), failed], [compared(0.0)], QUIET)
    assert found.verdict is Verdict.FAULT
    assert "boom" in found.why


def test_flips_tell_their_margin_and_only_of_greedy_answers() -> None:
    warm = answer(-1.0, -2.0)
    cold = replace(warm, top=({0: -1.0, 7: -3.0}, {1: -2.0, 9: -0.5}))
    assert judge.compare(warm, cold).flips == (judge.Flip(1, 1, 9, 1.5),)
    sampled = replace(warm, ask=replace(ASK, temperature=1.0))
    assert judge.compare(sampled, cold).flips == ()


def test_divergence_is_that_of_the_distributions() -> None:
    """Against the closed form for two outcomes and the rest."""
    p, q = (0.5, 0.25, 0.25), (0.25, 0.5, 0.25)
    warm = replace(answer(-1.0), top=({0: math.log(q[0]), 1: math.log(q[1])},))
    cold = replace(answer(-1.0), top=({0: math.log(p[0]), 1: math.log(p[1])},))
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert judge.compare(warm, cold).divergence == pytest.approx((expected,))

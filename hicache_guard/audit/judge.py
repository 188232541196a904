"""Whether a difference between a warm answer and its cold reading is rounding, or a fault.

What two cold computations of the same tokens differ by, in batches of other shapes, is the noise.
Of each answer the largest difference counts. The logarithms of those of the noise are taken for a
sample of a normal distribution; a warm answer is at fault beyond the one-sided prediction limit for
one more of these, with the false-alarm rate of the whole audit shared out among its comparisons
(Bonferroni; a longer answer is several), and beyond ``SLACK`` times the largest noise seen. The
limit: Student's t, see
Hahn and Meeker, Statistical Intervals, on prediction of a future observation; the quantile by
Abramowitz and Stegun, 26.7.5.

Noise can have a long tail (a token of a mixture of experts goes to another one), and then the limit
is far above most of it. So what is usual counts, too: a scenario is at fault if more of its answers
than of the cold ones, by Fisher's exact test, are beyond ``SLACK`` times what three of four cold
ones keep. Each of the two has half of the false-alarm rate.

Or only some tokens are noisy, and none of them was among the cold ones. So an answer that is
beyond the limit is read cold some times more; what these differ by at a position is noise there.

Noise itself can be a fault: no rounding of a type is larger than ``PLAUSIBLE`` says.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hicache_guard.audit.plan import SHORT, Answer

#: False alarms an audit of a healthy server gives on average, by what is assumed above.
FALSE_ALARMS = 1e-3
#: A warm answer is rounded in batches of shapes that the noise did not have.
SLACK = 4.0
#: The part of noise that is usual, and the most scenarios that are judged by that.
USUAL, SCENARIOS = 0.75, 20
#: Differences in log-probability below this are none, by the type: some units in the last place of
#: a float32; of the others one step of a logit of 8 to 16, which knows no smaller differences.
LEAST = {"float32": 1e-6, "float16": 2**-7, "bfloat16": 2**-4}
LEAST_ELSE = 2**-4
#: The largest difference in log-probability that rounding explains, by the type of the KV.
PLAUSIBLE = {"float32": 1e-3, "float16": 0.2, "bfloat16": 1.0}
PLAUSIBLE_ELSE = 1.0
#: The least part of the tokens that are due, and of the requests that they are due for, that is to
#: come from the cache. Healthy servers give all; others may use a running server meanwhile.
DUE = 0.5


class Verdict(StrEnum):
    """From the best to the worst but one; what was not tested is no verdict on the cache."""

    EQUAL = "equal"
    NOISE = "noise"
    NO_HITS = "no hits"
    FAULT = "fault"
    NOT_TESTED = "not tested"

    @property
    def bad(self) -> bool:
        return self in (Verdict.FAULT, Verdict.NO_HITS)


@dataclass(frozen=True)
class Flip:
    """A token that cold would have been another; ``margin`` is by how much, in log-probability."""

    position: int
    token: int
    instead: int
    margin: float


@dataclass(frozen=True)
class Comparison:
    """A warm answer beside its cold reading, position by position.

    ``deltas``: warm less cold log-probability of the token. ``divergence``: Kullback-Leibler, cold
    against warm, over the tokens that both name, and one for all others. ``wavers``: what more cold
    readings differ by, where there are any.
    """

    warm: Answer
    cold: Answer
    deltas: tuple[float, ...]
    divergence: tuple[float, ...]
    flips: tuple[Flip, ...]
    wavers: tuple[float, ...] = ()

    @property
    def off(self) -> float:
        """The largest difference in the log-probability of what was answered."""
        return max(map(abs, self.deltas), default=0.0)

    @functools.cached_property
    def apart(self) -> tuple[float, ...]:
        """How far warm and cold are apart at each position.

        A greedy token was the likeliest. If cold another is, one of the two log-probabilities
        differs by half of the margin at least, and which of them is not always told.
        """
        margins = {flip.position: flip.margin / 2 for flip in self.flips}
        return tuple(
            max(abs(delta), margins.get(place, 0.0)) for place, delta in enumerate(self.deltas)
        )

    @property
    def largest(self) -> float:
        return self.largest_of(len(self.deltas))

    def largest_of(self, positions: int) -> float:
        """The largest of the first so many positions."""
        return max(self.apart[:positions], default=0.0)

    def beyond(self, limit: float) -> bool:
        """Whether it is a fault beside that limit, and what cold readings of it differ by."""
        usual = self.wavers or [0.0] * len(self.apart)
        return any(
            not apart <= max(limit, SLACK * waver)
            for apart, waver in zip(self.apart, usual, strict=True)
        )

    @property
    def mean(self) -> float:
        return statistics.fmean(map(abs, self.deltas)) if self.deltas else 0.0


def compare(warm: Answer, cold: Answer) -> Comparison:
    """``cold`` is a reading of what ``warm`` answered."""
    deltas = tuple(
        0.0 if place in cold.unread else _apart(ours, theirs)
        for place, (ours, theirs) in enumerate(zip(warm.logprobs, cold.logprobs, strict=True))
    )
    flips = []
    if warm.ask.temperature == 0:
        for position, (token, top) in enumerate(zip(warm.output, cold.top, strict=False)):
            best = max(top, key=top.__getitem__, default=token)
            if best != token and position not in cold.unread:
                margin = top[best] - cold.logprobs[position]
                flips.append(Flip(position, token, best, margin))
    divergence = tuple(
        _divergence(theirs, ours) for ours, theirs in zip(warm.top, cold.top, strict=False)
    )
    return Comparison(warm, cold, deltas, divergence, tuple(flips))


def wavers(first: Answer, others: Sequence[Answer], plausible: float) -> tuple[float, ...]:
    """What cold readings of an answer differ from the first by, position by position.

    The second largest: one may be off for the very fault that is looked for. No more than lets
    what is not ``plausible`` be a fault still.
    """
    deltas = [compare(other, first).deltas for other in others]
    found = [sorted(map(abs, place))[-2] for place in zip(*deltas, strict=True)]
    return tuple(min(one, plausible / SLACK) for one in found)


def _apart(ours: float, theirs: float) -> float:
    """Their difference; what is no number is as far away as can be, also from its like."""
    return ours - theirs if math.isfinite(ours) and math.isfinite(theirs) else math.inf


def _divergence(cold: dict[int, float], warm: dict[int, float]) -> float:
    both = cold.keys() & warm.keys()
    pairs = [(math.exp(cold[token]), math.exp(warm[token])) for token in both]
    rest = tuple(max(0.0, 1.0 - sum(side)) for side in zip(*pairs, strict=True)) if pairs else ()
    total = 0.0
    for p, q in [*pairs, *([(rest[0], rest[1])] if rest else [])]:
        if p > 0:
            total += p * math.log(p / max(q, 1e-12))
    return max(0.0, total)


@dataclass(frozen=True)
class Noise:
    """What cold computations differ by, and the ``limit`` beyond which a difference is a fault.

    ``implausible`` are those samples that no rounding explains; the limit is made without them.
    """

    samples: tuple[float, ...]
    limit: float
    plausible: float
    comparisons: int
    least: float

    @property
    def implausible(self) -> int:
        return sum(sample > self.plausible for sample in self.samples)

    @property
    def largest(self) -> float:
        return max(self.samples, default=0.0)

    def decides(self, compared: Comparison) -> bool:
        """Whether no more needs to be known of an answer: it is within, or beyond any rounding."""
        return not self.limit < compared.largest <= self.plausible


def noise(samples: Sequence[float], *, dtype: str, comparisons: int) -> Noise:
    """The noise that an audit measured, for as many ``comparisons`` as it will make."""
    plausible = PLAUSIBLE.get(dtype, PLAUSIBLE_ELSE)
    least = LEAST.get(dtype, LEAST_ELSE)
    kept = [max(sample, least) for sample in samples if sample <= plausible]
    limit = plausible
    if len(kept) >= 8:
        logs = [math.log(sample) for sample in kept]
        spread = statistics.stdev(logs) * math.sqrt(1 + 1 / len(logs))
        quantile = t_quantile(1 - FALSE_ALARMS / 2 / max(1, comparisons), len(logs) - 1)
        predicted = math.exp(statistics.fmean(logs) + quantile * spread)
        limit = min(plausible, max(predicted, SLACK * max(kept)))
    return Noise(tuple(samples), limit, plausible, comparisons, least)


def t_quantile(probability: float, freedom: int) -> float:
    """Student's t by its expansion around the normal quantile; from 8 degrees of freedom on."""
    z = statistics.NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))


def unusual(noise: Noise, warm: Sequence[float]) -> tuple[int, float] | None:
    """How many of ``warm`` are beyond what is usual of the noise, and where that begins.

    None where it is no more than chance gives. Both are the largest differences of answers of the
    same length.
    """
    cold = noise.samples
    if not cold or not warm:
        return None
    usual = SLACK * max(sorted(cold)[int(USUAL * len(cold))], noise.least)
    beyond, of_noise = (sum(not one <= usual for one in some) for some in (warm, cold))
    chance = by_chance(beyond, len(warm), of_noise, len(cold))
    return (beyond, usual) if chance < FALSE_ALARMS / 2 / SCENARIOS else None


def by_chance(some: int, of: int, others: int, of_others: int) -> float:
    """That ``some`` and no fewer are among ``of``, if all of both are as likely: Fisher, exact."""
    both = some + others
    ways = sum(
        math.comb(of, count) * math.comb(of_others, both - count)
        for count in range(some, min(of, both) + 1)
    )
    return ways / math.comb(of + of_others, both)


@dataclass(frozen=True)
class Judgement:
    """What a scenario says of the server; ``why`` in one line."""

    verdict: Verdict
    why: str


def judge(
    answers: Sequence[Answer],
    comparisons: Sequence[Comparison],
    limit: float,
    *,
    noise: Noise | None = None,
    warm: bool = True,
    missed: str = "",
) -> Judgement:
    """Of all answers of a scenario, and those of them that could be compared.

    What differs by more than ``limit`` is a fault, and so are more of them beyond what is usual
    than of the ``noise``, if that is given. ``warm``: there should be hits among them;
    ``missed``: why they say nothing of what they were to show.
    """
    failed = [answer for answer in answers if answer.error]
    beyond = [each for each in comparisons if each.beyond(limit)]
    if beyond:
        worst = max(beyond, key=lambda each: each.largest)
        at = worst.apart.index(worst.largest)
        return Judgement(
            Verdict.FAULT,
            f"{len(beyond)} of {len(comparisons)} answers are not what they are cold: "
            f"{worst.warm.ask.name} is off by {worst.largest:.3g} at position {at} with "
            f"{worst.warm.cached} tokens cached; noise explains {limit:.2g}",
        )
    # Those that waver are explained.
    steady = [each.largest_of(SHORT) for each in comparisons if not each.wavers]
    if noise is not None and (often := unusual(noise, steady)):
        return Judgement(
            Verdict.FAULT,
            f"{often[0]} of {len(steady)} answers differ by more than {often[1]:.2g} from "
            "what they are cold, and that is unusual of cold ones",
        )
    if failed:
        return Judgement(
            Verdict.FAULT, f"{len(failed)} of {len(answers)} requests failed: {failed[0].error}"
        )
    if short := [answer for answer in answers if answer.cut_short]:
        return Judgement(
            Verdict.FAULT,
            f"{len(short)} of {len(answers)} answers are cut short: {short[0].ask.name} has "
            f"{len(short[0].output)} of {short[0].ask.tokens} tokens with {short[0].cached} "
            f"tokens cached, and ends by {short[0].finish!r}",
        )
    due = [answer for answer in answers if answer.ask.due and answer.whole]
    tokens = sum(answer.ask.due for answer in due)
    found = sum(min(answer.cached, answer.ask.due) for answer in due)
    served = sum(answer.cached > 0 for answer in due)
    if found < DUE * tokens or served < DUE * len(due):
        return Judgement(
            Verdict.NO_HITS,
            f"{served or 'none'} of {len(due)} requests found {f'{found:,}' if found else 'any'} "
            f"of the {tokens:,} tokens that were just cached",
        )
    if not comparisons:
        return Judgement(Verdict.NOT_TESTED, "no answer could be compared")
    hits = sum(each.warm.cached > 0 for each in comparisons)
    if warm and not hits:
        return Judgement(Verdict.NOT_TESTED, "no request found anything in the cache")
    if missed:
        return Judgement(Verdict.NOT_TESTED, missed)
    accepted, made = (sum(answer.drafts[part] for answer in answers) for part in (0, 1))
    largest = max(each.largest for each in comparisons)
    verdict = Verdict.EQUAL if largest == 0 else Verdict.NOISE
    wavering = sum(each.largest > limit for each in comparisons)
    noisy = f"; {wavering} by as much as their cold readings do" if wavering else ""
    guessed = f"; {accepted:,} of {made:,} drafts were accepted" if made else ""
    return Judgement(
        verdict,
        f"{len(comparisons)} answers, {hits} with a hit, differ by {largest:.2g} at most"
        + noisy
        + guessed,
    )

"""One audit, from the server's identity to a verdict on each scenario.

A server that dies on the way ends it, and what was measured until then stays. Whoever watches is
told of each step (``Watcher``).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from hicache_guard.audit import judge, play, scenarios, shrink
from hicache_guard.audit.facts import Facts
from hicache_guard.audit.judge import Comparison, Judgement, Noise, Verdict
from hicache_guard.audit.plan import SHORT, Answer, Ask, Plan
from hicache_guard.audit.scenarios import Scenario
from hicache_guard.audit.wire import NoSessionError, Wire, WireError

#: Requests whose cold answers are compared with cold readings, and how many run together at most.
SAMPLES, SHAPES = 48, 4
#: Most answers of a scenario that are read again some times, since they are beyond the limit.
SUSPECTS = 8
#: How many of these are compared with the reference, which takes its time.
REFERENCES = 16
#: Plays that a plan may be made smaller by, and seconds.
TRIES, SECONDS = 60, 60.0

#: Results that say nothing of a cache, unless they are bad.
COLD = ("cold", "reference", "server")

#: The cold log-probabilities of given tokens after a prompt, from somebody else than the server.
Reference = Callable[[Sequence[int], Sequence[int]], list[float]]


#: Of a scenario that is not over.
UNDECIDED = Judgement(Verdict.NOT_TESTED, "")


class Watcher(Protocol):
    """Is told how far an audit is."""

    def begins(self, name: str, steps: int) -> None: ...

    def goes_on(self) -> None: ...

    def ends(self, result: Result) -> None: ...


@dataclass
class Result:
    """What became of one scenario. Beyond ``limit`` is a fault, which ``smallest`` still shows."""

    name: str
    purpose: str
    judgement: Judgement
    plan: Plan | None = None
    answers: list[Answer] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    smallest: Plan | None = None
    limit: float = 0.0
    seconds: float = 0.0


@dataclass
class Audit:
    """All that is known at the end; ``broken`` says why there is no more."""

    url: str
    facts: Facts
    seed: int
    noise: Noise | None = None
    results: list[Result] = field(default_factory=list)
    broken: str = ""
    seconds: float = 0.0
    started: float = field(default_factory=time.time)

    @property
    def verdict(self) -> Verdict:
        found = {
            result.judgement.verdict
            for result in self.results
            if result.name not in COLD or result.judgement.verdict.bad
        }
        order = (Verdict.FAULT, Verdict.NO_HITS, Verdict.NOISE, Verdict.EQUAL)
        return next((one for one in order if one in found), Verdict.NOT_TESTED)

    @property
    def asked(self) -> tuple[int, int]:
        """Requests of the scenarios, and tokens of their prompts and answers."""
        answers = [answer for result in self.results for answer in result.answers]
        tokens = sum(len(answer.ask.prompt) + len(answer.output) for answer in answers)
        return len(answers), tokens


def looked_at(wire: Wire, compared: Comparison, noise: Noise) -> Comparison:
    """With what more cold readings differ by, unless the noise alone decides."""
    if noise.decides(compared):
        return compared
    readings = [*play.read_again(wire, compared.warm, SHAPES)]
    wavers = judge.wavers(compared.cold, readings, noise.plausible)
    return replace(compared, wavers=wavers)


@dataclass
class Auditor:
    """How an audit is made.

    ``may_flush``: the server is ours, and its cache may be emptied. ``ended`` says why it runs no
    more, or nothing. ``shrink``: look for the smallest plan that shows a fault.
    """

    wire: Wire
    facts: Facts
    watcher: Watcher
    seed: int = 0
    may_flush: bool = False
    shrink: bool = True
    reference: Reference | None = None
    ended: Callable[[], str] = lambda: ""

    def run(self, planned: Mapping[Scenario, Plan | str]) -> Audit:
        """Play what ``scenarios.planned`` says."""
        begun = time.monotonic()
        audit = Audit(self.wire.url, self.facts, self.seed)
        try:
            self._run(planned, audit)
        except WireError as error:
            audit.broken = str(error)
            if said := self.ended():
                found = Judgement(Verdict.FAULT, said)
                self._add(audit, Result("server", "It lives as long as it is asked", found))
        except KeyboardInterrupt:
            audit.broken = "interrupted"
        audit.seconds = time.monotonic() - begun
        return audit

    def _run(self, planned: Mapping[Scenario, Plan | str], audit: Audit) -> None:
        plans = [plan for plan in planned.values() if isinstance(plan, Plan)]
        # The noise is of short answers.
        due = sum(-(-ask.tokens // SHORT) for plan in plans for ask in plan.asks())
        self._cold(audit, due)
        assert audit.noise is not None
        for scenario, plan in planned.items():
            if isinstance(plan, Plan):
                self._scenario(audit, scenario, plan, audit.noise)
            else:
                untried = Judgement(Verdict.NOT_TESTED, plan)
                self._add(audit, Result(scenario.name, scenario.purpose, untried))
        for name, needs in scenarios.UNTRIED.items():
            if said := needs(self.facts):
                self._add(audit, Result(name, "", Judgement(Verdict.NOT_TESTED, said)))

    def _add(self, audit: Audit, result: Result) -> None:
        audit.results.append(result)
        self.watcher.ends(result)

    def _compare(self, result: Result, goes_on: Callable[[], None] = lambda: None) -> None:
        """Play the plan of a result, and put answers and comparisons into it as they come."""
        assert result.plan is not None
        for answer in play.play(self.wire, result.plan):
            result.answers.append(answer)
            goes_on()
        # In the plan's order, which is that of the noise.
        places = {ask.name: place for place, ask in enumerate(result.plan.asks())}
        result.answers.sort(key=lambda answer: places[answer.ask.name])
        for warm, cold in play.read_all(self.wire, result.answers):
            result.comparisons.append(judge.compare(warm, cold))
            goes_on()

    def _cold(self, audit: Audit, due: int) -> None:
        """Measure the noise; that cold answers agree with each other, and with the reference."""
        begun = time.monotonic()
        facts, dice = self.facts, random.Random(f"cold {self.seed}")
        writer = scenarios.Writer(facts, dice)
        steps: list[tuple[Ask, ...]] = []
        while sum(len(step) for step in steps) < SAMPLES:
            count = dice.randint(1, min(SHAPES, max(1, facts.running)))
            count = min(count, SAMPLES - sum(len(step) for step in steps))
            lengths = [dice.randint(1, 4 * facts.window) for _ in range(count)]
            if facts.chunk and dice.random() < 0.25:
                lengths[0] = facts.chunk + dice.randint(-2, facts.window)
            steps.append(tuple(writer.ask(writer.tokens(length)) for length in lengths))
        plan = Plan("cold", self.seed, tuple(steps))
        self.watcher.begins("cold", 2 * SAMPLES)
        # All in one part of the cache: nothing is shared but by accident.
        purpose = "Cold answers against cold readings: the noise of this server"
        result = Result("cold", purpose, UNDECIDED, plan)
        self._compare(result, self.watcher.goes_on)
        if not result.comparisons:
            why = next((answer.error for answer in result.answers if answer.error), "no answer")
            raise WireError(f"{self.wire.url}: nothing could be compared: {why}")
        audit.noise = judge.noise(
            [each.largest for each in result.comparisons],
            dtype=facts.dtype, comparisons=max(1, due),
        )  # fmt: skip
        result.limit = audit.noise.limit
        result.judgement = judge.judge(result.answers, result.comparisons, result.limit, warm=False)
        result.seconds = time.monotonic() - begun
        self._add(audit, result)
        if self.reference is not None:
            self._against(audit, result.answers)

    def _against(self, audit: Audit, answers: Sequence[Answer]) -> None:
        """That cold answers are those of the reference: what cold and warm share would not show."""
        assert self.reference is not None
        assert audit.noise is not None
        begun = time.monotonic()
        whole = [answer for answer in answers if answer.whole][:REFERENCES]
        self.watcher.begins("reference", len(whole))
        comparisons = []
        for answer in whole:
            logprobs = self.reference(answer.ask.prompt, answer.output)
            other = Answer(answer.ask, answer.output, tuple(logprobs), finish="reference")
            comparisons.append(judge.compare(answer, other))
            self.watcher.goes_on()
        # Another program rounds in its own way: only what no rounding explains is a fault.
        limit = audit.noise.plausible
        found = judge.judge(whole, comparisons, limit, warm=False)
        purpose = "Cold answers against a forward pass of another program"
        self._add(
            audit,
            Result("reference", purpose, found, None, list(whole), comparisons, limit=limit,
                   seconds=time.monotonic() - begun),
        )  # fmt: skip

    def _scenario(self, audit: Audit, scenario: Scenario, plan: Plan, noise: Noise) -> None:
        begun = time.monotonic()
        count = sum(1 for _ in plan.asks())
        self.watcher.begins(scenario.name, 2 * count)
        if self.may_flush:
            self.wire.flush()
        result = Result(scenario.name, scenario.purpose, UNDECIDED, plan, limit=noise.limit)
        broken = ""
        try:
            self._compare(result, self.watcher.goes_on)
            self._look_again(result, noise)
        except NoSessionError as error:
            untried = Judgement(Verdict.NOT_TESTED, str(error))
            self._add(audit, Result(scenario.name, scenario.purpose, untried))
            return
        except (WireError, KeyboardInterrupt):
            broken = f"it broke off: {len(result.comparisons)} of {count} answers were compared"
            raise
        finally:
            if result.answers:
                result.judgement = self._judged(result, scenario, noise, broken)
                result.seconds = time.monotonic() - begun
                self._add(audit, result)
        if self.shrink and any(each.beyond(noise.limit) for each in result.comparisons):
            result.smallest = self._smallest(result, noise)

    def _look_again(self, result: Result, noise: Noise) -> None:
        """Measure the noise of those answers whose difference could be noise, and is beyond it."""
        far = [
            (each.largest, place)
            for place, each in enumerate(result.comparisons)
            if not noise.decides(each)
        ]
        for _, place in sorted(far, reverse=True)[:SUSPECTS]:
            result.comparisons[place] = looked_at(self.wire, result.comparisons[place], noise)

    def _judged(self, result: Result, scenario: Scenario, noise: Noise, broken: str) -> Judgement:
        """Of a scenario that is ``broken`` off only what is wrong already can be said."""
        found = judge.judge(
            result.answers, result.comparisons, noise.limit, noise=noise,
            missed=scenario.missed(result.answers),
        )  # fmt: skip
        if broken and found.verdict is not Verdict.FAULT:
            return Judgement(Verdict.NOT_TESTED, broken)
        return found

    def _smallest(self, result: Result, noise: Noise) -> Plan | None:
        """The smallest plan found that shows the fault; None where it did not come again."""
        until = time.monotonic() + SECONDS
        assert result.plan is not None

        def shows(plan: Plan) -> bool:
            if time.monotonic() > until:
                return False
            if self.may_flush:
                self.wire.flush()
            tried = Result(result.name, result.purpose, UNDECIDED, plan)
            self._compare(tried)
            return any(each.off > noise.limit for each in tried.comparisons)

        beyond = [each for each in result.comparisons if each.beyond(noise.limit)]
        worst = max(beyond, key=lambda each: each.off).warm.ask
        # Most faults show in what a request and those before it did.
        until_worst = _until(result.plan, worst)
        for plan in (until_worst, result.plan):
            if shows(plan):
                return shrink.shrink(plan, shows, tries=TRIES)
        return None


def _until(plan: Plan, last: Ask) -> Plan:
    """The steps of a plan up to that of a request."""
    steps = []
    for step in plan.steps:
        steps.append(step)
        if any(ask.name == last.name for ask in step):
            break
    return Plan(plan.scenario, plan.seed, tuple(steps))

"""What is tried, by name: a purpose each, and how its requests are made from a server's facts.

The prompts are random tokens of a seed. Where a number of tokens is due from the cache, the same
prompt was asked before in the same part of the cache, and nothing was asked in between that could
have taken its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hicache_guard.audit.facts import Facts
from hicache_guard.audit.plan import SHORT, TOO_LATE, Answer, Ask, Leave, Plan, Session, Tokens

#: The first token ids are often special.
FIRST_TOKEN = 10
#: Tokens by which the server itself stays below what fits.
SPARE = 2
#: How much more than a pool is asked for where it is to run over.
OVER = 1.5
#: Most requests of a scenario that fills a pool; and most that wait together.
MOST, TOGETHER = 64, 4


class Writer:
    """Makes the requests of one plan."""

    def __init__(self, facts: Facts, dice: random.Random) -> None:
        self.facts, self.dice = facts, dice
        self._count = 0
        self.steps: list[tuple[Ask, ...]] = []
        #: The longest prompt that leaves room for an answer, and in the pool for others.
        self.longest = min(facts.context - 4 * SHORT, facts.full_pool // 2)

    def tokens(self, count: int) -> Tokens:
        count = max(1, min(count, self.longest))
        return tuple(self.dice.choices(range(FIRST_TOKEN, self.facts.vocabulary), k=count))

    def ask(self, prompt: Tokens, tokens: int = SHORT, *, known: int = 0, **more: Any) -> Ask:
        """A request whose first ``known`` tokens the cache should know, in whole pages.

        At least one token is always computed.
        """
        self._count += 1
        prompt = prompt[: self.longest]
        known = min(known, len(prompt) - 1)
        due = known - known % self.facts.page
        tokens = min(tokens, self.facts.context - SPARE - len(prompt))
        made = Ask(f"r{self._count}", prompt, tokens, due=due)
        return replace(made, **more)

    def step(self, *asks: Ask) -> None:
        self.steps.append(asks)

    def one_by_one(self, asks: Iterable[Ask]) -> None:
        self.steps += [(ask,) for ask in asks]


@dataclass(frozen=True)
class Scenario:
    """``needs`` says why a server cannot be tried with it, or nothing.

    ``missed`` says of the answers why they show nothing of what they were to show, or nothing.
    """

    name: str
    purpose: str
    write: Callable[[Writer], None]
    needs: Callable[[Facts], str] = lambda _facts: ""
    missed: Callable[[Sequence[Answer]], str] = lambda _answers: ""

    def plan(self, facts: Facts, seed: int) -> Plan:
        writer = Writer(facts, random.Random(f"{self.name} {seed}"))
        self.write(writer)
        return Plan(self.name, seed, tuple(writer.steps))


def planned(chosen: Iterable[Scenario], facts: Facts, seed: int) -> dict[Scenario, Plan | str]:
    """What each is played by, or why it cannot be tried on a server."""
    found: dict[Scenario, Plan | str] = {}
    for scenario in chosen:
        found[scenario] = scenario.needs(facts) or scenario.plan(facts, seed)
        if isinstance(plan := found[scenario], Plan) and not plan.steps:
            found[scenario] = f"its prompts do not fit {facts.context} tokens"
    return found


def _shared(make: Writer) -> None:
    facts = make.facts
    for length in (3 * facts.window + facts.page // 2, 6 * facts.window):
        prefix = make.tokens(length)
        make.step(make.ask(prefix))
        make.one_by_one(
            make.ask(prefix + make.tokens(number), known=len(prefix))
            for number in (1, facts.page, facts.window // 2, facts.window + 3)
        )


def _resume(make: Writer) -> None:
    facts = make.facts
    points = {facts.window + by for by in (-1, 0, 1)}
    points |= {2 * facts.page + by for by in (-1, 0, 1)}
    points |= {facts.window + facts.page + by for by in (-1, 0, 1)}
    if facts.chunk:
        points |= {facts.chunk + by for by in (-1, 0, 1)}
    for point in sorted(point for point in points if 1 < point < make.longest):
        start = make.tokens(point)
        make.step(make.ask(start, 1))
        make.step(make.ask(start + make.tokens(3), known=point))
        make.step(make.ask(start + make.tokens(facts.window), known=point))


def _branching(make: Writer) -> None:
    facts, dice = make.facts, make.dice
    known = [make.tokens(5 * facts.window)]
    make.step(make.ask(known[0]))
    for _ in range(16):
        base = dice.choice(known)
        cut = dice.randint(1, len(base))
        if dice.random() < 0.5:
            cut = max(1, len(base) - dice.randint(0, facts.window))
        known.append(base[:cut] + make.tokens(dice.randint(1, facts.window)))
        make.step(make.ask(known[-1]))


def _together(make: Writer) -> None:
    facts = make.facts
    count = min(TOGETHER, max(2, facts.running))
    for length in (facts.window // 2, 4 * facts.window + 1):
        prompt = make.tokens(length)
        make.step(*(make.ask(prompt) for _ in range(count)))
        make.step(*(make.ask(prompt, known=len(prompt)) for _ in range(count)))
        make.step(*(make.ask(prompt + make.tokens(number + 1)) for number in range(count)))


def _filled(make: Writer, pool: int, length: int) -> None:
    """Ask for more prompts than a pool holds, and for earlier ones again now and then."""
    dice = make.dice
    length = min(length, make.longest)
    count = min(MOST, int(OVER * pool / (length + SHORT)) + 2)
    prompts: list[Tokens] = []
    for number in range(count):
        prompts.append(make.tokens(length + dice.randint(-length // 8, length // 8)))
        asks = [make.ask(prompts[-1])]
        if number % 2:
            old = dice.choice(prompts)
            asks.append(make.ask(old + make.tokens(dice.randint(1, SHORT))))
        make.step(*asks)
    make.one_by_one(
        make.ask(prompt + make.tokens(2)) for prompt in dice.sample(prompts, k=min(8, count))
    )


def _full_pressure(make: Writer) -> None:
    _filled(make, make.facts.full_pool, max(4 * make.facts.window, make.longest // 3))


def _window_pressure(make: Writer) -> None:
    # Prompts within the window keep all of their window KV.
    _filled(make, make.facts.window_pool, max(4, make.facts.window - SHORT))


def _too_large(
    pool: Callable[[Facts], int], length: Callable[[Facts], int]
) -> Callable[[Facts], str]:
    def why(facts: Facts) -> str:
        if int(OVER * pool(facts) / (length(facts) + SHORT)) <= MOST:
            return ""
        return f"a pool of {pool(facts):,} tokens takes more than {MOST} requests to fill"

    return why


def _short(facts: Facts) -> int:
    """Tokens of a prompt of which a host tier holds more than what fills the device."""
    return max(2 * facts.window + facts.page, min(facts.context // 3, facts.full_pool // 16))


def _load_back(make: Writer) -> None:
    facts, dice = make.facts, make.dice
    length = min(make.longest, _short(facts))
    fills = min(MOST, facts.full_pool // length + 1)
    # As many as the host still has when all of them, and others meanwhile, have come and gone. Its
    # window pool is to its full pool as those of the device are, and a copy may take as much of it.
    held = facts.host_tokens * min(facts.full_pool, facts.window_pool) // facts.full_pool
    room = held // (length + SHORT + facts.page) - fills
    olds = [make.tokens(length + number) for number in range(max(1, min(4, room // 2)))]
    # Twice: some policies write a prompt to the host when it is hit.
    for _ in range(2):
        make.one_by_one(make.ask(old) for old in olds)
    make.one_by_one(make.ask(make.tokens(length)) for _ in range(fills))
    for old in olds:  # back from the host, while others are written
        make.step(make.ask(old + make.tokens(3)), make.ask(make.tokens(length)))
    many = min(MOST, int(OVER * facts.host_tokens / length))
    make.one_by_one(make.ask(make.tokens(length), 1) for _ in range(many))
    make.one_by_one(make.ask(old + make.tokens(dice.randint(1, 9))) for old in olds)


def _long(facts: Facts) -> int:
    return max(3 * facts.window, 2 * facts.context // 3)


def _storage(make: Writer) -> None:
    facts, dice = make.facts, make.dice
    length = min(2 * make.longest // 3, _long(facts))
    olds = [make.tokens(length + number) for number in range(4)]
    for _ in range(2):
        make.one_by_one(make.ask(old) for old in olds)
    fills = min(MOST, (facts.full_pool + facts.host_tokens) // length + 2)
    make.one_by_one(make.ask(make.tokens(length), 1) for _ in range(fills))
    for old in olds:  # twice at once, while others are written; then a part of what was fetched
        make.step(
            make.ask(old + make.tokens(3)), make.ask(old + make.tokens(2)),
            make.ask(make.tokens(length)),
        )  # fmt: skip
        make.step(make.ask(old[: dice.randint(min(facts.window, len(old)), len(old))] + old[:1]))


def _leaving(leave: Leave, leaves: int) -> Callable[[Writer], None]:
    def write(make: Writer) -> None:
        window = make.facts.window
        for length in (window + 5, 4 * window, make.longest):
            prompt = make.tokens(length)
            make.step(make.ask(prompt, 4 * SHORT, leave=leave, leaves=leaves))
            make.step(make.ask(prompt + make.tokens(2)))
            # Beside others, whose slots what was left behind may become.
            make.step(
                make.ask(prompt + make.tokens(3), 4 * SHORT, leave=leave, leaves=leaves),
                make.ask(make.tokens(length), 2 * SHORT),
                make.ask(prompt, SHORT),
            )
            make.step(make.ask(prompt + make.tokens(4)), make.ask(make.tokens(window)))

    return write


def _retraction(make: Writer) -> None:
    facts = make.facts
    count = max(2, min(facts.running, TOGETHER))
    # Together they want more than there is, once they have answered.
    length = min(make.longest, int(facts.full_pool * 0.8 / count))
    tokens = int(facts.full_pool * 0.35 / count)
    prompts = [make.tokens(length) for _ in range(count)]
    # Room for all of an answer is kept where it is known not to end before.
    make.step(*(make.ask(prompt, tokens, ignore_eos=False) for prompt in prompts))
    make.step(*(make.ask(prompt + make.tokens(2)) for prompt in prompts))


def _turns(make: Writer) -> None:
    window = make.facts.window
    last: list[Ask] = [make.ask(make.tokens(window * (1 + number))) for number in range(2)]
    make.step(*last)
    grown = [len(ask.prompt) for ask in last]
    for _ in range(6):
        last = [
            make.ask(make.tokens(make.dice.randint(1, window)), 2 * SHORT, after=ask.name)
            for ask in last
        ]
        grown = [old + len(ask.prompt) + 2 * SHORT for old, ask in zip(grown, last, strict=True)]
        if max(grown) > make.longest:
            break
        make.step(*last)


def _session_turns(streaming: bool) -> Callable[[Writer], None]:
    def write(make: Writer) -> None:
        # A window's worth, or what leaves room for all the turns.
        window, dice = min(make.facts.window, make.longest // 16), make.dice

        def turn(last: Ask, **more: Any) -> Ask:
            said = make.tokens(dice.randint(1, max(1, window // 2)))
            return make.ask(said, after=last.name, session=last.session, **more)

        sessions = [Session(name, streaming) for name in ("a", "b")]
        last = [
            make.ask(make.tokens(window * (1 + 2 * number)), session=session)
            for number, session in enumerate(sessions)
        ]
        make.step(*last)
        for _ in range(3):
            last = [turn(ask, due=1) for ask in last]
            make.step(*last)
        make.one_by_one(turn(ask, tokens=8 * SHORT, leave=Leave.ABORT, leaves=3) for ask in last)
        # From before what was aborted, once others have had the room.
        make.step(make.ask(make.tokens(make.longest)))
        if not streaming:  # a history can be gone on with more than once
            make.step(*(turn(ask) for ask in last for _ in range(2)))
        last = [turn(ask) for ask in last]
        make.step(*last)
        make.one_by_one(turn(ask, due=1) for ask in last)

    return write


def _speculative(make: Writer) -> None:
    # Prompts that repeat themselves are guessed well, and then no more.
    window, dice = make.facts.window, make.dice
    motif = make.tokens(dice.randint(3, 9))
    base = (motif * window)[: 3 * window]
    make.step(make.ask(base, 4 * SHORT))
    for length in (2 * window - 1, 2 * window, 2 * window + 1, 3 * window):
        known = base[:length]
        make.step(make.ask(known + motif, window + SHORT, known=length))
        make.step(
            make.ask(known + make.tokens(2), window + SHORT, known=length),
            make.ask(known + motif, 4 * SHORT, temperature=1.0),
        )


def _sampling(make: Writer) -> None:
    dice, window = make.dice, make.facts.window
    base = make.tokens(3 * window)
    shortest = min(2 * window, len(base))
    make.step(make.ask(base))
    for number in range(12):
        make.step(
            *(
                make.ask(
                    base[: dice.randint(shortest, len(base))] + make.tokens(number + 1),
                    4 * SHORT,
                    ignore_eos=bool(number % 2),
                    temperature=dice.choice((0.0, 1.0)),
                )
                for _ in range(2)
            )
        )


def _churn(make: Writer) -> None:
    facts, dice = make.facts, make.dice
    shortest = min(facts.window, make.longest)
    bases = [make.tokens(dice.randint(shortest, make.longest)) for _ in range(6)]
    for _ in range(24):
        asks = []
        for _ in range(dice.randint(1, max(2, min(TOGETHER, facts.running)))):
            base = dice.choice(bases)
            prompt = base[: dice.randint(1, len(base))] + make.tokens(dice.randint(1, 60))
            if dice.random() < 0.4:
                bases[dice.randrange(len(bases))] = prompt[: make.longest]
            leaves = dice.random() < 0.12
            asks.append(
                make.ask(
                    prompt,
                    dice.randint(1, 3 * SHORT),
                    leave=dice.choice(tuple(Leave)) if leaves else None,
                    leaves=dice.randint(0, 3) if leaves else 0,
                )
            )
        make.step(*asks)


def _no_drafts(answers: Sequence[Answer]) -> str:
    accepted, made = (sum(answer.drafts[part] for answer in answers) for part in (0, 1))
    if 0 < accepted < made:
        return ""
    return f"no draft was {'rejected' if accepted else 'accepted'}, of {made:,}"


def _all_too_late(answers: Sequence[Answer]) -> str:
    left = [answer for answer in answers if answer.ask.leave is not None]
    if any(answer.finish != TOO_LATE for answer in left):
        return ""
    return f"all {len(left)} requests were over before their clients left"


def _none_retracted(answers: Sequence[Answer]) -> str:
    return "" if any(answer.retractions for answer in answers) else "no request was retracted"


def none_from(*tiers: str) -> Callable[[Sequence[Answer]], str]:
    """Of answers, that none came even in part from one of some tiers; nothing where that is not
    told."""

    def missed(answers: Sequence[Answer]) -> str:
        told = [answer.cached_from for answer in answers if answer.cached_from]
        none = told and not any(one.get(tier) for one in told for tier in tiers)
        return f"nothing came from the {' or the '.join(tiers)}" if none else ""

    return missed


def _third_tier(facts: Facts) -> str:
    return "" if facts.storage != "no" else "the server has no third tier"


def _hierarchical(facts: Facts) -> str:
    return "" if facts.hierarchical != "no" else "the server has no hierarchical cache"


#: In the order in which they are played.
SCENARIOS = (
    Scenario("shared-prefix", "A long prefix that many requests share is used, and right", _shared),
    Scenario("resume-points", "Resuming around the edges of window, page and chunk", _resume),
    Scenario("branching", "Prompts that part from others anywhere, also inside a node", _branching),
    Scenario("together", "The same prompt several times at once", _together),
    Scenario("turns", "Conversations that grow by their own answers", _turns),
    Scenario(
        "sessions", "Sessions of the API: turns, branches, aborts, others in between",
        _session_turns(streaming=False),
    ),
    Scenario(
        "streaming-sessions", "Sessions that keep their KV outside of the tree",
        _session_turns(streaming=True),
        lambda facts: "" if facts.streaming else "the server has no --enable-streaming-session",
    ),
    Scenario(
        "speculation", "What is guessed well and badly, around the edge of the window",
        _speculative,
        lambda facts: "" if facts.speculative != "no" else "the server does not speculate",
        missed=_no_drafts,
    ),
    Scenario("sampling", "Sampled answers, and such as end when they like", _sampling),
    Scenario(
        "abort-in-prefill", "A request is aborted while its prompt is computed",
        _leaving(Leave.ABORT, 0), missed=_all_too_late,
    ),
    Scenario(
        "abort-in-decode", "A request is aborted after some tokens",
        _leaving(Leave.ABORT, 5), missed=_all_too_late,
    ),
    Scenario(
        "disconnect", "A client hangs up after some tokens",
        _leaving(Leave.DISCONNECT, 3), missed=_all_too_late,
    ),
    Scenario(
        "full-pressure", "The full pool runs over: prefixes are evicted and come again",
        _full_pressure,
        _too_large(lambda facts: facts.full_pool, lambda facts: facts.context // 3),
    ),
    Scenario(
        "window-pressure", "The window pool runs over: tombstones inside of living prefixes",
        _window_pressure,
        _too_large(lambda facts: facts.window_pool, lambda facts: facts.window),
    ),
    Scenario(
        "retraction", "More is wanted than the pool has: requests are retracted and computed again",
        _retraction,
        _too_large(lambda facts: facts.full_pool, lambda facts: facts.context // 3),
        _none_retracted,
    ),
    Scenario(
        "load-back", "Prefixes come back from the host while others are written; it runs over",
        _load_back,
        lambda facts: _hierarchical(facts) or _too_large(lambda it: it.full_pool, _short)(facts),
        none_from("host"),
    ),
    Scenario(
        "storage", "Prefixes come back from the third tier after device and host ran over",
        _storage,
        lambda facts: _third_tier(facts)
        or _too_large(lambda it: it.full_pool + it.host_tokens, _long)(facts),
        none_from("storage"),
    ),
    Scenario("churn", "Long random traffic of all of that over recycled pages", _churn),
)  # fmt: skip


def _disaggregation(facts: Facts) -> str:
    return "" if facts.disaggregation != "no" else "prefill and decode run in one server"


#: What is not played for itself, and why; where it says nothing, all that was played had it.
UNTRIED: dict[str, Callable[[Facts], str]] = {
    "disaggregation": _disaggregation,
}

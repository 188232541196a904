"""Generated traffic for a prefix cache: what requests ask for, and how they end. No SGLang in it.

Four kinds of request come mixed: *shared* ones, a system prompt that many have and some words of
their own; turns of *agents*, whose prompt is all that was said in their session so far; *plain*
ones, that share nothing; and *remote* ones, whose KV a prefill server sends (PD disaggregation).
Which system prompt is used follows Zipf's law: that of rank r as often as 1/r. Lengths are
log-normal, outputs geometric. Some end early: clients go away, transfers fail, requests are
retracted.

The same seed gives the same traffic, whoever reads it, however fast. Source: issue 7; the shares
are round numbers, and not measured on any production server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

#: How often each kind comes.
SHARES = {"shared": 0.45, "agent": 0.35, "plain": 0.10, "remote": 0.10}
#: How a request may end otherwise than by its last token, and how often.
PREFILL_ABORTS, DECODE_ABORTS, RETRACTIONS, LOST_TRANSFERS = 0.01, 0.03, 0.02, 1 / 32
#: System prompts, and the sessions that are open at a time.
PREFIXES, SESSIONS = 1024, 512
#: Mean of the output tokens, and the most.
OUTPUT, MOST_OUTPUT = 12, 64
#: One session in so many is over after each turn.
LAST_TURN = 16
VOCABULARY = 128_000
#: Arrivals whose dice are thrown at once.
_BLOCK = 1024


@dataclass(slots=True)
class Arrival:
    """One request: its prompt, and the tokens that it will be answered (both int32).

    ``gone_after`` is the output token after which its client goes away, 0 for during prefill;
    ``retracted_after`` the one after which it has to give everything back and start again; None
    where that does not happen. The KV of a ``lost`` one never comes. ``session`` numbers the
    agent's session, ``turn`` its turns from 0.
    """

    number: int
    kind: str
    prompt: Tokens
    output: Tokens
    gone_after: int | None = None
    retracted_after: int | None = None
    lost: bool = False
    session: int = -1
    turn: int = 0


class Traffic:
    """Arrivals without end. ``longest`` bounds prompt and output together, in tokens."""

    def __init__(self, seed: int, longest: int) -> None:
        """Raises ValueError where ``longest`` leaves no room for a prompt beside the output."""
        if longest < 4 * MOST_OUTPUT:
            raise ValueError(f"requests of {longest} tokens are too short; {4 * MOST_OUTPUT} do")
        self.longest = longest
        self._dice = np.random.default_rng(seed)
        lengths = self._lengths(longest / 4, 0.6, longest // 2, PREFIXES)
        self.prefixes = [self._tokens(int(length)) for length in lengths]
        weights = 1.0 / np.arange(1, PREFIXES + 1)
        self._zipf = np.cumsum(weights / weights.sum())
        self._sessions: list[tuple[int, int, Tokens]] = []
        self._opened = 0

    def __iter__(self) -> Iterator[Arrival]:
        number = 0
        while True:
            yield from self._block(number)
            number += _BLOCK

    def _block(self, first: int) -> Iterator[Arrival]:
        dice, longest = self._dice, self.longest
        kinds = dice.choice(list(SHARES), size=_BLOCK, p=list(SHARES.values())).tolist()
        ranks = np.searchsorted(self._zipf, dice.random(_BLOCK)).clip(max=PREFIXES - 1).tolist()
        outputs = dice.geometric(1 / OUTPUT, _BLOCK).clip(max=MOST_OUTPUT).tolist()
        # What is a request's own; less for who has a prefix, so that most of a prompt is shared.
        words = self._lengths(longest / 128, 0.8, longest // 8, _BLOCK).tolist()
        alone = self._lengths(longest / 16, 0.8, longest // 2, _BLOCK).tolist()
        sent = self._lengths(longest / 4, 0.6, longest // 2, _BLOCK).tolist()
        fates, moments, places, ends = dice.random((4, _BLOCK)).tolist()
        for at, kind in enumerate(kinds):
            output = self._tokens(outputs[at])
            session, turn = -1, 0
            if kind == "shared":
                prompt = np.concatenate((self.prefixes[ranks[at]], self._tokens(words[at])))
            elif kind == "agent":
                over = ends[at] < 1 / LAST_TURN
                session, turn, prompt = self._turn(places[at], ranks[at], words[at], output, over)
            else:
                prompt = self._tokens(sent[at] if kind == "remote" else alone[at])
            arrival = Arrival(first + at, kind, prompt, output, session=session, turn=turn)
            self._end(arrival, fates[at], moments[at])
            yield arrival

    def _end(self, arrival: Arrival, fate: float, moment: float) -> None:
        """How a request ends, by two dice."""
        if arrival.kind == "remote":
            arrival.lost = fate < LOST_TRANSFERS
            fate -= LOST_TRANSFERS
        elif fate < PREFILL_ABORTS:
            arrival.gone_after = 0
            return
        else:
            fate -= PREFILL_ABORTS
        inside = 1 + int(moment * (len(arrival.output) - 1))
        if 0 <= fate < DECODE_ABORTS:
            arrival.gone_after = inside
        elif 0 <= fate - DECODE_ABORTS < RETRACTIONS and len(arrival.output) > 1:
            arrival.retracted_after = inside

    def _turn(
        self, place: float, rank: int, words: int, output: Tokens, over: bool
    ) -> tuple[int, int, Tokens]:
        """The next turn of a session, or the first of a new one: (session, turn, prompt)."""
        index = int(place * SESSIONS)
        if index >= len(self._sessions):
            index = len(self._sessions)
            self._sessions.append((self._opened, 0, self.prefixes[rank]))
            self._opened += 1
        number, turn, said = self._sessions[index]
        if len(said) + words + MOST_OUTPUT > self.longest:
            number, turn, said = self._opened, 0, self.prefixes[rank]
            self._opened += 1
        prompt = np.concatenate((said, self._tokens(words)))
        if over:
            self._sessions[index] = (self._opened, 0, self.prefixes[rank])
            self._opened += 1
        else:
            self._sessions[index] = (number, turn + 1, np.concatenate((prompt, output)))
        return number, turn, prompt

    def _tokens(self, count: int) -> Tokens:
        return self._dice.integers(1, VOCABULARY, count, dtype=np.int32)

    def _lengths(self, median: float, sigma: float, most: int, count: int) -> npt.NDArray[np.int64]:
        drawn = self._dice.lognormal(np.log(median), sigma, count)
        return drawn.astype(np.int64).clip(1, most)

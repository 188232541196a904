"""What an audit asks of a server, as data: so that it can be played again, made smaller, and told.

Prompts are token ids. Asks of one step run together; a step begins when the one before is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

Tokens = tuple[int, ...]

#: Tokens that are generated where it does not matter, and of all answers that noise is measured of.
SHORT = 8
#: How an answer ends to a turn whose session had another history than it was given.
OTHER_HISTORY = "other history"
#: How it ends where it was over before its client left.
TOO_LATE = "too late"


class Leave(StrEnum):
    """How a client does not wait for its answer."""

    ABORT = "abort"
    DISCONNECT = "disconnect"


@dataclass(frozen=True)
class Session:
    """A session of SGLang's API. A ``streaming`` one keeps its KV outside of the prefix tree."""

    name: str
    streaming: bool = False


@dataclass(frozen=True)
class Ask:
    """One request.

    ``after`` names an earlier one: its prompt and what it was answered come before ``prompt``.
    ``tokens`` is how many are generated at most. ``leaves`` after so many tokens have come: 0 is
    while the prompt is computed. ``due``: how many tokens of the prompt the cache should know when
    it is asked, if nothing was evicted; 0 where that cannot be said. As a turn of a ``session`` it
    is sent without the first ``carried`` tokens, which the session has. Only with ``logprobs`` can
    its answer be judged.
    """

    name: str
    prompt: Tokens
    tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    leave: Leave | None = None
    leaves: int = 0
    due: int = 0
    after: str = ""
    session: Session | None = None
    carried: int = 0
    logprobs: bool = True


@dataclass(frozen=True)
class Plan:
    """The requests of a scenario, all in one part of the cache that nobody else uses."""

    scenario: str
    seed: int
    steps: tuple[tuple[Ask, ...], ...]

    def asks(self) -> Iterator[Ask]:
        for step in self.steps:
            yield from step

    @property
    def prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for ask in self.asks())


@dataclass(frozen=True)
class Answer:
    """What came back for an ask.

    ``logprobs`` and ``top`` (token to log-probability, the likeliest of each position) are those of
    the generated tokens. ``cached`` tokens of the prompt were not computed. ``finish`` is the
    server's reason, or "abort", "disconnect" and "failed" where there is no whole answer; ``error``
    says why it failed. Of ``unread`` positions the server did not tell. ``prompt_tokens`` is how
    long the server says that the prompt was, ``drafts`` how many it accepted, and made, for this,
    and ``retractions`` how often it was computed again.
    """

    ask: Ask
    output: Tokens = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[int, float], ...] = ()
    cached: int = 0
    cached_from: dict[str, int] = field(default_factory=dict)
    finish: str = "failed"
    error: str = ""
    seconds: float = 0.0
    unread: tuple[int, ...] = ()
    prompt_tokens: int = 0
    drafts: tuple[int, int] = (0, 0)
    retractions: int = 0

    @property
    def whole(self) -> bool:
        """Whether it can be judged."""
        return bool(self.output) and not self.error

    @property
    def cut_short(self) -> bool:
        """Whether it ended by itself before it had all the tokens that it was to have."""
        if self.error or self.ask.leave is not None or self.finish == OTHER_HISTORY:
            return False
        stopped = not self.ask.ignore_eos and self.finish == "stop"
        return len(self.output) < (1 if stopped else self.ask.tokens)

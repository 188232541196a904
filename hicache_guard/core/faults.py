"""The kinds of violation, what each means, and the reports that show it in the wild.

Source: the fault catalogue (C1 to C16) and the survey of public reports.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fault(enum.Enum):
    """One way in which physical evidence contradicts an operation."""

    PADDING_PAGE = "padding-page"
    NEGATIVE_INDEX = "negative-index"
    OUT_OF_RANGE = "out-of-range"
    DOUBLE_FREE = "double-free"
    DUPLICATE_IN_CALL = "duplicate-in-call"
    FREED_IN_PARTS = "freed-in-parts"
    STALE_MAPPING = "stale-mapping"
    UNMAPPED_RELEASE = "unmapped-release"
    LIVE_PEER = "live-peer"
    SHARED_WINDOW_SLOT = "shared-window-slot"
    DEAD_SLOT_MAPPED = "dead-slot-mapped"
    REPOINTED_IN_GROUP = "repointed-in-group"
    STALE_TRANSLATION = "stale-translation"
    LOST_ROLLBACK = "lost-rollback"
    HANDED_OUT_LIVE = "handed-out-live"
    KEPT_PAGES = "kept-pages"
    BYPASS = "bypass"
    UNPROVED_WINDOW = "unproved-window"
    LOCK_DRIFT = "lock-drift"
    FOREIGN_PREFIX = "foreign-prefix"
    FREED_UNDER_TREE = "freed-under-tree"
    STALE_HOST_COPY = "stale-host-copy"
    FREED_IN_FLIGHT = "freed-in-flight"
    DEAD_TOKENS_CACHED = "dead-tokens-cached"
    EVICTED_TOKENS_CACHED = "evicted-tokens-cached"
    CACHED_TWICE = "cached-twice"
    DEAD_WINDOW_READ = "dead-window-read"


@dataclass(frozen=True)
class FaultFacts:
    """What a person needs to know about a kind of violation.

    ``says`` is a sentence fragment for reports; ``cases`` are rows of the catalogue; ``reports``
    are numbers of public issues or pull requests in SGLang's tracker.
    """

    says: str
    cases: tuple[str, ...] = ()
    reports: tuple[int, ...] = ()


FACTS: dict[Fault, FaultFacts] = {
    Fault.PADDING_PAGE: FaultFacts(
        "the padding page, which belongs to nobody, is freed", ("C9",), (38519,)
    ),
    Fault.NEGATIVE_INDEX: FaultFacts("a negative slot index is freed", ("C10",)),
    Fault.OUT_OF_RANGE: FaultFacts("a slot beyond the end of the pool is freed", ("C10",)),
    Fault.DOUBLE_FREE: FaultFacts(
        "a page that is already free is freed again", ("C5", "C7", "C8"), (25805, 27779, 40305)
    ),
    Fault.DUPLICATE_IN_CALL: FaultFacts("one call frees the same page twice", ("C8",), (40305,)),
    Fault.FREED_IN_PARTS: FaultFacts(
        "the rest of a page is freed after the page was released and handed out again",
        ("C5",),
        (27779,),
    ),
    Fault.STALE_MAPPING: FaultFacts(
        "a mapping entry outlived the page it was written for",
        ("C1", "C4", "C5", "C12"),
        (25805, 26078, 27779),
    ),
    Fault.UNMAPPED_RELEASE: FaultFacts(
        "a window slot is released through an entry that maps to nothing",
        ("C6", "C7", "C15"),
        (38519,),
    ),
    Fault.LIVE_PEER: FaultFacts(
        "a full page is freed while its window peer is live", ("C4", "C11"), (36723,)
    ),
    Fault.SHARED_WINDOW_SLOT: FaultFacts(
        "two full slots are mapped to one window slot", (), (35501, 27586)
    ),
    Fault.DEAD_SLOT_MAPPED: FaultFacts("a mapping entry is written for a slot that is not live"),
    Fault.REPOINTED_IN_GROUP: FaultFacts(
        "a deferred free would release a window slot that the mapping was re-pointed to meanwhile",
        (),
        (36081, 36135),
    ),
    Fault.STALE_TRANSLATION: FaultFacts(
        "a translation outlived the mapping it was read from", ("C2", "C3"), (25889,)
    ),
    Fault.LOST_ROLLBACK: FaultFacts("free lists are rolled back and the mapping is not", ("C12",)),
    Fault.HANDED_OUT_LIVE: FaultFacts("a page is handed out while it is live: two owners"),
    Fault.KEPT_PAGES: FaultFacts("an allocation failed on one side and kept pages of the other"),
    Fault.BYPASS: FaultFacts("pool state was changed behind the guard's seams"),
    Fault.UNPROVED_WINDOW: FaultFacts(
        "a prefix is reused although its window tail cannot be proved",
        ("C14", "C15"),
        (17061, 35129, 38815),
    ),
    Fault.FOREIGN_PREFIX: FaultFacts(
        "a prefix is reused although its full KV was freed since it was cached", (), (29352,)
    ),
    Fault.FREED_UNDER_TREE: FaultFacts(
        "a page that the prefix tree holds is freed by somebody else", (), (27731, 28754)
    ),
    Fault.STALE_HOST_COPY: FaultFacts(
        "a load-back would bring KV that is not of the prefix that it is for",
        (),
        (28468, 29204, 31771, 40712),
    ),
    Fault.FREED_IN_FLIGHT: FaultFacts(
        "a host page is freed while a copy to or from it is queued or under way",
        (),
        (28468, 29204, 40712),
    ),
    Fault.DEAD_TOKENS_CACHED: FaultFacts(
        "tokens are cached whose KV was never computed, or is free", (), (24252,)
    ),
    Fault.CACHED_TWICE: FaultFacts(
        "a page that a prefix tree holds already is cached again", (), (27770,)
    ),
    Fault.EVICTED_TOKENS_CACHED: FaultFacts(
        "tokens are cached as live whose window KV is gone",
        ("C15",),
        (23259, 27770, 29350, 34823),
    ),
    Fault.DEAD_WINDOW_READ: FaultFacts(
        "attention reads a window slot that its request does not own", (), (25889,)
    ),
    Fault.LOCK_DRIFT: FaultFacts(
        "acquires and releases of a tree lock do not pair", (), (24153, 27038, 28161, 36350)
    ),
}

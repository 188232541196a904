"""The catalogue's cases by key, in words; importable without SGLang or torch."""

from __future__ import annotations

TITLES: dict[str, str] = {
    "C1": "recycled full page keeps an old window mapping (#25805)",
    "C2": "remembered translation outlives a replaced mapping (#25889)",
    "C2b": "the same, and the pool shrank",
    "C3": "remembered translation outlives a write in place",
    "C3b": "another batch writes first at a later layer",
    "C4": "window tail of length 0 keeps stale entries",
    "C5": "a page is freed in parts",
    "C6": "segment free of slots without window KV, busy pool",
    "C6b": "the same, idle pool",
    "C7": "the same window range leaves twice",
    "C8": "the same full pages are freed twice",
    "C9": "the padding slot is freed",
    "C10": "slot -1 is freed",
    "C11": "the full side is freed, its window peer left",
    "C12": "restore_state forgets the mapping",
    "C13": "clear() inside an open free group (control)",
    "C14": "pseudo-hit, legacy tree",
    "C14b": "pseudo-hit, unified tree",
    "C14c": "pseudo-hit, unified tree, rust core",
    "C15": "row without window KV inserted as live, matched, evicted",
    "C15b": "the same, rust core",
    "S3": "decode keeps a full page when there is no window page",
    "S2": "queued window free follows an entry re-pointed since (#36081)",
    "S1": "decode goes on after a token without window slot",
}

"""What each case is known to do on each unguarded release: the expectation the matrix is held to.

Source: the fault catalogue, whose entries were seen on those releases with independent scripts
before this project existed; rows and releases that it leaves open ("nr"), S1 to S3, are what the
unguarded release was seen to do here on 2026-11-29. S silent corruption, L silent leak, A
assertion, "range" a write out of range, ok correct, - the call does not exist.
"""

from __future__ import annotations

from hicache_guard.checkouts import SUPPORTED

_ROWS: dict[str, str] = {
    # case   0.5.12 .post1 0.5.13 0.5.15 0.5.18 0.5.23
    "C1":   "SA     ok     ok     ok     ok     ok",
    "C2":   "S      ok     -      -      -      -",
    "C2b":  "range  ok     -      -      -      -",
    "C3":   "S      S      -      -      -      -",
    "C3b":  "S      S      -      -      -      -",
    "C4":   "S      S      S      S      S      S",
    "C5":   "S      S      S      S      S      S",
    "C6":   "-      -      -      -      -      S",
    "C6b":  "-      -      -      -      -      A",
    "C7":   "ok     ok     ok     ok     ok     S",
    "C8":   "S      S      S      S      S      S",
    "C9":   "S      S      S      S      S      S",
    "C10":  "S      S      S      S      S      S",
    "C11":  "L      L      L      L      L      L",
    "C12":  "S      L      L      L      -      -",
    "C13":  "ok     ok     ok     ok     ok     ok",
    "C14":  "S      S      S      S      S      -",
    "C14b": "S      S      S      S      S      S",
    "C14c": "-      -      -      -      -      S",
    "C15":  "ok     ok     ok     ok     ok     S",
    "C15b": "-      -      -      -      -      S",
    "S1":   "S      S      S      S      S      S",
    "S2":   "ok     ok     ok     ok     L      ok",
    "S3":   "-      -      -      -      -      L",
}  # fmt: skip

#: Case to release to the outcome without a guard.
UNGUARDED: dict[str, dict[str, str]] = {
    case: dict(zip(SUPPORTED, row.split(), strict=True)) for case, row in _ROWS.items()
}

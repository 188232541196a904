"""What each case is known to do on each unguarded release: the expectation the matrix is held to.

Source: the fault catalogue, whose entries were seen on 0.5.12, 0.5.12.post1, 0.5.13, 0.5.15, 0.5.18
and 0.5.23 with independent scripts before this project existed; on the other releases the same
scripts were run on 2026-11-29. Cells that it leaves open ("nr") and the rows S1 to S3 are what the
unguarded release was seen to do here on that day. S silent corruption, L silent leak, A assertion,
"range" a write out of range, ok correct, - the call does not exist.
"""

from __future__ import annotations

from hicache_guard.checkouts import SUPPORTED

_ROWS: dict[str, str] = {
    # 0.5.  12    12p1  13    13p1  14    15    15p1  16    17    18    19    20    21    22    23
    "C1":  "SA    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok",
    "C2":  "S     ok    -     -     -     -     -     -     -     -     -     -     -     -     -",
    "C2b": "range ok    -     -     -     -     -     -     -     -     -     -     -     -     -",
    "C3":  "S     S     -     -     -     -     -     -     -     -     -     -     -     -     -",
    "C3b": "S     S     -     -     -     -     -     -     -     -     -     -     -     -     -",
    "C4":  "S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "C5":  "S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "C6":  "-     -     -     -     -     -     -     -     -     -     -     S     S     S     S",
    "C6b": "-     -     -     -     -     -     -     -     -     -     -     A     A     A     A",
    "C7":  "ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    S     S     S     S",
    "C8":  "S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "C9":  "S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "C10": "S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "C11": "L     L     L     L     L     L     L     L     L     L     L     L     L     L     L",
    "C12": "S     L     L     L     L     L     L     L     -     -     -     -     -     -     -",
    "C13": "ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok    ok",
    "C14": "S     S     S     S     S     S     S     S     S     S     S     S     -     -     -",
    "C14b":"S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "C14c":"-     -     -     -     -     -     -     -     -     -     S     S     S     S     S",
    "C15": "S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "C15b":"-     -     -     -     -     -     -     -     -     -     S     S     S     S     S",
    "S1":  "S     S     S     S     S     S     S     S     S     S     S     S     S     S     S",
    "S2":  "ok    ok    ok    ok    ok    ok    ok    ok    ok    L     ok    ok    ok    ok    ok",
    "S3":  "-     -     -     -     -     -     -     -     -     -     -     -     -     L     L",
}  # fmt: skip

#: Case to release to the outcome without a guard.
UNGUARDED: dict[str, dict[str, str]] = {
    case: dict(zip(SUPPORTED, row.split(), strict=True)) for case, row in _ROWS.items()
}

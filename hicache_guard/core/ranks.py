"""Which scheduler process of a server this is, and where it is to say that it is guarded.

Its rank stands in the title that SGLang gives every scheduler process, in all releases alike.
"""

from __future__ import annotations

import re

#: Names the file of a process's report; ``{pid}`` in it is the process id.
RANKS_VAR = "HICACHE_GUARD_RANKS"
#: The version of the report's format.
FORMAT = 1
_TITLE = "sglang::scheduler"
_PARTS = re.compile(r"(?<!MOE)_(DP|PP|TP)([0-9]+)")


def rank_of(title: str) -> dict[str, int] | None:
    """The numbers in a scheduler's title, 0 where it has none; None where it is no scheduler's."""
    if not title.startswith(_TITLE):
        return None
    told = {name.lower(): int(number) for name, number in _PARTS.findall(title)}
    return {"dp": 0, "pp": 0, "tp": 0} | told

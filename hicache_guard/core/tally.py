"""Counters of what the guard saw; host only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hicache_guard.core.faults import Fault


@dataclass
class Tally:
    """``violations`` counts offending operations by kind, ``slots`` the slots they named.

    ``waits`` counts the times the host had to wait for the device, ``unhooked_writes`` the times
    pool state was found changed although no seam was used, ``recomputed`` the times a request was
    computed again from nothing, since it had read a dead window.
    """

    operations: int = 0
    violations: Counter[Fault] = field(default_factory=Counter)
    slots: Counter[Fault] = field(default_factory=Counter)
    waits: int = 0
    unhooked_writes: int = 0
    recomputed: int = 0

    @property
    def total(self) -> int:
        """Violations of every kind."""
        return sum(self.violations.values())

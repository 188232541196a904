"""A retracted request's KV on the host (since 0.5.21): it is the request's until it is restored.

Its host pages are in no tree, so no print can tell whose they are. They are kept like those of a
copy under way, from the backup until it is restored or given up, and bear a ticket that a later
owner's do not. That a row was handed on before it was backed up cannot be told from its slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hicache_guard.adapters.host_flights import Flight
from hicache_guard.adapters.host_pool import contents_of, numbers
from hicache_guard.core.contents import Numbers
from hicache_guard.core.faults import Fault
from hicache_guard.core.journal import Operation
from hicache_guard.core.verdict import HostCopy

if TYPE_CHECKING:
    from hicache_guard.adapters.host_copies import HostTier


def watch(tier: HostTier) -> None:
    """Follow the backups of retracted requests that a tree makes, where it makes any."""
    if hasattr(tier.tree, "backup_kv_cache"):
        Retraction(tier).watch()


class Retraction:
    """The tickets of the backups of retracted requests, by the host slots that they begin with."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self._kept: dict[int, int] = {}

    def watch(self) -> None:
        tree: Any = self.tier.tree
        backing, restoring = tree.backup_kv_cache, tree.restore_kv_cache
        discarding = tree.discard_kv_cache_backup

        def backup_kv_cache(req: Any) -> Any:
            backup = backing(req)
            if backup is not None:
                self._keep(backup)
            return backup

        def restore_kv_cache(req: Any, backup: Any) -> Any:
            self._look(backup)
            return restoring(req, backup)

        def discard_kv_cache_backup(backup: Any) -> Any:
            self._kept.pop(_name(backup), None)
            return discarding(backup)

        tree.backup_kv_cache = backup_kv_cache
        tree.restore_kv_cache = restore_kv_cache
        tree.discard_kv_cache_backup = discard_kv_cache_backup

    def _keep(self, backup: Any) -> None:
        number, name = self.tier.next_ticket(), _name(backup)
        used = self._slots(backup)
        for pool, slots in used:
            contents_of(pool).write(slots, number)
        self._kept[name] = number
        counted = [(pool, numbers(slots)) for pool, slots in used]
        flight = Flight(counted, owned=True, over=lambda: name not in self._kept)
        self.tier.flights.add(flight)

    def _look(self, backup: Any) -> None:
        """Report what of a backup is somebody else's by now."""
        number, tier = self._kept.get(_name(backup)), self.tier
        if number is None:
            return
        borne = torch.cat([contents_of(pool).read(slots) for pool, slots in self._slots(backup)])

        def judge(wrong: Numbers, operation: Operation) -> None:
            if wrong[0]:
                tier.reports(Fault.STALE_HOST_COPY, int(wrong[0]), operation)

        with tier.link.operation("restore"):
            tier.link.guard.when_known(HostCopy((borne != number).sum().reshape(1)), judge)

    def _slots(self, backup: Any) -> list[tuple[Any, torch.Tensor]]:
        host = self.tier.tree.cache_controller.mem_pool_host
        parts = [(host.anchor_entry.host_pool, backup.host_indices)]
        for part in backup.pool_transfers or ():
            if part.name.name == "SWA":
                parts.append((host.entry_map[part.name].host_pool, part.host_indices))
        return parts


def _name(backup: Any) -> int:
    """What tells a backup from others: the first of its host slots is its alone."""
    return int(backup.host_indices[0])

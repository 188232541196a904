"""What a remembered translation is worth: it holds only for the epoch and the slots it was read at.

Source: PR #25889 (a memo of window slots outlived the mapping) and its residue, where the mapping
is written in place or another batch asks first.
"""

from __future__ import annotations

import weakref

import torch

from hicache_guard.core.verdict import HostCopy


class Remembered:
    """A translation, the slots it was read for, and the mapping's identity and version then.

    ``slots`` is None where they are not told: such a translation holds for none, but it can be
    asked whether its epoch is still the present one.
    """

    def __init__(
        self, translation: torch.Tensor, slots: torch.Tensor | None, mapping: torch.Tensor
    ) -> None:
        self._translation = weakref.ref(translation)
        self._slots = None if slots is None else weakref.ref(slots)
        self._slots_version = -1 if slots is None else slots._version
        self._mapping = weakref.ref(mapping)
        self._mapping_version = mapping._version

    def in_epoch(self, translation: torch.Tensor, mapping: torch.Tensor) -> bool:
        """Whether ``translation`` is the one remembered, and of this epoch. Host only."""
        return (
            self._translation() is translation
            and self._mapping() is mapping
            and mapping._version == self._mapping_version
        )

    @property
    def for_nobody(self) -> bool:
        """Whether the slots were not told."""
        return self._slots is None

    def holds(self, translation: torch.Tensor, slots: torch.Tensor, mapping: torch.Tensor) -> bool:
        """Whether ``translation`` is the one remembered, for these slots and epoch. Host only."""
        return (
            self._slots is not None
            and self._slots() is slots
            and slots._version == self._slots_version
            and self.in_epoch(translation, mapping)
        )


class Difference:
    """Where a remembered translation (int) differs from a fresh one, on its way to the host.

    Slots that only one of the two has (another batch, of another size) count as different.
    """

    def __init__(self, slots: torch.Tensor, remembered: torch.Tensor, fresh: torch.Tensor) -> None:
        both = min(remembered.numel(), fresh.numel())
        old, new = remembered.reshape(-1)[:both].long(), fresh.reshape(-1)[:both].long()
        unequal = old != new
        first = unequal.to(torch.uint8).argmax().reshape(1) if both else None
        facts = [unequal.sum().reshape(1)]
        if first is not None:
            facts += [
                column.index_select(0, first)
                for column in (slots.reshape(-1)[:both].long(), old, new)
            ]
        self._copy = HostCopy(torch.cat(facts))
        self._missing = max(remembered.numel(), fresh.numel()) - both

    def arrived(self) -> bool:
        return self._copy.arrived()

    def wait(self) -> None:
        self._copy.wait()

    @property
    def count(self) -> int:
        """Slots that differ. Call after the copy has arrived."""
        return self._copy.values()[0] + self._missing

    def first(self) -> tuple[int, int, int]:
        """(full slot, remembered window slot, fresh window slot) of the first that differs."""
        values = self._copy.values()
        return (values[1], values[2], values[3]) if len(values) == 4 else (-1, -1, -1)

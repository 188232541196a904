"""Taking back what an operation wrote: old values of the entries it touched, newest first.

Used twice: in strict mode an operation that raises leaves the state as it was, and a release's
``restore_state`` must roll back the mapping as well as the free lists. Costs what was touched.
"""

from __future__ import annotations

import torch

#: Writes that a log holds. SGLang restores a backup within a step or never.
MAX_SAVED = 16_384


class UndoLog:
    """Old values of tensor entries, in the order in which they were overwritten."""

    def __init__(self) -> None:
        self._saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @property
    def full(self) -> bool:
        """Whether so much was overwritten since that it will not be taken back any more."""
        return len(self._saved) >= MAX_SAVED

    def save(self, tensor: torch.Tensor, index: torch.Tensor) -> None:
        """Keep ``tensor[index]`` (index int64, within range) before it is overwritten."""
        self._saved.append((tensor, index, tensor.index_select(0, index)))

    def entries(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(index, old values) saved for ``tensor``, oldest first."""
        return [(index, old) for saved, index, old in self._saved if saved is tensor]

    def roll_back(self) -> None:
        """Put every old value back, newest first."""
        for tensor, index, old in reversed(self._saved):
            tensor.index_copy_(0, index, old)
        self._saved.clear()


class UndoLogs:
    """The logs that are open now; a write saves into each of them."""

    def __init__(self) -> None:
        self.open_now: list[UndoLog] = []

    def open(self) -> UndoLog:
        log = UndoLog()
        self.open_now.append(log)
        return log

    def close(self, log: UndoLog) -> None:
        self.open_now = [other for other in self.open_now if other is not log]

    def save(self, tensor: torch.Tensor, index: torch.Tensor) -> None:
        for log in self.open_now:
            log.save(tensor, index)
            if log.full:
                self.close(log)

    def __bool__(self) -> bool:
        return bool(self.open_now)

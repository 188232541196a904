"""How a case of the catalogue ends, other than by returning."""

from __future__ import annotations


class NotInThisRelease(Exception):
    """The call that this case is about does not exist in the release on the path."""


class OutOfRange(Exception):
    """A window write was aimed at a row that the pool does not have."""


class WrongSlot(Exception):
    """KV was written to, or would be read from, a slot of somebody else."""

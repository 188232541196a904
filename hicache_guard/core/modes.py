"""How much the guard may do about what it sees.

The four modes and their promises come from the fault catalogue (docs/design.md, "Modes").
"""

from __future__ import annotations

import enum
import os

from hicache_guard.core.errors import ConfigError

ENV_VAR = "HICACHE_GUARD"


class Mode(enum.Enum):
    """off: hooks not installed. observe: count and log. enforce: contain. strict: raise."""

    OFF = "off"
    OBSERVE = "observe"
    ENFORCE = "enforce"
    STRICT = "strict"

    @classmethod
    def parse(cls, text: str) -> Mode:
        """The mode a person wrote. Raises ConfigError for anything that is not one."""
        try:
            return cls(text.strip().lower())
        except ValueError:
            choices = ", ".join(mode.value for mode in cls)
            raise ConfigError(f"unknown guard mode {text!r}; choose one of {choices}") from None

    @classmethod
    def from_environment(cls) -> Mode:
        """The mode in ``HICACHE_GUARD``; off where the variable is unset or empty."""
        text = os.environ.get(ENV_VAR, "")
        return cls.parse(text) if text.strip() else cls.OFF

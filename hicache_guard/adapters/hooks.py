"""Putting the hooks in place, taking them out, and telling hook by hook whether they are there."""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hicache_guard.adapters import state
from hicache_guard.adapters.link import Factory, StandIn, all_links
from hicache_guard.adapters.releases import (
    QUEUES_RESOLVED,
    RELEASES,
    RESOLVING_NAME,
    Release,
    Seam,
)
from hicache_guard.core.errors import ConfigError, UnguardedError
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation

_MARK = "__hicache_guard_original__"


class HookStatus(enum.Enum):
    """Whether one hook is in place."""

    APPLIED = "applied"
    ABSENT = "not installed"
    MISSING = "missing"


@dataclass(frozen=True)
class Hook:
    """One method of one seam, and its state in this process."""

    seam: Seam
    method: str
    status: HookStatus
    detail: str = ""

    @property
    def target(self) -> str:
        return f"{self.seam.module}.{self.seam.cls}.{self.method}"


def running_version() -> str:
    """The version of SGLang that this process imports. Raises ConfigError where there is none."""
    try:
        version = importlib.import_module("sglang.version").__version__
    except ImportError:
        raise ConfigError(
            "no SGLang to import; put a checkout on PYTHONPATH or see `hicache-guard releases`"
        ) from None
    return str(version)


def running_release() -> Release:
    """The table row for the SGLang in this process. Raises UnguardedError for an unknown one."""
    version = running_version()
    if version not in RELEASES:
        raise UnguardedError(
            f"SGLang {version} is not a supported release; supported: {', '.join(RELEASES)}"
        )
    if version == QUEUES_RESOLVED.version:
        free_swa: Any = vars(_class_of(QUEUES_RESOLVED.seams[0]))["free_swa"]
        if RESOLVING_NAME in getattr(free_swa, _MARK, free_swa).__code__.co_names:
            return QUEUES_RESOLVED
    return RELEASES[version]


def install(
    mode: Mode | str | None = None, *, on_report: Callable[[Violation], None] | None = None
) -> Release | None:
    """Guard every hybrid allocator that is built from now on in this process.

    ``mode`` defaults to ``HICACHE_GUARD``; off installs nothing and returns None. ``on_report``
    receives each violation that is counted. Raises UnguardedError where a seam of this release is
    missing, unless the mode is observe. A second call replaces the choices of the first.
    """
    chosen = Mode.parse(mode) if isinstance(mode, str) else mode or Mode.from_environment()
    if chosen is Mode.OFF:
        return None
    release = running_release()
    uninstall()
    absent = []
    for seam in release.seams:
        try:
            cls = _class_of(seam)
        except (ImportError, AttributeError) as error:
            absent.append(f"{seam.module}.{seam.cls} ({error})")
            continue
        handlers = _handlers_of(seam)
        for method in seam.methods:
            if not _can_hook(cls, method, handlers):
                absent.append(f"{seam.module}.{seam.cls}.{method}")
                continue
            _wrap(cls, method, handlers)
    if absent and chosen is not Mode.OBSERVE:
        uninstall()
        raise UnguardedError("seams missing in this SGLang: " + "; ".join(absent))
    state.choose(state.Settings(chosen, release, on_report))
    return release


def uninstall() -> None:
    """Take every hook out. Allocators built meanwhile keep working, unguarded.

    What their guards still had to check is checked first, and what was held back is released.
    """
    for link in all_links():
        link.drain()
    for release in RELEASES.values():
        for seam, cls in _loaded(release):
            for method in seam.methods:
                found = vars(cls).get(method)
                original = getattr(found, _MARK, None)
                if original is not None:
                    setattr(cls, method, original)
                elif isinstance(found, StandIn):
                    delattr(cls, method)
    state.choose(None)


def hooks(release: Release) -> list[Hook]:
    """Every hook that ``release`` needs, with its state in this process. Imports the seams."""
    found = []
    for seam in release.seams:
        try:
            cls: type | None = _class_of(seam)
            detail = ""
        except (ImportError, AttributeError) as error:
            cls, detail = None, str(error)
        for method in seam.methods:
            there = None if cls is None else vars(cls).get(method)
            if hasattr(there, _MARK) or isinstance(there, StandIn):
                status = HookStatus.APPLIED
            elif cls is not None and _can_hook(cls, method, _handlers_of(seam)):
                status = HookStatus.ABSENT
            else:
                status = HookStatus.MISSING
            found.append(Hook(seam, method, status, detail))
    return found


def _class_of(seam: Seam) -> type:
    cls: type = getattr(importlib.import_module(seam.module), seam.cls)
    return cls


def _loaded(release: Release) -> Iterator[tuple[Seam, type]]:
    import sys

    for seam in release.seams:
        module = sys.modules.get(seam.module)
        cls = getattr(module, seam.cls, None)
        if cls is not None:
            yield seam, cls


def _handlers_of(seam: Seam) -> ModuleType:
    return importlib.import_module(f"hicache_guard.adapters.{seam.handlers}")


def _can_hook(cls: type, method: str, handlers: ModuleType) -> bool:
    """Whether the class has the method itself; an attribute we stand in for needs none."""
    return method in vars(cls) or isinstance(getattr(handlers, method), StandIn)


def _wrap(cls: type, method: str, handlers: ModuleType) -> None:
    handler = getattr(handlers, method)
    if isinstance(handler, StandIn):
        setattr(cls, method, handler)
        return
    original: Callable[..., Any] = vars(cls)[method]
    if isinstance(handler, Factory):
        hooked = functools.wraps(original)(handler.build(original))
    else:

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return handler(original, self, *args, **kwargs)

    setattr(hooked, _MARK, original)
    setattr(cls, method, hooked)

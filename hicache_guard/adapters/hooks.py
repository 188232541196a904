"""Putting the hooks in place, taking them out, and telling hook by hook whether they are there."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hicache_guard.adapters import patched, state
from hicache_guard.adapters.link import Factory, StandIn, all_links
from hicache_guard.adapters.releases import (
    QUEUES_RESOLVED,
    RELEASES,
    RESOLVING_NAME,
    Release,
    Seam,
)
from hicache_guard.adapters.state import Route, Settings
from hicache_guard.core.errors import ConfigError, UnguardedError
from hicache_guard.core.modes import Mode
from hicache_guard.core.report import Violation

logger = logging.getLogger("hicache_guard")

_GONE = "not in this SGLang"
_WAY_OUT = "see `hicache-guard doctor`, or use HICACHE_GUARD=observe to run without"
_MARK = "__hicache_guard_original__"

#: Which way each hook came in that is in place, by module and name of the class, and the method.
#: The class says where it is at home; old modules give it out, too.
_routes: dict[tuple[str, str, str], Route] = {}

#: After ``uninstall`` the decorations of modules that are imported later do nothing either.
_withdrawn = False

#: Hooks that are known to be missing, and that was said.
_told: set[str] = set()

#: The installation that was last seen to be complete.
_complete: Settings | None = None


class HookStatus(enum.Enum):
    """Whether one hook is in place."""

    APPLIED = "applied"
    ABSENT = "not installed"
    MISSING = "missing"
    NOT_NEEDED = "not needed"


@dataclass(frozen=True)
class Hook:
    """One method of one seam, and its state in this process."""

    seam: Seam
    method: str
    status: HookStatus
    detail: str = ""
    route: Route | None = None  # how it came in, where it is in place

    @property
    def target(self) -> str:
        return _target(self.seam, self.method)


def _target(seam: Seam, method: str) -> str:
    return f"{seam.module}.{seam.cls}.{method}"


def _key(cls: type, method: str) -> tuple[str, str, str]:
    return cls.__module__, cls.__qualname__, method


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
    """The table row for the SGLang in this process. Raises UnguardedError for an unknown one.

    Where the source is patched, the patch has written down which row its code is; it knows by
    fingerprints, where a version is only a name, and a git checkout has none.
    """
    version = running_version()
    named = RELEASES.get(version)
    if named is None:
        _import_what_every_release_has()
    written = _written_release()
    if written is None:
        if named is None:
            raise UnguardedError(
                f"SGLang {version} is not a supported release; supported: {', '.join(RELEASES)}; "
                "a checkout is recognised, and gets its hooks, by `hicache-guard patch apply`"
            )
        return named
    if named and dataclasses.replace(named, version=written.version) == written:
        return named  # the same row by its own name
    return written


def as_patched(release: Release) -> Release:
    """The row of ``release``, as a backport of ours that this SGLang carries changes it."""
    if release.version == QUEUES_RESOLVED.version:
        free_swa: Any = vars(_class_of(QUEUES_RESOLVED.seams[0]))["free_swa"]
        if RESOLVING_NAME in getattr(free_swa, _MARK, free_swa).__code__.co_names:
            return QUEUES_RESOLVED
    return release


def _import_what_every_release_has() -> None:
    """Import modules that are seams whatever the release, so that their decorations are seen."""
    modules = [{seam.module for seam in release.seams} for release in RELEASES.values()]
    for module in sorted(set.intersection(*modules)):
        with suppress(ImportError):
            importlib.import_module(module)


def _written_release() -> Release | None:
    """The release that the decorations in the source name, if there are any."""
    names = sorted(set(patched.decorations.values()))
    if not names:
        return None
    if len(names) > 1:
        raise UnguardedError(
            f"this SGLang is patched for different releases ({', '.join(names)}); "
            "`hicache-guard patch reverse` and apply again"
        )
    if names[0] not in RELEASES:
        raise UnguardedError(
            f"this SGLang is patched for {names[0]}, which this hicache-guard does not know; "
            "install the version that patched it, or reverse and apply again"
        )
    return RELEASES[names[0]]


def install(
    mode: Mode | str | None = None,
    *,
    on_report: Callable[[Violation], None] | None = None,
    route: Route = "install",
) -> Release | None:
    """Guard every hybrid allocator that is built from now on in this process.

    ``mode`` defaults to ``HICACHE_GUARD``; off installs nothing and returns None. ``on_report``
    receives each violation that is counted. Raises UnguardedError where a seam of this release is
    missing, unless the mode is observe. A second call replaces the choices of the first; hooks that
    a patched source brought stay as they are and follow the new choices.
    """
    global _complete, _withdrawn
    chosen = Mode.parse(mode) if isinstance(mode, str) else mode or Mode.from_environment()
    if chosen is Mode.OFF:
        return None
    release = running_release()
    _take_out(but_of="patch")
    absent = []
    for seam in release.seams:
        try:
            cls = _class_of(seam)
        except (ImportError, AttributeError) as error:
            absent.append(f"{seam.module}.{seam.cls} ({error})")
            continue
        absent += _put_in_place(cls, seam, route)
    if absent:
        if chosen is not Mode.OBSERVE:
            uninstall()
            raise UnguardedError(f"seams missing in this SGLang: {'; '.join(absent)}; {_WAY_OUT}")
        logger.error("seams missing in this SGLang, not guarded: %s", "; ".join(absent))
    settings = Settings(chosen, release, on_report, route)
    state.choose(settings)
    _complete = settings if absent else None  # said once is enough
    _withdrawn = False
    return release


def decorated(cls: type, version: str, mode: Mode) -> None:
    """Put the hooks of a class in place that the source of a patched SGLang decorates.

    What is missing in the class itself stops the process here; ``require_complete`` sees whether a
    whole class is.
    """
    if _withdrawn:
        return
    try:
        release = _written_release()
    except UnguardedError as error:
        state.stop(str(error), "patch")
    assert release is not None, "the decoration was noted"
    if not state.is_chosen():
        state.choose(Settings(mode, release, None, "patch"))
    seams = [s for s in release.seams if (s.module, s.cls) == (cls.__module__, cls.__qualname__)]
    absent = [] if seams else [f"{cls.__module__}.{cls.__qualname__} is no seam of {version}"]
    for seam in seams:
        absent += _put_in_place(cls, seam, "patch")
    if absent:
        _complain(absent)


def require_complete() -> None:
    """Make sure, once an installation, that every hook of the release is in place.

    Called when something is built or used that must be guarded: hooks that came in class by class,
    or were taken out by somebody else, are found missing here. Only observe goes on without.
    """
    global _complete
    if not state.is_chosen():
        return
    current = state.settings()
    if _complete is current:
        return
    missing = [h for h in hooks(current.release) if h.status is not HookStatus.APPLIED]
    _complete = current
    untold = [hook.target for hook in missing if hook.target not in _told]
    if untold:
        _complain(untold)


def _complain(absent: list[str]) -> None:
    """Some hooks are not in place: only observe goes on."""
    current = state.settings()
    _told.update(absent)
    count = "1 hook is" if len(absent) == 1 else f"{len(absent)} hooks are"
    message = f"{count} not in place: {'; '.join(absent)}"
    if current.mode is Mode.OBSERVE:
        logger.error("%s; not guarded there", message)
        return
    state.stop(f"{message}; {_WAY_OUT}", current.route)


def uninstall() -> None:
    """Take every hook out. Allocators built meanwhile keep working, unguarded.

    What their guards still had to check is checked first, and what was held back is released.
    """
    global _withdrawn
    _take_out()
    _withdrawn = True


def _take_out(but_of: Route | None = None) -> None:
    for link in all_links():
        link.drain()
    for release in RELEASES.values():
        for seam, cls in _loaded(release):
            for method in seam.methods:
                if but_of and _routes.get(_key(cls, method)) == but_of:
                    continue
                found = vars(cls).get(method)
                original = getattr(found, _MARK, None)
                if original is not None:
                    setattr(cls, method, original)
                elif isinstance(found, StandIn):
                    delattr(cls, method)
    for key in [key for key, route in _routes.items() if route != but_of]:
        del _routes[key]
    _told.clear()
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
            if cls is not None and is_hooked(cls, method):
                status = HookStatus.APPLIED
            elif cls is not None and _can_hook(cls, method, _handlers_of(seam)):
                status = HookStatus.ABSENT
            else:
                status = HookStatus.MISSING
            why = (detail or _GONE) if status is HookStatus.MISSING else ""
            route = None
            if cls is not None and status is HookStatus.APPLIED:
                route = _routes.get(_key(cls, method))
            found.append(Hook(seam, method, status, why, route))
    return found


def unneeded(release: Release) -> list[Hook]:
    """Hooks that other releases need and ``release`` does not."""
    here = {(seam.cls, method) for seam in release.seams for method in seam.methods}
    found: dict[tuple[str, str], Hook] = {}
    for other in reversed(RELEASES.values()):
        for seam in other.seams:
            for method in seam.methods:
                if (seam.cls, method) not in here:
                    hook = Hook(seam, method, HookStatus.NOT_NEEDED)
                    found.setdefault((seam.cls, method), hook)
    return list(found.values())


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


def _put_in_place(cls: type, seam: Seam, route: Route) -> list[str]:
    """Hook the methods of one seam, none of them twice; returns those that cannot be."""
    handlers = _handlers_of(seam)
    absent = []
    for method in seam.methods:
        if is_hooked(cls, method):
            continue
        if not _can_hook(cls, method, handlers):
            absent.append(_target(seam, method))
            continue
        _wrap(cls, method, handlers)
        _routes[_key(cls, method)] = route
    return absent


def is_hooked(cls: type, method: str) -> bool:
    """Whether the class itself has the hooked method, and did not inherit it."""
    there = vars(cls).get(method)
    return hasattr(there, _MARK) or isinstance(there, StandIn)


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

"""Putting the hooks in place, taking them out, and telling hook by hook whether they are there."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import wrapt

from hicache_guard.adapters import patched, recording, state
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
#: The class says where it is at home; old modules give it out, too. Of a function the class is "".
_routes: dict[tuple[str, str, str], Route] = {}

#: After ``uninstall`` the decorations of modules that are imported later do nothing either.
_withdrawn = False

#: Modules whose hooks are put in place when they are imported.
_awaited: set[str] = set()

#: Hooks that are known to be missing, and that was said.
_told: set[str] = set()

#: The installation that was last seen to be complete.
_complete: Settings | None = None


class HookStatus(enum.Enum):
    """Whether one hook is in place."""

    APPLIED = "applied"
    ABSENT = "not installed"
    MISSING = "missing"
    WAITING = "when it is imported"
    NOT_NEEDED = "not needed"


@dataclass(frozen=True)
class Hook:
    """One method of one seam, and its state in this process."""

    seam: Seam
    method: str
    status: HookStatus
    detail: str = ""
    route: Route | None = None  # how it came in, or will

    @property
    def target(self) -> str:
        return _target(self.seam, self.method)


def _target(seam: Seam, method: str) -> str:
    return f"{seam.module}.{seam.symbol(method)}"


#: What holds what is hooked: a class, or for functions their module.
Holder = type | ModuleType


def _key(holder: Holder, method: str) -> tuple[str, str, str]:
    if isinstance(holder, ModuleType):
        return holder.__name__, "", method
    return holder.__module__, holder.__qualname__, method


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
        free_swa: Any = vars(_holder_of(QUEUES_RESOLVED.seams[0]))["free_swa"]
        if RESOLVING_NAME in getattr(free_swa, _MARK, free_swa).__code__.co_names:
            return QUEUES_RESOLVED
    return release


def _import_what_every_release_has() -> None:
    """Import modules that are seams whatever the release, so that their decorations are seen."""
    modules = [set(release.modules) for release in RELEASES.values()]
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
        if seam.late and seam.module not in sys.modules:
            _await(seam.module)
            continue
        try:
            holder = _holder_of(seam)
        except (ImportError, AttributeError) as error:
            absent.append(f"{seam.module}.{seam.cls} ({error})")
            continue
        absent += _put_in_place(holder, seam, route)
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


def _await(module: str) -> None:
    """Put the hooks of a module in place as soon as somebody imports it."""
    if module not in _awaited:
        _awaited.add(module)
        wrapt.register_post_import_hook(_arrived, module)


def _arrived(module: ModuleType) -> None:
    if not state.is_chosen() or _withdrawn:
        return
    current = state.settings()
    absent = []
    for seam in current.release.seams:
        if seam.module == module.__name__:
            holder = getattr(module, seam.cls, None) if seam.cls else module
            if holder is None:
                absent.append(f"{seam.module}.{seam.cls}")
            else:
                absent += _put_in_place(holder, seam, current.route)
    if absent:
        _complain(absent)


def decorated(cls: type, version: str, mode: Mode) -> None:
    """Put the hooks of a class in place that the source of a patched SGLang decorates.

    What is missing in the class itself stops the process here; ``require_complete`` sees whether a
    whole class is.
    """
    if _withdrawn:
        return
    release = _decorated_release(mode)
    seams = [s for s in release.seams if (s.module, s.cls) == (cls.__module__, cls.__qualname__)]
    absent = [] if seams else [f"{cls.__module__}.{cls.__qualname__} is no seam of {version}"]
    for seam in seams:
        absent += _put_in_place(cls, seam, "patch")
    if absent:
        _complain(absent)


def decorated_function(function: FunctionType, version: str, mode: Mode) -> Callable[..., Any]:
    """As ``decorated``, of a function; what is to be called instead of it."""
    if _withdrawn:
        return function
    release = _decorated_release(mode)
    module, name = function.__module__, function.__qualname__
    for seam in release.seams:
        if (seam.module, seam.cls) == (module, "") and name in seam.methods:
            _routes[module, "", name] = "patch"
            return _hooked(function, getattr(_handlers_of(seam), name))
    _complain([f"{module}.{name} is no seam of {version}"])
    return function


def _decorated_release(mode: Mode) -> Release:
    """The release that the source says it is, which is chosen if nothing was."""
    try:
        release = _written_release()
    except UnguardedError as error:
        state.stop(str(error), "patch")
    assert release is not None, "the decoration was noted"
    if not state.is_chosen():
        state.choose(Settings(mode, release, None, "patch"))
    return release


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
    missing = [
        hook
        for hook in hooks(current.release, load=False)
        if hook.status not in (HookStatus.APPLIED, HookStatus.WAITING)
    ]
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
        for seam, holder in _loaded(release):
            for method in seam.methods:
                if but_of and _routes.get(_key(holder, method)) == but_of:
                    continue
                found = vars(holder).get(method)
                original = getattr(found, _MARK, None)
                if original is not None:
                    setattr(holder, method, original)
                elif isinstance(found, StandIn):
                    delattr(holder, method)
    for key in [key for key, route in _routes.items() if route != but_of]:
        del _routes[key]
    _told.clear()
    state.choose(None)


def hooks(release: Release, *, load: bool = True) -> list[Hook]:
    """Every hook that ``release`` needs, with its state in this process. Imports the seams.

    Late ones are imported only to ``load`` them, and wait where that cannot be done here.
    """
    found = []
    for seam in release.seams:
        holder: Holder | None = None
        detail = ""
        waits = seam.late and seam.module not in sys.modules
        if load or not waits:
            try:
                holder = _holder_of(seam)
            except (ImportError, AttributeError) as error:
                detail = str(error)
        waits = waits and holder is None and seam.module not in sys.modules
        for method in seam.methods:
            if holder is not None and is_hooked(holder, method):
                status = HookStatus.APPLIED
            elif holder is not None and _can_hook(holder, method, _handlers_of(seam)):
                status = HookStatus.ABSENT
            elif waits:
                status = HookStatus.WAITING if _comes(seam) else HookStatus.ABSENT
            else:
                status = HookStatus.MISSING
            why = (detail or _GONE) if status is HookStatus.MISSING else ""
            route = None
            if holder is not None and status is HookStatus.APPLIED:
                route = _routes.get(_key(holder, method))
            elif status is HookStatus.WAITING:
                route, why = _comes(seam), detail
            found.append(Hook(seam, method, status, why, route))
    return found


def _comes(seam: Seam) -> Route | None:
    """How the hooks of a module that nobody imported will come in, if they will."""
    if not state.is_chosen():
        return None
    if patched.decorations:
        return "patch"  # all of the source, or nothing
    return state.settings().route if seam.module in _awaited else None


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


def _holder_of(seam: Seam) -> Holder:
    module = importlib.import_module(seam.module)
    holder: Holder = getattr(module, seam.cls) if seam.cls else module
    return holder


def _loaded(release: Release) -> Iterator[tuple[Seam, Holder]]:
    for seam in release.seams:
        module = sys.modules.get(seam.module)
        holder = getattr(module, seam.cls, None) if seam.cls else module
        if holder is not None:
            yield seam, holder


def _handlers_of(seam: Seam) -> ModuleType:
    return importlib.import_module(f"hicache_guard.adapters.{seam.handlers}")


def _put_in_place(holder: Holder, seam: Seam, route: Route) -> list[str]:
    """Hook the methods of one seam, none of them twice; returns those that cannot be."""
    handlers = _handlers_of(seam)
    recorded = seam.handlers in recording.HANDLERS and recording.wanted()
    absent = []
    for method in seam.methods:
        if is_hooked(holder, method):
            continue
        if not _can_hook(holder, method, handlers):
            absent.append(_target(seam, method))
            continue
        handler = getattr(handlers, method)
        there = vars(holder).get(method)
        put = handler if isinstance(handler, StandIn) else _hooked(there, handler)
        if recorded and callable(put) and method != "__init__":
            put = recording.around(put)
        setattr(holder, method, put)
        _routes[_key(holder, method)] = route
    return absent


def is_hooked(holder: Holder, method: str) -> bool:
    """Whether the class itself has the hooked method, and did not inherit it."""
    there = vars(holder).get(method)
    return hasattr(there, _MARK) or isinstance(there, StandIn)


def _can_hook(holder: Holder, method: str, handlers: ModuleType) -> bool:
    """Whether the class has the method itself; an attribute we stand in for needs none."""
    return method in vars(holder) or isinstance(getattr(handlers, method), StandIn)


def _hooked(original: Any, handler: Any) -> Callable[..., Any]:
    """What is to be called instead of ``original``."""
    if isinstance(handler, Factory):
        hooked = functools.wraps(original)(handler.build(original))
    else:

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return handler(original, self, *args, **kwargs)

    setattr(hooked, _MARK, original)
    return hooked

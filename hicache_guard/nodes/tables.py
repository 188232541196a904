"""What is written down: shapes and models as TOML, read and checked by hand-written rules.

A shape says who runs where: roles, how many servers of each, nodes and GPUs of a server, ports, a
router. A model says what it needs in any shape: its path, its flags, how many GPUs, how its
attention may be split. Neither knows the other, so each pair of them is a topology.

Flags are written without their dashes. ``true`` is a bare flag, a list follows its flag, a table is
JSON, and ``false`` takes away what a table further out says. ``[[by_release]]`` tables add flags
and variables from release ``since`` to release ``until``, both inclusive: names come and go.

Every mistake is a ConfigError of one line that names the file and the key.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from hicache_guard import checkouts
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.modes import Mode

_T = TypeVar("_T")
Flag = str | int | float | bool | list[str | int | float] | dict[str, Any]

#: Roles, in the order in which their servers are numbered, and the mode each is started in.
ROLES: dict[str, str | None] = {"prefill": "prefill", "decode": "decode", "plain": None}
#: HiCache tiers: none, a copy on the host (L2), and a storage backend behind that (L3).
TIERS = ("none", "l2", "l3")

#: Flags that follow from a shape, and the key that says it: no table may write them down again.
DERIVED = {
    "model-path": "path of the model",
    "model": "path of the model",
    "host": "the addresses",
    "port": "ports.server",
    "tp-size": "gpus and nodes",
    "tp": "gpus and nodes",
    "tensor-parallel-size": "gpus and nodes",
    "pp-size": "pp",
    "pp": "pp",
    "pipeline-parallel-size": "pp",
    "dp-size": "dp or dp_attention",
    "dp": "dp or dp_attention",
    "data-parallel-size": "dp or dp_attention",
    "enable-dp-attention": "dp_attention",
    "nnodes": "nodes",
    "node-rank": "nodes",
    "dist-init-addr": "ports.dist",
    "disaggregation-mode": "the name of the role",
    "disaggregation-bootstrap-port": "ports.bootstrap",
    "worker-urls": "the roles",
    "prefill": "the roles",
    "decode": "the roles",
    "pd-disaggregation": "the roles",
    "prometheus-port": "ports.metrics",
}
_FLAG = re.compile(r"[a-z][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Of a topology also what a label of DNS may be, once ``sglang-`` stands before it.
_NAMES = {
    "topology": re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"),
    "model": re.compile(r"[a-z0-9]([a-z0-9.-]{0,62}[a-z0-9])?"),
}
_MOST = 1024


@dataclass(frozen=True)
class ByRelease:
    """Flags and variables that only some releases know."""

    since: str
    until: str
    flags: Mapping[str, Flag]
    environment: Mapping[str, str]

    def holds(self, release: str) -> bool:
        order = checkouts.SUPPORTED.index
        return order(self.since) <= order(release) <= order(self.until)


@dataclass(frozen=True)
class Settings:
    """Flags and variables, those of every release and those of some."""

    flags: Mapping[str, Flag]
    environment: Mapping[str, str]
    by_release: tuple[ByRelease, ...]

    def on(self, release: str) -> tuple[dict[str, Flag], dict[str, str]]:
        """Flags and variables on ``release``."""
        flags, environment = dict(self.flags), dict(self.environment)
        for some in self.by_release:
            if some.holds(release):
                flags |= some.flags
                environment |= some.environment
        return flags, environment


@dataclass(frozen=True)
class Role:
    """Servers of one role: ``count`` of them, on ``nodes`` nodes each."""

    name: str
    count: int
    nodes: int
    pp: int
    dp: int
    dp_attention: bool
    settings: Settings


@dataclass(frozen=True)
class Ports:
    """First ports; the n-th server of a shape adds n, or n times ``DIST_STEP`` to ``dist``."""

    server: int
    bootstrap: int
    dist: int
    router: int
    metrics: int


@dataclass(frozen=True)
class Hicache:
    """The tier, the roles that have it, and its flags."""

    tier: str
    roles: tuple[str, ...]
    settings: Settings


@dataclass(frozen=True)
class Shape:
    """Who runs where. ``gpus`` are those of a node; ``router`` is None where there is none."""

    name: str
    purpose: str
    model: str
    gpus: int
    speculate: bool
    guard: Mode
    ports: Ports
    roles: tuple[Role, ...]
    hicache: Hicache
    settings: Settings
    router: Mapping[str, Flag] | None


@dataclass(frozen=True)
class Model:
    """What a model needs in any shape.

    ``fewest`` and ``most`` GPUs may share its tensor parallelism. ``attention_tp`` is the size that
    its checkpoint is interleaved for, where it is: attention is then split into groups of so many
    GPUs, whether a shape asks for that or not.
    """

    name: str
    path: str
    source: str
    fewest: int
    most: int
    attention_tp: int | None
    dp_attention: bool
    settings: Settings
    speculation: Settings


def shapes() -> list[str]:
    """Names of the shapes that we ship."""
    return _names("")


def models() -> list[str]:
    """Names of the models that we ship."""
    return _names("models")


def shape(which: str) -> Shape:
    """A shape that we ship, by its name, or one's own, by its path (it ends in ``.toml``)."""
    name, text = _found(which, "", "topology", shapes)
    return _shape(name, _Reader(f"topology {name}", _parsed("topology", name, text)))


def model(which: str) -> Model:
    """As ``shape``, of a model."""
    name, text = _found(which, "models", "model", models)
    return _model(name, _Reader(f"model {name}", _parsed("model", name, text)))


def _names(folder: str) -> list[str]:
    place = resources.files("hicache_guard.topologies").joinpath(folder)
    return sorted(file.name[:-5] for file in place.iterdir() if file.name.endswith(".toml"))


def _found(which: str, folder: str, kind: str, known: Any) -> tuple[str, str]:
    if which.endswith(".toml"):
        try:
            return Path(which).stem, Path(which).read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"cannot read {which}: {why}") from None
    if which not in known():
        raise ConfigError(
            f"no {kind} {which!r}; choose one of {', '.join(known())}, or give the path of a .toml"
        )
    place = resources.files("hicache_guard.topologies").joinpath(folder, f"{which}.toml")
    return which, place.read_text()


def _parsed(kind: str, name: str, text: str) -> dict[str, Any]:
    if not _NAMES[kind].fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a {kind}: it takes few small letters, digits and dashes, "
            "and neither begins nor ends with a dash; rename the file"
        )
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}.toml is not TOML: {error}") from None


class _Reader:
    """Takes keys out of a table, each with its type; what is left at the end is unknown."""

    def __init__(self, where: str, table: dict[str, Any]) -> None:
        self.where = where
        self._left = dict(table)
        self._asked: list[str] = []

    def take(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        self._asked.append(key)
        if key not in self._left:
            if default is None:
                raise ConfigError(f"{self.where}: {key} is missing")
            return default
        value = self._left.pop(key)
        # bool is an int to isinstance, and is not meant
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} = {value!r} is no {_KINDS[kind]}")
        return value

    def count(self, key: str, default: int | None = None, most: int = _MOST) -> int:
        value = self.take(key, int, default)
        if not 1 <= value <= most:
            raise ConfigError(f"{self.where}: {key} = {value} is not between 1 and {most}")
        return value

    def has(self, key: str) -> bool:
        return key in self._left

    def below(self, key: str) -> _Reader:
        return _Reader(f"{self.where}: [{key}]", self.take(key, dict, {}))

    def done(self) -> None:
        if not self._left:
            return
        key = next(iter(self._left))
        near = difflib.get_close_matches(key, self._asked, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(self._asked)}"
        raise ConfigError(f"{self.where}: there is no key {key!r}{hint}")

    # -- settings --------------------------------------------------------------------------------

    def flags(self, key: str = "flags") -> dict[str, Flag]:
        table = self.take(key, dict, {})
        for name, value in table.items():
            if not _FLAG.fullmatch(name):
                raise ConfigError(f"{self.where}: {key}: {name!r} is no name of a flag")
            if name in DERIVED:
                raise ConfigError(
                    f"{self.where}: {key}: {name} follows from {DERIVED[name]}; leave it out"
                )
            numbers = (str, int, float)
            plain = value if isinstance(value, list) else [value]
            if not isinstance(value, dict) and not all(isinstance(one, numbers) for one in plain):
                raise ConfigError(f"{self.where}: {key}: {name} = {value!r} is no value of a flag")
        return table

    def environment(self) -> dict[str, str]:
        table = self.take("environment", dict, {})
        for name, value in table.items():
            if not _VARIABLE.fullmatch(name) or not isinstance(value, str):
                raise ConfigError(
                    f"{self.where}: environment: {name} = {value!r} is no variable; "
                    "names are letters, digits and underscores, values are strings"
                )
            if name.startswith("HICACHE_GUARD"):
                raise ConfigError(f"{self.where}: environment: {name} follows from guard")
        return table

    def settings(self) -> Settings:
        flags, environment = self.flags(), self.environment()
        some = []
        for number, table in enumerate(self.take("by_release", list, [])):
            where = f"{self.where}: by_release {number + 1}"
            if not isinstance(table, dict):
                raise ConfigError(f"{where} is no table")
            reader = _Reader(where, table)
            since = reader.take("since", str, checkouts.SUPPORTED[0])
            until = reader.take("until", str, checkouts.SUPPORTED[-1])
            for release in (since, until):
                checkouts.place_of(release)
            some.append(ByRelease(since, until, reader.flags(), reader.environment()))
            reader.done()
        return Settings(flags, environment, tuple(some))


_KINDS: dict[type, str] = {
    str: "string",
    int: "whole number",
    bool: "true or false",
    dict: "table",
    list: "list",
}


def _shape(name: str, reader: _Reader) -> Shape:
    ports = reader.below("ports")
    tables = reader.take("roles", dict)
    routed = reader.has("router")
    router = reader.below("router")
    hicache = reader.below("hicache")
    shape = Shape(
        name=name,
        purpose=reader.take("purpose", str),
        model=reader.take("model", str),
        gpus=reader.count("gpus", most=64),
        speculate=reader.take("speculate", bool, False),
        guard=Mode.parse(reader.take("guard", str, Mode.ENFORCE.value)),
        ports=Ports(
            server=ports.count("server", 30000, 65535),
            bootstrap=ports.count("bootstrap", 8998, 65535),
            dist=ports.count("dist", 20000, 65535),
            router=ports.count("router", 8000, 65535),
            metrics=ports.count("metrics", 29000, 65535),
        ),
        roles=_roles(f"topology {name}", tables),
        hicache=_hicache(hicache),
        settings=reader.settings(),
        router=router.flags() if routed else None,
    )
    for below in (ports, router, reader):
        below.done()
    names = [role.name for role in shape.roles]
    for role_name in shape.hicache.roles:
        if role_name not in names:
            raise ConfigError(f"topology {name}: [hicache]: there is no role {role_name!r} here")
    if shape.router is None and (len(names) > 1 or shape.roles[0].count > 1):
        raise ConfigError(f"topology {name}: several servers need a [router], if an empty one")
    return shape


def _roles(where: str, tables: dict[str, Any]) -> tuple[Role, ...]:
    for name, table in tables.items():
        if name not in ROLES or not isinstance(table, dict):
            raise ConfigError(f"{where}: [roles]: {name!r} is none of {', '.join(ROLES)}")
    names = set(tables)
    if names not in ({"plain"}, {"prefill", "decode"}):
        raise ConfigError(f"{where}: [roles] should be plain, or prefill and decode")
    roles = []
    for name in ROLES:
        if name in tables:
            reader = _Reader(f"{where}: [roles.{name}]", tables[name])
            role = Role(
                name=name,
                count=reader.count("count", 1),
                nodes=reader.count("nodes", 1),
                pp=reader.count("pp", 1),
                dp=reader.count("dp", 1),
                dp_attention=reader.take("dp_attention", bool, False),
                settings=reader.settings(),
            )
            reader.done()
            roles.append(role)
    return tuple(roles)


def _hicache(reader: _Reader) -> Hicache:
    tier = reader.take("tier", str, "none")
    roles = reader.take("roles", list, ["plain"] if tier != "none" else [])
    settings = reader.settings()
    reader.done()
    flags = settings.flags
    if tier not in TIERS:
        raise ConfigError(f"{reader.where}: tier = {tier!r} is none of {', '.join(TIERS)}")
    if tier == "none" and (roles or flags):
        raise ConfigError(f"{reader.where}: roles and flags need a tier, l2 or l3")
    if (tier == "l3") != ("hicache-storage-backend" in flags):
        raise ConfigError(f"{reader.where}: tier l3, and only that, has a hicache-storage-backend")
    if tier != "none" and "enable-hierarchical-cache" not in flags:
        raise ConfigError(f"{reader.where}: tier {tier} needs enable-hierarchical-cache = true")
    return Hicache(tier, tuple(str(role) for role in roles), settings)


def _model(name: str, reader: _Reader) -> Model:
    speculation = reader.below("speculation")
    model = Model(
        name=name,
        path=reader.take("path", str),
        source=reader.take("source", str),
        fewest=reader.count("fewest"),
        most=reader.count("most"),
        attention_tp=reader.count("attention_tp") if reader.has("attention_tp") else None,
        dp_attention=reader.take("dp_attention", bool, False),
        settings=reader.settings(),
        speculation=speculation.settings(),
    )
    for below in (speculation, reader):
        below.done()
    if model.most < model.fewest:
        raise ConfigError(f"model {name}: most = {model.most} is less than fewest")
    return model


def words(flags: Mapping[str, Flag]) -> list[str]:
    """Flags as the words of a command line."""
    line: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        line.append(f"--{name}")
        if isinstance(value, dict):
            line.append(json.dumps(value))
        elif isinstance(value, list):
            line.extend(str(one) for one in value)
        elif value is not True:
            line.append(str(value))
    return line

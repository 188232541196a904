"""A topology cut down to what one machine without a GPU can run, and what that leaves out.

Every server becomes an embedded server, with a tiny model and one rank; roles, counts, the router,
the host tier of HiCache, page size and guard stay. ``RULES`` is all that is known of flags and
variables, as data. What is left out is told with its reason, flag by flag, so that nobody takes a
rehearsal for more than it is.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from hicache_guard.embedded.server import free_port
from hicache_guard.nodes import tables
from hicache_guard.nodes.tables import Flag, Role, Settings
from hicache_guard.nodes.topology import Server, Topology


@dataclass(frozen=True)
class Rule:
    """Flags, or variables of the environment, by pattern: kept, or left out and ``why``."""

    pattern: str
    why: str = ""

    @property
    def kept(self) -> bool:
        return not self.why


_SIZES = "sized for a GPU's memory; a pool here is of some thousand slots"
_NO_GPU = "a matter of GPUs"
_SPECULATION = "drafts of EAGLE and MTP need a GPU, and n-grams are for one server without a peer"
_TEXT = "requests are token ids: nothing is tokenized or parsed"
_COPIES = "host copies are made in torch, as `embedded explain` says"
_FILES = "the third tier is files in the server's own folder, for prompts of any length"
_LINKS = "bytes go over the loopback, by an engine of ours"

#: The first that fits counts; what none fits is left out as unknown.
RULES = (
    Rule("page-size"),
    Rule("enable-hierarchical-cache"),
    Rule("hicache-ratio"),
    Rule("hicache-write-policy"),
    Rule("hicache-mem-layout"),
    Rule("hicache-io-backend", _COPIES),
    Rule("hicache-size", _SIZES),
    Rule("hicache-storage-*", _FILES),
    Rule("disaggregation-transfer-backend", _LINKS),
    Rule("disaggregation-ib-device", _LINKS),
    Rule("speculative-*", _SPECULATION),
    Rule("enable-multi-layer-eagle", _SPECULATION),
    Rule("swa-full-tokens-ratio", _SIZES),
    Rule("mem-fraction-static", _SIZES),
    Rule("max-running-requests", _SIZES),
    Rule("max-total-tokens", _SIZES),
    Rule("context-length", _SIZES),
    Rule("chunked-prefill-size", _SIZES),
    Rule("cuda-graph-*", _NO_GPU),
    Rule("attention-backend", "the Triton backend with its kernels in torch"),
    Rule("moe-*", _NO_GPU),
    Rule("disable-flashinfer-autotune", _NO_GPU),
    Rule("model-loader-extra-config", "a model of a few MB is loaded"),
    Rule("trust-remote-code", "a model of ours is served"),
    Rule("reasoning-parser", _TEXT),
    Rule("tool-call-parser", _TEXT),
    Rule("SGLANG_ENABLE_UNIFIED_RADIX_TREE"),
    Rule("SGLANG_PLUGINS"),
    Rule("SGLANG_ENABLE_SPEC_V2", _SPECULATION),
    Rule("SGLANG_MOONCAKE_*", _LINKS),
    Rule("SGLANG_HICACHE_FILE_*", _FILES),
    Rule("MC_*", _LINKS),
    Rule("NCCL_*", "a server is one rank, which speaks to no other"),
)
_UNKNOWN = "not known to work on a CPU"

#: What the router is told beside, or instead of, what the topology says. A failure is to be seen as
#: one, and soon: so nothing is sent twice, and health is asked for each second.
ROUTER: dict[str, Flag] = {
    "disable-retries": True,
    "disable-circuit-breaker": True,
    "health-check-interval-secs": 1,
    "health-check-timeout-secs": 5,
    "health-failure-threshold": 2,
    "worker-startup-check-interval": 1,
    "prometheus-host": "127.0.0.1",
}
_ROUTER_WHY = "a failure is to be seen, and soon: nothing is sent twice"


@dataclass(frozen=True)
class Missing:
    """``what`` a topology has and its rehearsal has not, ``where`` (a role), and ``why``."""

    where: str
    what: str
    why: str


@dataclass(frozen=True)
class Rehearsed:
    """A topology for this machine, and what of the one that it stands for is left out."""

    topology: Topology
    missing: tuple[Missing, ...]


def cut(topology: Topology, model: str, path: Path) -> Rehearsed:
    """``topology`` on free ports of this machine, with an embedded model that lies at ``path``."""
    missing = [
        Missing("all", topology.model.path, f"the model is {model}, of random weights and few MB")
    ]
    roles = []
    servers = topology.servers()
    for role in topology.shape.roles:
        server = next(server for server in servers if server.role == role.name)
        flags, lost = sorted_out(server.flags)
        environment, lost_too = sorted_out(server.environment)
        missing += _structure(role, server)
        missing += [Missing(role.name, what, why) for what, why in (*lost, *lost_too)]
        variables = {name: str(value) for name, value in environment.items()}
        roles.append(Role(role.name, role.count, 1, 1, 1, False, Settings(flags, variables, ())))
    shape = topology.shape
    if shape.router is not None:
        missing += [
            Missing("router", _spelled(name, value), _ROUTER_WHY)
            for name, value in shape.router.items()
            if name in ROUTER and ROUTER[name] != value
        ]
    first = _free(len(servers))
    bootstrap = _free(len(servers), but=range(first, first + len(servers)))
    taken = [*range(first, first + len(servers)), *range(bootstrap, bootstrap + len(servers))]
    router = _free(1, but=taken)
    nothing = Settings({}, {}, ())
    here = dataclasses.replace(
        shape,
        model=model,
        gpus=1,
        speculate=False,
        roles=tuple(roles),
        ports=dataclasses.replace(
            shape.ports,
            server=first,
            bootstrap=bootstrap,
            router=router,
            metrics=_free(1, but=[*taken, router]),
        ),
        hicache=dataclasses.replace(shape.hicache, settings=nothing),
        settings=nothing,
        router=None if shape.router is None else {**shape.router, **ROUTER},
    )
    source = "hicache_guard.embedded.models"
    embedded = tables.Model(model, str(path), source, 1, 1, None, False, nothing, nothing)
    return Rehearsed(dataclasses.replace(topology, shape=here, model=embedded), tuple(missing))


def sorted_out(
    given: Mapping[str, Flag] | Mapping[str, str],
) -> tuple[dict[str, Flag], list[tuple[str, str]]]:
    """Those of flags, or of variables, that are kept, and the others with the reason of each."""
    kept: dict[str, Flag] = {}
    lost = []
    for name, value in given.items():
        rule = next((rule for rule in RULES if fnmatch(name, rule.pattern)), Rule("", _UNKNOWN))
        if rule.kept:
            kept[name] = value
        elif value is not False:
            lost.append((_spelled(name, value), rule.why))
    return kept, lost


def _spelled(name: str, value: Flag) -> str:
    if name.isupper():
        return f"{name}={value}"
    return " ".join(tables.words({name: value}))


def _structure(role: Role, server: Server) -> list[Missing]:
    """What of the shape of a server one process cannot have."""
    found = []
    if server.tp > 1:
        why = "one rank: what ranks of a server tell each other is not seen"
        found.append(Missing(role.name, f"{server.tp} tensor-parallel ranks", why))
    if server.pp > 1:
        found.append(Missing(role.name, f"{server.pp} pipeline stages", "one stage"))
    if server.dp > 1:
        what = "attention groups" if server.dp_attention else "copies with a scheduler each"
        found.append(Missing(role.name, f"{server.dp} {what}", "one scheduler"))
    if role.nodes > 1:
        found.append(Missing(role.name, f"{role.nodes} nodes a server", "all is on this machine"))
    return found


def _free(count: int, but: Sequence[int] = ()) -> int:
    """The first of ``count`` ports in a row that nobody has."""
    while True:
        first = free_port()
        ports = range(first, first + count)
        if any(port in but for port in ports):
            continue
        with suppress(OSError), ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first

"""A topology: a shape, a model and a release put together.

It knows every server with its exact command lines, every scheduler rank that should be there, and
what the router is told. Where a node lies is not known here: a command line has the address of a
node as ``${HOST_PREFILL0_NODE0}``, and whoever renders or runs it puts one in (``Node.variable``).

A node is named ``4p2d/prefill2/node0``, a rank of it ``4p2d/prefill2/node0/tp3``; ``pp1`` and
``dp1`` stand before ``tp3`` where a server has several. How ranks are spread over nodes is the
release's own rule, the same from 0.5.12 to 0.5.23: pipeline stages first, tensor ranks within.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hicache_guard import checkouts
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.matches import TRACE_VAR
from hicache_guard.core.modes import ENV_VAR, Mode
from hicache_guard.core.ranks import RANKS_VAR
from hicache_guard.nodes import ranks, tables
from hicache_guard.nodes.tables import Flag, Model, Role, Shape

#: From one server's first port for ``--dist-init-addr`` to the next one's. SGLang takes up to 6
#: ports after it with attention in groups, and one more a group in 0.5.23's server in Rust.
DIST_STEP = 100
#: What stands for the folder of a run until it is known.
RUN = "${HICACHE_GUARD_RUN}"
#: Where a router listens, and a server too: on every interface of its node.
ANYWHERE = "0.0.0.0"


class NotForThis(ConfigError):
    """A model cannot be served in a shape, which is nobody's mistake; the message says why."""


@dataclass(frozen=True)
class Node:
    """The ``index``-th node of a server."""

    name: str
    server: str
    index: int

    @property
    def variable(self) -> str:
        """The variable that holds its address."""
        return "HOST_" + f"{self.server}_NODE{self.index}".upper()

    @property
    def file(self) -> str:
        """Its name where there may be no slash, after that of the topology."""
        return f"{self.server}-node{self.index}"


@dataclass(frozen=True)
class Rank:
    """A scheduler process: ``dp`` is its attention group, or its copy of the model."""

    name: str
    server: str
    node: int
    pp: int
    dp: int
    tp: int
    gpu: int


@dataclass(frozen=True)
class Server:
    """One server of SGLang, on one node or several.

    ``gpus`` are those that it uses on each node, ``dist`` is None on a single node, ``bootstrap``
    is the port where a prefill server is met by decode servers, and None for others.
    """

    name: str
    role: str
    index: int
    nodes: tuple[Node, ...]
    gpus: int
    tp: int
    pp: int
    dp: int
    dp_attention: bool
    port: int
    bootstrap: int | None
    dist: int | None
    path: str
    flags: Mapping[str, Flag]
    environment: Mapping[str, str]

    def arguments(self, node: int | str) -> list[str]:
        """What ``sglang.launch_server`` is given on a node, or on one that only the shell knows."""
        ours: dict[str, Flag] = {"model-path": self.path, "host": ANYWHERE, "port": self.port}
        ours["tp-size"] = self.tp
        if self.pp > 1:
            ours["pp-size"] = self.pp
        if self.dp > 1:
            ours["dp-size"] = self.dp
            ours["enable-dp-attention"] = self.dp_attention
        if self.dist is not None:
            ours["nnodes"] = len(self.nodes)
            ours["node-rank"] = node
            ours["dist-init-addr"] = f"{host(self.nodes[0])}:{self.dist}"
        mode = tables.ROLES[self.role]
        if mode is not None:
            ours["disaggregation-mode"] = mode
        if self.bootstrap is not None:
            ours["disaggregation-bootstrap-port"] = self.bootstrap
        return tables.words(ours | dict(self.flags))

    def ranks(self) -> list[Rank]:
        """Its scheduler processes, by the release's rule; see tests/test_nodes_topology.py."""
        stages = max(self.pp // len(self.nodes), 1)  # on a node
        nodes_a_stage = max(len(self.nodes) // self.pp, 1)
        width = self.tp // nodes_a_stage  # tensor ranks on a node
        copies = 1 if self.dp_attention else self.dp
        found = []
        for node in self.nodes:
            first_stage = stages * (node.index // nodes_a_stage)
            first = width * (node.index % nodes_a_stage)
            for copy in range(copies):
                for stage in range(first_stage, first_stage + stages):
                    for tp in range(first, first + width):
                        parts = [f"pp{stage}"] if self.pp > 1 else []
                        parts += [f"dp{copy}"] if copies > 1 else []
                        at = copy * stages + (stage - first_stage)
                        rank = Rank(
                            name="/".join([node.name, *parts, f"tp{tp}"]),
                            server=self.name,
                            node=node.index,
                            pp=stage,
                            dp=tp // (self.tp // self.dp) if self.dp_attention else copy,
                            tp=tp,
                            gpu=at * width + (tp - first),
                        )
                        found.append(rank)
        return found


@dataclass(frozen=True)
class Router:
    """SGLang's router, on the first node. ``metrics`` is the port of its own metrics."""

    node: Node
    port: int
    metrics: int
    flags: Mapping[str, Flag]

    def arguments(self, servers: list[Server]) -> list[str]:
        """What ``sglang_router.launch_router`` is given."""
        line = ["--host", ANYWHERE, "--port", str(self.port)]
        line += ["--prometheus-port", str(self.metrics)]
        urls = {server.name: f"http://{host(server.nodes[0])}:{server.port}" for server in servers}
        if any(server.role == "prefill" for server in servers):
            line.append("--pd-disaggregation")
            for server in servers:
                line += [f"--{server.role}", urls[server.name]]
                line += [str(server.bootstrap)] if server.bootstrap is not None else []
        else:
            line += ["--worker-urls", *urls.values()]
        return line + tables.words(self.flags)


@dataclass(frozen=True)
class Topology:
    """See the module; ``read`` makes one."""

    shape: Shape
    model: Model
    release: str
    guard: Mode

    @property
    def name(self) -> str:
        return self.shape.name

    def servers(self) -> list[Server]:
        """In the order of roles and indices, which is that of their ports."""
        found: list[Server] = []
        for role in self.shape.roles:
            for index in range(role.count):
                found.append(self._server(role, index, len(found)))
        return found

    def nodes(self) -> list[Node]:
        return [node for server in self.servers() for node in server.nodes]

    def ranks(self) -> list[Rank]:
        """Every scheduler process that should be there."""
        return [rank for server in self.servers() for rank in server.ranks()]

    def router(self) -> Router | None:
        ports = self.shape.ports
        if self.shape.router is None:
            return None
        return Router(self.nodes()[0], ports.router, ports.metrics, self.shape.router)

    def environment(self, node: Node) -> dict[str, str]:
        """The environment of a node's processes, the guard's settings with it."""
        server = next(one for one in self.servers() if one.name == node.server)
        trace = f"{RUN}/trace/{self.name}.{node.server}.node{node.index}.{{pid}}.jsonl"
        guards = {ENV_VAR: self.guard.value}
        if self.guard is not Mode.OFF:
            guards[TRACE_VAR] = trace
            guards[RANKS_VAR] = f"{RUN}/{ranks.place(node.server, node.index)}"
        return {**server.environment, **guards}

    def as_data(self) -> dict[str, Any]:
        """For programs: a rehearsal, or a doctor that must know which ranks are missing."""
        router = self.router()
        servers = self.servers()
        return {
            "topology": self.name,
            "model": self.model.name,
            "path": self.model.path,
            "release": self.release,
            "guard": self.guard.value,
            "hicache": {"tier": self.shape.hicache.tier, "roles": list(self.shape.hicache.roles)},
            "gpus": self.shape.gpus,
            "servers": [
                {
                    "name": server.name,
                    "role": server.role,
                    "index": server.index,
                    "gpus": server.gpus,
                    "tp": server.tp,
                    "pp": server.pp,
                    "dp": server.dp,
                    "dp_attention": server.dp_attention,
                    "port": server.port,
                    "bootstrap": server.bootstrap,
                    "dist": server.dist,
                    "flags": dict(server.flags),
                    "nodes": [
                        {
                            "name": node.name,
                            "variable": node.variable,
                            "arguments": server.arguments(node.index),
                            "environment": self.environment(node),
                        }
                        for node in server.nodes
                    ],
                    "ranks": [vars(rank) for rank in server.ranks()],
                }
                for server in servers
            ],
            "router": router
            and {
                "node": router.node.name,
                "port": router.port,
                "metrics": router.metrics,
                "flags": dict(router.flags),
                "arguments": router.arguments(servers),
            },
        }

    # -- how the two are put together --------------------------------------------------------------

    def _server(self, role: Role, index: int, number: int) -> Server:
        tp, dp, dp_attention = self._split(role)
        name = f"{role.name}{index}"
        ports = self.shape.ports
        flags, environment = self._settings(role)
        return Server(
            name=name,
            role=role.name,
            index=index,
            nodes=tuple(
                Node(f"{self.name}/{name}/node{node}", name, node) for node in range(role.nodes)
            ),
            gpus=tp * role.pp * (1 if dp_attention else dp) // role.nodes,
            tp=tp,
            pp=role.pp,
            dp=dp,
            dp_attention=dp_attention,
            port=ports.server + number,
            bootstrap=ports.bootstrap + number if role.name == "prefill" else None,
            dist=ports.dist + number * DIST_STEP if role.nodes > 1 or dp_attention else None,
            path=self.model.path,
            flags=flags,
            environment=environment,
        )

    def _split(self, role: Role) -> tuple[int, int, bool]:
        """Tensor-parallel size, data-parallel size, and whether the latter is of attention only."""
        shape, model = self.shape, self.model
        where = f"topology {self.name}: [roles.{role.name}]"
        all_gpus = shape.gpus * role.nodes
        if role.dp > 1 and (role.nodes > 1 or role.dp_attention):
            raise ConfigError(f"{where}: dp is for one node, without dp_attention")
        if all_gpus % (role.pp * role.dp):
            raise ConfigError(
                f"{where}: {all_gpus} GPUs cannot be shared by pp {role.pp} times dp {role.dp}"
            )
        if max(role.pp, role.nodes) % min(role.pp, role.nodes):
            raise ConfigError(f"{where}: {role.pp} stages do not go evenly on {role.nodes} nodes")
        tp = all_gpus // (role.pp * role.dp)
        if tp > model.most and role.nodes > 1:
            raise NotForThis(
                f"{self.name}: {model.name} is shared by at most {model.most} GPUs, not by {tp}"
            )
        tp = min(tp, model.most)
        if tp < model.fewest:
            raise NotForThis(
                f"{self.name}: {model.name} needs {model.fewest} GPUs, "
                f"a {role.name} server has {tp} for it"
            )
        if model.attention_tp is not None:
            if tp % model.attention_tp:
                raise NotForThis(
                    f"{self.name}: attention of {model.name} is over {model.attention_tp} GPUs, "
                    f"which do not divide {tp}"
                )
            groups = tp // model.attention_tp
        else:
            groups = tp if role.dp_attention and model.dp_attention else 1
        if groups > 1 and role.dp > 1:
            raise NotForThis(f"{self.name}: attention of {model.name} is split, dp cannot be had")
        return (tp, groups, True) if groups > 1 else (tp, role.dp, False)

    def _settings(self, role: Role) -> tuple[dict[str, Flag], dict[str, str]]:
        shape, model = self.shape, self.model
        layers = [model.settings]
        layers += [model.speculation] if shape.speculate else []
        layers += [shape.settings]
        layers += [shape.hicache.settings] if role.name in shape.hicache.roles else []
        layers += [role.settings]
        flags: dict[str, Flag] = {}
        environment: dict[str, str] = {}
        for layer in layers:
            more, variables = layer.on(self.release)
            flags |= more
            environment |= variables
        return flags, environment


def host(node: Node) -> str:
    """What stands for the address of a node in a command line."""
    return f"${{{node.variable}}}"


def placed(words: list[str], address: Callable[[Node], str], nodes: list[Node]) -> list[str]:
    """A command line with the addresses of nodes in it."""
    for node in nodes:
        words = [word.replace(host(node), address(node)) for word in words]
    return words


def read(
    which: str,
    model: str | None = None,
    release: str = checkouts.SUPPORTED[-1],
    guard: str | None = None,
) -> Topology:
    """A topology by the name or path of its shape, with the shape's own model unless told.

    Raises ConfigError for what cannot be, NotForThis where the model does not go with the shape.
    """
    checkouts.place_of(release)
    shape = tables.shape(which)
    topology = Topology(
        shape=shape,
        model=tables.model(model or shape.model),
        release=release,
        guard=shape.guard if guard is None else Mode.parse(guard),
    )
    _no_port_twice(topology)
    return topology


def _no_port_twice(topology: Topology) -> None:
    """Not even on different nodes, so that a topology can be rehearsed on one machine."""
    taken: dict[int, str] = {}
    claims: list[tuple[str, int]] = []
    for server in topology.servers():
        claims.append((f"the port of {server.name}", server.port))
        if server.bootstrap is not None:
            claims.append((f"the bootstrap port of {server.name}", server.bootstrap))
        if server.dist is not None:
            ports = range(server.dist, server.dist + DIST_STEP)
            claims += [(f"the dist ports of {server.name}", port) for port in ports]
    router = topology.router()
    if router is not None:
        claims += [("the port of the router", router.port)]
        claims += [("the metrics of the router", router.metrics)]
    for what, port in claims:
        if port > 65535:
            raise ConfigError(f"topology {topology.name}: {what} would be {port}")
        if port in taken:
            raise ConfigError(
                f"topology {topology.name}: {what} is {port}, and so is {taken[port]}; "
                "move one under [ports]"
            )
        taken[port] = what

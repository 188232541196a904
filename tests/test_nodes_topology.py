"""Topologies: what is written down, what follows from it, and whether releases take it.

Proved by mutation, each of which makes this fail: no look at keys that are left over; bool taken
for a number; no look at a port that is taken, or at a flag that follows from the shape; ``since``
that leaves its own release out; ``gpu`` without the stage; tensor ranks counted anew on each node;
attention groups dealt out in turn; names that are not looked up whole; a line that is looked up and
not parsed; what was refused remembered as taken.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import fetched
from typer.testing import CliRunner

from hicache_guard import checkouts
from hicache_guard.cli.main import app
from hicache_guard.core.errors import ConfigError
from hicache_guard.nodes import flags, tables, topology
from hicache_guard.nodes.topology import NotForThis, Topology

SHAPE = """
purpose = "for a test"
model = "gpt-oss-120b"
gpus = 4

[roles.plain]
"""
MODEL = """
path = "nobody/nothing"
source = "a test"
fewest = 1
most = 1024
"""


def written(folder: Path, text: str, name: str = "mine") -> str:
    file = folder / f"{name}.toml"
    file.write_text(text)
    return str(file)


def all_of(release: str) -> list[Topology]:
    """Every topology with every model that it goes with."""
    found = []
    for shape in tables.shapes():
        for model in tables.models():
            try:
                found.append(topology.read(shape, model, release))
            except NotForThis:
                continue
    return found


# -- what is written down --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("gpus = 4\n=", "mine.toml is not TOML"),
        ("", "roles is missing"),
        (SHAPE.replace("purpose", "purpse"), "purpose is missing"),
        (SHAPE.replace("gpus = 4", 'gpus = "4"'), r"gpus = '4' is no whole number"),
        (SHAPE.replace("gpus = 4", "gpus = true"), r"gpus = True is no whole number"),
        (SHAPE.replace("gpus = 4", "gpus = 0"), "gpus = 0 is not between 1 and 64"),
        ("gpsu = 3\n" + SHAPE, "no key 'gpsu'; did you mean gpus"),
        (SHAPE + "cuont = 2", r"\[roles.plain\]: there is no key 'cuont'; did you mean count"),
        (SHAPE + "count = -1", "count = -1 is not between"),
        (SHAPE + "[roles.plian]", "'plian' is none of prefill, decode, plain"),
        (SHAPE + "[roles.decode]", "should be plain, or prefill and decode"),
        (SHAPE + "count = 2", r"several servers need a \[router\]"),
        (SHAPE + "dp = 2\nnodes = 2", "dp is for one node"),
        (SHAPE + "dp = 3", "4 GPUs cannot be shared by pp 1 times dp 3"),
        (SHAPE + "pp = 3\nnodes = 2", "8 GPUs cannot be shared by pp 3"),
        (SHAPE + "pp = 2\nnodes = 3", "2 stages do not go evenly on 3 nodes"),
        ('guard = "maybe"\n' + SHAPE, "off, observe, enforce"),
        (SHAPE.replace("gpt-oss-120b", "gpt-9"), "no model 'gpt-9'; choose one of deepseek"),
        (SHAPE + "[flags]\ntp-size = 4", "tp-size follows from gpus and nodes"),
        (SHAPE + "[flags]\n--page-size = 4", "'--page-size' is no name of a flag"),
        (SHAPE + "[flags]\npage-size = 1979-05-27", "page-size = .* is no value of a flag"),
        (SHAPE + "[environment]\nA = 1", "A = 1 is no variable"),
        (SHAPE + '[environment]\nHICACHE_GUARD = "off"', "HICACHE_GUARD follows from guard"),
        (SHAPE + "[[by_release]]\nsince = '0.4'", "SGLang '0.4' is not supported"),
        (SHAPE + "[hicache]\ntier = 'l4'", "tier = 'l4' is none of none, l2, l3"),
        (SHAPE + "[hicache]\ntier = 'l3'", "tier l3, and only that, has a hicache-storage-backend"),
        (SHAPE + "[hicache]\ntier = 'l2'", "needs enable-hierarchical-cache = true"),
        (
            SHAPE + "[hicache]\ntier='l2'\nroles=['decode']\n[hicache.flags]\n"
            "enable-hierarchical-cache = true",
            "there is no role 'decode' here",
        ),
        (
            SHAPE + "count = 2\n[router]\n[ports]\nrouter = 30001",
            "the port of the router is 30001, and so is the port of plain1",
        ),
        (SHAPE + "nodes = 2\n[ports]\nserver = 20007", "dist ports of plain0 is 20007, and so is"),
        (SHAPE + "count = 9\n[router]\n[ports]\nserver = 65530", "port of plain6 would be 65536"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(wrong: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        topology.read(written(tmp_path, wrong))
    assert "\n" not in str(error.value)


def test_a_name_that_dns_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'Mine_' cannot name a topology"):
        topology.read(written(tmp_path, SHAPE, "Mine_"))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (MODEL.replace("fewest = 1", "fewest = 8"), "needs 8 GPUs, a plain server has 4 for it"),
        (MODEL + "attention_tp = 8", "attention of mine is over 8 GPUs, which do not divide 4"),
    ],
)
def test_a_model_that_does_not_go_with_a_shape_is_nobodys_mistake(
    model: str, told: str, tmp_path: Path
) -> None:
    shape = written(tmp_path, SHAPE, "shape")
    with pytest.raises(NotForThis, match=told):
        topology.read(shape, written(tmp_path, model)).servers()


def test_tables_further_in_say_more_and_can_take_away(tmp_path: Path) -> None:
    shape = written(
        tmp_path,
        SHAPE
        + """
        [roles.plain.flags]
        c = false
        [roles.plain.environment]
        X = "role"
        [flags]
        b = "shape"
        [[by_release]]
        until = "0.5.15"
        flags = { d = 1 }
        [[by_release]]
        since = "0.5.15.post1"
        flags = { d = 2 }
        environment = { Y = "new" }
        """,
        "shape",
    )
    model = written(
        tmp_path,
        MODEL
        + """
        environment = { X = "model" }
        [flags]
        a = [1, 2]
        b = "model"
        c = true
        e = { k = 1 }
        [speculation.flags]
        f = true
        """,
    )
    for release, d, y in (("0.5.15", "1", None), ("0.5.15.post1", "2", "new")):
        one = topology.read(shape, model, release)
        line = one.servers()[0].arguments(0)
        assert line[line.index("--tp-size") + 2 :] == [
            "--a", "1", "2", "--b", "shape", "--e", '{"k": 1}', "--d", d,
        ]  # fmt: skip
        variables = one.environment(one.nodes()[0])
        assert (variables["X"], variables.get("Y")) == ("role", y)


def test_4p2d_is_the_six_nodes_of_25805() -> None:
    one = topology.read("4p2d")
    assert one.model.path == "deepseek-ai/DeepSeek-V4-Pro"
    assert [node.name for node in one.nodes()] == [
        *(f"4p2d/prefill{index}/node0" for index in range(4)),
        *(f"4p2d/decode{index}/node0" for index in range(2)),
    ]
    assert len(one.ranks()) == 24
    assert len({rank.name for rank in one.ranks()}) == 24
    assert {one.ranks()[-1].name} == {"4p2d/decode1/node0/tp3"}
    assert all(server.flags["speculative-algorithm"] == "EAGLE" for server in one.servers())
    router = one.router()
    assert router is not None
    words = router.arguments(one.servers())
    assert [words[at + 1 : at + 3] for at, word in enumerate(words) if word == "--prefill"] == [
        [f"http://${{HOST_PREFILL{index}_NODE0}}:{30000 + index}", str(8998 + index)]
        for index in range(4)
    ]


def test_no_port_is_had_twice_so_one_machine_can_rehearse_each() -> None:
    for one in all_of("0.5.23"):
        ports = [server.port for server in one.servers()]
        ports += [server.bootstrap for server in one.servers() if server.bootstrap]
        ports += [server.dist + n for server in one.servers() if server.dist for n in range(7)]
        assert len(ports) == len(set(ports))


# -- ranks, by the release's own rule --------------------------------------------------------------


def _upstream(version: str, file: str, *names: str, **given: Any) -> list[Callable[..., Any]]:
    """Functions out of a release's source; to import the rest takes half a minute."""
    tree = ast.parse((fetched(version) / "sglang" / "srt" / file).read_text())
    there = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    space: dict[str, Any] = dict(given)
    for name in names:
        node = there[name]
        node.returns = None
        for argument in [*node.args.args, *node.args.kwonlyargs]:
            argument.annotation = None
        exec(compile(ast.Module([node], []), file, "exec"), space)
    return [space[name] for name in names]


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("nodes", "pp"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4)])
def test_ranks_are_where_the_release_puts_them(
    version: str, groups: int, nodes: int, pp: int, tmp_path: Path
) -> None:
    shape = written(tmp_path, SHAPE + f"nodes = {nodes}\npp = {pp}", "shape")
    tp = 4 * nodes // pp
    model = written(tmp_path, MODEL + f"attention_tp = {tp // groups}")
    server = topology.read(shape, model, version).servers()[0]
    assert (server.tp, server.dp, server.dp_attention) == (tp, groups, groups > 1)

    if version == "0.5.12":
        (spread,) = _upstream(version, "entrypoints/engine.py", "_calculate_rank_ranges")
        (place,) = _upstream(version, "layers/dp_attention.py", "compute_dp_attention_world_info")
        spreads = [spread(nodes, pp, tp, node) for node in range(nodes)]
        groups_of = [place(groups > 1, rank, tp, groups)[2] for rank in range(tp)]
    else:
        parallel = SimpleNamespace(nnodes=nodes, pp_size=pp, tp_size=tp)
        (spread,) = _upstream(
            version,
            "entrypoints/engine.py",
            "_calculate_rank_ranges",
            get_parallel=lambda: parallel,
        )
        file = "runtime_context.py"
        width, place = _upstream(version, file, "derive_attn_tp_size", "derive_attention_ranks")
        spreads = [spread(node) for node in range(nodes)]
        attention = width(tp_size=tp, attn_cp_size=1, attn_dp_size=groups)
        groups_of = [
            place(tp_rank=rank, attn_tp_size=attention, attn_cp_size=1)[1] for rank in range(tp)
        ]
    expected = [
        (node, stage, rank, (stage % stages) * width_ + rank % width_, groups_of[rank])
        for node, (all_stages, ranks, stages, width_) in enumerate(spreads)
        for stage in all_stages
        for rank in ranks
    ]
    found = [(rank.node, rank.pp, rank.tp, rank.gpu, rank.dp) for rank in server.ranks()]
    assert found == expected
    # each GPU of each node once
    assert sorted((node, gpu) for node, _, _, gpu, _ in found) == [
        (node, gpu) for node in range(nodes) for gpu in range(4)
    ]


def test_copies_of_a_model_have_gpus_of_their_own() -> None:
    ranks = topology.read("dp", "deepseek-v4-flash").ranks()
    assert [rank.name.removeprefix("dp/plain0/node0/") for rank in ranks] == [
        f"dp{copy}/tp{tp}" for copy in range(2) for tp in range(4)
    ]
    assert [rank.gpu for rank in ranks] == list(range(8))
    assert [rank.dp for rank in ranks] == [0] * 4 + [1] * 4


# -- what releases take ----------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the releases of the other, in which nothing was asked yet."""
    place = tmp_path / "home"
    place.mkdir()
    (place / "releases").symlink_to(checkouts.home() / "releases")
    monkeypatch.setenv(checkouts.HOME_VAR, str(place))
    return place


#: Flags that are added to a role, and what is told of them on each release (nothing: it is taken).
ADDED = {
    "misspelt": (
        "mem-fraction-sttic = 0.5",
        r"there is no --mem-fraction-sttic; the nearest is --mem-fraction-static",
        r"there is no --mem-fraction-sttic; the nearest is --mem-fraction-static",
    ),
    "shortened": (
        "mem-fraction = 0.5",
        "there is no --mem-fraction;",
        "there is no --mem-fraction;",
    ),
    "too-new": ("kv-canary = 'log'", "there is no --kv-canary", ""),
    "gone": ("cuda-graph-max-bs = 8", "", "there is no --cuda-graph-max-bs; the nearest is --cuda"),
    "choice": (
        "hicache-mem-layout = 'sideways'",
        "invalid choice: 'sideways'",
        "invalid choice: 'sideways'",
    ),
    "no-number": ("page-size = 'big'", "invalid int value: 'big'", "invalid int value: 'big'"),
}


@pytest.mark.sglang
@pytest.mark.parametrize(("version", "column"), [("0.5.12", 1), ("0.5.23", 2)])
def test_every_topology_is_taken_and_what_is_wrong_is_not(
    version: str, column: int, home: Path, tmp_path: Path
) -> None:
    """With every model. One process for each release, so the mistakes are in the same question."""
    fetched(version)
    asked = [one for one in all_of(version) if one.router() is None]
    asked += [routed_aside(one) for one in all_of(version) if one.router() is not None]
    for name, added in ADDED.items():
        text = SHAPE + "[roles.plain.flags]\n" + added[0]
        asked.append(topology.read(written(tmp_path, text, name), None, version))
    text = SHAPE + '[environment]\nSGLANG_NO_SUCH_THING = "1"\nNCCL_ANYTHING = "1"'
    asked.append(topology.read(written(tmp_path, text, "variable"), None, version))

    refused = {one.topology: str(one) for one in flags.refusals(asked)}
    expected = {name: added[column] for name, added in ADDED.items() if added[column]}
    expected["variable"] = "its source names no variable SGLANG_NO_SUCH_THING"
    assert set(refused) == set(expected)
    for name, told in expected.items():
        assert refused[name].startswith(f"topology {name} with gpt-oss-120b: SGLang {version}: ")
        assert re.search(told, refused[name])
        assert "\n" not in refused[name]

    # What was taken is not asked again, what was refused is, and a changed parser is another.
    kept = home / "nodes" / f"flags-{version}.json"
    before = set(json.loads(kept.read_text()))
    lines = {tuple(one.arguments(0)) for each in asked for one in each.servers()}
    taken = flags._Taken(version, checkouts.require(version))
    assert len([line for line in lines if not taken.has(line)]) == len(expected) - 1
    other = home / "other" / "sglang" / "srt"
    other.mkdir(parents=True)
    (other / "server_args.py").write_text("")
    assert not any(flags._Taken(version, home / "other").has(line) for line in lines)
    assert before == set(json.loads(kept.read_text()))


def routed_aside(one: Topology) -> Topology:
    """The same servers; the router is asked by a test of its own, where it is installed."""
    return Topology(
        tables.Shape(**{**vars(one.shape), "router": None}), one.model, one.release, one.guard
    )


def test_the_router_takes_its_flags(tmp_path: Path) -> None:
    if flags.router_version() is None:
        pytest.skip("sglang-router is not installed; run pip install sglang-router")
    routed = [one for one in all_of("0.5.23") if one.router() is not None]
    assert {one.name for one in routed} == {"1p1d", "4p2d", "replicas"}
    for name, added in (("unknown", "polcy = 'random'"), ("choice", "policy = 'best'")):
        text = SHAPE + "[router.flags]\n" + added
        routed.append(topology.read(written(tmp_path, text, name)))
    refused = {one.topology: str(one) for one in flags._of_router(routed)}
    assert set(refused) == {"unknown", "choice"}
    assert "there is no --polcy; the nearest is --policy" in refused["unknown"]
    assert "invalid choice: 'best'" in refused["choice"]


# -- the command line ------------------------------------------------------------------------------


def test_list_and_show() -> None:
    said = json.loads(CliRunner().invoke(app, ["nodes", "list", "--json"]).stdout)
    assert {one["name"] for one in said["topologies"]} == set(tables.shapes())
    assert {one["name"] for one in said["models"]} == set(tables.models())
    shown = CliRunner().invoke(app, ["nodes", "show", "4p2d"], env={"COLUMNS": "200"})
    for node in topology.read("4p2d").nodes():
        assert node.name in shown.stdout
    command = ["nodes", "show", "pp-two-nodes", "--json", "--guard", "strict"]
    data = json.loads(CliRunner().invoke(app, command).stdout)
    assert data["guard"] == "strict"
    assert [len(server["ranks"]) for server in data["servers"]] == [16]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["show", "6p"], "no topology '6p'"),
        (["show", "6p.toml"], "cannot read 6p.toml: No such file"),
        (["show", "tp", "--model", "nothing"], "no model 'nothing'"),
        (["show", "tp", "--release", "1.0"], "SGLang '1.0' is not supported"),
        (["show", "tp", "--guard", "on"], "enforce"),
        (["render", "tp", "--as", "helm"], "choose one of commands, slurm, kubernetes, json"),
        (["render", "tp", "--no-check", "--as", "slurm"], "with --out FOLDER"),
        (["check"], "name one topology, or give --all"),
        (["check", "tp", "--all"], "name one topology, or give --all"),
    ],
)
def test_bad_input_is_a_complaint(command: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["nodes", *command])
    assert isinstance(done.exception, ConfigError)
    assert told in str(done.exception)

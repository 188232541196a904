"""A server that dies, hangs, or answers nonsense on the way ends an audit with one clear line.

The server is ``stand_in.Model``, of which a whole audit finds nothing; then it fails from some
request on. What real servers answer is in
``test_audit_embedded``. Mutations seen to fail: no ``status_code`` check, no JSON check, time-outs
not caught, histories of sessions not looked at, results dropped where an audit breaks off, cold
readings that may be cached.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from stand_in import Model

from hicache_guard.audit import play
from hicache_guard.audit.plan import TOO_LATE, Answer, Ask, Leave, Session
from hicache_guard.audit.scenarios import SCENARIOS
from hicache_guard.audit.wire import Wire, WireError
from hicache_guard.cli import main


@contextmanager
def serving() -> Iterator[Model]:
    server = Model()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def model() -> Iterator[Model]:
    with serving() as server:
        yield server


@dataclass
class Done:
    """What a command left behind, as of a process."""

    returncode: Any
    stdout: str
    stderr: str


Command = Callable[..., Done]
Bend = Callable[[dict[str, Any]], Any]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``hicache-guard audit`` in this process; the import of torch takes seconds."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["hicache-guard", "audit", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        told = capsys.readouterr()
        return Done(ended.value.code, told.out, told.err)

    return run


@pytest.fixture
def audit(command: Command, model: Model, tmp_path: Path) -> Command:
    """Audits the stand-in."""

    def run(*more: str) -> Done:
        return command(
            "--url", model.url, "--window", "16", "--timeout", "1", "--only", "shared-prefix",
            "--only", "turns", "--keep", str(tmp_path / "kept"), "--json", *more,
        )  # fmt: skip

    return run


def _off(meta: dict[str, Any], by: float) -> None:
    """The last token, answered or read."""
    rows = meta["input_token_logprobs"] or meta["output_token_logprobs"]
    rows[-1][0] += by


def _long(meta: dict[str, Any]) -> bool:
    """Longer than any request by which noise is measured."""
    return bool(meta["prompt_tokens"] > 100)


def test_a_noisy_token_that_no_cold_answer_had_is_no_fault(model: Model, audit: Command) -> None:
    """It comes out in two ways where it is read: a router between experts that is undecided.

    Mutation: answers that are beyond the limit are not read again.
    """
    ways = itertools.cycle((0.0, 5e-4))

    def bend(meta: dict[str, Any]) -> None:
        if _long(meta):
            _off(meta, next(ways) if meta["input_token_logprobs"] else 5e-4)

    model.bend = bend
    done = audit()
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"]) == (0, "noise"), done.stderr
    compared = [each for row in found["scenarios"] for each in row["comparisons"]]
    assert any(max(each["wavers"], default=0) > 2e-4 for each in compared)


def test_what_is_cached_and_always_off_is_a_fault_however_little(
    model: Model, audit: Command
) -> None:
    """Also where a cold reading of ten is off as well.

    Mutation: the largest of what readings differ by is taken for noise.
    """
    turns = itertools.count(1)

    def bend(meta: dict[str, Any]) -> None:
        if _long(meta):
            _off(meta, 5e-4 if meta["cached_tokens"] or next(turns) % 10 == 0 else 0.0)

    model.bend = bend
    done = audit("--no-shrink")
    found = json.loads(done.stdout)
    assert (done.returncode, found["verdict"]) == (1, "fault"), done.stderr
    row = next(row for row in found["scenarios"] if row["name"] == "shared-prefix")
    assert row["verdict"] == "fault"


def test_a_right_server_is_found_right(model: Model, audit: Command, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = audit("--html", str(page))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "equal"
    assert {row["name"]: row["verdict"] for row in found["scenarios"]} == {
        "cold": "equal", "shared-prefix": "equal", "turns": "equal",
        "disaggregation": "not tested",
    }  # fmt: skip
    assert model.flushed == 0, "a running server's cache is not ours to empty"
    assert "<html" in page.read_text()
    assert audit("--flush").returncode == 0
    assert model.flushed > 0


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("dies", "nobody answers"),
        ("hangs", "no answer within 1 s"),
        ("500", "status 500"),
        ("garbage", "not JSON"),
        ("deep", "not JSON"),
        ("other", "not what SGLang answers"),
        ("list", "not what SGLang answers"),
        ("headers", "no answer within 1 s"),
        ("redirects", "it redirects to http://elsewhere/generate; give that URL"),
    ],
)
def test_what_was_measured_until_then_is_kept(
    model: Model, audit: Command, fails: str, said: str
) -> None:
    """Mutations: redirects are followed; nobody looks at the time while headers come."""
    model.fails, model.after = fails, 110  # the cold part is 97 or so
    done = audit()
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback (most" not in done.stderr
    found = json.loads(done.stdout)
    assert said in json.dumps(found)
    assert found["scenarios"][0]["name"] == "cold"
    assert found["scenarios"][0]["verdict"] == "equal"
    assert found["broken"] or found["verdict"] == "fault"


def _interrupted(model: Model, keep: Path, *more: str, within: float) -> dict[str, Any]:
    """What an audit says that is sent Ctrl-C when the stand-in begins to fail."""
    program = [sys.executable, "-P", "-m", "hicache_guard.cli.main", "audit", "--url", model.url]
    program += ["--window", "16", "--keep", str(keep), "--json", *more]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while model.asked <= model.after:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=within)
    assert process.returncode == 2, errors
    assert b"Traceback" not in errors
    found: dict[str, Any] = json.loads(told)
    assert found["broken"] == "interrupted"
    return found


def test_interrupted_audits_keep_what_they_have(model: Model, tmp_path: Path) -> None:
    model.fails, model.after = "hangs", 110
    found = _interrupted(model, tmp_path, "--timeout", "3", within=60)
    assert found["scenarios"][0]["verdict"] == "equal"


def test_readings_that_are_not_cold_prove_nothing(model: Model, audit: Command) -> None:
    model.tells_keys_apart = False
    done = audit()
    assert done.returncode == 2
    assert "does not tell extra keys apart" in json.loads(done.stdout)["broken"]


def _without(name: str) -> Bend:
    return lambda meta: meta.pop(name)


def _cut(count: int) -> Bend:
    """Of answers with a hit, so many tokens are told."""

    def bend(meta: dict[str, Any]) -> None:
        if meta["cached_tokens"]:
            del meta["output_token_logprobs"][count:], meta["output_top_logprobs"][count:]

    return bend


def _misread(*, told: int | None) -> Bend:
    """The last token of a prompt that is read goes by another name."""

    def bend(meta: dict[str, Any]) -> None:
        if meta["input_token_logprobs"]:
            last = meta["input_token_logprobs"][-1]
            last[1] = last[1] + 1 if told is None else told

    return bend


def _nan(meta: dict[str, Any]) -> None:
    """Warm and cold are no number, alike."""
    for row in [*meta["output_token_logprobs"], *meta["input_token_logprobs"][1:]]:
        row[0] = math.nan


@pytest.mark.parametrize(
    ("bend", "status", "said"),
    [
        (_without("cached_tokens"), 2, "not what SGLang answers there (KeyError('cached_tokens'))"),
        (_without("output_token_logprobs"), 2, "KeyError('output_token_logprobs')"),
        (_without("input_token_logprobs"), 2, "KeyError('input_token_logprobs')"),
        (_cut(1), 1, "answers are cut short"),
        (_cut(0), 1, "answers are cut short"),
        (_misread(told=None), 2, "log-probabilities of other tokens"),
        (_misread(told=0), 2, "log-probabilities of other tokens"),
        (_nan, 1, "off by inf"),
    ],
)
def test_what_is_not_told_is_not_taken_for_right(
    model: Model, audit: Command, bend: Bend, status: int, said: str
) -> None:
    """Mutations: what is not told of hits is none; half of the tokens may go by other names."""
    model.bend = bend
    done = audit()
    assert done.returncode == status, done.stderr
    assert said in done.stdout + done.stderr


def test_a_token_that_is_padding_to_a_release_is_not_read(model: Model) -> None:
    """The last of a vocabulary is told as token 0, and its log-probability is that of 0."""
    wire = Wire(model.url)

    def bend(meta: dict[str, Any]) -> None:
        for row in meta["input_token_logprobs"]:
            row[1] %= 999

    model.bend = bend
    assert wire.reread((5, 6), (7, 999, 8, 999), space="here").unread == (1, 3)
    with pytest.raises(WireError, match="of other tokens"):
        wire.reread((5, 6), (7, 999, 1000), space="there")


def test_key_is_sent_and_asked_for(model: Model, audit: Command) -> None:
    model.key = "secret"
    done = audit()
    assert done.returncode == 2
    assert "--api-key" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert audit("--api-key", "secret").returncode == 0


def test_nobody_there_is_one_line(command: Command) -> None:
    done = command("--url", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "nobody answers" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--url", "localhost:1"],
        ["--url", "http://x", "--launch"],
        ["--only", "nonsense"],
        ["--launch"],
        ["--launch", "--", "--port", "1"],
        ["--guard", "maybe"],
        ["--hicache", "sideways"],
        ["--model", "huge"],
        ["--release", "9.9"],
        ["--checkout", "/nowhere"],
        ["--html", "/nowhere/at/all.html"],
        ["surplus"],
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(*arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not done.stdout


@pytest.fixture
def behind(model: Model) -> Iterator[Model]:
    """A server, and ``model`` is a router before it."""
    with serving() as server:
        workers = [{"url": server.url, "worker_type": "regular"}]
        model.info = {"router_manager": True, "workers": workers}
        yield server


def test_servers_behind_a_router_say_what_they_are(
    model: Model, behind: Model, audit: Command
) -> None:
    """The router answers; what it does not pass on goes to the servers. Mutation: ``behind``."""
    behind.info |= {"disaggregation_mode": "prefill"}
    done = audit("--only", "abort-in-prefill")
    assert done.returncode == 0, done.stderr
    engine = json.loads(done.stdout)["engine"]
    assert (engine["page"], engine["router"]) == ("4", "1 regular")
    assert engine["disaggregation"] == "prefill and decode"
    assert model.asked > 100
    assert behind.asked == 0
    assert behind.aborted
    assert not model.aborted


@pytest.mark.parametrize("role", ["regular", "prefill"])
@pytest.mark.parametrize("version", ["0.5.12", "0.5.12.post1", "0.5.13"])
def test_a_prefill_server_is_not_asked_for_what_it_dies_of(
    model: Model, behind: Model, role: str, version: str
) -> None:
    """SGLang #26286. Mutation: without ``Wire.top`` the old pair is asked for five, too."""
    behind.info |= {"version": version}
    model.info["workers"][0]["worker_type"] = role
    wire = Wire(model.url, timeout=5)
    answer = wire.attempt(Ask("one", (1, 2, 3), 4), space="here")
    wire.reread(answer.ask.prompt, answer.output, space="there")
    dies = role == "prefill" and version != "0.5.13"
    assert [body.get("top_logprobs_num", 0) for body in model.heard] == [0 if dies else 5] * 2


@pytest.mark.parametrize(
    ("known", "tokens", "said"),
    [
        ({"context_length": 259}, 100, "a request has at most 255 tokens; an audit takes 256"),
        ({"max_total_num_tokens": 263}, 100, "a request has at most 255 tokens"),
        ({}, 99, "there are 99 tokens; an audit takes 100"),
    ],
)
def test_a_server_too_small_for_any_prompt_is_refused(
    model: Model, audit: Command, tmp_path: Path, known: dict[str, int], tokens: int, said: str
) -> None:
    model.info |= {"model_path": str(tmp_path)} | known
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": tokens}))
    done = audit()
    assert done.returncode == 2
    assert said in done.stderr
    assert model.asked == 0


def test_what_no_prompt_fits_is_not_tested(model: Model, command: Command) -> None:
    """Mutation: without ``not plan.steps`` it is a scenario of nothing, found equal."""
    model.info |= {"page_size": 256, "context_length": 520, "max_total_num_tokens": 1024}
    model.info |= {"chunked_prefill_size": None}
    done = command("--url", model.url, "--window", "250", "--only", "resume-points", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)["scenarios"]}
    assert rows["resume-points"]["verdict"] == "not tested"
    assert "do not fit" in rows["resume-points"]["why"]


def test_one_server_of_a_pair_is_not_audited_alone(model: Model, audit: Command) -> None:
    model.info |= {"disaggregation_mode": "decode"}
    done = audit()
    assert done.returncode == 2
    assert "give the URL of its router" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_sessions_have_the_history_that_they_were_given(model: Model, audit: Command) -> None:
    """Mutation: without ``play._checked`` a session that forgets is not noticed."""
    done = audit("--only", "sessions")
    assert done.returncode == 0, done.stdout
    sessions = {row["name"]: row for row in json.loads(done.stdout)["scenarios"]}["sessions"]
    assert sessions["hits"] >= 8
    model.forgets = True
    done = audit("--only", "sessions")
    assert done.returncode == 1
    assert "the session had" in done.stdout


def test_server_without_sessions_is_audited_without(model: Model, audit: Command) -> None:
    model.opens = False
    done = audit("--only", "sessions")
    assert done.returncode == 0, done.stderr
    verdicts = {row["name"]: row["verdict"] for row in json.loads(done.stdout)["scenarios"]}
    assert verdicts["sessions"] == "not tested"
    assert verdicts["shared-prefix"] == "equal"


def test_a_turn_after_one_that_was_left_is_not_judged() -> None:
    """How far a turn had come that was left, nobody can say; else another history is a fault."""
    session = Session("a", streaming=True)
    turn = Ask("two", (1, 2, 3), 4, session=session, carried=2)
    told = Answer(turn, (4,), prompt_tokens=9, finish="length")
    left = Answer(Ask("one", (1,), 4, session=session, leave=Leave.ABORT), finish="abort")
    assert play._checked(told, {}).error
    other = replace(left, ask=replace(left.ask, session=Session("b", streaming=True)))
    assert play._checked(told, {"one": other}).error
    found = play._checked(told, {"one": left})
    assert not found.error
    assert not found.whole


def test_requests_that_leave_are_answers(model: Model) -> None:
    wire = Wire(model.url, timeout=5)
    for leave, leaves, finish in (
        (Leave.ABORT, 0, TOO_LATE),  # the stand-in ends what it has begun
        (Leave.ABORT, 3, "abort"),
        (Leave.DISCONNECT, 0, "disconnect"),
        (Leave.DISCONNECT, 10, "disconnect"),
        (Leave.DISCONNECT, 11, TOO_LATE),  # it has ten parts
    ):
        ask = Ask("one", (1, 2, 3), 8, leave=leave, leaves=leaves)
        answer = wire.generate(ask, space=f"here-{leave}{leaves}")
        assert answer.finish == finish
        assert not answer.whole


def _left(finish: str) -> Answer:
    return Answer(Ask("one", (1,), 8, leave=Leave.ABORT), finish=finish)


@pytest.mark.parametrize(
    ("scenario", "answers", "said"),
    [
        ("abort-in-decode", [_left(TOO_LATE), _left(TOO_LATE)], "all 2 requests were over before"),
        ("disconnect", [_left(TOO_LATE), _left("disconnect")], ""),
        ("retraction", [Answer(Ask("one", (1,), 8))], "no request was retracted"),
        ("retraction", [Answer(Ask("one", (1,), 8), retractions=1)], ""),
        ("load-back", [Answer(Ask("one", (1,), 8), cached_from={"device": 8})], "from the host"),
        ("load-back", [Answer(Ask("one", (1,), 8), cached_from={"device": 8, "host": 1})], ""),
        ("load-back", [Answer(Ask("one", (1,), 8))], ""),  # older releases do not tell
    ],
)
def test_what_did_not_happen_was_not_tested(
    scenario: str, answers: list[Answer], said: str
) -> None:
    found = next(one for one in SCENARIOS if one.name == scenario).missed(answers)
    assert said in found
    assert bool(said) == bool(found)


def test_readings_are_of_the_tokens_given(model: Model) -> None:
    wire = Wire(model.url, timeout=5)
    answer = wire.generate(Ask("one", (5, 6, 7), 4), space="here")
    again = wire.reread(answer.ask.prompt, answer.output, space="there")
    assert again.output == answer.output
    assert again.logprobs == answer.logprobs
    with pytest.raises(WireError, match="nobody answers"):
        Wire("http://127.0.0.1:9").reread((1,), (2,), space="x")


# -- what is found stays found, and nothing else gets out ------------------------------------------


@pytest.mark.parametrize("after", [112, 118, 124], ids=["reading again", "later", "shrinking"])
def test_a_fault_that_is_proven_is_kept(model: Model, audit: Command, after: int) -> None:
    """The server dies while answers are read again, or while they are made few.

    Mutations: a result is kept only once all of it is read; only once it is as small as can be.
    """
    model.wrong, model.fails, model.after = True, "dies", after
    done = audit()
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["verdict"] == "fault"
    assert "nobody answers" in done.stdout
    row = next(row for row in found["scenarios"] if row["name"] == "shared-prefix")
    assert row["verdict"] == "fault"
    assert row["largest"] == pytest.approx(1)


def test_what_broke_off_without_a_fault_is_not_tested(model: Model, audit: Command) -> None:
    model.fails, model.after = "dies", 112
    done = audit()
    assert done.returncode == 2
    rows = {row["name"]: row for row in json.loads(done.stdout)["scenarios"]}
    assert rows["shared-prefix"]["verdict"] == "not tested"
    assert "it broke off: " in rows["shared-prefix"]["why"]


def test_who_hangs_is_not_waited_for(model: Model, tmp_path: Path) -> None:
    """Ctrl-C while four requests hang. Mutation: threads that are joined: 30 s."""
    model.fails, model.after, model.hangs = "hangs", 100, 30.0
    _interrupted(model, tmp_path, "--only", "together", within=15)


@pytest.mark.parametrize(
    "told",
    [
        {"version": "[red]x[/nope]\x1b[31m\x1b]0;title\x07\nline"},
        {"internal_states": [1]},
        {"internal_states": [{"memory_usage": "x"}]},
        {"page_size": math.inf},
        {"swa_full_tokens_ratio": math.nan},
        {"hicache_ratio": math.nan, "enable_hierarchical_cache": True},
        {"model_path": ["x"], "dtype": {"y": 1}},
    ],
)
def test_nothing_that_a_server_says_of_itself_is_a_traceback(
    model: Model, audit: Command, told: dict[str, Any]
) -> None:
    model.info |= told
    done = audit("--only", "shared-prefix")
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
    assert "\x1b]" not in done.stderr
    assert "\x1b[31m" not in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"cached_tokens": math.inf}, {"cached_tokens": "x"}, {"cached_tokens_details": [1]},
        {"cached_tokens": -5}, {"cached_tokens": 10**6}, {"cached_tokens": True},
        {"output_token_logprobs": [[-1.0, 1e400, None]] * 8}, {"output_token_logprobs": "x"},
        {"output_token_logprobs": [[{}, 1, None]]}, {"finish_reason": "abort"},
        {"output_top_logprobs": 5},
    ],
)  # fmt: skip
def test_nothing_that_a_server_answers_is_a_traceback(
    model: Model, audit: Command, change: dict[str, Any]
) -> None:
    model.bend = lambda meta: meta.update(change)
    done = audit()
    assert done.returncode == 2
    assert "not what SGLang answers there" in json.loads(done.stdout)["broken"]


def test_null_is_no_number(model: Model) -> None:
    """A server writes its NaN as null. Mutation: only a float is one."""

    def bend(meta: dict[str, Any]) -> None:
        meta["output_token_logprobs"][0][0] = None

    model.bend = bend
    answer = Wire(model.url).generate(Ask("one", (5, 6, 7), 4), space="here")
    assert not answer.error
    assert math.isnan(answer.logprobs[0])


def test_keys_and_passwords_go_nowhere(model: Model, audit: Command, tmp_path: Path) -> None:
    """Neither into the page, the data nor a program that shows a fault."""
    model.wrong, model.key = True, None
    page, url = tmp_path / "page.html", model.url.replace("http://", "http://user:s3cret@")
    for words in (["--api-key", "s3cret"], ["--api-key=s3cret"]):
        done = audit("--url", url, "--html", str(page), *words)
        assert done.returncode == 1
        kept = [file.read_text() for file in (tmp_path / "kept").iterdir()]
        assert kept
        for text in (done.stdout, done.stderr, page.read_text(), *kept):
            assert "s3cret" not in text


@pytest.mark.parametrize(("option", "there"), [("--html", "folder"), ("--keep", "file")])
def test_where_nothing_can_be_written_is_said_before(
    model: Model, command: Command, tmp_path: Path, option: str, there: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    done = command("--url", model.url, option, str(tmp_path / there))
    assert done.returncode == 2
    assert f"{option} {tmp_path / there}: " in done.stderr
    assert model.asked == 0


def test_a_full_disk_hides_no_fault(model: Model, audit: Command) -> None:
    model.wrong = True
    done = audit("--html", "/dev/full", "--no-shrink")
    assert done.returncode == 1
    assert "/dev/full: No space left on device" in done.stderr
    assert json.loads(done.stdout)["verdict"] == "fault"
    model.wrong = False
    assert audit("--html", "/dev/full").returncode == 2


@pytest.mark.parametrize("option", [["--fault", "shifted"], ["--guard", "nope"], ["--pool", "600"]])
@pytest.mark.parametrize("server", [["--url", "http://127.0.0.1:9"], ["--launch"]])
def test_what_is_of_the_embedded_server_is_of_no_other(
    command: Command, server: list[str], option: list[str]
) -> None:
    done = command(*server, *option)
    assert done.returncode == 2
    assert f"{option[0]} is of the embedded server" in done.stderr


def test_an_answer_that_never_ends_is_given_up(model: Model) -> None:
    """A byte now and then. Mutation: a limit for each part only."""
    model.fails, model.after = "drips", 0
    with pytest.raises(WireError, match="does not end within 1 s"):
        Wire(model.url, timeout=1).attempt(Ask("one", (1, 2, 3), 4), space="here")


def test_our_own_faults_are_no_faults_of_a_server(
    model: Model, audit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1 is for those."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hicache_guard.cli.audit.as_data", broken)
    done = audit()
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr

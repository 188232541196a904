"""A record: what is written comes back, whatever a crash, a full disk or a stranger left of it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_guard.core import record as records
from hicache_guard.core.bounded import rotated
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.faults import Fault
from hicache_guard.core.record import (
    Record,
    RecordFile,
    RecordOptions,
    decode,
    encode,
    from_runs,
    pack,
    read_record,
    runs,
    unpack,
)
from hicache_guard.core.report import Violation

FACTS = {"sglang": "0.5.12", "row": "0.5.12", "mode": "observe", "route": "install"}
ALLOCATOR = {
    "k": "allocator", "a": 0, "class": "SWATokenToKVPoolAllocator", "full": 64, "window": 32,
    "page": 4, "dtype": "float16", "device": "cpu", "sort": False, "serial": 0, "state": None,
}  # fmt: skip


def _opened(path: Path, max_bytes: int = 1 << 20) -> RecordFile:
    file = RecordFile(RecordOptions(str(path), max_bytes), FACTS)
    file.allocator(ALLOCATOR)
    return file


def _called(file: RecordFile, serial: int, **more: Any) -> int:
    facts = {"a": 0, "on": "pair", "do": "free", "args": [encode(torch.arange(4))], "at": "x.py:1"}
    number = file.call({**facts, "time": 1.0, **more})
    file.returned(number, {"serial": serial, "gave": None})
    return number


def _numbers(record: Record) -> list[int]:
    return [call.number for call in record.calls]


# -- values


@given(st.lists(st.integers(-(2**40), 2**40) | st.integers(0, 9), max_size=200))
def test_runs_say_what_they_were_made_of(values: list[int]) -> None:
    """Mutation: a run that goes down, or a repeated number, taken for one that goes up."""
    assert from_runs(runs(values)) == values


def test_runs_are_as_the_format_says() -> None:
    assert runs([8, 9, 10, 5, 5, 4]) == "8+3 5 5 4"
    assert runs([*range(7, 107), 3, 4]) == "7+100 3+2"  # many take another way
    assert from_runs("8+3 5") == [8, 9, 10, 5]


@pytest.mark.parametrize("text", ["x", "1+-2", "1+0", "1+99999999999", "+", "1+67108865"])
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"run of|invalid literal"):
        from_runs(text)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_arguments_come_back(kind: torch.dtype) -> None:
    for value in (torch.tensor([3, 4, 5, 9, -1], dtype=kind), torch.tensor([], dtype=kind)):
        back = decode(json.loads(json.dumps(encode(value))))
        assert back.dtype == kind
        assert back.tolist() == value.tolist()
    for plain in (None, 7, True):
        assert decode(encode(plain)) == plain


def test_what_cannot_be_made_again_says_so() -> None:
    for value in (object(), torch.zeros(2), torch.zeros((2, 2), dtype=torch.int64), "text"):
        with pytest.raises(ValueError, match="cannot be made again"):
            decode(encode(value))
    for other in ({"q": 5}, {"z": "1"}, [1], "text", {}):
        with pytest.raises(ValueError, match="no value"):
            decode(other)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_tensors_are_exact(values: list[int]) -> None:
    for kind in (torch.int32, torch.int64):
        back = unpack(json.loads(json.dumps(pack(torch.tensor(values, dtype=kind)))))
        assert back.dtype == kind
        assert back.tolist() == values


@pytest.mark.parametrize(
    "packed", [{}, {"zlib": "!", "type": "int64"}, {"zlib": "", "type": "int64"}]
)
def test_what_is_no_packed_tensor_is_refused(packed: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(packed)


# -- writing and reading


def test_everything_that_is_written_is_read(tmp_path: Path) -> None:
    file = _opened(tmp_path / "r")
    first = _called(file, 1, **{"for": "r1"}, group=True, named={"start_pos": 4})
    file.written({"a": 0, "what": "mapping", "to": pack(torch.zeros(3, dtype=torch.int64))})
    number = file.call({"a": 0, "on": "full", "do": "alloc", "args": [8], "at": "y:2", "time": 2.0})
    file.violation(
        0, Violation(Fault.DOUBLE_FREE, "full", 9, 2, 1, "#3 full_pool.alloc at y:2", "r2")
    )
    file.returned(number, {"serial": 3, "raised": {"type": "AssertionError", "at": "z:3"}})
    record = read_record(tmp_path / "r")
    assert (record.release, record.mode, record.whole) == ("0.5.12", "observe", True)
    assert record.head["pid"] == os.getpid()
    assert record.allocators[0].facts["page"] == 4
    one, write, two = record.events
    assert isinstance(one, records.Call)
    assert (one.number, one.do, one.request, one.group) == (first, "free", "r1", True)
    assert one.named == {"start_pos": 4}
    assert list(one.serials) == [1]
    assert isinstance(write, records.Write)
    assert isinstance(two, records.Call)
    assert (two.on, two.args, two.raised) == ("full", [8], {"type": "AssertionError", "at": "z:3"})
    assert list(two.serials) == [2, 3]
    (violated,) = record.violations
    assert (violated.call, violated.fault) == (number, "double-free")
    assert record.unreadable == 0


def test_violation_belongs_to_the_operation_that_it_names(tmp_path: Path) -> None:
    """Mutation: the call during which it was told; a check may be put off."""
    file = _opened(tmp_path / "r")
    for serial in (1, 2, 3):
        _called(file, serial)
    number = file.call({"a": 0, "on": "pair", "do": "free", "args": [], "at": "x", "time": 1.0})
    for operation in ("#2 free at x", "#4 free at x", "#900 match_prefix at tree.py"):
        file.violation(0, Violation(Fault.DOUBLE_FREE, "full", 9, 2, 1, operation, None))
    file.returned(number, {"serial": 4, "gave": None})
    found = [violated.call for violated in read_record(tmp_path / "r").violations]
    assert found == [1, 3, None]


def test_call_that_never_returned_is_there(tmp_path: Path) -> None:
    """Mutation: write a call when it returned; the one that killed the process is lost."""
    file = _opened(tmp_path / "r")
    file.call({"a": 0, "on": "pair", "do": "free", "args": [], "at": "x", "time": 1.0})
    file.violation(0, Violation(Fault.DOUBLE_FREE, "full", 9, 2, 1, "#1 free at x", None))
    record = read_record(tmp_path / "r")
    assert [call.ended for call in record.calls] == [False]
    assert record.violations[0].call == 0


def test_every_torn_end_of_the_last_line_is_left_out(tmp_path: Path) -> None:
    """At every byte. Mutations: raise; take what parses without its line end."""
    path = tmp_path / "r"
    file = _opened(path)
    for serial in range(3):
        _called(file, serial)
    file.close()
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        record = read_record(path)
        assert _numbers(record) == [0, 1, 2]
        assert [call.ended for call in record.calls] == [True, True, False]
        assert record.unreadable == cut - last
    path.write_bytes(whole)
    assert all(call.ended for call in read_record(path).calls)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 100,
        b"\xff\xfe garbage\n",
        b'{"k":"call","n":7}\n',
        b'{"k":"no such"}\n',
        b"[]\n",
        b"{}\n",
        b'{"k":"return","n":99,"serial":1}\n',
        b'{"k":"call","n":3,"a":5,"on":"pair","do":"x","args":[],"at":"","time":1}\n',
        b'{"k":"violation","a":0,"n":null,"fault":"x","slot":"y","page":1,"pool":"full"}\n',
    ],
)
def test_nothing_behind_garbage_is_believed(garbage: bytes, tmp_path: Path) -> None:
    """Also where good lines follow: a call is missing there, and pages would mean others."""
    path = tmp_path / "r"
    file = _opened(path)
    for serial in range(3):
        _called(file, serial)
    file.close()
    good = path.read_bytes()
    more = good[good.rfind(b'{"k":"call"') :].replace(b'"n":2', b'"n":3')
    path.write_bytes(good + garbage + more)
    record = read_record(path)
    assert _numbers(record) == [0, 1, 2]
    assert record.unreadable == len(garbage + more)


def test_something_else_is_refused(tmp_path: Path) -> None:
    for name, content, says in (
        ("other", b'{"v":1,"kind":"match"}\n', "is not a record"),
        ("empty", b"", "is not a record"),
        ("head", b'{"record":1,"id":', "nothing in it"),
        ("new", b'{"record":2,"id":"x"}\n', "of format 2; this reads 1"),
        ("lacks", b'{"record":1,"id":"x"}\n', "lacks facts"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=says):
            read_record(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_record(tmp_path / "none")


# -- bounds, disks and deaths


def _rotating(path: Path, calls: int) -> RecordFile:
    file = _opened(path, records.MIN_BYTES)
    for serial in range(1, calls + 1):
        if file.lacks_room():
            file.begin_anew([{**ALLOCATOR, "serial": serial - 1, "state": {"at": serial - 1}}])
        _called(file, serial)
    return file


def test_rotation_begins_with_the_state_and_is_read_from_there(tmp_path: Path) -> None:
    """Mutations: without the state; with the older half of another record; numbers from 0."""
    path = tmp_path / "r"
    _rotating(path, 1500).close()
    assert {each.name for each in tmp_path.iterdir()} == {"r", "r.1"}
    assert all(each.stat().st_size < records.MIN_BYTES + 1000 for each in tmp_path.iterdir())
    both = read_record(path)
    assert not both.whole
    state = both.allocators[0].state
    assert state is not None
    numbers = _numbers(both)
    assert numbers == list(range(state["at"], 1500))
    rotated(path).unlink()
    newest = read_record(path)
    assert _numbers(newest) == numbers[-len(_numbers(newest)) :]
    assert newest.allocators[0].state == {"at": _numbers(newest)[0]}


def test_older_half_of_another_record_is_not_read(tmp_path: Path) -> None:
    path, other = tmp_path / "r", tmp_path / "other"
    _rotating(path, 500).close()
    _rotating(other, 500).close()
    alone = _numbers(read_record(path))
    rotated(path).write_bytes(rotated(other).read_bytes())
    assert _numbers(read_record(path)) == [n for n in alone if n >= read_record(path).head["next"]]
    assert len(_numbers(read_record(path))) < len(alone)


def test_torn_older_half_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "r"
    _rotating(path, 500).close()
    older = rotated(path).read_bytes()
    rotated(path).write_bytes(older[:-3])
    record = read_record(path)
    assert _numbers(record)[0] == record.head["next"] > 0


def test_state_that_does_not_fit_stops_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _opened(tmp_path / "r", records.MIN_BYTES)
    file.begin_anew([{**ALLOCATOR, "state": "x" * records.MIN_BYTES}])
    assert file.stopped
    assert "recording stops" in caplog.text
    assert _numbers(read_record(tmp_path / "r")) == []


def test_full_disk_stops_recording_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A real ENOSPC. Mutations: raise; log at each line."""
    file = RecordFile(RecordOptions("/dev/full"), FACTS)
    for serial in range(3):
        _called(file, serial)
    assert file.stopped
    assert [each.levelno for each in caplog.records] == [logging.ERROR]
    assert "No space left" in caplog.text


def test_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    """Mutation: a buffered file loses what a killed process thought it had written."""
    path = tmp_path / "r"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_record as t; from pathlib import "
        "Path\nfile = t._opened(Path(sys.argv[2]))\nfor n in range(50): t._called(file, n)\n"
        "file.call({'a': 0, 'on': 'pair', 'do': 'free', 'args': [], 'at': 'x', 'time': 1.0})\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(Path(__file__).parent), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    record = read_record(path)
    assert _numbers(record) == list(range(51))
    assert [call.ended for call in record.calls] == [True] * 50 + [False]


def test_record_of_an_earlier_process_is_put_aside(tmp_path: Path) -> None:
    """Mutation: append to it; two records in one file are none."""
    path = tmp_path / "r"
    first = _opened(path)
    _called(first, 1)
    first.close()
    again = _opened(path)
    again.close()
    assert _numbers(read_record(path)) == []
    assert _numbers(read_record(rotated(path))) == [0]


# -- what the environment asks for


def test_no_record_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(records.RECORD_VAR, raising=False)
    assert RecordOptions.from_environment() is None


def test_process_and_rank_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(records.RECORD_VAR, str(tmp_path / "g.{rank}.{pid}.rec"))
    options = RecordOptions.from_environment()
    assert options is not None
    assert options.place == tmp_path / f"g.0.{os.getpid()}.rec"
    assert list(tmp_path.iterdir()) == []


def _open_as_asked() -> None:
    options = RecordOptions.from_environment()
    assert options is not None
    RecordFile(options, FACTS)


@pytest.mark.parametrize(
    ("path", "size", "says"),
    [
        ("rec", "many", "HICACHE_GUARD_RECORD_BYTES='many'"),
        ("rec", "100", "from 65536 on"),
        (".", "", "is a folder"),
        ("no/folder/rec", "", "there is no folder"),
        ("notes.txt", "", "is not a record; name another file"),
    ],
)
def test_bad_environment_is_one_clear_line(
    path: str, size: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("remember the milk\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(records.RECORD_VAR, path)
    monkeypatch.setenv(records.BYTES_VAR, size)
    with pytest.raises(ConfigError) as raised:
        _open_as_asked()
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert notes.read_text() == "remember the milk\n"

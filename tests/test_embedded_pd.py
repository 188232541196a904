"""Prefill and decode in two servers on this CPU: the transfer engine, and a release that uses it.

Proved by mutation, each of which makes this fail: pieces written whether or not they lie in
registered memory; no look at what is sent from here; an engine that answers before it has copied; a
peer waited for without an end; and window KV that is not sent, which is done in the test itself.
"""

from __future__ import annotations

import ctypes
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import fetched

from hicache_guard.core.errors import ConfigError
from hicache_guard.core.matches import TRACE_VAR, read_trace
from hicache_guard.embedded import models, reference, replacements, transfer
from hicache_guard.embedded.server import ROLES, Server
from hicache_guard.embedded.transfer import TransferEngine

SHIM = Path(replacements.__file__).parent / "shim"


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(models.ORDINARY, k=length)


# -- the engine alone ----------------------------------------------------------------------------


class Memory:
    """Bytes at an address."""

    def __init__(self, content: bytes) -> None:
        self._kept = ctypes.create_string_buffer(content, len(content))
        self.address, self.size = ctypes.addressof(self._kept), len(content)

    @property
    def content(self) -> bytes:
        return self._kept.raw


def engine() -> tuple[TransferEngine, str]:
    """One that listens, and what its peers call it."""
    one = TransferEngine()
    assert one.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return one, f"127.0.0.1:{one.get_rpc_port()}"


@pytest.fixture
def pair() -> Iterator[tuple[TransferEngine, Memory, TransferEngine, Memory, str]]:
    """A sender with a kilobyte of noise, and a receiver with one of zeros."""
    (sender, _), (receiver, name) = engine(), engine()
    source, target = Memory(random.Random(0).randbytes(1024)), Memory(bytes(1024))
    sender.register_memory(source.address, source.size)
    receiver.register_memory(target.address, target.size)
    yield sender, source, receiver, target, name
    assert receiver.unregister_memory(target.address) == 0
    assert receiver.unregister_memory(target.address) != 0
    assert sender.transfer_sync_write(name, source.address, target.address, 1) != 0


Pair = tuple[TransferEngine, Memory, TransferEngine, Memory, str]


def test_bytes_arrive_where_they_were_sent(pair: Pair) -> None:
    sender, source, _, target, name = pair
    pieces = [(0, 512, 100), (700, 0, 300), (5, 900, 0), (100, 1000, 24)]
    done = sender.batch_transfer_sync_write(
        name,
        [source.address + at for at, _, _ in pieces],
        [target.address + to for _, to, _ in pieces],
        [size for _, _, size in pieces],
    )
    assert done == 0
    expected = bytearray(1024)
    for at, to, size in pieces:
        expected[to : to + size] = source.content[at : at + size]
    assert target.content == bytes(expected)
    assert sender.send_probe(name) == 0


def test_threads_may_write_at_once(pair: Pair) -> None:
    """Each more than a socket takes at once, so that without a lock they would mix."""
    sender, _, receiver, _, name = pair
    size, count = 8 << 20, 4
    source, target = Memory(random.Random(1).randbytes(size * count)), Memory(bytes(size * count))
    sender.register_memory(source.address, source.size)
    receiver.register_memory(target.address, target.size)
    assert sender.send_probe(name) == 0, "all have one connection"
    with ThreadPoolExecutor(count) as pool:
        done = pool.map(
            lambda at: sender.transfer_sync_write(
                name, source.address + at, target.address + at, size
            ),
            range(0, size * count, size),
        )
    assert set(done) == {0}
    assert target.content == source.content


@pytest.mark.parametrize(("at", "size"), [(-1, 8), (1020, 8), (4096, 1), (0, 1025)])
def test_nothing_is_written_beside_what_is_registered(pair: Pair, at: int, size: int) -> None:
    sender, source, _, target, name = pair
    wide = Memory(bytes(2048))
    sender.register_memory(wide.address, wide.size)
    to = [target.address, target.address + at]
    done = sender.batch_transfer_sync_write(name, [source.address, wide.address], to, [16, size])
    assert done != 0
    assert target.content == bytes(1024), "all pieces or none"
    assert sender.transfer_sync_write(name, source.address, target.address, 16) == 0, "it goes on"


def test_nothing_is_sent_of_what_is_not_registered_here(pair: Pair) -> None:
    sender, _, _, target, name = pair
    secret = Memory(b"\xff" * 16)
    assert sender.transfer_sync_write(name, secret.address, target.address, 16) != 0
    assert target.content == bytes(1024)


def test_a_peer_that_is_gone_is_an_error(pair: Pair) -> None:
    sender, source, *_ = pair
    with socket.create_server(("127.0.0.1", 0)) as gone:
        name = f"127.0.0.1:{gone.getsockname()[1]}"
    assert sender.transfer_sync_write(name, source.address, 0, 16) != 0
    assert sender.send_probe(name) != 0


def test_a_peer_that_says_nothing_is_an_error_in_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, source, *_ = pair
    monkeypatch.setattr(transfer, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        name = f"127.0.0.1:{silent.getsockname()[1]}"
        assert sender.transfer_sync_write(name, source.address, 0, 16) != 0
        assert 0.4 < time.monotonic() - began < 10


def test_a_role_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match="no role 'both'; choose one of prefill, decode"):
        Server(Path(), role="both")


# -- a release -----------------------------------------------------------------------------------

#: Beside the shim, in all processes of a server: window KV is not sent while a file is there.
LOSING = """
import os, runpy, wrapt
@wrapt.when_imported("sglang.srt.disaggregation.mooncake.conn")
def lose(module):
    send = module.MooncakeKVManager.maybe_send_extra
    def losing(*args, **kwargs):
        return 0 if os.path.exists({switch!r}) else send(*args, **kwargs)
    module.MooncakeKVManager.maybe_send_extra = losing
runpy.run_path({shim!r})
"""


def asked(prefill: Server, decode: Server, ids: list[int], room: int) -> dict[str, Any]:
    """What decode answers to a request that both servers are sent, as a router does."""
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {
        "input_ids": ids, "sampling_params": sampling, "return_logprob": True,
        "bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap, "bootstrap_room": room,
    }  # fmt: skip
    with ThreadPoolExecutor(2) as both:
        _, answer = both.map(lambda server: server.ask("/generate", body), (prefill, decode))
    found: dict[str, Any] = answer
    return found


def off(server: Server, answer: dict[str, Any], ids: list[int]) -> float:
    """By how much log-probabilities of an answer differ from the reference."""
    right = reference.logprobs(server.model, ids + answer["output_ids"])[len(ids) - 1 :].tolist()
    told = answer["meta_info"]["output_token_logprobs"]
    apart: list[float] = [abs(one[0] - row[one[1]]) for one, row in zip(told, right, strict=False)]
    return max(apart)


@pytest.mark.sglang
@pytest.mark.parametrize(
    "version",
    ["0.5.23", *(pytest.param(old, marks=pytest.mark.slow) for old in ("0.5.18", "0.5.12"))],
)
def test_decode_answers_as_the_reference(version: str, tmp_path: Path) -> None:
    """Cold and from a cache, on both sides; without the window's KV it is not so."""
    fetched(version)
    switch, losing = tmp_path / "losing", tmp_path / "shim"
    losing.mkdir()
    shim = str(SHIM / "sitecustomize.py")
    (losing / "sitecustomize.py").write_text(LOSING.format(switch=str(switch), shim=shim))
    prefill, decode = (
        Server(
            version,
            page_size=16,
            guard="enforce",
            role=role,
            folder=tmp_path / role,
            environment={TRACE_VAR: str(tmp_path / f"{role[0]}.{{pid}}.jsonl")},
        )
        for role in ROLES
    )
    prefill.environment["PYTHONPATH"] = f"{losing}:{prefill.environment['PYTHONPATH']}"
    with prefill, decode:
        for room, (length, cached) in enumerate([(20, 0), (300, 16), (300, 288), (317, 288)], 1):
            ids = prompt(length)
            answer = asked(prefill, decode, ids, room)
            assert len(answer["output_ids"]) == 8
            assert answer["meta_info"]["cached_tokens"] == cached
            assert off(prefill, answer, ids) < 2e-4
        switch.touch()
        ids = prompt(300, seed=1)
        assert off(prefill, asked(prefill, decode, ids, 9), ids) > 0.1
        for server in (prefill, decode):
            assert server.ask("/health") == ""
            server.flush()
    for name in "pd":
        (trace,) = tmp_path.glob(f"{name}.*.jsonl")
        kinds = {record["kind"] for record in read_trace(trace)}
        assert "violation" not in kinds
        assert ("match" in kinds) == (name == "p"), "guarded, and decode matches nothing"

"""A stand-in for a server: log-probabilities are made of a hash of the tokens before.

So cold and warm agree, whatever is asked, and what fails is what a test lets fail.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

INFO = {
    "version": "0.0", "model_path": "nowhere", "page_size": 4, "chunked_prefill_size": 64,
    "max_total_num_tokens": 400, "context_length": 300, "max_running_requests": 4,
    "dtype": "float32", "swa_full_tokens_ratio": 0.5,
}  # fmt: skip


def logprob(tokens: list[int]) -> float:
    """Of the last token, after those before it."""
    digest = hashlib.sha256(str(tokens).encode()).digest()
    return -0.1 - digest[0] / 64


class Model(ThreadingHTTPServer):
    """Remembers prompts by extra key; ``fails`` from the ``after``-th generation on."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.known: dict[str, list[list[int]]] = {}
        self.asked, self.after, self.fails, self.hangs = 0, 10**9, "", 5.0
        self.flushed = 0
        self.key: str | None = None
        self.tells_keys_apart = True
        #: What came before each turn of a session, by session and turn.
        self.turns: dict[str, dict[str | None, list[int]]] = {}
        self.opens, self.forgets = True, False
        self.info: dict[str, Any] = dict(INFO)
        #: How many requests are still to be refused, and bodies of those that were not.
        self.busy = 0
        self.heard: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        #: Whether prompts are remembered, and whether what is cached is wrong.
        self.remembers, self.wrong = True, False
        #: Changes what is told of an answer.
        self.bend: Callable[[dict[str, Any]], None] = lambda _meta: None
        self.on_ask: Callable[[dict[str, Any]], None] = lambda _wanted: None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients hang up on purpose


class Handler(BaseHTTPRequestHandler):
    server: Model

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _allowed(self) -> bool:
        key = self.server.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._send(b"no", 401)
        return False

    def do_GET(self) -> None:
        if self._allowed():
            self._send(json.dumps(self.server.info).encode())

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        if not self._allowed():
            return
        if self.path == "/flush_cache":
            self.server.flushed += 1
            self.server.known.clear()
        if self.path == "/open_session" and self.server.opens:
            self.server.turns[wanted["session_id"]] = {None: []}
            self._send(json.dumps(wanted["session_id"]).encode())
            return
        if self.path == "/abort_request":
            self.server.aborted.append(wanted["rid"])
        if self.path != "/generate":
            self._send(b"{}")
            return
        with self.server.lock:
            if self.server.busy > 0:
                self.server.busy -= 1
                self._send(b"no room", 503)
                return
            self.server.heard.append(wanted)
            self.server.on_ask(wanted)
            self.server.asked += 1
            failing = self.server.fails if self.server.asked > self.server.after else ""
        if failing == "dies":
            self.server.socket.close()
            self.connection.close()
        elif failing == "cuts":
            self.connection.close()
        elif failing == "hangs":
            time.sleep(self.server.hangs)
        elif failing == "drips":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b" ")
                    time.sleep(0.1)
        elif failing == "headers":
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                for part in range(80):
                    self.wfile.write(b"X-%d: more\r\n" % part)
                    time.sleep(0.5)
        elif failing == "redirects":
            self.send_response(307)
            self.send_header("Location", "http://elsewhere/generate")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif failing == "500":
            self._send(b"Traceback (most recent call last):\n  boom", 500)
        elif failing == "garbage":
            self._send(b"<html>\xff\x00")
        elif failing == "deep":
            self._send(b"[" * 100_000 + b"]" * 100_000)
        elif failing == "other":
            self._send(b'{"text": "hello"}')
        elif failing == "list":
            self._send(b"[]")
        elif wanted.get("stream"):
            self._stream()
        else:
            meta = self._answer(wanted)
            ids = [row[1] for row in meta["output_token_logprobs"]]
            self.server.bend(meta)
            self._send(json.dumps({"output_ids": ids, "meta_info": meta}).encode())

    def _stream(self) -> None:
        self.send_response(200)
        self.end_headers()
        for part in range(10):
            self.wfile.write(b"data: " + json.dumps({"part": part}).encode() + b"\n\n")

    def _answer(self, wanted: dict[str, Any]) -> dict[str, Any]:
        ids, count = wanted["input_ids"], wanted["sampling_params"]["max_new_tokens"]
        turns: dict[str | None, list[int]] = {None: []}
        if params := wanted.get("session_params"):
            turns = self.server.turns[params["id"]]
            if not self.server.forgets:
                ids = turns[params.get("rid")] + ids
        space = wanted["extra_key"] if self.server.tells_keys_apart else ""
        known = self.server.known.setdefault(space, [])
        cached = max((_common(ids, other) for other in known), default=0)
        known += [ids] if self.server.remembers else []
        off = 1.0 if self.server.wrong and cached >= 4 else 0.0
        rows: list[list[Any]] = []
        whole = list(ids)
        for _ in range(count):
            whole.append(int.from_bytes(hashlib.sha256(str(whole).encode()).digest()[:2]) % 1000)
            rows.append([logprob(whole) - off, whole[-1], None])
        turns[wanted.get("rid")] = whole
        told: list[list[Any]] = []
        if (start := wanted.get("logprob_start_len", -1)) >= 0:
            told = [[None, ids[start], None]]
            told += [
                [logprob(ids[: end + 1]), ids[end], None] for end in range(start + 1, len(ids))
            ]
        return {
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(ids),
            "cached_tokens": min(cached, len(ids) - 1) // 4 * 4,
            "output_token_logprobs": rows,
            "output_top_logprobs": [[row] for row in rows],
            "input_token_logprobs": told,
            "input_top_logprobs": [[row] if row[0] is not None else None for row in told],
        }


def _common(one: list[int], other: list[int]) -> int:
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip

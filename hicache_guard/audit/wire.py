"""A running SGLang server, by its public HTTP API and nothing else.

Whatever goes wrong on the way (nobody there, a time-out, an error status, an answer that is none)
is a ``WireError`` of one line. Only questions that change nothing are asked again here; whether
another may be is in the kind of the error: ``RefusedError`` or ``LostError``.
"""

from __future__ import annotations

import functools
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3

from hicache_guard.audit.plan import TOO_LATE, Answer, Ask, Leave, Session
from hicache_guard.core.errors import GuardError, printable

#: Likeliest tokens asked for at each position.
TOP = 5
#: Releases whose prefill server dies of being asked for them: SGLang #26286.
DIES_OF_TOP = ("0.5.12", "0.5.12.post1")
#: How often a question that changes nothing is asked, and the seconds between.
TRIES, PAUSE = 3, 0.5
#: Seconds to be connected, and those after which a session that nobody uses ends.
CONNECT, SESSION = 5.0, 300.0
#: How much of an answer is read at once, and the most that it may have, in bytes.
PART, MOST_BYTES = 1 << 16, 1 << 28
#: Statuses of a server, or of a router before it, that takes no more requests now.
BUSY = (429, 503)
_NOBODY = "nobody answers, or the line was cut"


#: What goes wrong with numbers, lists and names of somebody else's.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


class WireError(GuardError):
    """The server did not answer, or not as the API says; ``status`` is HTTP's, if any."""

    def __init__(self, said: str, status: int | None = None) -> None:
        super().__init__(printable(said))
        self.status = status


class RefusedError(WireError):
    """The request was never accepted: nobody was there, or there was no room."""


class LostError(WireError):
    """No answer came in time, or it broke off: nobody can say how far the request had come."""


class NoSessionError(WireError):
    """The server opens no session."""


class Wire:
    """One server; may be used by several threads.

    ``timeout`` is in seconds, for each answer to begin and between its parts.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout: float = 120.0) -> None:
        try:
            parts = urlsplit(url.rstrip("/"))
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            good = False
        if not good:
            raise WireError(f"{url}: not a URL such as http://127.0.0.1:30000")
        self._auth = (parts.username, parts.password or "") if parts.username else None
        #: Without a user and a password, as others may read it.
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self.timeout = timeout
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._local = threading.local()

    # -- the ways to ask -------------------------------------------------------------------------

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # a proxy is never meant for the server under audit
            session.headers.update(self._headers)
            session.auth = self._auth
        return session

    def _send(
        self, method: str, path: str, patience: float | None = None, **options: Any
    ) -> requests.Response:
        patience = self.timeout if patience is None else patience
        session = self._session()
        call = functools.partial(
            session.request, method, self.url + path,
            timeout=(CONNECT, patience), allow_redirects=False, **options,
        )  # fmt: skip
        try:
            answer = _within(CONNECT + patience, call)
        except _Endless:
            self._local.session = None  # its line is still in use
            raise LostError(f"{self.url}{path}: no answer within {patience:g} s") from None
        except (
            requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError,
        ) as error:  # fmt: skip
            kind = RefusedError if _unconnected(error) else LostError
            late = isinstance(error, requests.Timeout)
            why = f"no answer within {patience:g} s" if late else _NOBODY
            raise kind(f"{self.url}{path}: {why}") from None
        except (requests.RequestException, ValueError) as error:
            raise WireError(f"{self.url}{path}: {error}") from None
        if answer.status_code == 200:
            return answer
        with answer:
            if answer.status_code in (401, 403):
                why = f"{self.url}{path}: the API key is missing or wrong (--api-key)"
                raise WireError(why, answer.status_code)
            said = b""
            with suppress(LostError):
                said = next(self._parts(answer, patience), b"")
        text = said[:200].decode(errors="replace").strip()
        if answer.is_redirect:
            text = f"it redirects to {printable(answer.headers['location'])[:200]}; give that URL"
        why = f"{self.url}{path}: status {answer.status_code}: {text}"
        if answer.status_code in BUSY:
            raise RefusedError(why, answer.status_code)
        raise WireError(why, answer.status_code)

    def _parts(self, answer: requests.Response, patience: float) -> Iterator[bytes]:
        """What comes of an answer, until ``patience`` is over after it began."""
        until, size = time.monotonic() + patience, 0
        try:
            while part := answer.raw.read1(PART, decode_content=True):
                yield part
                size += len(part)
                if time.monotonic() > until:
                    raise LostError(f"{answer.url}: the answer does not end within {patience:g} s")
                if size > MOST_BYTES:
                    raise WireError(f"{answer.url}: the answer is longer than {MOST_BYTES:,} bytes")
        except (urllib3.exceptions.HTTPError, HTTPException, OSError) as error:
            raise LostError(f"{answer.url}: the answer broke off: {error}") from None

    def _told(self, method: str, path: str, patience: float | None = None, **options: Any) -> bytes:
        """A whole answer."""
        patience = self.timeout if patience is None else patience
        with self._send(method, path, patience, stream=True, **options) as answer:
            return b"".join(self._parts(answer, patience))

    def _json(self, method: str, path: str, **options: Any) -> Any:
        try:
            return json.loads(self._told(method, path, **options))
        except (ValueError, RecursionError):
            raise WireError(f"{self.url}{path}: the answer is not JSON") from None

    def _read(self, *paths: str) -> dict[str, Any]:
        """The first of some paths that a release knows."""
        said = WireError(f"{self.url}: nothing was asked")
        for _ in range(TRIES):
            for path in paths:
                try:
                    found = self._json("GET", path)
                except WireError as error:
                    said = error
                    continue
                if isinstance(found, dict):
                    return found
                said = WireError(f"{self.url}{path}: not what SGLang answers there")
            time.sleep(PAUSE)
        raise said

    def healthy(self) -> bool:
        """Whether the server is up."""
        try:
            self._told("GET", "/health")
        except WireError:
            return False
        return True

    # -- what is asked ---------------------------------------------------------------------------

    def server_info(self) -> dict[str, Any]:
        """What a server says of itself; of a router, what a server behind it says."""
        if self.behind:
            first = min(self.behind, key=lambda worker: worker.role != "prefill")
            return first.wire.server_info()
        return self._read("/server_info", "/get_server_info")

    def model_info(self) -> dict[str, Any]:
        return self._read("/model_info", "/get_model_info")

    @functools.cached_property
    def behind(self) -> tuple[Worker, ...]:
        """The servers behind SGLang's router; none where this is a server itself."""
        if not self._read("/server_info", "/get_server_info").get("router_manager"):
            return ()
        try:
            rows = self._read("/workers")["workers"]
            found = [(str(row["url"]), str(row["worker_type"])) for row in rows]
        except MALFORMED:
            raise WireError(f"{self.url}/workers: not what SGLang's router answers there") from None
        if not found:
            raise WireError(f"{self.url}: a router without servers")
        key = self._headers.get("Authorization", "").removeprefix("Bearer ") or None
        return tuple(Worker(role, Wire(url, key=key, timeout=self.timeout)) for url, role in found)

    def flush(self) -> None:
        """Empty the cache; a server that has requests under way is asked again."""
        for _ in range(TRIES * 10):
            try:
                self._told("POST", "/flush_cache")
            except WireError as error:
                said = error
            else:
                return
            time.sleep(PAUSE / 5)
        raise said

    def open_session(self, name: str, *, streaming: bool) -> None:
        """Open a session, which the server closes itself if nobody asks in it for a while."""
        wanted: dict[str, Any] = {"capacity_of_str_len": 1 << 20, "session_id": name}
        wanted |= {"streaming": streaming, "timeout": SESSION}
        try:
            found = self._json("POST", "/open_session", json=wanted)
        except WireError as error:
            raise NoSessionError(f"no session could be opened: {error}") from None
        if found != name:
            raise NoSessionError(f"{self.url}/open_session: not what SGLang answers there")

    def close_session(self, name: str) -> None:
        """Close a session; that there is none is no fault."""
        with suppress(WireError):
            self._told("POST", "/close_session", CONNECT, json={"session_id": name})

    def generate(self, ask: Ask, *, space: str) -> Answer:
        """Ask for tokens; ``space`` is the part of the cache that may be used.

        A request that leaves is streamed until then. What fails is an answer, too.
        """
        begun = time.monotonic()
        try:
            return self.attempt(ask, space=space)
        except WireError as error:
            return _timed(Answer(ask, error=str(error)), time.monotonic() - begun)

    def attempt(self, ask: Ask, *, space: str) -> Answer:
        """As ``generate``, but what fails is raised."""
        begun = time.monotonic()
        found = self._asked(ask, request_id(ask.name, space), space)
        return _timed(found, time.monotonic() - begun)

    @functools.cached_property
    def top(self) -> int:
        """How many likeliest tokens may be asked for at each position."""
        split = any(worker.role == "prefill" for worker in self.behind)
        return 0 if split and self.server_info().get("version") in DIES_OF_TOP else TOP

    def _wanted(self, ask: Ask, space: str, start: int = -1) -> dict[str, Any]:
        """The body of a request; log-probabilities of the prompt are told from ``start`` on."""
        wanted = _body(ask, space)
        if ask.logprobs:
            wanted |= {"return_logprob": True, "logprob_start_len": start}
            wanted |= {"top_logprobs_num": self.top} if self.top else {}
        return wanted

    def _asked(self, ask: Ask, rid: str, space: str) -> Answer:
        wanted = self._wanted(ask, space) | {"rid": rid}
        if ask.leave is None:
            return _answer(ask, self._json("POST", "/generate", json=wanted), self.url)
        if ask.leave is Leave.ABORT and ask.leaves == 0:
            timer = threading.Timer(0.02, self.abort, [rid])
            timer.start()
            finish = Leave.ABORT.value
            try:
                meta = _meta(self._json("POST", "/generate", json=wanted), self.url)
                reason = meta.get("finish_reason")
                if isinstance(reason, dict) and reason.get("type") != "abort":
                    finish = TOO_LATE
            except WireError as error:
                # Some releases answer an abort with a status.
                if error.status is None:
                    raise
            finally:
                timer.join()
            return Answer(ask, finish=finish)
        return self._left(ask, rid, wanted)

    def _left(self, ask: Ask, rid: str, wanted: dict[str, Any]) -> Answer:
        """Stream an answer until enough has come, and leave."""
        assert ask.leave is not None
        if ask.leaves == 0:
            with suppress(LostError):
                self._send(
                    "POST", "/generate", 0.03, json=wanted | {"stream": True}, stream=True
                ).close()
            return Answer(ask, finish="disconnect")
        came = 0
        with self._send("POST", "/generate", json=wanted | {"stream": True}, stream=True) as stream:
            for came, _ in enumerate(_events(self._parts(stream, self.timeout)), start=1):
                if came == ask.leaves:
                    if ask.leave is Leave.DISCONNECT:
                        break
                    self.abort(rid)
        return Answer(ask, finish=ask.leave.value if came >= ask.leaves else TOO_LATE)

    def abort(self, rid: str) -> None:
        """End a request; that it is over already is no fault. A router does not pass it on."""
        for wire in [worker.wire for worker in self.behind] or [self]:
            with suppress(WireError):
                wire._told("POST", "/abort_request", json={"rid": rid})

    def reread(
        self, prompt: Sequence[int], output: Sequence[int], *, space: str, rid: str = ""
    ) -> Answer:
        """What the server makes of given tokens after a prompt, computed as one prompt."""
        wanted = self._wanted(Ask("reread", (*prompt, *output), 1), space, len(prompt) - 1)
        wanted |= {"rid": rid} if rid else {}
        begun = time.monotonic()
        meta = _meta(self._json("POST", "/generate", json=wanted), self.url)
        try:
            rows = meta["input_token_logprobs"][-len(output) :]
            tops = meta["input_top_logprobs"][-len(output) :] if self.top else ()
            # A release takes the last token of a vocabulary for padding, and tells of token 0.
            unread = tuple(place for place, row in enumerate(rows) if int(row[1]) != output[place])
            told = {(int(rows[place][1]), output[place]) for place in unread}
            if len(rows) != len(output) or not told <= {(0, max(output))}:
                raise WireError(f"{self.url}/generate: log-probabilities of other tokens")
            found = Answer(
                Ask("reread", tuple(prompt), len(output)),
                tuple(output),
                tuple(_number(row[0]) for row in rows),
                tuple(_top(row) for row in tops),
                _cached(meta, len(prompt) + len(output)),
                finish="reread",
                unread=unread,
            )
        except MALFORMED as error:
            raise WireError(
                f"{self.url}/generate: not what SGLang answers there ({error!r})"
            ) from None
        return _timed(found, time.monotonic() - begun)


@dataclass(frozen=True)
class Worker:
    """A server behind a router; its ``role`` is prefill, decode or regular."""

    role: str
    wire: Wire


def _body(ask: Ask, space: str) -> dict[str, Any]:
    """The body of a request, without what it is to tell of log-probabilities."""
    return _turn(ask, space) | {
        "input_ids": list(ask.prompt[ask.carried :]),
        "sampling_params": {
            "temperature": ask.temperature,
            "max_new_tokens": ask.tokens,
            "ignore_eos": ask.ignore_eos,
        },
        "extra_key": space,
    }


def session_id(session: Session, space: str) -> str:
    return f"{space}-{session.name}"


def _turn(ask: Ask, space: str) -> dict[str, Any]:
    """What makes a request a turn; a streaming session has one history, another has many."""
    if ask.session is None:
        return {}
    params = {"id": session_id(ask.session, space)}
    if ask.carried and not ask.session.streaming:
        params["rid"] = request_id(ask.after, space)
    return {"session_params": params}


def request_id(name: str, space: str) -> str:
    """The id of a request."""
    return f"{space}-{name}"


def _timed(answer: Answer, seconds: float) -> Answer:
    return replace(answer, seconds=seconds)


def _events(parts: Iterator[bytes]) -> Iterator[Any]:
    """The events of a streamed answer."""
    left = b""
    for part in parts:
        *lines, left = (left + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                try:
                    yield json.loads(line[6:])
                except (ValueError, RecursionError) as error:
                    raise LostError(f"a streamed answer broke off: {error}") from None


class _Endless(Exception):
    """No answer began in time, though parts of one came."""


def _within(seconds: float, call: Callable[[], requests.Response]) -> requests.Response:
    """What it returns. A time-out of ``requests`` is for each part of a header, not for all."""
    found: queue.SimpleQueue[requests.Response | BaseException] = queue.SimpleQueue()

    def make() -> None:
        try:
            found.put(call())
        except BaseException as error:
            found.put(error)

    threading.Thread(target=make, daemon=True).start()
    try:
        one = found.get(timeout=seconds)
    except queue.Empty:
        raise _Endless from None
    if isinstance(one, BaseException):
        raise one
    return one


def _unconnected(error: requests.RequestException) -> bool:
    """Whether there was no connection yet, so that nothing can have been sent."""
    told = error.args[0] if error.args else None
    return isinstance(
        getattr(told, "reason", None),
        urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError,
    )


def _top(row: Any) -> dict[int, float]:
    return {int(token): _number(logprob) for logprob, token, *_ in row or ()}


def _meta(found: Any, url: str) -> dict[str, Any]:
    meta = found.get("meta_info") if isinstance(found, dict) else None
    if not isinstance(meta, dict):
        raise WireError(f"{url}/generate: not what SGLang answers there")
    return meta


def _number(logprob: Any) -> float:
    """SGLang tells null of what is no number."""
    return math.nan if logprob is None else float(logprob)


def _cached(meta: dict[str, Any], of: int) -> int:
    """How many tokens of a prompt of so many were cached."""
    told = meta["cached_tokens"]
    if isinstance(told, bool) or not isinstance(told, int) or not 0 <= told <= of:
        raise ValueError(f"{str(told)[:20]} tokens of {of} were cached")
    return told


def _drafts(meta: dict[str, Any], which: str) -> int:
    return int(meta.get(f"spec_num_{which}_drafts") or 0)


def _answer(ask: Ask, found: Any, url: str) -> Answer:
    meta = _meta(found, url)
    try:
        reason = meta["finish_reason"]["type"]
        if ask.logprobs:
            rows = meta["output_token_logprobs"]
        else:
            rows = [(math.nan, token) for token in found["output_ids"]]
        details = meta.get("cached_tokens_details") or {}
        answer = Answer(
            ask,
            tuple(int(row[1]) for row in rows),
            tuple(_number(row[0]) for row in rows),
            tuple(_top(row) for row in meta.get("output_top_logprobs") or ()),
            _cached(meta, max(len(ask.prompt), int(meta.get("prompt_tokens") or 0))),
            {name: int(part) for name, part in details.items() if isinstance(part, int)},
            reason,
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            drafts=(_drafts(meta, "correct"), _drafts(meta, "proposed")),
            retractions=int(meta.get("num_retractions") or 0),
        )
    except MALFORMED as error:
        raise WireError(f"{url}/generate: not what SGLang answers there ({error!r})") from None
    if reason == "abort":
        said = meta["finish_reason"].get("message") or "the server aborted it"
        return Answer(ask, finish="abort", error=printable(str(said))[:200])
    return answer

"""A real HTTP server of a release, as a context manager.

It runs in a process group of its own, which is ended with the block, with the interpreter, and with
a parent that is killed; its log stays.
"""

from __future__ import annotations

import atexit
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hicache_guard import checkouts, children
from hicache_guard.core.errors import ConfigError, GuardError
from hicache_guard.core.modes import ENV_VAR, Mode
from hicache_guard.embedded import models, replacements
from hicache_guard.embedded.replacements import ATTENTION

__all__ = ["ATTENTION", "HICACHE", "SPECULATIVE", "TREES", "Server", "ServerError"]

_SHIM = Path(__file__).parent / "shim"
#: Lines of a log that tell why a server did not start, the most of each, and seconds to end in.
_TOLD, _WIDTH, _GRACE = 15, 300, 0.5
_PORTS = 20000, 32000
#: Seconds within which a server is gone whose scheduler died.
DYING = 10.0

#: Trees, and how the environment asks for them: from 0.5.21 on the unified one is the only one.
TREES: dict[str, dict[str, str]] = {
    "default": {},
    "unified": {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"},
}
#: When HiCache writes to the host.
HICACHE = ("write_through", "write_through_selective", "write_back")
#: A third tier. Files are asked for one token already, or no prompt of an embedded server were
#: long enough, and waited for, or it would be a matter of time what is found.
STORAGE: dict[str, Any] = {
    "hicache_storage_backend": "file",
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_backend_extra_config": json.dumps({"prefetch_threshold": 1}),
}
_STORAGE_VAR = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
#: Where drafts come from, and how a server is asked for them: what was answered before tells how
#: a text may go on; in a chain of drafts, or (with pages of one token) a tree of them.
SPECULATIVE: dict[str, dict[str, Any]] = {
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1},
    "ngram-tree": {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 4},
}
#: Halves of a server whose prefill and decode are disaggregated.
ROLES = ("prefill", "decode")


#: How Python ends what it says of an error, and how we begin.
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Violation)\b|hicache-guard: ")


class ServerError(GuardError):
    """An embedded server ended, or refused a request; the first line says it, then the log does."""


class Server:
    """A server of ``release``, a version or the folder that holds ``sglang``; see ``start``."""

    def __init__(
        self,
        release: str | Path,
        model: str | Path = "alternating",
        *,
        page_size: int = 1,
        max_total_tokens: int = 4096,
        swa_ratio: float | None = None,
        chunked_prefill_size: int = 256,
        hicache: str | None = None,
        hicache_ratio: float = 2.0,
        hicache_size: int = 0,
        storage: bool = False,
        attention: str = "triton",
        tree: str = "default",
        speculative: str | None = None,
        overlap: bool = True,
        guard: str = "off",
        role: str | None = None,
        port: int | None = None,
        bootstrap: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        patience: float = 120.0,
    ) -> None:
        """``arguments`` are more of ``ServerArgs``, ``folder`` is for the model and the log.

        ``storage``: behind the host tier there are files, in ``folder``; none of an earlier server.

        ``role`` is one of ``ROLES``, or both in one. ``port``, and ``bootstrap`` where decode
        servers meet one for prefill, are free ones unless told.
        """
        _one_of("attention", attention, ATTENTION)
        _one_of("tree", tree, TREES)
        if hicache is not None:
            _one_of("hicache", hicache, HICACHE)
        elif storage:
            raise ConfigError("a third tier is behind a host tier: choose a policy for hicache")
        if speculative is not None:
            _one_of("speculative", speculative, SPECULATIVE)
            if ATTENTION[attention] != "triton":
                raise ConfigError(f"attention {attention} knows no drafts; choose triton")
        if role is not None:
            _one_of("role", role, ROLES)
        mode = Mode.parse(guard)
        self._tree = release if isinstance(release, Path) else checkouts.require(release)
        self._patience = patience
        self.folder = folder or Path(tempfile.mkdtemp(prefix="hicache-guard-embedded-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "server.log"
        self._storage = self.folder.absolute() / "storage"
        self.model = _written(model, self.folder / "model")
        self.port = port or free_port()
        self.bootstrap = (bootstrap or free_port()) if role == "prefill" else None
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = checkouts.environment(self._tree) | {
            "PYTHONPATH": f"{_SHIM}:{self._tree}",
            "OMP_NUM_THREADS": "1",
            # or the answer to whether it is there would leave a token in the cache
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
            ENV_VAR: mode.value,
            **replacements.environment(attention, models.module_of(self.model)),
            # of the trees for hybrid models only this one has a host tier
            **TREES["unified" if hicache is not None else tree],
            **({_STORAGE_VAR: str(self._storage)} if storage else {}),
            **(environment or {}),
        }
        self.arguments = {
            "model_path": str(self.model),
            "host": "127.0.0.1",
            "port": self.port,
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": ATTENTION[attention],
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": not overlap,
            "page_size": page_size,
            "max_total_tokens": max_total_tokens,
            "max_running_requests": 8,
            "context_length": max_total_tokens,
            "chunked_prefill_size": chunked_prefill_size,
            "random_seed": 1,
            # or a scheduler without work takes a core of the two that there may be
            "sleep_on_idle": True,
            **({} if swa_ratio is None else {"swa_full_tokens_ratio": swa_ratio}),
            **({} if hicache is None else _hicache(hicache, hicache_ratio, hicache_size)),
            **(STORAGE if storage else {}),
            **({} if speculative is None else SPECULATIVE[speculative]),
            **({} if role is None else _disaggregated(role, self.bootstrap)),
            **(arguments or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    # -- from start to end -----------------------------------------------------------------------

    def start(self) -> Self:
        """Start, and wait until it answers. Raises ServerError with the end of the log."""
        command = [
            sys.executable, "-P", "-m", "hicache_guard.embedded.launch",
            json.dumps(self.arguments),
        ]  # fmt: skip
        # A file is known by tokens alone, and not by the model whose KV it has.
        shutil.rmtree(self._storage, ignore_errors=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        atexit.register(self.stop)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        assert self._process is not None
        limit = time.monotonic() + self._patience
        while time.monotonic() < limit:
            if self._process.poll() is not None:
                raise self._failure(f"ended with status {self._process.returncode} at its start")
            with suppress(OSError):
                self._asked("/health", None, 5.0)
                return
            time.sleep(0.1)
        raise self._failure(f"did not answer within {self._patience:.0f} s")

    def _failure(self, what: str) -> ServerError:
        """One line with the last error of the log, and then the end of the log."""
        said = f"{what}, see {self.log}: {last_error(self.log) or 'no error is told'}"
        return ServerError("\n".join([said, *_lines(self.log)[-_TOLD:]]))

    def wait(self) -> None:
        """Until it ends by itself: raises ServerError with the end of the log."""
        assert self._process is not None, "not started"
        self._process.wait()
        raise self._failure(f"ended with status {self._process.returncode}")

    def ended(self) -> str:
        """Why it runs no more, in one line; nothing while it does.

        A release whose scheduler died takes seconds to go.
        """
        assert self._process is not None, "not started"
        try:
            self._process.wait(DYING)
        except subprocess.TimeoutExpired:
            return ""
        return str(self._failure("the server ended")).splitlines()[0]

    def stop(self) -> None:
        """End the whole group: asked first, killed then. Nothing of it is left afterwards."""
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        assert process.stdin is not None
        children.end(process, _GRACE)
        process.stdin.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def status(self) -> int | None:
        """The exit status of a started server, or None while it runs."""
        assert self._process is not None, "not started"
        return self._process.poll()

    @property
    def group(self) -> int:
        """The process group of a started server."""
        assert self._process is not None, "not started"
        return self._process.pid

    # -- requests --------------------------------------------------------------------------------

    def ask(self, path: str, body: object = None, *, timeout: float = 60.0) -> Any:
        """What the server answers to a body (or, without one, to a GET); JSON is read."""
        try:
            return self._asked(path, body, timeout)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise ServerError(f"{path} was answered {error.code}: {said}") from None
        except OSError as error:
            raise self._failure(f"{path} was not answered ({error})") from None

    def _asked(self, path: str, body: object, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            said = answer.read().decode()
        with suppress(ValueError):
            return json.loads(said)
        return said

    def generate(self, ids: list[int], new: int = 16, **more: Any) -> dict[str, Any]:
        """What ``/generate`` answers to one prompt, greedily and with log-probabilities."""
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **more}
        found: dict[str, Any] = self.ask("/generate", body)
        return found

    def flush(self) -> None:
        """Forget every prefix. Raises ServerError where a request still runs."""
        self.ask("/flush_cache", {})


def last_error(log: Path) -> str:
    """The last error that a log tells, in one line; nothing where it tells none."""
    return next((line for line in reversed(_lines(log)) if _ERROR.match(line)), "")


def _lines(log: Path) -> list[str]:
    return [line[:_WIDTH] for line in log.read_text(errors="replace").splitlines()]


def _one_of(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(f"no {name} {value!r}; choose one of {', '.join(choices)}")


def _hicache(policy: str, ratio: float, size: int) -> dict[str, Any]:
    return {
        "enable_hierarchical_cache": True,
        "hicache_write_policy": policy,
        "hicache_ratio": ratio,
        "hicache_size": size,
        "hicache_io_backend": "direct",
    }


def _disaggregated(role: str, bootstrap: int | None) -> dict[str, Any]:
    return {
        "disaggregation_mode": role,
        "disaggregation_transfer_backend": "mooncake",
        **({} if bootstrap is None else {"disaggregation_bootstrap_port": bootstrap}),
    }


def free_port() -> int:
    """Not one that the system gives: releases add up to 20,000 to it for ports of their own."""
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port


def _written(model: str | Path, folder: Path) -> Path:
    """The folder of a model, written there first if it is one of ours."""
    if isinstance(model, Path):
        return model
    _one_of("model", model, models.MODELS)
    models.write(model, folder)
    return folder

"""A file of lines that stays below a bound, and that neither crashes nor full disks can spoil.

Each line is written with one system call, so that nothing but the last can be torn, and only by a
crash. When the file is full it becomes ``<path>.1`` and a new one begins. Writing can fail; then it
ends with one line in the log, and the server goes on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hicache_guard.core.errors import ConfigError

logger = logging.getLogger("hicache_guard")


def asked_for(
    path_variable: str, bytes_variable: str, default: int, least: int
) -> tuple[str, int] | None:
    """The path and the bound in bytes that two variables of the environment name; None for none.

    Raises ConfigError for a bound that is none.
    """
    text = os.environ.get(bytes_variable, "").strip()
    if text and (not (text.isascii() and text.isdigit()) or int(text) < least):
        raise ConfigError(f"{bytes_variable}={text!r} is not a number of bytes from {least} on")
    path = os.environ.get(path_variable, "").strip()
    return (path, int(text) if text else default) if path else None


def require_place(place: Path, variable: str, asked: str) -> None:
    """Raises ConfigError where no file can lie at ``place``, which a variable asked for."""
    if place.is_dir():
        raise ConfigError(f"{variable}={asked!r} is a folder; name a file in it")
    if not place.parent.is_dir():
        raise ConfigError(f"{variable}={asked!r}: there is no folder {str(place.parent)!r}")


class BoundedFile:
    """Appends to one file, at most ``max_bytes`` of it, and as much again in ``<path>.1``.

    ``beginning`` are the first bytes of every such file, ``what`` it is, in words, and ``doing``
    what stops when it cannot be written. A path that another process writes to gets ``.pid<its
    id>`` added. Nothing raises but the constructor: after an error one line is logged, writing
    stops, and ``dropped`` counts what was not written.
    """

    def __init__(
        self, path: Path, max_bytes: int, *, beginning: bytes, what: str, doing: str
    ) -> None:
        """Raises ConfigError where the file cannot be written or is something else."""
        self.path = path
        self.max_bytes = max_bytes
        self.dropped = 0
        self.size = 0
        self._beginning = beginning
        self._what = what
        self._doing = doing
        self._file = -1
        # HiCache moves pages in threads of its own.
        self._lock = threading.RLock()
        try:
            if not self._open():
                self.path = path.with_name(f"{path.name}.pid{os.getpid()}")
                if not self._open():
                    raise ConfigError(f"{str(self.path)!r} is being written already")
        except OSError as error:
            raise ConfigError(f"cannot write a {what} to {str(self.path)!r}: {error}") from None

    @property
    def stopped(self) -> bool:
        """Whether lines are no longer written."""
        return self._file < 0

    def write(self, line: bytes, *, beyond: bool = False) -> None:
        """Append one line, which ends in a line end; with ``beyond`` to the same file if full."""
        with self._lock:
            if self._file < 0:
                self.dropped += 1
                return
            if len(line) > self.max_bytes and not beyond:
                self.drop(f"a record of {len(line)} bytes is more than the whole bound")
                return
            if self.size + len(line) > self.max_bytes and not beyond:
                self.rotate()
            self._append(line)

    def rotate(self, first: Iterable[bytes] = ()) -> None:
        """Begin a new file, with the lines ``first``."""
        with self._lock:
            if self._file < 0:
                return
            try:
                os.close(self._file)
                self._file = -1
                self.path.replace(rotated(self.path))
                if not self._open():
                    raise OSError("another process writes to it")
            except (OSError, ConfigError) as error:
                self.stop(str(error))
                return
            for line in first:
                self._append(line)

    def drop(self, why: str) -> None:
        """One line is not written; the first time that is said."""
        if not self.dropped:
            logger.error("%s %s: %s", self._what, self.path, why)
        self.dropped += 1

    def stop(self, why: str) -> None:
        """Write nothing more, and say so."""
        self.close()
        self.dropped += 1
        logger.error("%s %s: %s; %s stops", self._what, self.path, why, self._doing)

    def close(self) -> None:
        """Stop; what comes after is dropped."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _append(self, line: bytes) -> None:
        if self._file < 0:
            self.dropped += 1
            return
        try:
            written = os.write(self._file, line)
            if written < len(line):
                raise OSError("the disk is full")
            self.size += written
        except OSError as error:
            self.stop(str(error))

    def _open(self) -> bool:
        """Open ``path`` to append to; whether it is free. What is there must be ours."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            if not _lock(file):
                os.close(file)
                return False
            size = os.fstat(file).st_size
            there = os.pread(file, len(self._beginning), 0) if size else b""
            if not begins_with(there, self._beginning):
                raise ConfigError(f"{str(self.path)!r} is not a {self._what}; name another file")
            if size and os.pread(file, 1, size - 1) != b"\n":
                size += os.write(file, b"\n")  # behind the torn line of a crash
        except BaseException:
            os.close(file)
            raise
        self._file, self.size = file, size
        return True


def _lock(file: int) -> bool:
    """Whether this file is ours alone to write to."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def rotated(path: Path) -> Path:
    """Where the older half of such a file lies."""
    return path.with_name(path.name + ".1")


def begins_with(start: bytes, beginning: bytes) -> bool:
    """Whether the first bytes of a file are ours; a process can die in its very first line."""
    return start == beginning[: len(start)]


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read. Raises ConfigError where that cannot be done."""
    try:
        with path.open("rb") as lines:
            yield lines
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from None

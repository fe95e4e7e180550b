"""Messages on a stream socket: a length, then so many bytes.

Rule: a message that is too long is refused before it is read. Called from `link` and `candidate`.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

MAX_FRAME: Final = 32 << 20  # bytes; the longest honest answers are below 1 MiB
_LENGTH: Final = struct.Struct("!I")


class FrameError(Exception):
    """A message that is not a valid frame."""


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Send one frame: 4 bytes of length, big-endian, then the bytes; FrameError if too long."""
    if len(body) > MAX_FRAME:
        raise FrameError(f"{len(body)} bytes are more than a frame holds")
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket) -> bytes | None:
    """The next frame, None at the end of the stream; FrameError for one that is too long.

    Blocks: another process keeps the deadline of the caller's process.
    """
    head = receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME:
        raise FrameError(f"{length} bytes are more than a frame holds")
    return receive_exactly(sock, length)


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """The next `size` bytes, None if the stream ends before."""
    chunk = sock.recv(size) if size else b""
    if len(chunk) == size:
        return chunk
    parts = bytearray(chunk)
    while len(parts) < size:
        chunk = sock.recv(min(size - len(parts), 1 << 20))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)

"""Messages on a stream socket: a length, then so many bytes.

Rule: what is too long is refused before it is read. Called from `link` and `candidate`.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

MAX_FRAME: Final = 32 << 20  # bytes; the longest honest answers seen are below 1 MiB
_LENGTH: Final = struct.Struct("!I")


class FrameError(Exception):
    """What came, or is to go, is no frame."""


def send_frame(sock: socket.socket, body: bytes) -> None:
    """One frame: its length in 4 bytes, big-endian, then its bytes. FrameError above MAX_FRAME."""
    if len(body) > MAX_FRAME:
        raise FrameError(f"{len(body)} bytes are more than a frame holds")
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket) -> bytes | None:
    """The next frame, None at the end of the stream; FrameError for one that is too long. Blocks: its caller's
    process has a deadline that another process keeps.
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

"""Frames of JSON and raw bytes over a socket: what a worker and its child speak.

    header: magic, number, bytes of JSON, number of blobs | blob lengths | JSON | blobs

A large blob does not go through the socket: it is written into memory that is then sealed, so that
nobody can change it any more, and the socket carries its descriptor. Never pickles, so that
whoever holds the other end can send garbage but not code; every size is bounded before memory is
taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

__all__ = ["Blob", "Channel", "Closed", "Expired", "Garbled"]

Blob = bytes | bytearray | memoryview | mmap.mmap
T = TypeVar("T")

MAX_JSON_BYTES = 256 * 2**20  # thousands of samples are 1 MB; more than this is garbage
MAX_BLOBS = 4096
MAX_FRAME_BYTES = 64 * 2**30  # all blobs of a frame; the largest tensor in sight is 9 GB

SHARED_FROM_BYTES = 2**20  # smaller ones are copied as fast as memory is mapped
_IS_SHARED = 1 << 63  # in a blob's length: a descriptor comes in its place
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034  # <linux/fcntl.h>; Python 3.11 does not name them all
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # no more seals, no shrinking, no growing, no writing

_HEADER = struct.Struct("<8sQII")  # magic, request number, bytes of JSON, number of blobs
_MAGIC = b"tunerwk1"


class Closed(Exception):
    """The other side closed the channel, or died."""


class Expired(Exception):
    """The deadline passed."""


class Garbled(Exception):
    """What came is not a frame of ours."""


class _Shared(mmap.mmap):
    """Sealed memory of the sender's, mapped here: whoever writes into it writes into a copy."""

    fd: int

    @classmethod
    def of(cls, fd: int, num_bytes: int) -> _Shared:
        found = cls(fd, num_bytes, access=mmap.ACCESS_COPY)
        found.fd = fd
        return found

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


class Channel:
    """Frames over a non-blocking stream socket.

    A frame: header, blob lengths (8 bytes each), JSON, blobs. With `pidfd`, the death of that
    process ends a wait even if a grandchild still holds the other end open.
    """

    def __init__(self, sock: socket.socket, pidfd: int | None = None) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # the kernel clips it; 2x faster
            sock.setsockopt(socket.SOL_SOCKET, option, 4 * 2**20)
        self.sock = sock
        self.pidfd = pidfd

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self.sock, event)
        if self.pidfd is not None:
            poll.register(self.pidfd, select.POLLIN)
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise Expired
        ready = poll.poll(None if left_s is None else left_s * 1e3 + 1)
        if ready and all(fd == self.pidfd for fd, _ in ready):
            raise Closed

    def _once_ready(self, call: Callable[[], T], event: int, deadline: float | None) -> T:
        """Return what a call of the socket returns, as soon as it need not wait."""
        while True:
            try:
                return call()
            except BlockingIOError:
                self._wait(event, deadline)
            except ConnectionError:
                raise Closed from None

    def _send_bytes(self, view: memoryview, deadline: float | None) -> None:
        while view:
            send = partial(self.sock.send, view, socket.MSG_NOSIGNAL)
            view = view[self._once_ready(send, select.POLLOUT, deadline) :]

    def _send_fd(self, fd: int, deadline: float | None) -> None:
        send = partial(socket.send_fds, self.sock, [b"s"], [fd], socket.MSG_NOSIGNAL)
        self._once_ready(send, select.POLLOUT, deadline)

    def _receive_shared(self, num_bytes: int, deadline: float | None) -> _Shared:
        receive = partial(socket.recv_fds, self.sock, 1, 1)
        mark, fds, _, _ = self._once_ready(receive, select.POLLIN, deadline)
        if not mark:
            raise Closed
        if not fds:
            raise Garbled("no descriptor came where one was announced")
        try:
            is_sealed = fcntl.fcntl(fds[0], _F_GET_SEALS) == _SEALS
            if not is_sealed or os.fstat(fds[0]).st_size != num_bytes:
                os.close(fds[0])
                raise Garbled(f"shared memory that is not sealed, or not of {num_bytes} bytes")
            return _Shared.of(fds[0], num_bytes)
        except OSError as error:
            os.close(fds[0])
            raise Garbled(f"shared memory that cannot be mapped: {error}") from None

    def _receive_into(self, view: memoryview, deadline: float | None) -> None:
        while view:
            receive = partial(self.sock.recv_into, view)
            count = self._once_ready(receive, select.POLLIN, deadline)
            if count == 0:
                raise Closed
            view = view[count:]

    def _receive(self, num_bytes: int, deadline: float | None) -> bytearray:
        try:
            buffer = bytearray(num_bytes)
        except MemoryError:
            raise Garbled(f"a part of {num_bytes} bytes does not fit in memory") from None
        self._receive_into(memoryview(buffer), deadline)
        return buffer

    def send(
        self,
        number: int,
        data: Mapping[str, Any],
        blobs: Sequence[Blob],
        deadline: float | None = None,
    ) -> None:
        """Send one frame; TypeError or ValueError before the first byte if it cannot be sent."""
        text = json.dumps(data).encode()
        views = [_flat(blob) for blob in blobs]
        lengths = [len(view) for view in views]
        _refuse_absurd(len(text), lengths)
        with contextlib.ExitStack() as stack:
            fds = [_shared_fd(blob, view, stack) for blob, view in zip(blobs, views, strict=True)]
            flagged = [
                length if fd is None else length | _IS_SHARED
                for length, fd in zip(lengths, fds, strict=True)
            ]
            head = _HEADER.pack(_MAGIC, number, len(text), len(views))
            head += struct.pack(f"<{len(views)}Q", *flagged) + text
            self._send_bytes(memoryview(head), deadline)
            for view, fd in zip(views, fds, strict=True):
                if fd is None:
                    self._send_bytes(view, deadline)
                else:
                    self._send_fd(fd, deadline)

    def receive(
        self, deadline: float | None = None
    ) -> tuple[int, dict[str, Any], list[bytearray | mmap.mmap]]:
        """Wait for one frame: its number, its data, its blobs (writable, and the caller's own)."""
        head = self._receive(_HEADER.size, deadline)
        magic, number, num_json, num_blobs = _HEADER.unpack(head)
        if magic != _MAGIC:
            raise Garbled(f"a frame starts with {bytes(magic)!r}")
        if num_blobs > MAX_BLOBS:
            raise Garbled(f"a frame of {num_blobs} blobs; at most {MAX_BLOBS} are allowed")
        packed = self._receive(8 * num_blobs, deadline)
        flagged = struct.unpack(f"<{num_blobs}Q", packed)
        lengths = [length & ~_IS_SHARED for length in flagged]
        try:
            _refuse_absurd(num_json, lengths)
            data = json.loads(self._receive(num_json, deadline))
        except (ValueError, RecursionError) as error:
            raise Garbled(str(error)) from None
        if not isinstance(data, dict):
            raise Garbled("the JSON of a frame is not an object")
        blobs: list[bytearray | mmap.mmap] = [
            self._receive_shared(length, deadline)
            if flag & _IS_SHARED
            else self._receive(length, deadline)
            for length, flag in zip(lengths, flagged, strict=True)
        ]
        return number, data, blobs


def _shared_fd(blob: Blob, view: memoryview, stack: contextlib.ExitStack) -> int | None:
    """Return a descriptor of sealed memory that holds a large blob, None for a small one.

    What came as such is passed on as it is.
    """
    if isinstance(blob, _Shared):
        return blob.fd
    if len(view) < SHARED_FROM_BYTES:
        return None
    try:
        fd = os.memfd_create("tuner", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:  # a kernel or a sandbox without it
        return None
    stack.callback(os.close, fd)
    while view:
        view = view[os.write(fd, view) :]
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def _flat(blob: Blob) -> memoryview:
    view = memoryview(blob)
    if not view.c_contiguous:
        raise TypeError("a blob must be contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _refuse_absurd(num_json: int, lengths: Sequence[int]) -> None:
    if num_json > MAX_JSON_BYTES:
        raise ValueError(f"{num_json} bytes of JSON; at most {MAX_JSON_BYTES} are allowed")
    if len(lengths) > MAX_BLOBS or sum(lengths) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(lengths)} blobs of {sum(lengths)} bytes in one frame")

"""The front end's side of one decoding process: images to it, canvases from it, and a new one when it dies or hangs.

Invariant: whatever an image does to the process that decodes it, `draw` comes back in bounded time, and the next image
finds a process that works. No process outlives this one, and each is waited for.
"""

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import msgspec
import numpy as np

from distributed.messages import ProtocolError
from encoder.geometry import PlanError, plan
from encoder.image import Canvas
from service.decode_process import LENGTH, Drawn, Encoded, Ready, Refused, Setup, ToFront, pack
from service.errors import ServiceError
from service.settings import ENV_PREFIX

_NUM_TRIES = 2
_START_TIMEOUT_S = 30.0
_EXIT_TIMEOUT_S = 1.0
_LIMIT_HEADER_BYTES = 4096
_LIMIT_WAIT_S = 3600.0

# Left to itself, glibc gives an image's memory back and has the kernel clear it anew for the next: half the time of a
# small image, a fifth of a large one's. With these a process keeps at most 64 MiB between images.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}

_log = logging.getLogger(__name__)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


@dataclass(frozen=True, slots=True)
class Drawing:
    """An image as the tower sees it, and its digest."""

    canvas: Canvas
    digest: str


class Decoder:
    """One process at a time, started at once. `draw` is for one thread at a time, `stop` for any.

    The kernel ends a process when the thread that started it ends: make it, and draw, on threads that outlive it.
    """

    def __init__(self, setup: Setup, *, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # held to end or replace the process
        self._stopped = False
        self._process = _Process(setup)

    @property
    def pid(self) -> int:
        """The present process's id."""
        return self._process.pid

    def draw(self, data: bytes | memoryview) -> Drawing:
        """Have an image decoded. Waits without the interpreter's lock.

        An image is tried once more when its process dies, for it may not have been the cause: a kernel short of memory
        takes what it finds, and so does whoever sends signals.

        Raises:
            ServiceError: the image cannot be used, or not within the limit, or its decoder died of it; or `stop` was
                called.
            RuntimeError, OSError: no process can be started.
        """
        for _ in range(_NUM_TRIES):
            process = self._process
            try:
                process.wait_ready()
                return process.draw(data, time.monotonic() + self._timeout_s)
            except TimeoutError as error:
                self._replace()
                _log.warning("decoder %d ended: more than %g s for %d bytes", process.pid, self._timeout_s, len(data))
                message = f"the image takes longer than {self._timeout_s:g} s to decode"
                raise ServiceError("decode_timeout", message) from error
            except (EOFError, OSError, ProtocolError):
                exit_code = self._replace(_EXIT_TIMEOUT_S)
                _log.warning("decoder %d died with code %d over %d bytes", process.pid, exit_code, len(data))
        if not process.is_ready:
            raise RuntimeError("decoding processes die before they are ready")
        raise ServiceError("invalid_image", "the image cannot be decoded: its decoder crashes")

    def stop(self) -> None:
        """End the process for good, and with an error what is being drawn."""
        with self._lock:
            self._stopped = True
            self._process.kill()

    def close(self) -> None:
        """Stop, and leave nothing of it. Nothing may be drawn any more."""
        self.stop()
        self._process.close()

    def _replace(self, exit_timeout_s: float = 0.0) -> int:
        """End the process, start the next, and give the exit code of the old: its own if it exits within the time."""
        with self._lock:
            exit_code = self._process.close(exit_timeout_s)
            if self._stopped:
                raise ServiceError("draining", "the service is ending", retry_after_s=1)
            self._process = _Process(self._setup)
        return exit_code


class _Process:
    """One decoding process and the socket to it.

    The socket blocks, with time-outs that the kernel keeps: an image costs the interpreter's lock a few times, not once
    for every buffer's worth of it.
    """

    def __init__(self, setup: Setup) -> None:
        self.is_ready = False
        self._config = setup.config
        self._socket, theirs = socket.socketpair()
        # What settings the environment holds stays here: some are secret.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        try:
            with theirs:
                self._popen = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
                    [sys.executable, "-P", "-W", "ignore", "-m", "service.decode_process", str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=_MALLOC | environment,
                    process_group=0,  # a terminal's Ctrl-C is the front end's to handle
                )
        except BaseException:
            self._socket.close()
            raise
        with contextlib.suppress(OSError):  # dead already: whoever waits for it will see
            self._socket.sendall(pack(setup))

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_ready(self) -> None:
        """Wait until it has started. EOFError if it does not."""
        if self.is_ready:
            return
        try:
            reply = self._receive_header(time.monotonic() + _START_TIMEOUT_S)
        except TimeoutError as error:
            raise EOFError from error
        if not isinstance(reply, Ready):
            raise ProtocolError("a decoder that did not begin with Ready")
        self.is_ready = True

    def draw(self, data: bytes | memoryview, deadline: float) -> Drawing:
        """Have an image decoded. TimeoutError at the deadline; EOFError, OSError or ProtocolError if it died."""
        self._send(pack(Encoded(len(data))), deadline)
        self._send(data, deadline)
        reply = self._receive_header(deadline)
        if isinstance(reply, Refused):
            raise ServiceError(reply.code, reply.message)
        if not isinstance(reply, Drawn):
            raise ProtocolError("a decoder that does not answer")
        try:
            planned = plan(self._config, *reply.image_size)
        except PlanError as error:
            raise ProtocolError("a decoder that drew an impossible image") from error
        width, height = planned.resized
        pixels = np.empty((height, width, 3), np.uint8)
        self._receive_into(pixels.data.cast("B"), deadline)
        return Drawing(Canvas(pixels, planned), reply.digest)

    def kill(self) -> None:
        self._popen.kill()

    def close(self, exit_timeout_s: float = 0.0) -> int:
        """End it, unless it exits by itself within the time, and give its exit code, negative for a signal."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(exit_timeout_s)
        self._popen.kill()
        self._socket.close()
        return self._popen.wait()

    def _send(self, data: bytes | memoryview, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._set_timeout(socket.SO_SNDTIMEO, deadline)
            with contextlib.suppress(BlockingIOError):
                rest = rest[self._socket.send(rest) :]

    def _receive_header(self, deadline: float) -> ToFront:
        length = bytearray(LENGTH.size)
        self._receive_into(memoryview(length), deadline)
        (num_bytes,) = LENGTH.unpack(length)
        if num_bytes > _LIMIT_HEADER_BYTES:
            raise ProtocolError("a decoder's header that is too long")
        header = bytearray(num_bytes)
        self._receive_into(memoryview(header), deadline)
        try:
            return _to_front.decode(header)
        except msgspec.DecodeError as error:
            raise ProtocolError("a decoder's header that cannot be read") from error

    def _receive_into(self, rest: memoryview, deadline: float) -> None:
        while rest:
            self._set_timeout(socket.SO_RCVTIMEO, deadline)
            with contextlib.suppress(BlockingIOError):
                num_bytes = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
                if num_bytes == 0:
                    raise EOFError
                rest = rest[num_bytes:]

    def _set_timeout(self, option: int, deadline: float) -> None:
        """Bound the socket's next call, which then gives what it has, or raises BlockingIOError if that is nothing."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        seconds, fraction = divmod(min(left_s, _LIMIT_WAIT_S), 1)
        microseconds = int(fraction * 1e6) or 1  # no time at all would mean for ever
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), microseconds))

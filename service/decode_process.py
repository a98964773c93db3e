"""The process that decodes images: `python -m service.decode_process PARENT_PID`, with a socket as its stdin.

Only here do foreign bytes meet Pillow and the C libraries under it, so that a decoder that hangs, crashes or eats
memory takes nothing along. Invariant: nothing secret is here, and nothing is kept from one image to the next, nor
imported but what decoding needs. Canvases are digested here, where their pixels are in the cache already.

A message is a msgpack header behind its length, then the buffer that the header announces. From the front end: `Setup`
once, then for each image `Encoded`, with the file's bytes. From here: `Ready` once, then for each image in turn
`Drawn`, with the canvas, or `Refused`.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Annotated, BinaryIO, TypeAlias

import msgspec

from distributed.processes import die_with_parent
from encoder.config import VisionConfig
from encoder.geometry import Size
from encoder.image import ImageError, ImageErrorCode, ImageProfile, read_canvas
from service.identity import canvas_digest

# What a decode may hold at once. WebP with transparency, on its side, is the hungriest: 22 bytes for each pixel.
MEMORY_BYTES_PER_PIXEL = 48
_MEMORY_BYTES = 512 * 1024 * 1024

# Of -1000 to 1000: where memory runs out, the kernel rather ends a decoder than a rank or the front end.
_OOM_SCORE = "500"

LENGTH = struct.Struct("!I")


class Setup(msgspec.Struct, frozen=True):
    """What every image is read with."""

    config: VisionConfig
    profile: ImageProfile
    limit_pixels: int


class Encoded(msgspec.Struct, frozen=True):
    """An image file. Buffer: its bytes."""

    num_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Images can come."""


class Drawn(msgspec.Struct, frozen=True, tag="drawn"):
    """The image's own size, turned upright, and its canvas's digest.

    Buffer: the canvas, uint8, height x width x 3 as planned for that size.
    """

    image_size: Size
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An image that cannot be used, and why, fit for whoever sent it."""

    code: ImageErrorCode
    message: str


ToFront: TypeAlias = Ready | Drawn | Refused


def pack(message: Setup | Encoded | ToFront) -> bytes:
    """A message's header behind its length."""
    header = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(header)) + header


def main() -> None:
    """Decode until the front end closes its end of the socket."""
    die_with_parent(int(sys.argv[1]))
    # Whoever ends a whole service by signals means the front end, which may have images to finish.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with (
        socket.socket(fileno=sys.stdin.fileno()) as front,
        front.makefile("rb") as incoming,
        contextlib.suppress(EOFError, ConnectionError),
    ):
        setup = msgspec.msgpack.decode(_read_header(incoming), type=Setup)
        _confine(setup.limit_pixels)
        _silence_libraries()
        front.sendall(pack(Ready()))
        while True:
            encoded = msgspec.msgpack.decode(_read_header(incoming), type=Encoded)
            _answer(front, setup, _read(incoming, encoded.num_bytes))


def _answer(front: socket.socket, setup: Setup, data: bytes) -> None:
    try:
        canvas = read_canvas(data, setup.config, setup.profile, limit_pixels=setup.limit_pixels)
    except ImageError as error:
        front.sendall(pack(Refused(error.code, str(error))))
    except MemoryError:
        front.sendall(pack(Refused("invalid_image", "the image takes too much memory to decode")))
    else:
        front.sendall(pack(Drawn(canvas.plan.image_size, canvas_digest(canvas))))
        front.sendall(canvas.pixels.data)


def _confine(limit_pixels: int) -> None:
    """Bound the memory that a decode can take, leave no core files of clients' images, and be the first to go."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit_bytes = _MEMORY_BYTES + MEMORY_BYTES_PER_PIXEL * limit_pixels
    limit_bytes = min(limit_bytes, sys.maxsize if most == resource.RLIM_INFINITY else most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not every sandbox has the file, or lets it be written
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _silence_libraries() -> None:
    """Keep what libraries have to say of an image out of the log, and Python's tracebacks in it."""
    logging.disable()
    sys.stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def _read_header(incoming: BinaryIO) -> bytes:
    return _read(incoming, *LENGTH.unpack(_read(incoming, LENGTH.size)))


def _read(incoming: BinaryIO, num_bytes: int) -> bytes:
    data = incoming.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


if __name__ == "__main__":
    main()

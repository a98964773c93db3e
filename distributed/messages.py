"""What crosses a process border: a msgpack header, then raw buffers, never pickle.

On the wire a message is one frame of header and one frame per image: uint8 pixels towards the ranks, rows back.
A header names the shape of every buffer that follows it, so a receiver can check each one before it uses it.
"""

from typing import Literal, TypeAlias

import msgspec

from encoder.layout import Layout

RowDtype: TypeAlias = Literal["bfloat16", "float16", "float32"]

DTYPE_BYTES: dict[RowDtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


class ProtocolError(RuntimeError):
    """A message that this side of the wire cannot have been sent."""


class ImageSpec(msgspec.Struct, frozen=True, array_like=True):
    """One canvas of a batch: its height and width in pixels, and which rows are wanted of it."""

    height: int
    width: int
    layout: Layout
    dtype: RowDtype


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    """Encode these images. Buffers: one per image, height x width x 3 bytes."""

    batch_id: int
    images: tuple[ImageSpec, ...]


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Is anyone there? Answered by rank 0's link thread, whatever its other threads are at."""

    nonce: int


class Assignment(msgspec.Struct, frozen=True, tag="assignment"):
    """Sent by rank 0 to its peers: each encode your share of this batch. `backlog`: patches each has still to do."""

    batch: Encode
    backlog: tuple[int, ...]


class Idle(msgspec.Struct, frozen=True, tag="idle"):
    """Sent by rank 0 to its peers again and again while there is no work, so that no rank times out."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish what was sent before this, then exit with code 0."""


class RankInfo(msgspec.Struct, frozen=True):
    """What a rank says of itself once it has joined the group."""

    rank: int
    pid: int
    host: str
    device: str
    fingerprint: str
    attention: str


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The group has loaded, joined and run a first forward: it takes batches from now on."""

    epoch: int
    ranks: tuple[RankInfo, ...]
    dtype: str
    layouts: tuple[Layout, ...]
    max_patches_per_forward: int
    out_width: int


class RowsSpec(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one image: their count and width, and whether they can be used.

    `not_finite`: the tower gave NaN or infinity. `overflow`: the dtype that was asked for cannot hold what it gave.
    """

    num_rows: int
    width: int
    state: Literal["good", "not_finite", "overflow"]


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    """The answer to `Encode`. Buffers: one per image in the order of the question, empty where not good.

    `wait_s` passed in rank 0 behind other batches and on the ways to and from its device. `encode_s` is rank 0's own.
    `gather_s` includes the wait for slower ranks and for the batch before, so the times of two batches may overlap.
    """

    batch_id: int
    images: tuple[RowsSpec, ...]
    rank_patches: tuple[int, ...]
    wait_s: float
    encode_s: float
    gather_s: float


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to `Ping`: for each rank, the seconds since rank 0 last saw its heartbeat move."""

    nonce: int
    silent_s: tuple[float, ...]


class Failure(msgspec.Struct, frozen=True):
    """Why a rank ended, left in a file for the front end. A `setup` failure would only repeat itself."""

    rank: int
    phase: Literal["setup", "join", "serve"]
    reason: str


ToRank: TypeAlias = Encode | Ping | Stop
ToFront: TypeAlias = Hello | Encoded | Pong
Command: TypeAlias = Assignment | Idle | Stop

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
_command: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def pack_header(message: ToRank | ToFront | Command) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def unpack_to_rank(header: bytes | memoryview) -> ToRank:
    """A header that the front end sent to rank 0."""
    return _to_rank.decode(header)


def unpack_to_front(header: bytes | memoryview) -> ToFront:
    """A header that rank 0 sent to the front end."""
    return _to_front.decode(header)


def unpack_command(header: bytes | memoryview) -> Command:
    """A header that rank 0 broadcast to its peers."""
    return _command.decode(header)

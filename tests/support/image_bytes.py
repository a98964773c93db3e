"""Image files written by hand or altered by hand, where Pillow would not write them: files that lie."""

import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    with io.BytesIO() as file:
        image.save(file, image_format, **options)
        return file.getvalue()


def scene(mode: str = "RGB", size: tuple[int, int] = (64, 48), seed: int = 7) -> Image.Image:
    """Noise under a ramp: no two of its turns, flips or crops are alike."""
    width, height = size
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 4))
    noise[..., 0] += np.linspace(0, 127, width).astype(int)
    noise[..., 1] += np.linspace(127, 0, height).astype(int)[:, None]
    return Image.fromarray(noise.astype(np.uint8)).convert(mode)


def decoded(data: bytes, mode: str = "RGB") -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return image.convert(mode)


# PNG


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_header(width: int, height: int, depth: int = 8, colour: int = 0, interlace: int = 0) -> bytes:
    return PNG_SIGNATURE + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace))


def png(
    width: int, height: int, rows: Sequence[bytes], *chunks: bytes, depth: int = 8, colour: int = 0, interlace: int = 0
) -> bytes:
    """Rows as they are stored, unfiltered; chunks go before them. It is whole if the rows are."""
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    body = [*chunks, png_chunk(b"IDAT", pixels), png_chunk(b"IEND", b"")]
    return png_header(width, height, depth, colour, interlace) + b"".join(body)


def with_png_chunk(data: bytes, kind: bytes, body: bytes) -> bytes:
    """The PNG with one more chunk, straight after its header."""
    return data[:33] + png_chunk(kind, body) + data[33:]


# JPEG


def jpeg_segment(marker: int, body: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body


def with_jpeg_segment(data: bytes, marker: int, body: bytes) -> bytes:
    """The JPEG with one more segment, straight after its first two bytes."""
    return data[:2] + jpeg_segment(marker, body) + data[2:]


def with_jpeg_size(data: bytes, width: int, height: int) -> bytes:
    """The JPEG with another size in its frame header."""
    start = next(i for i in range(2, len(data)) if data[i : i + 2] in (b"\xff\xc0", b"\xff\xc2"))
    return data[: start + 5] + struct.pack(">HH", height, width) + data[start + 9 :]


# TIFF

Tags = Mapping[int, tuple[int, Sequence[int]]]
"""Number to type and values; types: 1 byte, 3 short, 4 long."""


def tiff(tags: Tags, strip: bytes = b"", *, first_ifd: int | None = None, next_ifd: int = 0) -> bytes:
    """A little-endian TIFF: header, strip (at byte 8), values that do not fit into an entry, directory."""
    beyond, entries = bytearray(strip + b"\0" * (len(strip) % 2)), []
    for number, (kind, values) in sorted(tags.items()):
        packed = struct.pack(f"<{len(values)}{ {1: 'B', 3: 'H', 4: 'I'}[kind] }", *values)
        if len(packed) > 4:
            place = 8 + len(beyond)
            beyond += packed + b"\0" * (len(packed) % 2)
            packed = struct.pack("<I", place)
        entries.append(struct.pack("<HHI", number, kind, len(values)) + packed.ljust(4, b"\0"))
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + struct.pack("<I", next_ifd)
    start = 8 + len(beyond) if first_ifd is None else first_ifd
    return b"II*\0" + struct.pack("<I", start) + bytes(beyond) + directory


def gray_tags(width: int, height: int, num_bytes: int, bits: Sequence[int] = (8,)) -> dict[int, tuple[int, list[int]]]:
    """The tags of an uncompressed gray TIFF of one strip."""
    return {
        256: (4, [width]),
        257: (4, [height]),
        258: (3, list(bits)),
        259: (3, [1]),
        262: (3, [1]),
        273: (4, [8]),
        277: (3, [len(bits)]),
        278: (4, [height]),
        279: (4, [num_bytes]),
    }


# EXIF


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


def exif_block(kind: int, count: int, value: bytes) -> bytes:
    """A big-endian EXIF block of one orientation tag, of any type."""
    return b"MM\0*\0\0\0\x08\0\1\1\x12" + struct.pack(">HI", kind, count) + value.ljust(4, b"\0") + bytes(4)

"""Files that must be refused, each with the code of its refusal: no image, cut short, lying, or far too large."""

import gzip
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from image_bytes import (
    PNG_SIGNATURE,
    encode,
    gray_tags,
    jpeg_segment,
    png,
    png_chunk,
    png_header,
    scene,
    tiff,
    with_jpeg_size,
    with_png_chunk,
)
from PIL import Image
from tricky_images import CANARY, Make, upright

Code = Literal["unsupported_format", "invalid_image", "image_too_large", "degenerate_image"]


@dataclass(frozen=True, slots=True)
class Broken:
    """A file, and why it is refused."""

    name: str
    data: Make
    code: Code


def broken_images() -> list[Broken]:
    """All of them. Nothing is made before it is called for."""
    return [*_other_formats(), *_cut_short(), *_damaged(), *_without_pixels(), *_bombs()]


def _other_formats() -> Iterator[Broken]:
    foreign = {
        "nothing": b"",
        "one byte": b"\x89",
        "text": CANARY,
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(" + CANARY + b") run\n",
        "EPS with a preview": b"\xc5\xd0\xd3\xc6\x1e\0\0\0" + bytes(22) + b"%!PS-Adobe-3.0 EPSF-3.0\n",
        "PSD": b"8BPS\0\1" + bytes(6) + b"\0\3" + struct.pack(">IIHH", 9, 9, 8, 3) + bytes(99),
        "SVG": b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'><script>" + CANARY + b"</script></svg>",
        "SVG that reads a file": b"<!DOCTYPE svg [<!ENTITY x SYSTEM 'file:///etc/passwd'>]><svg>&x;</svg>",
        "PDF": b"%PDF-1.7\n1 0 obj<<>>endobj\n",
        "HTML": b"<html><img src=x onerror=" + CANARY + b">",
        "WAV": b"RIFF\x24\0\0\0WAVEfmt ",
        "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99),
        "MP4": b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(99),
        "FITS": b"SIMPLE  =                    T",
        "WMF": b"\xd7\xcd\xc6\x9a" + bytes(99),
        "pickle": b"\x80\x04\x95\x0c\0\0\0\0\0\0\0\x8c\5posix\x94.",
        "ImageMagick's script": b"push graphic-context\nimage over 0,0 0,0 'https://127.0.0.1/x.png'\n",
        "JPEG, junk before it": b"\0" + encode(scene(), "JPEG"),
        "PNG in a gzip": gzip.compress(upright()),
        "PNG, line ends converted": upright().replace(b"\r\n", b"\n"),
    }
    for name, data in foreign.items():
        yield Broken(name, lambda data=data: data, "unsupported_format")
    for image_format in ("ICO", "PPM", "TGA", "PCX", "SGI", "JPEG2000", "ICNS", "DDS", "PDF", "EPS"):
        image = scene("RGB", (64, 64))
        yield Broken(f"a real {image_format}", partial(encode, image, image_format), "unsupported_format")


def _cut_short() -> Iterator[Broken]:
    for name, options in (
        ("PNG", {}),
        ("JPEG", {"quality": 95}),
        ("JPEG", {"progressive": True}),
        ("GIF", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("AVIF", {}),
    ):
        data = encode(scene(size=(200, 150)), name, **options)
        for share in (0.02, 0.3, 0.6, 0.9):
            cut = data[: max(int(len(data) * share), 16)]
            yield Broken(f"{name} {options}, {share:.0%} of it", lambda cut=cut: cut, "invalid_image")
    for image_format in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"):
        head = encode(scene(), image_format)[:16]
        yield Broken(f"{image_format}, its first bytes", lambda head=head: head, "invalid_image")
        junk = head + bytes(range(256)) * 4
        yield Broken(f"{image_format}, its first bytes and junk", lambda junk=junk: junk, "invalid_image")


def _damaged() -> Iterator[Broken]:
    whole = upright()
    first_idat = whole.index(b"IDAT")
    flipped = bytearray(whole)
    flipped[first_idat + 40] ^= 0x55
    header_crc = bytearray(whole)
    header_crc[29] ^= 1
    gray, jpeg, gif = gray_tags(4, 3, 12), encode(scene(), "JPEG"), encode(scene("L"), "GIF")
    frame = jpeg.index(b"\xff\xc0")
    cases: dict[str, bytes] = {
        "PNG, a bit in its pixels": bytes(flipped),
        "PNG, the check of its header": bytes(header_crc),
        "PNG, pixels that are not packed": png_header(2, 2) + png_chunk(b"IDAT", CANARY) + png_chunk(b"IEND", b""),
        "PNG without pixels": png_header(2, 2) + png_chunk(b"IEND", b""),
        "PNG without a header": PNG_SIGNATURE + png_chunk(b"IDAT", zlib.compress(b"\0\0")) + png_chunk(b"IEND", b""),
        "PNG without a palette": png(2, 1, [b"\0\1"], colour=3),
        "PNG, no such filter": png_header(1, 1)
        + png_chunk(b"IDAT", zlib.compress(b"\x63\0"))
        + png_chunk(b"IEND", b""),
        "PNG of 3 bits": png(2, 1, [b"\0"], depth=3),
        "PNG of colour type 5": png(2, 1, [b"\0\0"], colour=5),
        "PNG, a chunk of 4 GB": png_header(2, 2) + b"\xff\xff\xff\xffIDAT" + CANARY,
        "PNG, a chunk of no name": png_header(2, 2) + png_chunk(b"\0\0\0\0", CANARY),
        "JPEG without a scan": jpeg[: jpeg.index(b"\xff\xda")] + b"\xff\xd9",
        "JPEG without tables": jpeg[:2] + jpeg[frame:].replace(b"\xff\xc4", b"\xff\xfe"),
        "JPEG of 5 components": jpeg[: frame + 9] + b"\5" + jpeg[frame + 10 :],
        "JPEG, only a comment": b"\xff\xd8" + jpeg_segment(0xFE, CANARY) + b"\xff\xd9",
        "GIF without a picture": gif[:13] + b";",
        "GIF, codes of 99 bits": _gif(b"\x63\2\0\1\0"),
        "GIF, an extension without an end": b"GIF89a\1\0\1\0\0\0\0!\xfe\xff" + CANARY,
        "BMP, a header of 7 bytes": b"BM" + bytes(12) + struct.pack("<I", 7) + bytes(99),
        "BMP, pixels far away": _bmp(offset=2**31 - 1),
        "BMP of 7 bits": _bmp(bits=7),
        "BMP, no such compression": _bmp(compression=99),
        "TIFF, directory beyond the end": tiff(gray, bytes(12), first_ifd=2**31),
        "TIFF, directory in its header": tiff(gray, bytes(12), first_ifd=0),
        "TIFF, an empty directory": tiff({}),
        "TIFF, pixels beyond the end": tiff(gray | {273: (4, [2**31])}, bytes(12)),
        "TIFF, no pixels": tiff({tag: value for tag, value in gray.items() if tag != 273}, bytes(12)),
        "TIFF of 7 bits": tiff(gray | {258: (3, [7])}, bytes(12)),
        "TIFF of 60,000 samples": tiff(gray | {277: (3, [60_000])}, bytes(12)),
        "TIFF, no such compression": tiff(gray | {259: (3, [31_337])}, bytes(12)),
        "TIFF, a JPEG that is none": tiff(gray | {259: (3, [7])}, CANARY),
        "WebP of another size": _webp_sized(2**32 - 2),
        "WebP of no chunk": b"RIFF\4\0\0\0WEBP",
        "WebP, a chunk of 4 GB": b"RIFF\x10\0\0\0WEBPVP8L\xff\xff\xff\xff" + bytes(99),
        "AVIF of a brand alone": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf",
        "AVIF, a box of 4 GB": b"\0\0\0\x1cftypavif\0\0\0\0avifmif1miaf\xff\xff\xff\xffmeta" + bytes(99),
    }
    for name, data in cases.items():
        yield Broken(name, lambda data=data: data, "invalid_image")


def _without_pixels() -> Iterator[Broken]:
    for width, height in ((0, 1), (1, 0), (0, 0)):
        for name, data in (
            ("PNG", png(width, height, [])),
            ("BMP", _bmp(width=width, height=height)),
            ("TIFF", tiff(gray_tags(width, height, 12), bytes(12))),
            ("JPEG", with_jpeg_size(encode(scene(), "JPEG"), width, height)),
        ):
            yield Broken(f"{name} of {width} x {height}", lambda data=data: data, "invalid_image")
    for size in ((1, 20_000), (1, 60_000)):
        narrow = Image.new("L", size)
        yield Broken(f"{size[0]} x {size[1]}", partial(encode, narrow), "degenerate_image")


def _bombs() -> Iterator[Broken]:
    jpeg, gif = encode(scene(), "JPEG"), encode(scene("L"), "GIF")
    cases: dict[str, bytes] = {
        "PNG of 10,001 x 10,000": png(10_001, 10_000, [b"\0"]),
        "PNG of 100,000 x 100,000": png(100_000, 100_000, [b"\0"]),
        "PNG as large as can be": png(2**31 - 1, 2**31 - 1, [b"\0"]),
        "PNG, a line of 2 billion": png(2**31 - 1, 1, [b"\0"]),
        "JPEG of 65,500 x 65,500": with_jpeg_size(jpeg, 65_500, 65_500),
        "GIF of 65,535 x 65,535": gif[:6] + b"\xff\xff\xff\xff" + gif[10:],
        "BMP of 2 billion squared": _bmp(width=2**31 - 1, height=2**31 - 1),
        "TIFF of 4 billion squared": tiff(gray_tags(2**32 - 1, 2**32 - 1, 12), bytes(12)),
        "TIFF of 50,000 x 50,000": tiff(gray_tags(50_000, 50_000, 12), bytes(12)),
        "WebP of 16,383 x 16,383": _webp_canvas(16_383, 16_383),
    }
    for name, data in cases.items():
        yield Broken(name, lambda data=data: data, "image_too_large")
    packed = zlib.compress(bytes(80_000_000), 9)
    for name, kind, body in (
        ("packed text of 80 MB", b"zTXt", b"Comment\0\0" + packed),
        ("packed international text of 80 MB", b"iTXt", b"Comment\0\1\0\0\0" + packed),
    ):
        yield Broken(f"PNG, {name}", partial(with_png_chunk, upright(), kind, body), "invalid_image")


def _gif(pixels: bytes) -> bytes:
    return b"GIF89a\1\0\1\0\x80\0\0" + bytes(6) + b",\0\0\0\0\1\0\1\0\0" + pixels + b";"


def _bmp(
    *,
    width: int = 4,
    height: int = 3,
    bits: int = 24,
    compression: int = 0,
    offset: int = 54,
    pixels: bytes = bytes(36),
) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(pixels), 0, 0, offset) + info + pixels


def _webp_sized(size: int) -> bytes:
    data = encode(scene(), "WEBP", lossless=True)
    return data[:4] + struct.pack("<I", size) + data[8:]


def _webp_canvas(width: int, height: int) -> bytes:
    """An extended WebP whose canvas is this large, and one small picture on it."""
    canvas = (
        b"VP8X"
        + struct.pack("<I", 10)
        + bytes(4)
        + (width - 1).to_bytes(3, "little")
        + (height - 1).to_bytes(3, "little")
    )
    picture = encode(scene(), "WEBP", lossless=True)[12:]
    return b"RIFF" + struct.pack("<I", 4 + len(canvas) + len(picture)) + b"WEBP" + canvas + picture

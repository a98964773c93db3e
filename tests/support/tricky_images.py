"""Images that are all right however odd they look, each with a plain PNG that it must equal where there is one.

`same` is what the picture shows under the profile `vllm`: upright, over white, its first frame, in eight bits. Files
are made when they are called for.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from image_bytes import (
    decoded,
    encode,
    exif,
    exif_block,
    gray_tags,
    png,
    png_chunk,
    scene,
    tiff,
    with_jpeg_segment,
    with_png_chunk,
)
from PIL import Image, ImageOps

Make = Callable[[], bytes]

SIZE = (64, 48)
RED, BLUE, WHITE = (200, 0, 0), (0, 0, 200), (255, 255, 255)
CANARY = b"kanarienvogel"
"""What no answer and no line of a log may hold."""

# The scene as a camera stores it that is held so (EXIF 2.3, figure 12).
_HELD: dict[int, Callable[[Image.Image], Image.Image]] = {
    1: lambda image: image,
    2: ImageOps.mirror,
    3: lambda image: image.rotate(180),
    4: ImageOps.flip,
    5: lambda image: ImageOps.mirror(image.rotate(270, expand=True)),
    6: lambda image: image.rotate(90, expand=True),
    7: lambda image: ImageOps.mirror(image.rotate(90, expand=True)),
    8: lambda image: image.rotate(270, expand=True),
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A file that must be answered with rows: those of `same`, and other than those of `unlike`."""

    name: str
    data: Make
    same: Make | None = None
    unlike: Make | None = None


def pictures() -> list[Picture]:
    """All of them."""
    return [*_orientations(), *_transparency(), *_depths(), *_frames(), *_encodings(), *_baggage(), *_shapes()]


def plain(image: Image.Image) -> Make:
    return partial(encode, image.convert("RGB"))


def shown_by(make: Make) -> Make:
    """What Pillow alone makes of a lossy file, as PNG."""
    return lambda: encode(decoded(make()))


def upright() -> bytes:
    return encode(scene())


def ycck_jpeg() -> bytes:
    """Adobe's transform 2: samples of CMYK, said to be YCCK."""
    data = encode(scene("CMYK"), "JPEG")
    place = data.index(b"Adobe") + 11
    return data[:place] + b"\2" + data[place + 1 :]


def top_down_bmp() -> bytes:
    data = bytearray(encode(ImageOps.flip(scene()), "BMP"))
    data[22:26] = struct.pack("<i", -SIZE[1])
    return bytes(data)


def _orientations() -> Iterator[Picture]:
    formats = [("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
    for number, hold in _HELD.items():
        stored = hold(scene())
        for image_format, options in formats:
            data = partial(encode, stored, image_format, exif=exif(number), **options)
            as_stored = None if number == 1 else plain(stored)
            yield Picture(f"{image_format} held as {number}", data, upright, as_stored)
    turned = _HELD[6](scene())
    held = partial(encode, turned, "JPEG", exif=exif(6))
    yield Picture("JPEG held as 6", held, lambda: encode(decoded(held()).rotate(270, expand=True)))
    packed = partial(encode, turned, "TIFF", exif=exif(6), compression="tiff_lzw")
    yield Picture("packed TIFF held as 6", packed, upright)
    pages = partial(encode, turned, "TIFF", exif=exif(6), save_all=True, append_images=[scene(seed=8)])
    yield Picture("TIFF of two pages held as 6", pages, upright)
    for name, block in (
        ("0", exif_block(3, 1, b"\0\0")),
        ("9", exif_block(3, 1, b"\0\x09")),
        ("65535", exif_block(3, 1, b"\xff\xff")),
        ("text", exif_block(2, 4, b"six\0")),
        ("a long text far away", exif_block(2, 2_000_000_000, b"\x7f\xff\xff\xff")),
        ("a fraction by zero", exif_block(5, 1, b"\0\0\0\x08")),
        ("of no type", exif_block(99, 1, b"\0\6")),
        ("none, junk", CANARY),
        ("none, cut short", b"MM\0*\0\0"),
        ("none, directory beyond the end", b"MM\0*\x7f\xff\xff\xff"),
        ("none, directory in a circle", b"MM\0*\0\0\0\x08\0\0\0\0\0\x08"),
        ("none, nothing", b""),
    ):
        yield Picture(f"PNG, orientation {name}", partial(with_png_chunk, upright(), b"eXIf", block), upright)
    jpeg = partial(encode, scene(), "JPEG")
    broken = partial(with_jpeg_segment, jpeg(), 0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff")
    yield Picture("JPEG of broken EXIF", broken, shown_by(jpeg))


def _transparency() -> Iterator[Picture]:
    white = plain(Image.new("RGB", SIZE, WHITE))
    opaque, hidden, half, gray = scene("RGBA"), scene("RGBA"), scene("RGBA"), scene("LA")
    opaque.putalpha(255)
    hidden.putalpha(0)
    half.putalpha(scene("L", seed=9))
    gray.putalpha(0)
    over_white = Image.new("RGB", SIZE, WHITE)
    over_white.paste(half, mask=half.getchannel("A"))
    yield Picture("RGBA, opaque", partial(encode, opaque), upright)
    yield Picture("RGBA, half seen through", partial(encode, half), plain(over_white), upright)
    yield Picture("RGBA, hidden colours", partial(encode, hidden), white)
    yield Picture("WebP, hidden colours", partial(encode, hidden, "WEBP", lossless=True, exact=True), white)
    yield Picture("TIFF, hidden colours", partial(encode, hidden, "TIFF"), white)
    yield Picture("LA, hidden grays", partial(encode, gray), white)
    yield Picture("PA in a TIFF", partial(encode, hidden.convert("PA"), "TIFF"), white)
    premultiplied = tiff(gray_tags(4, 3, 24, (8, 8)) | {338: (3, [1])}, bytes([50, 128]) * 12)
    yield Picture("La in a TIFF", lambda: premultiplied, plain(Image.new("RGB", (4, 3), (177, 177, 177))))

    palette = Image.new("P", SIZE, 0)
    palette.putpalette([*RED, *BLUE])
    palette.paste(1, (20, 10, 40, 30))
    shown = Image.new("RGB", SIZE, WHITE)
    shown.paste(BLUE, (20, 10, 40, 30))
    yield Picture("palette, transparency bytes", partial(encode, palette, transparency=b"\0\xff"), plain(shown))
    yield Picture("palette, one clear index", partial(encode, palette, transparency=0), plain(shown))
    yield Picture("GIF, one clear index", partial(encode, palette, "GIF", transparency=0), plain(shown))
    yield Picture("palette, opaque", partial(encode, palette), plain(palette), plain(shown))
    two_colours = png_chunk(b"PLTE", bytes(6))
    alphas = png_chunk(b"tRNS", b"\xff" * 256)
    black = plain(Image.new("RGB", (2, 1)))
    yield Picture(
        "palette, more alphas than colours", partial(png, 2, 1, [b"\0\1"], two_colours, alphas, colour=3), black
    )
    yield Picture("palette, an index beyond it", partial(png, 2, 1, [b"\0\xfe"], two_colours, colour=3))
    for mode, clear in (("1", 0), ("L", 70), ("RGB", RED), ("I;16", 70 << 8)):
        yield Picture(
            f"{mode}, one clear colour", partial(encode, Image.new(mode, SIZE, clear), transparency=clear), white
        )


def _depths() -> Iterator[Picture]:
    gray, rgb = np.asarray(scene("L")), np.asarray(scene())
    yield Picture("L", partial(encode, scene("L")), plain(scene("L")), upright)
    for dtype in ("<u2", ">u2"):
        deep = Image.fromarray(((gray.astype(np.uint16) << 8) + 200).astype(dtype))
        for image_format in ("PNG", "TIFF"):
            yield Picture(f"{image_format} of 16 bits {dtype}", partial(encode, deep, image_format), plain(scene("L")))
    yield Picture(
        "RGB of 16 bits",
        partial(png, *SIZE, [(row.astype(">u2") << 8).astype(">u2").tobytes() for row in rgb], depth=16, colour=2),
        upright,
    )
    yield Picture("LA of 16 bits", partial(png, 2, 1, [b"\x80\0\xff\xff" * 2], depth=16, colour=4))
    yield Picture("RGBA of 16 bits", partial(png, 1, 1, [b"\x80\0" * 3 + b"\xff\xff"], depth=16, colour=6))
    fourth = Image.fromarray(np.array([[0, 85, 170, 255]], np.uint8))
    yield Picture("gray of 2 bits", partial(png, 4, 1, [b"\x1b"], depth=2), plain(fourth))
    bits = scene("L").convert("1")
    for image_format, options in (("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "group4"})):
        yield Picture(f"1 bit, {image_format} {options}", partial(encode, bits, image_format, **options), plain(bits))

    ramp = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    for peak in (1.0, 255.0, 65535.0):
        floats = Image.fromarray(ramp.astype(np.float32) / 255 * np.float32(peak))
        yield Picture(f"float TIFF up to {peak:g}", partial(encode, floats, "TIFF"), plain(Image.fromarray(ramp)))
    no_numbers = Image.fromarray(np.full(SIZE[::-1], np.nan, np.float32))
    yield Picture("float TIFF of no numbers", partial(encode, no_numbers, "TIFF"), plain(Image.new("RGB", SIZE)))
    yield Picture("TIFF of 32 bits", partial(encode, Image.fromarray(ramp.astype(np.int32) << 16), "TIFF"))
    half_white = tiff(gray_tags(4, 2, 12, (12,)), b"\x80\x08\x00" * 4)
    yield Picture("TIFF of 12 bits", lambda: half_white, plain(Image.new("RGB", (4, 2), (128, 128, 128))))

    cmyk = partial(encode, scene("CMYK"), "JPEG")
    yield Picture("CMYK JPEG", cmyk, shown_by(cmyk))
    yield Picture("YCCK JPEG", ycck_jpeg, shown_by(ycck_jpeg), cmyk)
    yield Picture("CMYK TIFF", partial(encode, scene("CMYK"), "TIFF"), plain(scene("CMYK")))
    yield Picture("YCbCr TIFF", partial(encode, scene("YCbCr"), "TIFF"))
    yield Picture("LAB TIFF", partial(encode, Image.new("LAB", SIZE, (120, 100, 90)), "TIFF"))


def _frames() -> Iterator[Picture]:
    first, second, third = (scene(seed=seed).quantize(64, dither=0) for seed in (7, 8, 9))
    rgb = [image.convert("RGB") for image in (first, second, third)]
    gif = partial(encode, first, "GIF", save_all=True, append_images=[second, third])
    yield Picture("first frame of GIF", gif, plain(first), plain(second))
    yield Picture("interlaced GIF", partial(encode, first, "GIF", interlace=True), plain(first))
    for image_format, options in (("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})):
        frames = partial(encode, rgb[0], image_format, save_all=True, append_images=rgb[1:], **options)
        yield Picture(f"first frame of {image_format}", frames, plain(first), plain(second))
    apng = partial(encode, rgb[0], save_all=True, default_image=True, append_images=rgb[1:])
    yield Picture("APNG with a picture for others", apng, plain(first), plain(second))
    mpo = partial(encode, scene(), "MPO", save_all=True, append_images=[scene(seed=8)])
    yield Picture("first picture of MPO", mpo, shown_by(partial(encode, scene(), "JPEG")))
    cut = gif()[:-200]
    yield Picture("GIF, its last frame cut short", lambda: cut, plain(first))
    avif = partial(encode, scene(), "AVIF", save_all=True, append_images=[scene(seed=8)])
    yield Picture("first frame of AVIF", avif, shown_by(avif))


def _encodings() -> Iterator[Picture]:
    for name, options in (
        ("progressive", {"progressive": True}),
        ("4:4:4", {"subsampling": 0}),
        ("4:2:2", {"subsampling": 1}),
        ("4:1:1", {"subsampling": "4:1:1"}),
        ("with restarts", {"restart_marker_blocks": 1}),
        ("of quality 1", {"quality": 1}),
    ):
        jpeg = partial(encode, scene(size=(61, 43)), "JPEG", **options)
        yield Picture(f"JPEG {name}", jpeg, shown_by(jpeg))
    for compression in ("tiff_adobe_deflate", "packbits"):
        yield Picture(f"TIFF {compression}", partial(encode, scene(), "TIFF", compression=compression), upright)
    yield Picture("big TIFF", partial(encode, scene(), "TIFF", big_tiff=True), upright)
    yield Picture("BMP", partial(encode, scene(), "BMP"), upright)
    yield Picture("BMP from the top", top_down_bmp, upright)
    yield Picture("AVIF", partial(encode, scene(), "AVIF"))
    yield Picture("WebP with loss", partial(encode, scene(), "WEBP"))
    one = plain(Image.new("RGB", (1, 1), (128, 128, 128)))
    rest_black = plain(Image.fromarray(np.array([[9, 9], [0, 0], [0, 0]], np.uint8)))
    yield Picture("PNG, rows missing at its end", partial(png, 2, 3, [b"\x09\x09"]), rest_black)
    yield Picture("interlaced PNG", partial(png, 1, 1, [b"\x80"], interlace=1), one)


def _baggage() -> Iterator[Picture]:
    """What a file carries beside its pixels changes none of them."""
    jpeg = encode(scene(), "JPEG")
    shown = shown_by(lambda: jpeg)
    for name, marker, body in (
        ("half a profile", 0xE2, b"ICC_PROFILE\0\1\x09" + CANARY),
        ("a long comment", 0xFE, CANARY * 4000),
        ("XMP of junk", 0xE1, b"http://ns.adobe.com/xap/1.0/\0<" + CANARY),
        ("Photoshop's block cut short", 0xED, b"Photoshop 3.0\x008BIM\4"),
        ("an index of junk", 0xE2, b"MPF\0II*\0\x08\0\0\0\1\0x"),
    ):
        yield Picture(f"JPEG, {name}", partial(with_jpeg_segment, jpeg, marker, body), shown)
    yield Picture("JPEG, a segment of no length", lambda: jpeg[:2] + b"\xff\xe0\0\0" + jpeg[2:], shown)
    yield Picture("JPEG, profile of junk", partial(encode, scene(), "JPEG", icc_profile=CANARY * 99), shown)
    yield Picture("JPEG, junk behind", lambda: jpeg + CANARY * 99, shown)
    for name, kind, body in (
        ("profile of junk", b"iCCP", b"x\0\0" + zlib.compress(CANARY * 99)),
        ("unknown chunk", b"kaNa", CANARY),
        ("text", b"tEXt", b"Comment\0" + CANARY),
        ("text without a key", b"tEXt", b"\0\0\0"),
        ("gamma of nothing", b"gAMA", bytes(4)),
        ("odd resolution", b"pHYs", b"\xff" * 9),
        ("XMP of junk", b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<" + CANARY),
    ):
        yield Picture(f"PNG, {name}", partial(with_png_chunk, upright(), kind, body), upright)
    yield Picture("PNG, junk behind", lambda: upright() + CANARY * 99, upright)
    comment = partial(encode, scene("L"), "GIF", comment=CANARY * 99)
    yield Picture("GIF, a comment", comment, plain(scene("L")))


def _shapes() -> Iterator[Picture]:
    for size in ((1, 1), (1, 2), (2, 1), (1, 400), (400, 1), (3, 20_000), (20_000, 3), (15, 15)):
        image = Image.new("RGB", size, RED)
        yield Picture(f"{size[0]} x {size[1]}", partial(encode, image), partial(encode, image, "BMP"))

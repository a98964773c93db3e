"""Canvases against the reference's patches, and every kind of file that people really send."""

import hashlib
import io
import json
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from encoder.config import DEEPSEEK_V4, DEEPSEEK_V41, VisionConfig
from encoder.geometry import plan
from encoder.image import ImageError, ImageProfile, read_canvas

CONFIGS = {"deepseek_v4": DEEPSEEK_V4, "deepseek_v41": DEEPSEEK_V41}
PROFILES: list[ImageProfile] = ["vllm", "plain"]
LIMIT_PIXELS = 10_000_000

WHITE, RED, BLUE = (255, 255, 255), (200, 0, 0), (0, 0, 200)

LOSSLESS: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("BMP", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("WEBP", {"lossless": True}),
]
LOSSY: list[tuple[str, dict[str, Any]]] = [("JPEG", {}), ("GIF", {}), ("WEBP", {}), ("AVIF", {})]


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:
    with io.BytesIO() as file:
        image.save(file, image_format, **options)
        return file.getvalue()


def noise(mode: str = "RGB", size: tuple[int, int] = (60, 40)) -> Image.Image:
    width, height = size
    rgba = np.random.default_rng(7).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(rgba).convert(mode)


def read(data: bytes, profile: ImageProfile = "vllm", config: VisionConfig = DEEPSEEK_V4) -> NDArray[np.uint8]:
    return read_canvas(data, config, profile, limit_pixels=LIMIT_PIXELS).pixels


def centre(data: bytes, profile: ImageProfile = "vllm") -> tuple[int, ...]:
    """The colour in the middle of an image's canvas."""
    pixels = read(data, profile)
    height, width, _ = pixels.shape
    return tuple(pixels[height // 2, width // 2].tolist())


def refusal(data: bytes, limit_pixels: int = LIMIT_PIXELS) -> ImageError:
    with pytest.raises(ImageError) as caught:
        read_canvas(data, DEEPSEEK_V4, "vllm", limit_pixels=limit_pixels)
    return caught.value


def png(width: int, height: int, *, pixels: bytes = b"", extra: bytes = b"") -> bytes:
    """An 8-bit gray PNG, written by hand so that it may lie."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [png_chunk(b"IHDR", header), extra, png_chunk(b"IDAT", zlib.compress(pixels)), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def gray_tiff(width: int, height: int, bits: tuple[int, ...], strip: bytes, extra_samples: int | None = None) -> bytes:
    """A gray TIFF of depths that Pillow reads and does not write."""
    tags = {256: width, 257: height, 259: 1, 262: 1, 273: 8, 277: len(bits), 278: height, 279: len(strip)}
    if extra_samples is not None:
        tags[338] = extra_samples
    packed_bits = bits[0] if len(bits) == 1 else bits[0] | bits[1] << 16
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()]
    entries.append(struct.pack("<HHII", 258, 3, len(bits), packed_bits))
    entries.sort(key=lambda entry: entry[:2][::-1])
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + directory


def released_patches(pixels_HWC: NDArray[np.uint8], side: int) -> NDArray[np.uint16]:
    """The bits of the bfloat16 patches as the reference makes them: (patches, channel, y, x)."""
    height, width, _ = pixels_HWC.shape
    values = (pixels_HWC.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    bits = values.view(np.uint32)
    nearest_even = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    grid = nearest_even.astype("<u2").reshape(height // side, side, width // side, side, 3)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3))


@pytest.mark.parametrize("model", CONFIGS)
def test_patches_of_the_golden_files_are_bit_identical(goldens: Path, model: str) -> None:
    entries = json.loads((goldens / "preprocess.json").read_text())["images"]
    assert len(entries) == 9
    for entry in entries:
        data = (goldens / "images" / entry["file"]).read_bytes()
        canvas = read_canvas(data, CONFIGS[model], "plain", limit_pixels=LIMIT_PIXELS)
        assert list(canvas.plan.vit_grid) == entry[model]["vit_grid"]
        assert list(canvas.plan.llm_grid) == entry[model]["llm_grid"]
        digest = hashlib.sha256(released_patches(canvas.pixels, CONFIGS[model].patch_size)).hexdigest()
        assert digest == entry[model]["patches_bf16_sha256"], entry["file"]


def test_profiles_agree_on_an_upright_opaque_image(goldens: Path) -> None:
    for file in sorted((goldens / "images").iterdir()):
        assert np.array_equal(read(file.read_bytes(), "vllm"), read(file.read_bytes(), "plain")), file.name


@pytest.mark.parametrize("config", CONFIGS.values())
def test_canvas_is_what_the_plan_says(config: VisionConfig) -> None:
    canvas = read_canvas(encode(noise(), "PNG"), config, "vllm", limit_pixels=LIMIT_PIXELS)
    width, height = canvas.plan.resized
    assert canvas.plan == plan(config, 60, 40)
    assert canvas.pixels.shape == (height, width, 3)
    assert canvas.pixels.dtype == np.uint8
    assert canvas.pixels.flags.c_contiguous
    assert canvas.pixels.flags.writeable


def test_memoryview_is_read_as_bytes_are() -> None:
    data = encode(noise(), "PNG")
    view = memoryview(b"before" + data)[6:]
    assert np.array_equal(read_canvas(view, DEEPSEEK_V4, "vllm", limit_pixels=LIMIT_PIXELS).pixels, read(data))


def test_padding_is_gray_and_wide_images_are_stretched() -> None:
    tall = read(encode(Image.new("RGB", (100, 1000), RED), "PNG"))
    wide = read(encode(Image.new("RGB", (1000, 100), RED), "PNG"))
    assert tall[0, 0].tolist() == [127, 127, 127]
    assert np.all(wide == RED)


@pytest.mark.parametrize(("image_format", "options"), LOSSLESS + LOSSY)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_format_on_the_list_is_read(image_format: str, options: dict[str, Any], profile: ImageProfile) -> None:
    image = Image.new("RGB", (60, 40), (90, 120, 30))
    colour = centre(encode(image, image_format, **options), profile)
    assert colour == pytest.approx((90, 120, 30), abs=3)


@pytest.mark.parametrize(("image_format", "options"), LOSSLESS)
def test_lossless_formats_give_the_same_canvas(image_format: str, options: dict[str, Any]) -> None:
    assert np.array_equal(read(encode(noise(), image_format, **options)), read(encode(noise(), "PNG")))


@pytest.mark.parametrize("image_format", ["PNG", "GIF", "WEBP", "TIFF", "MPO", "AVIF"])
@pytest.mark.parametrize("profile", PROFILES)
def test_first_frame_is_taken(image_format: str, profile: ImageProfile) -> None:
    first, second = Image.new("RGB", (60, 40), RED), Image.new("RGB", (60, 40), BLUE)
    data = encode(first, image_format, save_all=True, append_images=[second])
    assert centre(data, profile) == pytest.approx(RED, abs=3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not an image",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"8BPS\0\1" + bytes(100),
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        encode(noise(), "ICO"),
        encode(noise(), "PPM"),
        encode(noise(), "JPEG2000"),
        encode(noise(), "TGA"),
        encode(noise(), "PDF"),
    ],
)
def test_formats_off_the_list_are_refused_by_content(data: bytes) -> None:
    assert refusal(data).code == "unsupported_format"


def test_nothing_but_the_listed_formats_is_ever_registered() -> None:
    """Ghostscript and its kind cannot be reached, whatever the bytes are."""
    code = """
from PIL import Image
from encoder.config import DEEPSEEK_V4
from encoder.image import ImageError, read_canvas

for data in (b"%!PS-Adobe-3.0", b"BM", b"II*\\0", b"RIFF\\0\\0\\0\\0WEBP", b"\\0\\0\\0\\x14ftypavif\\0\\0\\0\\0avif"):
    try:
        read_canvas(data, DEEPSEEK_V4, "vllm", limit_pixels=1)
    except ImageError:
        pass
print(*sorted(Image.OPEN))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"AVIF", "BMP", "DIB", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"}


@pytest.mark.parametrize(("image_format", "options"), LOSSLESS + LOSSY)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.filterwarnings("ignore")
def test_truncated_files_are_refused(image_format: str, options: dict[str, Any], share: float) -> None:
    data = encode(noise(size=(300, 200)), image_format, **options)
    error = refusal(data[: int(len(data) * share)])
    assert error.code == "invalid_image"
    assert error.__cause__ is not None


@pytest.mark.parametrize(
    "head", [b"BM", b"GIF89a", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"II*\0", b"RIFF\0\0\0\0WEBP"]
)
@pytest.mark.filterwarnings("ignore")
def test_files_of_a_signature_and_junk_are_refused(head: bytes) -> None:
    assert refusal(head + bytes(range(256))).code == "invalid_image"


def test_messages_are_our_own() -> None:
    """Pillow's would tell an address and a file object's class."""
    error = refusal(b"GIF89a" + bytes(100))
    assert str(error) == "the GIF image is broken or incomplete"
    assert "BytesIO" in str(error.__cause__)


@settings(max_examples=150)
@given(
    data=st.sampled_from([encode(noise(size=(40, 30)), name, **options) for name, options in LOSSLESS + LOSSY]),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12),
    profile=st.sampled_from(PROFILES),
)
def test_damaged_bytes_give_a_canvas_or_an_image_error(
    data: bytes, edits: list[tuple[float, int]], profile: ImageProfile
) -> None:
    damaged = bytearray(data)
    for place, value in edits:
        damaged[int(place * len(damaged))] = value
    try:
        canvas = read_canvas(bytes(damaged), DEEPSEEK_V4, profile, limit_pixels=100_000)
    except ImageError:
        return
    assert canvas.pixels.shape == (canvas.plan.resized[1], canvas.plan.resized[0], 3)


def test_size_is_checked_before_anything_is_decoded() -> None:
    """There are no pixels in this file: were they looked for, it would be invalid."""
    error = refusal(png(4001, 4000), limit_pixels=4000 * 4000)
    assert error.code == "image_too_large"
    assert str(error) == "4001 x 4000 pixels are more than 16000000"


def test_an_image_of_exactly_the_limit_is_read() -> None:
    data = encode(noise(size=(60, 40)), "PNG")
    read_canvas(data, DEEPSEEK_V4, "vllm", limit_pixels=60 * 40)
    assert refusal(data, limit_pixels=60 * 40 - 1).code == "image_too_large"


@pytest.mark.parametrize("side", [10_000, 20_000, 2**31 - 1])
def test_decompression_bombs_are_too_large(side: int) -> None:
    """Pillow warns of the first and refuses the others on its own."""
    assert refusal(png(side, side)).code == "image_too_large"


def test_text_chunk_bombs_are_refused() -> None:
    bomb = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(8_000_000)))
    assert refusal(png(1, 1, pixels=b"\0\0", extra=bomb)).code == "invalid_image"


@pytest.mark.parametrize("size", [(0, 1), (1, 0)])
def test_images_without_pixels_are_refused(size: tuple[int, int]) -> None:
    assert refusal(png(*size)).code == "invalid_image"


@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (1, 400), (400, 1), (3, 20_000), (20_000, 1)])
@pytest.mark.parametrize("config", CONFIGS.values())
def test_tiny_and_long_images_are_read(config: VisionConfig, size: tuple[int, int]) -> None:
    canvas = read_canvas(encode(Image.new("RGB", size, RED), "PNG"), config, "vllm", limit_pixels=LIMIT_PIXELS)
    assert np.any(np.all(canvas.pixels == RED, axis=-1))


@pytest.mark.parametrize(
    ("config", "size"),
    [(DEEPSEEK_V4, (1, 20_000)), (DEEPSEEK_V41, (1, 60_000)), (DEEPSEEK_V41, (90_000, 1))],
)
def test_images_of_which_nothing_would_be_left_are_refused(config: VisionConfig, size: tuple[int, int]) -> None:
    data = encode(Image.new("L", size), "PNG")
    with pytest.raises(ImageError, match="too narrow to draw") as caught:
        read_canvas(data, config, "vllm", limit_pixels=LIMIT_PIXELS)
    assert caught.value.code == "degenerate_image"


@pytest.mark.parametrize("config", CONFIGS.values())
@settings(max_examples=40)
@given(width=st.integers(1, 3), height=st.integers(10_000, 140_000), turned=st.booleans())
def test_refused_as_degenerate_is_what_pillow_draws_as_bare_gray(
    config: VisionConfig, width: int, height: int, turned: bool
) -> None:
    image = Image.new("L", (height, width) if turned else (width, height), 255)
    drawn = ImageOps.pad(image, plan(config, *image.size).resized, color=127)
    stretched = config.max_aspect_ratio is not None and turned
    vanished = not stretched and np.asarray(drawn).max() == 127
    data = encode(image, "PNG")
    if not vanished:
        read_canvas(data, config, "vllm", limit_pixels=LIMIT_PIXELS)
        return
    with pytest.raises(ImageError, match="too narrow to draw"):
        read_canvas(data, config, "vllm", limit_pixels=LIMIT_PIXELS)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("image_format", "options"), [*LOSSLESS[:1], ("WEBP", {"lossless": True}), ("JPEG", {})])
def test_vllm_turns_an_image_upright(image_format: str, options: dict[str, Any], orientation: int) -> None:
    """However a camera was held, its picture gives the canvas of the upright scene."""
    stored: dict[int, Callable[[Image.Image], Image.Image]] = {
        1: lambda scene: scene,
        2: ImageOps.mirror,
        3: lambda scene: scene.rotate(180),
        4: ImageOps.flip,
        5: lambda scene: ImageOps.mirror(scene.rotate(270, expand=True)),
        6: lambda scene: scene.rotate(90, expand=True),
        7: lambda scene: ImageOps.mirror(scene.rotate(90, expand=True)),
        8: lambda scene: scene.rotate(270, expand=True),
    }
    scene = Image.new("RGB", (64, 48), WHITE)
    scene.paste(RED, (0, 0, 32, 16))
    scene.paste(BLUE, (48, 32, 64, 48))
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = read(encode(stored[orientation](scene), image_format, exif=exif, **options))
    upright = read(encode(scene, image_format, **options))
    assert turned.shape == upright.shape
    assert np.abs(turned.astype(int) - upright).mean() < 2


def test_plain_leaves_orientation_alone() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(noise(), "PNG", exif=exif)
    assert np.array_equal(read(data, "plain"), read(encode(noise(), "PNG"), "plain"))
    assert read(data, "vllm").shape != read(data, "plain").shape


@pytest.mark.parametrize("profile", PROFILES)
def test_tiff_is_turned_once(profile: ImageProfile) -> None:
    """Pillow itself turns a TIFF when it loads it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encode(noise().rotate(90, expand=True), "TIFF", exif=exif)
    assert np.array_equal(read(turned, profile), read(encode(noise(), "TIFF"), profile))


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\2\0\0\0\x09\0\0\0\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\x63\0\0\0\0\0\0",
    ],
    ids=["no header", "offset beyond the end", "a long text", "orientation 99"],
)
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.filterwarnings("ignore")
def test_broken_exif_is_no_reason_to_refuse(image_format: str, exif: bytes) -> None:
    assert np.array_equal(read(encode(noise(), image_format, exif=exif)), read(encode(noise(), image_format)))


@pytest.mark.parametrize(
    ("mode", "image_format"),
    [("RGBA", "PNG"), ("RGBA", "TIFF"), ("RGBA", "WEBP"), ("LA", "PNG"), ("LA", "TIFF"), ("PA", "TIFF"), ("P", "PNG")],
)
def test_vllm_lays_transparency_over_white_and_hides_what_is_under_it(mode: str, image_format: str) -> None:
    hidden = Image.new("RGBA", (60, 40), (*RED, 0))
    data = encode(
        hidden.convert(mode), image_format, **({"lossless": True, "exact": True} if image_format == "WEBP" else {})
    )
    assert centre(data, "vllm") == WHITE
    assert centre(data, "plain") != WHITE


@pytest.mark.parametrize("profile", PROFILES)
def test_half_transparent_red(profile: ImageProfile) -> None:
    data = encode(Image.new("RGBA", (60, 40), (*RED, 128)), "PNG")
    assert centre(data, profile) == ((227, 127, 127) if profile == "vllm" else RED)


@pytest.mark.parametrize("transparency", [0, b"\0\xff"], ids=["one index", "alpha of each"])
def test_transparent_palette_entries(transparency: int | bytes) -> None:
    image = Image.new("P", (60, 40), 0)
    image.putpalette([*RED, *BLUE])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = encode(image, "PNG", transparency=transparency)
        assert centre(data, "vllm") == WHITE
        assert centre(data, "plain") == RED


def test_transparent_gif_is_laid_over_white() -> None:
    image = Image.new("P", (60, 40), 0)
    image.putpalette([*RED, *BLUE])
    data = encode(image, "GIF", transparency=0)
    assert (centre(data, "vllm"), centre(data, "plain")) == (WHITE, RED)


@pytest.mark.parametrize(
    ("image", "transparent", "opaque"),
    [
        (Image.new("1", (60, 40), 0), 0, (0, 0, 0)),
        (Image.new("L", (60, 40), 70), 70, (70, 70, 70)),
        (Image.new("RGB", (60, 40), RED), RED, RED),
        (Image.new("I;16", (60, 40), 70 << 8), 70 << 8, (70, 70, 70)),
    ],
    ids=["1", "L", "RGB", "I;16"],
)
def test_transparent_colour_of_a_png(image: Image.Image, transparent: int, opaque: tuple[int, ...]) -> None:
    data = encode(image, "PNG", transparency=transparent)
    assert (centre(data, "vllm"), centre(data, "plain")) == (WHITE, opaque)


@pytest.mark.parametrize(
    ("mode", "image_format"),
    [
        ("1", "PNG"),
        ("1", "TIFF"),
        ("L", "PNG"),
        ("L", "JPEG"),
        ("L", "BMP"),
        ("P", "PNG"),
        ("P", "GIF"),
        ("P", "BMP"),
        ("CMYK", "JPEG"),
        ("CMYK", "TIFF"),
        ("YCbCr", "TIFF"),
        ("LAB", "TIFF"),
    ],
)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_mode_arrives_as_pillow_converts_it(mode: str, image_format: str, profile: ImageProfile) -> None:
    source = Image.new("LAB", (60, 40), (120, 100, 90)) if mode == "LAB" else noise("RGB").convert(mode)
    data = encode(source, image_format)
    with Image.open(io.BytesIO(data)) as opened:
        converted = encode(opened.convert("RGB"), "PNG")
    assert np.array_equal(read(data, profile), read(converted, profile))


@pytest.mark.parametrize("profile", PROFILES)
def test_premultiplied_gray_arrives(profile: ImageProfile) -> None:
    """Mode La: gray 100 under alpha 128 is stored as 50."""
    data = gray_tiff(60, 40, (8, 8), bytes([50, 128]) * 60 * 40, extra_samples=1)
    with Image.open(io.BytesIO(data)) as opened:
        assert opened.mode == "La"
    assert centre(data, profile) == pytest.approx((177,) * 3 if profile == "vllm" else (100,) * 3, abs=1)


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
@pytest.mark.parametrize("image_format", ["PNG", "TIFF"])
@pytest.mark.parametrize("profile", PROFILES)
def test_16_bit_gray_is_scaled_as_16_bit_colour_is(dtype: str, image_format: str, profile: ImageProfile) -> None:
    samples = np.random.default_rng(3).integers(0, 65536, (40, 60))
    deep = encode(Image.fromarray(samples.astype(dtype)), image_format)
    assert np.array_equal(read(deep, profile), read(encode(Image.fromarray((samples >> 8).astype(np.uint8)), "PNG")))


@pytest.mark.parametrize("profile", PROFILES)
def test_12_bit_gray_is_scaled(profile: ImageProfile) -> None:
    """Two samples of 0x800 in three bytes: half of white."""
    data = gray_tiff(60, 40, (12,), b"\x80\x08\x00" * (60 * 40 // 2))
    assert centre(data, profile) == (128, 128, 128)


@pytest.mark.parametrize("white", [1.0, 255.0, 65535.0, 1e9])
@pytest.mark.parametrize("profile", PROFILES)
def test_float_tiff_is_scaled_to_the_first_white_that_holds_it(white: float, profile: ImageProfile) -> None:
    ramp = np.tile(np.linspace(0, 255, 64, dtype=np.float32).round(), (48, 1))
    data = encode(Image.fromarray(ramp / 255 * np.float32(white)), "TIFF")
    same = encode(Image.fromarray(ramp.astype(np.uint8)), "TIFF")
    assert np.array_equal(read(data, profile), read(same, profile))


def test_float_samples_that_are_no_numbers_are_black() -> None:
    samples = np.full((40, 60), 0.5, np.float32)
    samples[:20] = np.nan
    samples[0, 0], samples[0, 1] = np.inf, -np.inf
    pixels = read(encode(Image.fromarray(samples), "TIFF"))
    height, width, _ = pixels.shape
    assert pixels[height // 4, width // 2].tolist() == [0, 0, 0]
    assert pixels[height * 3 // 4, width // 2].tolist() == [128, 128, 128]


@pytest.mark.parametrize(("peak", "brightest"), [(255, 255), (200, 200), (65535, 255), (2**31 - 1, 255)])
def test_32_bit_integers_are_scaled(peak: int, brightest: int) -> None:
    samples = np.full((40, 60), peak, np.int32)
    assert centre(encode(Image.fromarray(samples), "TIFF")) == (brightest,) * 3


def test_the_front_end_needs_no_torch() -> None:
    modules = "encoder.checkpoint, encoder.config, encoder.geometry, encoder.image, encoder.layout"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"], check=False
    )
    assert done.returncode == 0

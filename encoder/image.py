"""Foreign bytes to the canvas that the tower reads. Only here is Pillow touched: its rounding is part of the model.

Invariant: whatever the bytes are, the answer is a canvas or an ImageError; nothing is decoded before its format is on
the list and its size is within the limit; and a canvas depends on the bytes, the config and the profile alone.
"""

import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Importing a plugin registers it. With these three, Pillow never goes on to load the formats that are not on the list.
from PIL import AvifImagePlugin, Image, ImageOps, TiffImagePlugin, WebPImagePlugin  # noqa: F401
from PIL.ExifTags import Base as ExifTag

from encoder.config import VisionConfig
from encoder.geometry import Plan, Size, plan

ImageProfile = Literal["vllm", "plain"]

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)
_HEAD_BYTES = 256

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_WHITE = (255, 255, 255)
_GRAY = (127, 127, 127)

# What white is in samples of 32 bits, since files do not say: the first of these that no sample exceeds.
_WHITES = {"I": (255.0, 65535.0, 2.0**31), "F": (1.0, 255.0, 65535.0)}

ImageErrorCode = Literal["unsupported_format", "invalid_image", "image_too_large", "degenerate_image"]


class ImageError(ValueError):
    """An image that cannot be used. The message is our own and fit for whoever sent the image; the cause is not."""

    def __init__(self, code: ImageErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Canvas:
    """One image, drawn to be cut. pixels: uint8, (H, W, 3), contiguous, H and W as plan.resized has them."""

    pixels: NDArray[np.uint8]
    plan: Plan


def read_canvas(data: bytes | memoryview, config: VisionConfig, profile: ImageProfile, *, limit_pixels: int) -> Canvas:
    """Decode an image's first frame and draw it as the model expects.

    `vllm` turns the image upright by its EXIF orientation and lays it over white where it is transparent, as vLLM does;
    `plain` converts to RGB and does nothing else, as the reference does. In both, gray of more than 8 bits is scaled.

    Raises:
        ImageError: `unsupported_format` if the content is none of JPEG, PNG, WebP, GIF, BMP, TIFF and AVIF;
            `image_too_large` beyond limit_pixels, or Pillow's own 178,956,970; `invalid_image` if it cannot be decoded
            whole; `degenerate_image` if it is so long that nothing of it would be left on the canvas.
    """
    image = _decode(data, profile, limit_pixels)
    planned = plan(config, *image.size)
    if config.max_aspect_ratio is not None and image.width >= config.max_aspect_ratio * image.height:
        drawn = image.resize(planned.resized, Image.Resampling.BICUBIC)
    elif _vanishes(image.size, planned.resized):
        raise ImageError("degenerate_image", f"an image of {image.width} x {image.height} pixels is too narrow to draw")
    else:
        drawn = ImageOps.pad(image, planned.resized, Image.Resampling.BICUBIC, color=_GRAY)
    return Canvas(pixels=np.array(drawn), plan=planned)


def _decode(data: bytes | memoryview, profile: ImageProfile, limit_pixels: int) -> Image.Image:
    """The first frame in RGB, turned upright if the profile says so."""
    format_name = _identify(bytes(data[:_HEAD_BYTES]))
    if format_name is None:
        raise ImageError("unsupported_format", "the content is not JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF")
    try:
        with Image.open(io.BytesIO(data), formats=[format_name]) as image:
            width, height = image.size
            if width * height > limit_pixels:
                raise ImageError("image_too_large", f"{width} x {height} pixels are more than {limit_pixels}")
            image.load()
            return _to_rgb(image, profile)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError("image_too_large", "the image has too many pixels") from error
    except Exception as error:  # decoders of foreign bytes raise whatever comes to hand, MemoryError included
        raise ImageError("invalid_image", f"the {format_name} image is broken or incomplete") from error


def _identify(head: bytes) -> str | None:
    """Pillow's name of the format that the first bytes announce, if it is on the list."""
    for signature, format_name in _SIGNATURES:
        if head.startswith(signature):
            return format_name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        box = head[8 : int.from_bytes(head[:4], "big")]
        brands = {box[start : start + 4] for start in range(0, len(box), 4)}
        if brands & {b"avif", b"avis"}:
            return "AVIF"
    return None


def _to_rgb(image: Image.Image, profile: ImageProfile) -> Image.Image:
    upright = _UPRIGHT.get(_orientation(image)) if profile == "vllm" else None
    image = _to_8_bits(image)
    if profile == "vllm" and image.has_transparency_data:
        image = image.convert("RGBA")
        opaque = Image.new("RGB", image.size, _WHITE)
        opaque.paste(image, mask=image.getchannel("A"))
        image = opaque
    elif image.mode != "RGB":
        # A transparent colour changes no pixel here, but makes Pillow warn.
        image.info.pop("transparency", None)
        image = image.convert("RGB")
    return image if upright is None else image.transpose(upright)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 if there is none. Read from the image as opened: a copy parses broken EXIF anew."""
    try:
        return int(image.getexif().get(ExifTag.Orientation, 1))
    except Exception:  # EXIF is foreign bytes too, and a picture is none the worse for it
        return 1


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale gray of more than 8 bits, which Pillow clips, and undo premultiplied gray, which it does not convert."""
    if image.mode == "La":
        return image.convert("LA")
    if image.mode.startswith("I;16"):
        samples = np.asarray(image)
        # The high byte, as Pillow takes it of 16-bit colour. TIFF's 12 bits arrive in the low ones.
        gray = Image.fromarray((samples >> (4 if _has_12_bits(image) else 8)).astype(np.uint8))
        transparent = image.info.get("transparency")
        if isinstance(transparent, int):
            gray.putalpha(Image.fromarray(np.where(samples == transparent, 0, 255).astype(np.uint8)))
        return gray
    if image.mode in ("I", "F"):
        samples = np.nan_to_num(np.asarray(image, dtype=np.float32), nan=0.0, posinf=0.0, neginf=0.0)
        peak = float(samples.max())
        white = next((scale for scale in _WHITES[image.mode] if peak <= scale), peak)
        return Image.fromarray((samples.clip(0, white) * np.float32(255 / white)).round().astype(np.uint8))
    return image


def _has_12_bits(image: Image.Image) -> bool:
    return isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE) == (12,)


def _vanishes(image_size: Size, canvas_size: Size) -> bool:
    """Whether ImageOps.pad would shrink a side to 0 pixels, on which Pillow 13 returns the bare background."""
    (width, height), (canvas_width, canvas_height) = image_size, canvas_size
    return round(width / height * canvas_height) == 0 or round(height / width * canvas_width) == 0

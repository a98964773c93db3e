"""What an image is, and what its rows are: digests of content, and of nothing that a client says of it.

Two images share an id only if the same rows answer both. Digests of images can be computed by anyone, so that no
process but the front end needs the key, which makes ids unguessable.
"""

import hashlib

from distributed.messages import RowDtype
from encoder.image import Canvas, ImageProfile
from encoder.layout import Layout

_DIGEST_BYTES = 32


def canvas_digest(canvas: Canvas) -> str:
    """64 hexadecimal digits of the pixels that the tower sees and of the size of the image that they came from."""
    header = f"{canvas.plan.image_size}|{canvas.pixels.shape}|".encode()
    return _digest(b"patchgrid.canvas", "", header, canvas.pixels.data)


def file_digest(data: bytes | memoryview) -> str:
    """64 hexadecimal digits of an encoded image, byte for byte."""
    return _digest(b"patchgrid.file", "", data)


def content_id(
    digest: str, *, fingerprint: str, profile: ImageProfile, layout: Layout, dtype: RowDtype, key: str
) -> str:
    """The id of one image's rows, 64 hexadecimal digits.

    Args:
        digest: the canvas's, or that of the file from which this profile makes it.
        fingerprint: of the weights, the config and the dtype that the tower computes in.
        profile, layout, dtype: as they were asked for.
        key: a deployment's secret; empty for ids that anyone can compute.
    """
    return _digest(b"patchgrid.rows", key, f"{digest}|{fingerprint}|{profile}|{layout}|{dtype}".encode())


def _digest(purpose: bytes, key: str, *parts: bytes | memoryview) -> str:
    hashed_key = hashlib.blake2b(key.encode()).digest() if key else b""
    digest = hashlib.blake2b(key=hashed_key, digest_size=_DIGEST_BYTES, person=purpose)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()

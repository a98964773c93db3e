"""An image's id: what it would be computed from, and nothing that a client says of it.

Two images share an id only if the same rows answer both. The key makes ids unguessable for others where that matters.
"""

import hashlib

from distributed.messages import RowDtype
from encoder.image import Canvas, ImageProfile
from encoder.layout import Layout

_DIGEST_BYTES = 32


def content_id(
    canvas: Canvas, *, fingerprint: str, profile: ImageProfile, layout: Layout, dtype: RowDtype, key: str
) -> str:
    """The id of one image's rows.

    Args:
        canvas: the pixels that the tower sees, and the size of the image that they came from.
        fingerprint: of the weights, the config and the dtype that the tower computes in.
        profile, layout, dtype: as they were asked for.
        key: a deployment's secret; empty for ids that anyone can compute.

    Returns:
        64 hexadecimal digits of a keyed BLAKE2b.
    """
    key_digest = hashlib.blake2b(key.encode()).digest() if key else b""
    digest = hashlib.blake2b(key=key_digest, digest_size=_DIGEST_BYTES, person=b"patchgrid.image")
    plan = canvas.plan
    digest.update(f"{fingerprint}|{profile}|{layout}|{dtype}|{plan.image_size}|{canvas.pixels.shape}|".encode())
    digest.update(canvas.pixels.data)
    return digest.hexdigest()

"""The full-size tower on two ranks: `scripts/test -m full_size`."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load
from server import Server

pytestmark = [pytest.mark.full_size, pytest.mark.timeout(900)]


def photo(width: int, height: int) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def embed(server: Server, image: bytes) -> torch.Tensor:
    headers = {"content-type": "image/jpeg", "accept": "application/x-safetensors"}
    response = server.client.post("/embed", content=image, headers=headers).raise_for_status()
    return load(response.content)["0"]


def test_two_ranks_agree_with_one_on_a_photo(start_server: Callable[..., Server]) -> None:
    rows = []
    for num_ranks in (1, 2):
        flags = ["--model=random:deepseek_v4", "--dtype=bfloat16", f"--nproc-per-node={num_ranks}"]
        server = start_server(*flags).wait_ready(timeout_s=300)
        rows.append(embed(server, photo(1920, 1080)))
        assert server.end() == 0
    one, two = rows
    assert one.dtype == two.dtype == torch.bfloat16
    assert one.shape == two.shape == (350, 4096)
    assert (one.float() - two.float()).norm() <= 1e-2 * one.float().norm()

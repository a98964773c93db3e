"""What a user would build instead: LitServe in front of timm's port of the same tower, with random weights.

    python -m benchmarks.peers.litserve_timm --port 8200 --threads 2

POST /predict with {"image": base64} answers {"shape": [rows, 4096], "embedding": base64 of little-endian bfloat16}.
Its canvases are patchgrid's own, so both servers encode the same patches.
"""

import argparse
import base64
from typing import Any

import litserve
import torch
from torch import Tensor

from benchmarks.peers.timm_tower import build_tower, normalise
from encoder.config import DEEPSEEK_V4
from encoder.image import read_canvas


class TowerApi(litserve.LitAPI):  # type: ignore[misc]
    """Images queue up to a batch; timm takes one size at a time, so each is a forward of its own."""

    def __init__(self, threads: int, batch: int) -> None:
        super().__init__(max_batch_size=batch, batch_timeout=0.01)
        self._threads = threads

    def setup(self, device: str) -> None:
        """Build the tower in the worker's process."""
        torch.set_num_threads(self._threads)
        self._device = torch.device(device)
        self._tower = build_tower(DEEPSEEK_V4, None, self._device, torch.bfloat16)

    def decode_request(self, request: dict[str, str]) -> Tensor:
        """The image as (1, 3, H, W) in bfloat16, normalised to [-1, 1]."""
        canvas = read_canvas(base64.b64decode(request["image"]), DEEPSEEK_V4, "vllm", limit_pixels=10**8)
        return normalise(torch.from_numpy(canvas.pixels), torch.device("cpu"), torch.bfloat16)

    def batch(self, inputs: list[Tensor]) -> list[Tensor]:
        """Sizes differ: nothing to stack."""
        return inputs

    @torch.inference_mode()
    def predict(self, inputs: Any) -> list[Tensor]:
        """Rows of each image."""
        images = inputs if isinstance(inputs, list) else [inputs]
        return [self._tower(image.to(self._device))[0].cpu() for image in images]

    def unbatch(self, output: list[Tensor]) -> list[Tensor]:
        """One answer an image."""
        return output

    def encode_response(self, output: Any) -> dict[str, object]:
        """An image's rows as base64."""
        rows = output[0] if isinstance(output, list) else output
        octets = rows.contiguous().view(torch.int16).numpy().tobytes()
        return {"shape": list(rows.shape), "embedding": base64.b64encode(octets).decode()}


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(prog="benchmarks.peers.litserve_timm", description=__doc__)
    parser.add_argument("--port", type=int, default=8200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    server = litserve.LitServer(TowerApi(options.threads, options.batch), accelerator="auto", timeout=1800)
    server.run(port=options.port, host="127.0.0.1", generate_client_file=False)


if __name__ == "__main__":
    main()

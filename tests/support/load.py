"""Clients who send images for as long as they are let, and compare every answer with the undisturbed one."""

import io
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import httpx
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load
from server import Server

SIZES = [(420, 420), (600, 300), (300, 640), (800, 450), (384, 384), (1024, 280), (500, 333), (640, 480)]
OPTIONS = {"dtype": "float32"}
HEADERS = {"accept": "application/x-safetensors", "content-type": "image/png"}


def png(pixels: np.ndarray) -> bytes:  # type: ignore[type-arg]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def plain(colour: tuple[int, int, int], width: int = 392, height: int = 392) -> bytes:
    """An image of one colour, large enough to reach the canvas unscaled and unpadded."""
    return png(np.full((height, width, 3), colour, np.uint8))


def noise(count: int, seed: int = 0) -> list[bytes]:
    rng = np.random.default_rng(seed)
    sizes = [SIZES[index % len(SIZES)] for index in range(count)]
    return [png(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)) for width, height in sizes]


def embed(client: httpx.Client, image: bytes, **headers: str) -> httpx.Response:
    return client.post("/embed", params=OPTIONS, content=image, headers=HEADERS | headers)


@dataclass
class Reference:
    """Images and the rows that an undisturbed server gives for them."""

    images: list[bytes]
    rows: list[torch.Tensor]

    @classmethod
    def of(cls, server: Server, images: Sequence[bytes]) -> "Reference":
        return cls(
            list(images), [load(embed(server.client, image).raise_for_status().content)["0"] for image in images]
        )

    def check(self, index: int, response: httpx.Response) -> None:
        rows, expected = load(response.content)["0"], self.rows[index]
        assert rows.shape == expected.shape
        assert (rows - expected).norm() <= 1e-3 * expected.norm(), f"image {index} got other rows"


class Load:
    """Clients in threads, from `with` to the end of the block, each of whom wants its next answer.

    What they try again for: "refusals" at the door, as clients do; "outages" too, when nobody is there; or "nothing".
    """

    def __init__(
        self,
        url: str,
        reference: Reference,
        *,
        clients: int = 8,
        forgive: Literal["nothing", "refusals", "outages"] = "refusals",
    ) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self._url = url
        self._reference = reference
        self._forgive = forgive
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(clients)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def wait_for(self, count: int, timeout_s: float = 120.0) -> None:
        """Until this many more answers are in."""
        goal = self.answers["200"] + count
        deadline = time.monotonic() + timeout_s
        while self.answers["200"] < goal:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, f"no progress: {self.answers}"
            time.sleep(0.02)

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._stopping.is_set():
            try:
                with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
                    while not self._stopping.is_set():
                        self._ask(client, int(rng.integers(len(self._reference.images))))
            except httpx.TransportError as error:
                if self._forgive != "outages":
                    self.errors.append(repr(error))
                    return
                time.sleep(0.1)
            except AssertionError as error:
                self.errors.append(str(error))
                return

    def _ask(self, client: httpx.Client, index: int) -> None:
        response = embed(client, self._reference.images[index])
        if response.status_code == 200:
            self._reference.check(index, response)
        else:
            assert response.status_code in (429, 503), response.text
            assert self._forgive != "nothing", response.text
            assert int(response.headers["retry-after"]) > 0
            time.sleep(0.1)
        self.answers[str(response.status_code)] += 1

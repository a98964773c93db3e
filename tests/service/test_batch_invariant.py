"""With --batch-invariant an image's rows are the same bytes, whatever it is batched with and whichever rank runs it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from load import embed, noise
from server import Server


def test_rows_are_the_same_bytes_under_random_batching(start_server: Callable[..., Server], goldens: Path) -> None:
    images = noise(12, seed=4)
    flags = [f"--model={goldens / 'tiny-deepseek_v4'}", "--dtype=bfloat16", "--batch-invariant", "--cache-bytes=0"]
    alone = start_server(*flags, "--nproc-per-node=1").wait_ready()
    expected = [embed(alone.client, image).raise_for_status().content[-100_000:] for image in images]
    assert alone.end() == 0

    server = start_server(*flags, "--nproc-per-node=2").wait_ready()
    rng = np.random.default_rng(0)
    for _ in range(4):
        order = [int(index) for index in rng.permutation(len(images))]
        with ThreadPoolExecutor(len(order)) as clients:
            answers = list(clients.map(lambda index: embed(server.client, images[index]).content[-100_000:], order))
        assert answers == [expected[index] for index in order]
    assert server.metric("patchgrid_rank_patches_total", rank="1") > 0
    assert server.end() == 0

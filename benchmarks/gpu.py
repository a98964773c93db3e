"""The full-size tower on one GPU: parity of the attention backends, speed, share of the matrix rate, memory; graphs.

    python -m benchmarks.gpu [--model random:deepseek_v4] [--seconds 20] [--json FILE]

Speeds are those of whole forwards, from canvases in host memory to rows on the device. The matrix rate is that of one
large bfloat16 product on the same device in the same sitting; arithmetic is that of linear layers, attention, aligner.
Graphs are compared with eager forwards of the same images: alone is one call until its rows are there, queued is the
time of each in a row of calls that nobody waits for between, and host is what a call keeps the caller.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks._arithmetic import arithmetic, matrix_rate
from encoder.attention import ATTENTIONS, AttentionName, AttentionUnavailable
from encoder.checkpoint import open_checkpoint
from encoder.config import VisionConfig
from encoder.geometry import Plan, Size, plan
from encoder.graphs import CAPTURABLE
from encoder.layout import Layout
from encoder.tower import Tower
from encoder.weights import load_weights
from service.bench_images import MIXES

GRAPHED_SIZES: dict[str, list[Size]] = {
    "a small image": [(300, 300)],
    "a large image": [(1920, 1080)],
    "4 images": [(640, 480), (500, 333), (640, 480), (500, 333)],
}
QUEUED = 8
IMAGES = 64
PARITY_IMAGES = 8
TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    figure: str


def per_call(call: Callable[[], object], at_least_s: float) -> float:
    """Seconds per call, the device's work included, after two calls to warm up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    calls, started = 0, time.perf_counter()
    while time.perf_counter() - started < at_least_s:
        call()
        torch.cuda.synchronize()
        calls += 1
    return (time.perf_counter() - started) / calls


def canvases(plans: Sequence[Plan]) -> list[Tensor]:
    """Noise canvases."""
    rng = np.random.default_rng(0)
    shapes = [(each.resized[1], each.resized[0], 3) for each in plans]
    return [torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]


def difference(found: Tensor, expected: Tensor) -> float:
    """Of two answers, relative to the second."""
    found, expected = found.float().cpu(), expected.float().cpu()
    return float((found - expected).norm() / expected.norm())


def built(
    config: VisionConfig, weights: dict[str, Tensor], name: AttentionName, graph_patches: int | None
) -> tuple[Tower, float, float]:
    """A tower in bfloat16, the seconds it took to build, and the bytes of the device that it holds."""
    torch.cuda.empty_cache()
    free, started = torch.cuda.mem_get_info()[0], time.perf_counter()
    tower = Tower(
        config,
        weights,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        attention=name,
        graph_patches=graph_patches,
    )
    torch.cuda.synchronize()
    return tower, time.perf_counter() - started, free - torch.cuda.mem_get_info()[0]


def host_time(call: Callable[[], object], at_least_s: float) -> float:
    """Seconds until a call returns, with nothing queued before it."""
    calls, spent, started = 0, 0.0, time.perf_counter()
    while time.perf_counter() - started < at_least_s:
        torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        spent += time.perf_counter() - before
        calls += 1
    torch.cuda.synchronize()
    return spent / calls


def compare_graphs(
    config: VisionConfig, weights: dict[str, Tensor], name: AttentionName, seconds: float
) -> tuple[list[Row], bool]:
    """Graphs against eager forwards, and whether they agree."""
    eager, eager_build_s, eager_bytes = built(config, weights, name, 0)
    graphed, build_s, held_bytes = built(config, weights, name, None)
    rows = [
        Row(f"{name}: graphs, time to capture", f"{build_s - eager_build_s:.1f} s"),
        Row(f"{name}: graphs, memory", f"{(held_bytes - eager_bytes) / 2**30:.2f} GiB"),
    ]
    agree = True
    part_s = seconds / (6 * len(GRAPHED_SIZES))
    for what, sizes in GRAPHED_SIZES.items():
        images = canvases([plan(config, *size) for size in sizes])
        layouts: list[Layout] = ["rows"] * len(images)
        apart = difference(graphed.encode(images, layouts), eager.encode(images, layouts))
        agree = agree and apart < TOLERANCE
        rows.append(Row(f"{name}: graphs, {what}, difference from eager", f"{apart:.1e}"))
        for kind, tower in (("eager", eager), ("graph", graphed)):

            def call(tower: Tower = tower, images: list[Tensor] = images, layouts: list[Layout] = layouts) -> None:
                tower.encode(images, layouts)

            def queue(call: Callable[[], None] = call) -> None:
                for _ in range(QUEUED):
                    call()

            alone, queued, host = per_call(call, part_s), per_call(queue, part_s) / QUEUED, host_time(call, part_s)
            figure = f"{alone * 1e3:.2f} ms alone, {queued * 1e3:.2f} ms queued, {host * 1e3:.2f} ms host"
            rows.append(Row(f"{name}: {kind}, {what}", figure))
    return rows, agree


def run(model: str, seconds: float) -> tuple[list[Row], bool]:
    """All measurements, and whether the backends agree."""
    device = torch.device("cuda")
    checkpoint = open_checkpoint(model)
    config, weights = checkpoint.config, load_weights(checkpoint)
    sizes = MIXES["mixed"]
    plans = [plan(config, *sizes[index % len(sizes)]) for index in range(IMAGES)]
    images, patches = canvases(plans), sum(each.num_patches for each in plans)
    layouts: list[Layout] = ["rows"] * IMAGES
    rows = [Row("device", f"{torch.cuda.get_device_name()}, torch {torch.__version__}")]
    rate = matrix_rate(device, torch.bfloat16)
    rows.append(Row("bfloat16 matrix product", f"{rate / 1e12:.0f} TFLOP/s"))
    exact = Tower(config, weights, device=device, dtype=torch.float32, attention="sdpa")
    expected = exact.encode(images[:PARITY_IMAGES], layouts[:PARITY_IMAGES]).cpu()
    del exact
    agree = True
    for name in ATTENTIONS:
        try:
            tower = built(config, weights, name, 0)[0]
        except AttentionUnavailable as error:
            rows.append(Row(name, str(error)))
            continue
        apart = difference(tower.encode(images[:PARITY_IMAGES], layouts[:PARITY_IMAGES]), expected)
        agree = agree and apart < TOLERANCE
        rows.append(Row(f"{name}: difference from float32", f"{apart:.1e}"))
        torch.cuda.reset_peak_memory_stats()
        packed = per_call(lambda tower=tower: tower.encode(images, layouts), seconds / 4)  # type: ignore[misc]
        share = arithmetic(config, plans) / packed / rate
        memory = torch.cuda.max_memory_allocated() / 2**30
        tower.max_patches_per_forward = 1
        alone = per_call(lambda tower=tower: tower.encode(images, layouts), seconds / 4)  # type: ignore[misc]
        rows.append(Row(f"{name}: packed", f"{patches / packed:,.0f} patches/s, {IMAGES / packed:.1f} images/s"))
        rows.append(Row(f"{name}: share of the matrix rate", f"{share:.0%}"))
        rows.append(Row(f"{name}: against image by image", f"{alone / packed:.2f}x"))
        rows.append(Row(f"{name}: peak memory", f"{memory:.1f} GiB"))
        del tower
        if name in CAPTURABLE:
            graph_rows, graphs_agree = compare_graphs(config, weights, name, seconds)
            rows += graph_rows
            agree = agree and graphs_agree
    return rows, agree


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--model", default="random:deepseek_v4")
    parser.add_argument("--seconds", type=float, default=20.0, help="measuring time for each backend")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    rows, agree = run(arguments.model, arguments.seconds)
    print("| what | figure |\n|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.figure} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({row.what: row.figure for row in rows}, indent=1))
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

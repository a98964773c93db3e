"""The full-size tower by itself: packed forwards at several caps, against the same images one at a time.

Invariant: contestants take turns on the same canvases in one sitting, in another order every round, and only ratios
within a round are compared. Throughput is the median round's.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._common import describe_machine, report
from encoder.checkpoint import open_checkpoint
from encoder.config import VisionConfig
from encoder.geometry import Size, plan
from encoder.packing import split_packs
from encoder.tower import Tower
from encoder.weights import load_weights

# Each mix is repeated as often as --images needs.
_MIXES: dict[str, tuple[Size, ...]] = {
    "small": ((300, 300), (500, 333), (224, 224), (300, 300)),
    "real": (
        (1920, 1080),
        (640, 480),
        (500, 333),
        (1024, 1024),
        (300, 300),
        (1080, 1920),
        (1280, 720),
        (1700, 2200),
    ),
}
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to run the images of one mix. run encodes them all and returns when it is done."""

    name: str
    forwards: int
    run: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Pass:
    """One contestant's turn. kernel_share is of its CPU time, and goes to page faults mostly."""

    wall_s: float
    cpu_s: float
    kernel_share: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass as reported, so that a disturbed one can be told by its cores and not by its result."""

    dtype: str
    mix: str
    round: int
    run: str
    wall_s: float
    cores: float
    kernel_share: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """One contestant over all rounds. The ratio is that of images per second to one at a time in the same round.

    cores is what this process got: where it is less than the machine has, something else was running.
    """

    dtype: str
    mix: str
    run: str
    forwards: int
    rounds: int
    images_per_s: float
    patches_per_s: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    cores: float
    kernel_share: float


def main() -> None:
    """Measure every mix in every dtype."""
    parser = argparse.ArgumentParser(prog="benchmarks.encoder", description=__doc__)
    parser.add_argument("--model", default="random:deepseek_v4")
    parser.add_argument("--dtype", nargs="+", choices=list(_DTYPES), default=["bfloat16"])
    parser.add_argument("--mix", nargs="+", choices=list(_MIXES), default=list(_MIXES))
    parser.add_argument("--caps", nargs="+", type=int, default=[2560, 8192], help="most patches in one packed forward")
    parser.add_argument("--images", type=int, default=6, help="images in each mix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=340.0, help="no round begins that would end later than this")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()

    machine = describe_machine()
    start = time.perf_counter()
    runs_left = len(options.dtype) * len(options.mix)
    checkpoint = open_checkpoint(options.model)
    weights = load_weights(checkpoint)
    device = torch.device(options.device)
    rows: list[Throughput] = []
    turns: list[Turn] = []
    for dtype in options.dtype:
        placed = {name: tensor.to(device, _DTYPES[dtype]) for name, tensor in weights.items()}
        towers = {
            cap: Tower(checkpoint.config, placed, device=device, dtype=_DTYPES[dtype], max_patches_per_forward=cap)
            for cap in options.caps
        }
        for mix in options.mix:
            sizes = [_MIXES[mix][index % len(_MIXES[mix])] for index in range(options.images)]
            canvases = _draw_canvases(checkpoint.config, sizes)
            contestants = _contestants(towers, canvases, checkpoint.config.patch_size)
            towers[options.caps[0]].encode([min(canvases, key=Tensor.numel)], ["rows"])  # kernels are loaded
            # What is left of the time is shared by what is left to run.
            now = time.perf_counter()
            passes = _take_turns(contestants, options.rounds, now + (start + options.limit_s - now) / runs_left)
            runs_left -= 1
            num_patches = sum(_num_patches(canvas, checkpoint.config.patch_size) for canvas in canvases)
            rows += [_summarize(dtype, mix, len(canvases), num_patches, each, passes) for each in contestants]
            turns += [
                Turn(dtype, mix, turn, name, each.wall_s, each.cpu_s / each.wall_s, each.kernel_share)
                for turn, by_name in enumerate(passes, 1)
                for name, each in by_name.items()
            ]
    report({"every pass": turns, "throughput of the tower": rows}, machine, options.json)


def _draw_canvases(config: VisionConfig, sizes: Sequence[Size]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    canvases = []
    for size in sizes:
        width, height = plan(config, *size).resized
        canvases.append(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator))
    return canvases


def _num_patches(canvas: Tensor, patch_size: int) -> int:
    return canvas.shape[0] * canvas.shape[1] // patch_size**2


def _contestants(towers: dict[int, Tower], canvases: Sequence[Tensor], patch_size: int) -> list[Contestant]:
    """One at a time first. All towers share their weights, and differ in the cap only."""

    def one_at_a_time() -> None:
        tower = next(iter(towers.values()))
        for canvas in canvases:
            tower.encode([canvas], ["rows"])
        _wait(tower)

    def packed(tower: Tower) -> Callable[[], None]:
        def run() -> None:
            tower.encode(canvases, ["rows"] * len(canvases))
            _wait(tower)

        return run

    counts = [_num_patches(canvas, patch_size) for canvas in canvases]
    return [
        Contestant("one at a time", len(canvases), one_at_a_time),
        *(Contestant(f"cap {cap}", len(split_packs(counts, cap)), packed(tower)) for cap, tower in towers.items()),
    ]


def _wait(tower: Tower) -> None:
    if tower.device.type == "cuda":
        torch.cuda.synchronize(tower.device)


def _take_turns(contestants: Sequence[Contestant], rounds: int, deadline: float) -> list[dict[str, Pass]]:
    """As many rounds as asked for, or as there is time for, but one at least."""
    passes: list[dict[str, Pass]] = []
    round_s = 0.0
    for turn in range(rounds):
        start = time.perf_counter()
        if start + round_s > deadline:
            break
        first = turn % len(contestants)
        passes.append({each.name: _measure(each) for each in (*contestants[first:], *contestants[:first])})
        round_s = time.perf_counter() - start
        print(f"round {turn + 1}: " + ", ".join(f"{name} {each.wall_s:.1f} s" for name, each in passes[-1].items()))
    return passes


def _measure(contestant: Contestant) -> Pass:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    contestant.run()
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    user_s, kernel_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return Pass(wall_s, user_s + kernel_s, kernel_s / (user_s + kernel_s))


def _summarize(
    dtype: str, mix: str, num_images: int, num_patches: int, contestant: Contestant, passes: list[dict[str, Pass]]
) -> Throughput:
    own = [each[contestant.name] for each in passes]
    wall_s = statistics.median(each.wall_s for each in own)
    ratios = [each["one at a time"].wall_s / each[contestant.name].wall_s for each in passes]
    return Throughput(
        dtype=dtype,
        mix=f"{mix}: {num_images} images, {num_patches} patches",
        run=contestant.name,
        forwards=contestant.forwards,
        rounds=len(passes),
        images_per_s=num_images / wall_s,
        patches_per_s=num_patches / wall_s,
        ratio=statistics.median(ratios),
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
        cores=statistics.median(each.cpu_s / each.wall_s for each in own),
        kernel_share=statistics.median(each.kernel_share for each in own),
    )


if __name__ == "__main__":
    main()

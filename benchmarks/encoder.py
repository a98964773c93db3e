"""The tower by itself: packed forwards at several caps, one image at a time, and timm's port of it where there is one.

    .venv/bin/python -m benchmarks.encoder                       # ours
    PEERS/bin/python -m benchmarks.encoder                       # timm too: see benchmarks/peers/requirements.txt
    .venv/bin/python -m benchmarks.encoder --model demo --rounds 1 --images 2 --caps 2560     # seconds, to try it

Invariant: contestants take turns on the same canvases in one sitting, in another order every round, under a rank's
environment. A share of the floor is the time that the arithmetic would take at the rate of a large matrix product in
the same round, as a part of the time that it took. Everything else is the median round's.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks._arithmetic import arithmetic, matrix_rate
from benchmarks._chart import draw_bars, open_chart
from benchmarks._contestants import ONE_AT_A_TIME, Contestant, build_timm, check_agreement, enter_contestants
from benchmarks._environment import enter_rank_environment
from benchmarks._progress import Steps, show_steps
from benchmarks._report import describe_machine, make_parser, report
from encoder.attention import ATTENTIONS
from encoder.checkpoint import open_checkpoint
from encoder.geometry import plan
from encoder.tower import Tower
from encoder.weights import load_weights
from service.bench_images import MIXES

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CHECKED_SIZES = ((300, 300), (500, 333))


@dataclass(frozen=True, slots=True)
class Pass:
    """One contestant's turn. kernel_share is of its CPU time, and goes to page faults mostly."""

    wall_s: float
    cpu_s: float
    kernel_share: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One pass as reported, so that a disturbed one can be told by its cores and not by its result."""

    mix: str
    round: int
    run: str
    wall_s: float
    matrix_tflop_per_s: float
    cores: float
    kernel_share: float


@dataclass(frozen=True, slots=True)
class Throughput:
    """One contestant over all rounds. The ratio is that of images per second to one at a time in the same round.

    cores is what this process got: where it is less than the machine has, something else was running.
    """

    mix: str
    run: str
    forwards: int
    rounds: int
    images_per_s: float
    patches_per_s: float
    share_of_floor: float
    share_lowest: float
    share_highest: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    cores: float
    kernel_share: float


@dataclass(frozen=True, slots=True)
class Round:
    """Everybody's turn, and the matrix rate beside it."""

    operations_per_s: float
    passes: dict[str, Pass]


def main() -> None:
    """Measure every mix."""
    options = _parse()
    enter_rank_environment()
    machine = describe_machine()
    start = time.perf_counter()
    checkpoint = open_checkpoint(options.model)
    config, weights = checkpoint.config, load_weights(checkpoint)
    device, dtype = torch.device(options.device), _DTYPES[options.dtype]
    placed = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
    towers = {
        cap: Tower(config, placed, device=device, dtype=dtype, attention=options.attention, max_patches_per_forward=cap)
        for cap in options.caps
    }
    timm = None if options.no_timm else build_timm(config, weights, device, dtype)
    check_agreement(enter_contestants(towers, timm, [plan(config, *size) for size in _CHECKED_SIZES]))
    rows: list[Throughput] = []
    turns: list[Turn] = []
    for left, mix in zip(range(len(options.mix), 0, -1), options.mix, strict=True):
        sizes = [MIXES[mix][index % len(MIXES[mix])] for index in range(options.images)]
        plans = [plan(config, *size) for size in sizes]
        contestants = enter_contestants(towers, timm, plans)
        # What is left of the time is shared by what is left to run.
        now = time.perf_counter()
        deadline = now + (start + options.limit_s - now) / left
        with show_steps(options.rounds * len(contestants)) as steps:
            rounds = _take_turns(contestants, options.rounds, deadline, device, dtype, steps)
        num_patches = sum(each.num_patches for each in plans)
        name = f"{mix}: {len(plans)} images, {num_patches:,} patches"
        rows += [
            _summarize(name, len(plans), num_patches, arithmetic(config, plans), each, rounds) for each in contestants
        ]
        turns += [_turn(mix, number, run, each) for number, each in enumerate(rounds, 1) for run in each.passes]
    tower = towers[options.caps[0]]
    title = f"{options.model}, {options.dtype}, attention {tower.attention}, {torch.get_num_threads()} threads"
    machine = report({"every pass": turns, title: rows}, machine, options.json)
    if options.png:
        _draw(options.png, title, machine, rows)


def _parse() -> argparse.Namespace:
    parser = make_parser("benchmarks.encoder", __doc__)
    parser.add_argument("--model", default="random:deepseek_v4", help="as for serve; random:deepseek_v41 is V4.1's")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="bfloat16")
    parser.add_argument("--attention", choices=["auto", *ATTENTIONS], default="auto")
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=["small", "mixed"])
    parser.add_argument("--caps", nargs="+", type=int, default=[2560, 8192], help="most patches in one packed forward")
    parser.add_argument("--images", type=int, default=8, help="in each mix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=600.0, help="no round begins that would end later than this")
    parser.add_argument("--no-timm", action="store_true", help="leave timm out where there is one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser.parse_args()


def _take_turns(
    contestants: Sequence[Contestant],
    rounds: int,
    deadline: float,
    device: torch.device,
    dtype: torch.dtype,
    steps: Steps,
) -> list[Round]:
    """As many rounds as asked for, or as there is time for, but one at least."""
    done: list[Round] = []
    round_s = 0.0
    for number in range(rounds):
        start = time.perf_counter()
        if start + round_s > deadline:
            break
        rates, passes = [matrix_rate(device, dtype)], {}
        first = number % len(contestants)
        for each in (*contestants[first:], *contestants[:first]):
            steps.begin(f"round {number + 1}: {each.name}")
            passes[each.name] = _measure(each)
            steps.done(f"round {number + 1}: {each.name}: {passes[each.name].wall_s:.1f} s")
        rates.append(matrix_rate(device, dtype))
        done.append(Round(max(rates), passes))
        round_s = time.perf_counter() - start
    return done


def _measure(contestant: Contestant) -> Pass:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    contestant.run()
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    user_s, kernel_s = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return Pass(wall_s, user_s + kernel_s, kernel_s / (user_s + kernel_s))


def _turn(mix: str, number: int, run: str, each: Round) -> Turn:
    taken = each.passes[run]
    tflop_per_s = each.operations_per_s / 1e12
    return Turn(mix, number, run, taken.wall_s, tflop_per_s, taken.cpu_s / taken.wall_s, taken.kernel_share)


def _summarize(
    mix: str, num_images: int, num_patches: int, operations: float, contestant: Contestant, rounds: Sequence[Round]
) -> Throughput:
    own = [each.passes[contestant.name] for each in rounds]
    wall_s = statistics.median(each.wall_s for each in own)
    shares = [operations / each.operations_per_s / each.passes[contestant.name].wall_s for each in rounds]
    ratios = [each.passes[ONE_AT_A_TIME].wall_s / each.passes[contestant.name].wall_s for each in rounds]
    return Throughput(
        mix=mix,
        run=contestant.name,
        forwards=contestant.forwards,
        rounds=len(rounds),
        images_per_s=num_images / wall_s,
        patches_per_s=num_patches / wall_s,
        share_of_floor=statistics.median(shares),
        share_lowest=min(shares),
        share_highest=max(shares),
        ratio=statistics.median(ratios),
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
        cores=statistics.median(each.cpu_s / each.wall_s for each in own),
        kernel_share=statistics.median(each.kernel_share for each in own),
    )


def _draw(file: Path, title: str, machine: str, rows: Sequence[Throughput]) -> None:
    runs = list(dict.fromkeys(row.run for row in rows))
    mixes = list(dict.fromkeys(row.mix for row in rows))
    by_run = {run: [row for row in rows if row.run == run] for run in runs}
    with open_chart(
        file,
        f"Patches per second: {title}",
        machine,
        height_in=1.6 + 0.32 * len(rows),
        note="In brackets: share of the floor, which is the arithmetic at the rate of a large matrix product.",
    ) as (axes,):
        draw_bars(
            axes,
            ["\n".join(mix.replace(":", ",").split(", ")) for mix in mixes],
            {run: [row.patches_per_s for row in found] for run, found in by_run.items()},
            "patches/s",
            notes={
                run: [f"{row.patches_per_s:,.0f} ({row.share_of_floor:.0%})" for row in found]
                for run, found in by_run.items()
            },
        )


if __name__ == "__main__":
    main()

"""Two ranks of one server against two independent processes: what sharing batches and the all-gather cost.

    .venv/bin/python -m benchmarks.ranks
    .venv/bin/python -m benchmarks.ranks --model demo --rounds 1 --images 16      # half a minute, to try it

Invariant: the same images on the same cores, one thread a rank, in turns and in one sitting, and nothing is known from
before: the caches are off.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks._chart import draw_bars, open_chart
from benchmarks._progress import Steps, show_steps
from benchmarks._report import describe_machine, make_parser, report
from benchmarks._server import Server
from service.bench import Load, LoadReport, run_load
from service.bench_images import MIXES, Photos, Pictures


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """One round: the same images through one server with two ranks, and halved through two servers with one each."""

    round: int
    images: int
    two_ranks_images_per_s: float
    two_processes_images_per_s: float
    ratio: float
    errors: int


def main() -> None:
    """Let both take turns."""
    parser = make_parser("benchmarks.ranks", __doc__)
    parser.add_argument("--model", default="random:deepseek_v4")
    parser.add_argument("--mix", choices=list(MIXES), default="small")
    parser.add_argument("--images", type=int, default=16, help="in each turn, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    if options.images % 8:
        parser.error("--images is not a multiple of 8")

    machine = describe_machine()
    photos = Photos((MIXES[options.mix] * 8)[:8], seed=0)
    with show_steps(options.rounds) as steps:
        rows = _compare(options.model, photos, options.images, options.rounds, steps)
    title = "two ranks against two processes, one thread each"
    machine = report({title: rows}, machine, options.json)
    if options.png:
        series = {
            "one server, two ranks": [row.two_ranks_images_per_s for row in rows],
            "two servers, one rank each": [row.two_processes_images_per_s for row in rows],
        }
        with open_chart(
            options.png, f"Two ranks against two processes, {options.model}", machine, height_in=1.8 + 0.5 * len(rows)
        ) as (axes,):
            draw_bars(axes, [f"round {row.round}" for row in rows], series, "images/s")


def _compare(model: str, photos: Photos, images: int, rounds: int, steps: Steps) -> list[TwoRanks]:
    os.environ["OMP_NUM_THREADS"] = "1"  # the ranks inherit it
    flags = (f"--model={model}", "--device=cpu", "--decode-processes=1", "--cache-bytes=0")
    rows = []
    with ExitStack() as stack:
        steps.begin("three servers start")
        together = stack.enter_context(Server(*flags, "--nproc-per-node=2"))
        apart = [stack.enter_context(Server(*flags, "--nproc-per-node=1")) for _ in range(2)]
        for server in (together, *apart):
            server.wait_for("/health/ready")
            run_load(Load(server.url, clients=4, images=4), photos)
        for number in range(1, rounds + 1):
            watch = steps.watch(f"round {number}, two ranks")
            one = run_load(Load(together.url, clients=16, images=images), photos, on_progress=watch)
            steps.begin(f"round {number}, two processes")
            with ThreadPoolExecutor(2) as threads:
                start = time.perf_counter()
                halves = list(threads.map(_half(photos, images), [server.url for server in apart], range(2)))
                elapsed_s = time.perf_counter() - start
            two_images_per_s = sum(half.images for half in halves) / elapsed_s
            errors = sum(count for each in (one, *halves) for _, count in each.errors)
            ratio = one.images_per_s / two_images_per_s
            rows.append(TwoRanks(number, images, one.images_per_s, two_images_per_s, ratio, errors))
            steps.done(f"round {number}: {ratio:.3f} of two processes")
    return rows


def _half(photos: Pictures, images: int) -> Callable[[str, int], LoadReport]:
    """A load of every other image of the mix but for their order: the first or the second half of each round of it."""

    def run(url: str, which: int) -> LoadReport:
        load = Load(url, clients=8, images=images // 2)
        return run_load(load, lambda index: photos(index // 4 * 8 + which * 4 + index % 4))

    return run


if __name__ == "__main__":
    main()

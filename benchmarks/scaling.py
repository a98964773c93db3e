"""More of everything: 1 to 64 ranks in a simulation at this machine's costs, and what deciding takes as queues grow.

    .venv/bin/python -m benchmarks.scaling
    .venv/bin/python -m benchmarks.scaling --curve 20 1860 190 --batches 50      # ten seconds, to try it

Invariant: only the cost of a forward is measured, and it may be given instead; see benchmarks/_simulation.py. Two real
ranks are benchmarks.ranks'.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks._chart import draw_lines, open_chart
from benchmarks._cost import CostCurve, fit_curve, given_curve
from benchmarks._environment import enter_rank_environment
from benchmarks._growth import Growth, measure_growth
from benchmarks._progress import show_steps
from benchmarks._report import Row, describe_machine, make_parser, report
from benchmarks._simulation import Group, Simulated, simulate
from service.bench_images import MIXES

_RANKS = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    """Measure, fit, simulate."""
    parser = make_parser("benchmarks.scaling", __doc__)
    parser.add_argument("--model", default="random:deepseek_v4", help="whose forwards are measured")
    parser.add_argument("--parts", nargs="+", choices=["simulation", "growth"], default=["simulation", "growth"])
    parser.add_argument("--mix", nargs="+", choices=list(MIXES), default=["mixed", "thumbnails", "screens"])
    parser.add_argument("--rounds", type=int, default=2, help="of measuring forwards")
    parser.add_argument("--cap", type=int, default=2560, help="simulated: patches in a forward of a rank")
    parser.add_argument(
        "--curve", nargs=3, type=float, metavar=("MS", "US", "NS"), help="simulated: a, b and c, rather than measured"
    )
    parser.add_argument("--forwards", nargs="+", type=int, default=[1, 3], help="simulated: a rank's part of a batch")
    parser.add_argument("--batches", type=int, default=400, help="simulated, for each number of ranks")
    parser.add_argument("--gather-gb-per-s", type=float, default=2.0, help="simulated: what a rank receives")
    options = parser.parse_args()
    enter_rank_environment()

    machine = describe_machine()
    tables: dict[str, Sequence[Row]] = {}
    simulated: list[Simulated] = []
    growth: list[Growth] = []
    if "simulation" in options.parts:
        curve = given_curve(*options.curve) if options.curve else _measure_curve(options.model, options.rounds)
        tables["cost of a forward"] = [curve]
        groups = [
            Group(curve, ranks, options.cap, forwards, options.gather_gb_per_s * 1e9)
            for forwards in options.forwards
            for ranks in _RANKS
        ]
        with show_steps(len(options.mix) * len(groups)) as steps:
            for mix in options.mix:
                for group in groups:
                    name = f"{mix}, {group.forwards} forwards for each of {group.ranks} ranks"
                    steps.begin(name)
                    simulated.append(simulate(group, mix, options.batches))
                    steps.done(f"{name}: {simulated[-1].efficiency:.0%} busy")
        tables["simulated ranks"] = simulated
    if "growth" in options.parts:
        tables["growth of what decides"] = growth = measure_growth()
    machine = report(tables, machine, options.json)
    if options.png:
        _draw(options.png, machine, simulated, growth)


def _measure_curve(model: str, rounds: int) -> CostCurve:
    with show_steps(rounds) as steps:
        return fit_curve(model, rounds, steps)


def _draw(file: Path, machine: str, simulated: Sequence[Simulated], growth: Sequence[Growth]) -> None:
    panels = bool(simulated) + bool(growth)
    with open_chart(
        file, "More ranks, simulated (left), and what deciding takes (right)", machine, panels=panels
    ) as axes:
        if simulated:
            lines = {}
            for mix, forwards in dict.fromkeys((each.mix, each.forwards) for each in simulated):
                found = [each for each in simulated if (each.mix, each.forwards) == (mix, forwards)]
                name = f"{mix}, {forwards} forward{'s' * (forwards > 1)}"
                lines[name] = ([each.ranks for each in found], [100 * each.efficiency for each in found])
            paired = len({each.forwards for each in simulated}) == 2
            draw_lines(axes[0], lines, "ranks", "% of the ranks' time spent encoding", paired=paired)
            axes[0].set_xscale("log", base=2)
            axes[0].set_xticks(_RANKS, map(str, _RANKS))
            axes[0].set_ylim(0, 105)
        if growth:
            names = dict.fromkeys(each.what for each in growth)
            found_by_name = {name: [each for each in growth if each.what == name] for name in names}
            lines = {
                name: ([each.number for each in found], [each.us_each for each in found])
                for name, found in found_by_name.items()
            }
            draw_lines(axes[-1], lines, "images or ranks", "microseconds for each of them")
            axes[-1].set_xscale("log")
            axes[-1].set_yscale("log")
            axes[-1].xaxis.set_major_formatter("{x:,.0f}")
            axes[-1].yaxis.set_major_formatter("{x:g}")


if __name__ == "__main__":
    main()

"""One plain chart of a benchmark's table: 800 points wide, titled, the machine named below. Needs matplotlib.

Invariant: colours are told apart by everyone (Okabe and Ito's), and every figure that is drawn is in the table too.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#F0E442")
_DARK = ("#0072B2", "#009E73", "#D55E00")
_MARKERS = "osD^vPX*"
_GREY = "#555555"
_DPI = 150  # on 8 inches: 1200 pixels, for screens with fine ones


@contextmanager
def open_chart(
    file: Path, title: str, machine: str, *, panels: int = 1, height_in: float = 4.5, note: str = ""
) -> Iterator[list["Axes"]]:
    """Axes to draw on, side by side. The file is written when the block ends; note goes before the machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height_in), layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
    caption = "\n".join(textwrap.wrap(f"{note} {machine}".strip(), 125))
    figure.supxlabel(caption, x=0.012, ha="left", fontsize=7.5, color=_GREY)
    found: list[Axes] = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        axes.set_axisbelow(True)
    yield found
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=_DPI)


def draw_bars(
    axes: "Axes",
    labels: Sequence[str],
    series: Mapping[str, Sequence[float]],
    unit: str,
    *,
    notes: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Horizontal bars, one of each series for every label, from the top down; a bar's note stands at its end."""
    thickness = 0.8 / len(series)
    for place, (name, values) in enumerate(series.items()):
        offsets = [index - 0.4 + (place + 0.5) * thickness for index in range(len(labels))]
        bars = axes.barh(offsets, values, thickness * 0.9, label=name, color=COLOURS[place])
        texts = notes[name] if notes else [_short(value) for value in values]
        axes.bar_label(bars, texts, padding=3, fontsize=8.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_xlabel(unit, fontsize=9)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    if len(series) > 1:
        _add_legend_above(axes, len(series))


def draw_shares(axes: "Axes", labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Horizontal bars of one length, cut into parts that add up to 1; parts that are wide enough are labelled."""
    left = [0.0] * len(labels)
    for place, (name, shares) in enumerate(parts.items()):
        percents = [100 * share for share in shares]
        bars = axes.barh(range(len(labels)), percents, 0.7, left, label=name, color=COLOURS[place])
        texts = [f"{percent:.0f}" if percent >= 5 else "" for percent in percents]
        ink = "white" if COLOURS[place] in _DARK else "black"
        axes.bar_label(bars, texts, label_type="center", fontsize=8.5, color=ink)
        left = [before + percent for before, percent in zip(left, percents, strict=True)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the time", fontsize=9)
    _add_legend_above(axes, len(parts))


def draw_lines(
    axes: "Axes",
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_unit: str,
    y_unit: str,
    *,
    paired: bool = False,
) -> None:
    """Lines with a marker at every point. Paired: of two that follow each other, the first is dashed in one colour."""
    for place, (name, (xs, ys)) in enumerate(lines.items()):
        kind, style = (place // 2, "--" if place % 2 == 0 else "-") if paired else (place, "-")
        axes.plot(xs, ys, style, marker=_MARKERS[kind], markersize=4.5, label=name, color=COLOURS[kind])
    axes.set_xlabel(x_unit, fontsize=9)
    axes.set_ylabel(y_unit, fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.legend(fontsize=8.5, frameon=False)


def _add_legend_above(axes: "Axes", columns: int) -> None:
    axes.set_title(" ", fontsize=13)  # room for it
    axes.legend(
        fontsize=8.5,
        frameon=False,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
        ncols=columns,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"

"""What every benchmark tells and how: tables on the terminal, the same as JSON, a chart as PNG.

Invariant: every report names the machine, in words, and how busy it was before and after.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

_CPU_FLAGS = ("avx512f", "avx512_bf16", "amx_bf16")


class Row(Protocol):
    """A frozen dataclass: its fields are the columns, with their units in their names."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def make_parser(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """A benchmark's command line, with what all have: --json and --png."""
    parser = argparse.ArgumentParser(prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the tables")
    parser.add_argument("--png", type=_drawable, metavar="FILE", help="draw the main figures as a chart")
    return parser


def _drawable(name: str) -> Path:
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "charts need matplotlib: pip install -c constraints.txt -e '.[bench]' (or: pip install matplotlib)"
        )
    return Path(name)


def report(tables: Mapping[str, Sequence[Row]], machine: str, json_file: Path | None) -> str:
    """Print the tables, and write them as JSON where that was asked for. Returns the machine as they name it."""
    machine = f"{machine}, {os.getloadavg()[0]:.1f} at the end"
    print(f"\n{machine}")
    for title, rows in tables.items():
        print(f"\n{title}")
        _print_table([dataclasses.asdict(row) for row in rows])
    if json_file is not None:
        content = {title: [dataclasses.asdict(row) for row in rows] for title, rows in tables.items()}
        json_file.write_text(json.dumps({"machine": machine, "tables": content}, indent=2) + "\n")
    return machine


def describe_machine() -> str:
    """Cores, processor, torch, Python, and the load before anything was measured. Names nothing but kinds."""
    fields = dict(line.split(":", 1) for line in _cpuinfo().splitlines() if ":" in line)
    info = {name.strip(): value.strip() for name, value in fields.items()}
    flags = [flag for flag in _CPU_FLAGS if flag in info.get("flags", "").split()]
    return ", ".join(
        [
            f"{len(os.sched_getaffinity(0))} cores of {info.get('model name', platform.machine())}",
            *([" ".join(flags)] if flags else []),
            f"torch {importlib.metadata.version('torch')}",
            f"Python {platform.python_version()}",
            f"load {os.getloadavg()[0]:.1f} at the start",
        ]
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _print_table(rows: Sequence[Mapping[str, object]]) -> None:
    cells = [[name.replace("_", " ") for name in rows[0]], *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    numeric = [isinstance(value, int | float) for value in rows[0].values()]
    for row in cells:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        print("  " + "  ".join(padded).rstrip())


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.{3 if abs(value) < 1 else 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0}f}"
    return str(value)

"""What the benchmarks share: a real server and its processes, photographs, tables.

Invariant: every report names the machine, in words, and how busy it was before and after.
"""

import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import httpx
import numpy as np
import psutil
from PIL import Image

_PARTS = ("front end", "decoder", "torchrun agent", "rank")
_CPU_FLAGS = ("avx512f", "avx512_bf16", "amx_bf16")


class Server:
    """A real `patchgrid serve` on a free loopback port. A context manager; leaving it ends the server."""

    def __init__(self, *flags: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the server has ended)
        self.started_at = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "service.cli", "serve", "--port=0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._url = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    @property
    def url(self) -> str:
        """Where it listens, as its log says."""
        while not self._url:
            match = re.search(r"listening on (http://\S+)", self._read_log())
            self._url = match.group(1) if match else ""
            self._check_alive()
            time.sleep(0 if self._url else 0.01)
        return self._url

    def wait_for(self, path: str, timeout_s: float = 900.0) -> float:
        """Ask until GET path answers 200. Returns the seconds since the process was started."""
        deadline = self.started_at + timeout_s
        with httpx.Client(base_url=self.url, trust_env=False) as client:
            while client.get(path).status_code != 200:
                self._check_alive()
                if time.perf_counter() > deadline:
                    raise TimeoutError(f"{path} did not answer 200 within {timeout_s:g} s")
                time.sleep(0.02)
        return time.perf_counter() - self.started_at

    def processes(self) -> dict[str, psutil.Process]:
        """The server's processes by the part they play, in the order in which an image meets them."""
        found = {"front end": psutil.Process(self.process.pid)}
        decoders = 0
        for child in found["front end"].children(recursive=True):
            command = child.cmdline()
            if "service.decode_process" in command:
                found[f"decoder {decoders}"] = child
                decoders += 1
            elif "distributed.agent" in command:
                found["torchrun agent"] = child
            elif "distributed.worker" in command:
                found[f"rank {child.environ()['RANK']}"] = child
        return dict(sorted(found.items(), key=lambda item: (_PARTS.index(item[0].rstrip(" 0123456789")), item[0])))

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"serve ended with code {self.process.returncode}:\n{self._read_log()}")

    def _read_log(self) -> str:
        # Not by the handle's position: the server writes at it.
        return os.pread(self._log.fileno(), 2**20, 0).decode(errors="replace")


def draw_photo(width: int, height: int, *, seed: int = 0) -> bytes:
    """A JPEG that costs about what a photograph of its size does: smooth shapes, some grain, quality 85."""
    generator = np.random.default_rng(seed)
    shapes = Image.fromarray(generator.integers(0, 256, (max(2, height // 40), max(2, width // 40), 3), dtype=np.uint8))
    smooth = np.asarray(shapes.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    grain = generator.integers(-8, 9, (height, width, 1), dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class _Row(Protocol):
    """A frozen dataclass: its fields are the columns, with their units in their names."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def report(tables: Mapping[str, Sequence[_Row]], machine: str, json_file: Path | None) -> None:
    """Print the tables, and write them as JSON where that was asked for."""
    machine = f"{machine}, {os.getloadavg()[0]:.1f} at the end"
    print(f"\n{machine}")
    for title, rows in tables.items():
        print(f"\n{title}")
        _print_table([dataclasses.asdict(row) for row in rows])
    if json_file is not None:
        content = {title: [dataclasses.asdict(row) for row in rows] for title, rows in tables.items()}
        json_file.write_text(json.dumps({"machine": machine, "tables": content}, indent=2) + "\n")


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

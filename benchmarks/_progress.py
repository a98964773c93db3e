"""How far a benchmark has come: a bar where there is a terminal, one line a step where there is none.

Invariant: on standard error only; standard output has the tables and nothing else.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Steps:
    """The steps of one benchmark, one after the other."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def begin(self, what: str) -> None:
        """Say what runs now."""
        self._progress.update(self._task, description=what)

    def watch(self, what: str) -> Callable[[int, int], None]:
        """Say that a load runs now, and give it what keeps the line up to date: run_load's on_progress."""
        self.begin(what)
        return lambda answered, failed: self.begin(f"{what}: {answered} answered, {failed} failed")

    def done(self, came_of_it: str) -> None:
        """A step is over; its line stays."""
        self._progress.console.print(came_of_it, markup=False, highlight=False, soft_wrap=True)
        self._progress.advance(self._task)


@contextmanager
def show_steps(total: int) -> Iterator[Steps]:
    """A bar of so many steps, gone when the block ends."""
    console = Console(stderr=True)
    columns = (MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        yield Steps(progress, progress.add_task("starting", total=total))

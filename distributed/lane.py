"""A thread that does what it is given, in order: for the host what a stream is for a GPU.

OpenMP keeps a pool of threads for every thread that computes. Once there are more of them than cores, they no longer
spin while they wait for one another, and a tower on two cores becomes 10 to 17 % slower. So one lane of a process
computes on several threads, and everybody else on one.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Lane:
    """Starts its thread when made. The thread goes on after what raises, and does not keep the process alive."""

    def __init__(self, name: str, device: torch.device, num_threads: int = 1) -> None:
        """num_threads: how many run torch's operations on the CPU for this thread."""
        self._given: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()
        self.do(lambda: use_threads(num_threads)).result()
        if device.type == "cuda":
            self.do(lambda: torch.cuda.set_device(device)).result()  # every thread begins at the first

    def do(self, work: Callable[[], T]) -> "Future[T]":
        """Have the thread do this after all that it was given before. What it raises is in the future."""
        future: Future[T] = Future()
        self._given.put((work, future))
        return future

    def _run(self) -> None:
        while True:
            self._do_next()

    def _do_next(self) -> None:
        work, future = self._given.get()
        try:
            future.set_result(work())
        except BaseException as error:  # whoever asked for it is told
            future.set_exception(error)


def use_threads(num_threads: int) -> None:
    """Have torch's operations on the CPU run on so many threads where the calling thread is concerned."""
    torch.set_num_threads(num_threads)
    # A thread takes over what was set last when it first looks, and keeps it whatever others set afterwards.
    found = torch.get_num_threads()
    assert found == num_threads

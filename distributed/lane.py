"""A thread that does what it is given, in order: on a CPU what a stream is on CUDA, and on both what feeds a stream."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Lane:
    """Starts its thread when made. The thread goes on after what raises, and does not keep the process alive."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._given: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], T]) -> "Future[T]":
        """Have the thread do this after all that it was given before. What it raises is in the future."""
        future: Future[T] = Future()
        self._given.put((work, future))
        return future

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # every thread begins at the first
        while True:
            self._do_next()

    def _do_next(self) -> None:
        work, future = self._given.get()
        try:
            future.set_result(work())
        except Exception as error:  # whoever asked for it is told
            future.set_exception(error)

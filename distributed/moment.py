"""Points in the work of a rank's device, to wait for and to measure between, and a stream beside the one that computes.

On CUDA a call only queues its work, so a moment comes when the device gets there. On a CPU the work is done when the
call returns, so a moment has come when it is marked.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Moment:
    """When all that the current stream was given so far is done. Marked when made."""

    def __init__(self, device: torch.device) -> None:
        self._marked_at = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Blocking: a rank that spins while it waits takes a core from the front end's decoders.
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Wait until the device is there. Raises what went wrong on it since."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """The time between two moments that have come, by the device's clock."""
        if self._event is None or earlier._event is None:
            return self._marked_at - earlier._marked_at
        return float(earlier._event.elapsed_time(self._event)) / 1000

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """What the stream is given from here on waits for this moment."""
        assert self._event is not None
        stream.wait_event(self._event)


class SideStream:
    """Runs what has to wait for one batch's computing while the device computes the next. On a CPU, nothing special."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # A higher priority: where both could run, an answer goes before the batch behind it.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def after(self, moment: Moment) -> Iterator[None]:
        """Have what is queued within run once the moment has come.

        Memory that the computing stream allocated has to be kept until it is done: its allocator does not know of it.
        """
        if self._stream is None:
            yield
            return
        moment.hold_back(self._stream)
        with torch.cuda.stream(self._stream):
            yield

"""The wire between the front end and rank 0: one ZeroMQ pair over a Unix socket per life of the group.

A group that died leaves its socket behind with everything queued in it; the next one gets a new socket, so no stale
message can reach the wrong group. Buffers cross without a copy on either side: received ones are views of the frames,
sent ones must stay unchanged until they are gone. Neither side imports torch here.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import zmq
import zmq.asyncio

from distributed.messages import (
    Encode,
    Ping,
    Pong,
    Stop,
    ToFront,
    ToRank,
    pack_header,
    unpack_to_front,
    unpack_to_rank,
)

Buffer: TypeAlias = bytes | memoryview

_NO_LIMIT = 0  # what is on its way is bounded by the batches in flight, not by the socket


def socket_path(run_dir: Path, epoch: int) -> Path:
    """Where the group of this epoch and the front end meet."""
    return run_dir / f"link-{epoch}.sock"


class FrontLink:
    """The front end's end, on its event loop. Binds, so rank 0 may come when it likes and has to speak first."""

    def __init__(self, context: zmq.asyncio.Context, run_dir: Path, epoch: int) -> None:
        self._path = socket_path(run_dir, epoch)
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(_NO_LIMIT)
        try:
            self._socket.bind(f"ipc://{self._path}")
        except zmq.ZMQError:
            self._socket.close(linger=0)
            raise

    async def send(self, message: ToRank, buffers: Sequence[Buffer] = ()) -> bool:
        """Hand a message to the socket; the buffers must not change afterwards.

        Never waits. Returns False if nobody is at the other end: rank 0 has not come yet, or is gone.
        """
        try:
            await self._socket.send_multipart([pack_header(message), *buffers], copy=False, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def receive(self) -> tuple[ToFront, list[memoryview]]:
        """Wait for rank 0. The buffers are views that live as long as they are referred to."""
        header, *frames = await self._socket.recv_multipart(copy=False)
        return unpack_to_front(header.buffer), [frame.buffer for frame in frames]

    def hide(self) -> None:
        """Remove the socket's file once rank 0 has come: nobody else may, and a killed front end leaves no socket."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Drop whatever is still queued and remove the socket's file."""
        self._socket.close(linger=0)
        self.hide()


@dataclass(frozen=True, slots=True)
class Delivery:
    """What rank 0 has to do next, its buffers, and when it arrived by `time.perf_counter`."""

    message: Encode | Stop
    buffers: list[memoryview]
    arrived_at: float


class RankLink:
    """Rank 0's end: a thread that owns the socket, so that pings are answered whatever the others are at.

    Batches and the final `Stop` arrive in `inbox`.
    """

    def __init__(self, run_dir: Path, epoch: int, silent_s: Callable[[], tuple[float, ...]]) -> None:
        self.inbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._silent_s = silent_s
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PAIR)
        self._outbox.set_hwm(_NO_LIMIT)
        self._outbox.bind("inproc://outbox")
        self._endpoint = f"ipc://{socket_path(run_dir, epoch)}"
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def send(self, message: ToFront, buffers: Sequence[Buffer] = ()) -> None:
        """Main thread only: have the link thread send this. The buffers must not change afterwards."""
        self._outbox.send_multipart([pack_header(message), *buffers], copy=False)

    def close(self) -> None:
        """Send what is waiting, then end the thread."""
        self._outbox.send(b"")
        self._thread.join()
        self._outbox.close()
        self._context.term()

    def _run(self) -> None:
        front = self._context.socket(zmq.PAIR)
        front.set_hwm(_NO_LIMIT)
        front.connect(self._endpoint)
        outgoing = self._context.socket(zmq.PAIR)
        outgoing.set_hwm(_NO_LIMIT)
        outgoing.connect("inproc://outbox")
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        poller.register(outgoing, zmq.POLLIN)
        open_ = True
        while open_:
            ready = dict(poller.poll())
            if outgoing in ready:
                frames = outgoing.recv_multipart(copy=False)
                open_ = len(frames[0]) > 0
                if open_:
                    front.send_multipart(frames, copy=False)
            if front in ready:
                header, *frames = front.recv_multipart(copy=False)
                message = unpack_to_rank(header.buffer)
                if isinstance(message, Ping):
                    front.send(pack_header(Pong(message.nonce, self._silent_s())))
                else:
                    self.inbox.put(Delivery(message, [frame.buffer for frame in frames], time.perf_counter()))
        outgoing.close()
        front.close(linger=1000)

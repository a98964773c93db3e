"""The wire: buffers arrive whole and in order, pings are answered while rank 0 works, sockets are new per epoch."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import zmq.asyncio

from distributed.link import FrontLink, RankLink, socket_path
from distributed.messages import Encode, Encoded, ImageSpec, Ping, Pong, RowsSpec, Stop, ToRank


async def send(front: FrontLink, message: ToRank, buffers: Sequence[bytes] = ()) -> None:
    """The rank's thread may not have connected yet."""
    while not await front.send(message, buffers):
        await asyncio.sleep(0.01)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, timeout=30))


def test_a_batch_and_its_answer_cross_with_their_buffers(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        front, rank = FrontLink(context, tmp_path, 1), RankLink(tmp_path, 1, lambda: (0.0,))
        pixels = bytes(range(256)) * 3 * 4
        batch = Encode(5, (ImageSpec(32, 32, "v4", "float16"), ImageSpec(0, 0, "rows", "float32")))
        await send(front, batch, [pixels, b""])
        delivery = await asyncio.to_thread(rank.inbox.get)
        assert delivery.message == batch
        assert [bytes(buffer) for buffer in delivery.buffers] == [pixels, b""]
        answer = Encoded(5, (RowsSpec(1, 2, "good"), RowsSpec(1, 2, "not_finite")), (3, 4), 0.1, 0.2, 0.3)
        rank.send(answer, [b"abcd", b""])
        message, buffers = await front.receive()
        assert message == answer
        assert [bytes(buffer) for buffer in buffers] == [b"abcd", b""]
        rank.close()
        front.close()
        context.destroy(linger=0)

    run(scenario())


def test_pings_are_answered_while_nobody_takes_the_batch(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        front, rank = FrontLink(context, tmp_path, 1), RankLink(tmp_path, 1, lambda: (0.25, 9.0))
        await send(front, Encode(1, ()))  # stays in the inbox
        await send(front, Ping(nonce=3))
        message, _ = await front.receive()
        assert message == Pong(3, (0.25, 9.0))
        rank.close()
        front.close()
        context.destroy(linger=0)

    run(scenario())


def test_what_was_sent_to_a_dead_group_does_not_reach_the_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        first, dead = FrontLink(context, tmp_path, 1), RankLink(tmp_path, 1, lambda: ())
        await send(first, Encode(1, ()))
        first.close()
        dead.close()
        assert not socket_path(tmp_path, 1).exists()
        second, rank = FrontLink(context, tmp_path, 2), RankLink(tmp_path, 2, lambda: ())
        await send(second, Stop())
        delivery = await asyncio.to_thread(rank.inbox.get)
        assert delivery.message == Stop()
        assert delivery.arrived_at <= time.perf_counter()
        rank.close()
        second.close()
        context.destroy(linger=0)

    run(scenario())


def test_a_send_to_nobody_says_so_and_does_not_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        front = FrontLink(context, tmp_path, 1)
        assert not await front.send(Stop())
        rank = RankLink(tmp_path, 1, lambda: ())
        while not await front.send(Ping(nonce=1)):
            await asyncio.sleep(0.01)
        await front.receive()
        rank.close()
        while await front.send(Ping(nonce=2)):
            await asyncio.sleep(0.01)
        front.close()
        context.destroy(linger=0)

    run(scenario())


def test_a_hidden_socket_still_carries_what_was_connected(tmp_path: Path) -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        front, rank = FrontLink(context, tmp_path, 1), RankLink(tmp_path, 1, lambda: ())
        while not await front.send(Ping(nonce=1)):
            await asyncio.sleep(0.01)
        await front.receive()
        front.hide()
        assert list(tmp_path.iterdir()) == []
        assert await front.send(Ping(nonce=2))
        message, _ = await front.receive()
        assert message == Pong(2, ())
        rank.close()
        front.close()
        context.destroy(linger=0)

    run(scenario())

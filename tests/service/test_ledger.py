"""Whose turn it is to be sent, and who is charged when the group dies."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from distributed.messages import Encoded, RowsSpec
from encoder.config import DEMO
from encoder.geometry import plan
from encoder.image import Canvas
from service.batcher import QueuedImage
from service.ledger import Debt, Ledger
from service.metrics import Metrics
from service.quarantine import Quarantine

PLANNED = plan(DEMO, 300, 300)
NUM_ROWS = PLANNED.llm_grid[0] * PLANNED.llm_grid[1]


def image(digest: str = "digest") -> QueuedImage:
    width, height = PLANNED.resized
    canvas = Canvas(np.zeros((height, width, 3), np.uint8), PLANNED)
    return QueuedImage(canvas, digest, "rows", "bfloat16", asyncio.get_running_loop().create_future())


def with_ledger(test: Callable[[Ledger, Quarantine], Any]) -> Callable[[], None]:
    """The test, on an event loop, which debts belong to."""

    async def run() -> None:
        quarantine = Quarantine(60.0)
        test(Ledger(DEMO.out_width, quarantine, Metrics()), quarantine)

    return lambda: asyncio.run(run())


def send(ledger: Ledger, epoch: int) -> list[Debt]:
    """Everything that may go now."""
    sent = []
    while debt := ledger.next_to_send(epoch):
        debt.epoch = epoch
        sent.append(debt)
    return sent


def answer(ledger: Ledger, debt: Debt) -> None:
    num_images = len(debt.images)
    rows = [RowsSpec(num_rows=NUM_ROWS, width=DEMO.out_width, state="good")] * num_images
    ledger.deliver(
        Encoded(
            batch_id=debt.message.batch_id, images=tuple(rows), rank_patches=(1,), wait_s=0, encode_s=0, gather_s=0
        ),
        [memoryview(bytes(NUM_ROWS * DEMO.out_width * 2))] * num_images,
    )


@with_ledger
def test_debts_go_in_the_order_in_which_they_were_made(ledger: Ledger, quarantine: Quarantine) -> None:
    debts = [ledger.add([image()], deaths=0) for _ in range(3)]
    assert send(ledger, 1) == debts
    assert send(ledger, 1) == []
    assert send(ledger, 2) == debts


@with_ledger
def test_a_suspect_goes_first_and_alone(ledger: Ledger, quarantine: Quarantine) -> None:
    suspect, other = ledger.add([image(), image()], deaths=0), ledger.add([image()], deaths=0)
    send(ledger, 1)
    ledger.blame(1)
    assert send(ledger, 2) == [suspect]
    answer(ledger, suspect)
    assert send(ledger, 2) == [other]


@with_ledger
def test_a_suspect_waits_for_what_is_with_the_ranks(ledger: Ledger, quarantine: Quarantine) -> None:
    innocent = ledger.add([image()], deaths=0)
    send(ledger, 1)
    suspect, behind = ledger.add([image()], deaths=1), ledger.add([image()], deaths=0)
    assert send(ledger, 1) == []
    answer(ledger, innocent)
    assert send(ledger, 1) == [suspect]
    answer(ledger, suspect)
    assert send(ledger, 1) == [behind]


@with_ledger
def test_an_innocent_batch_before_the_one_that_kills_is_cleared(ledger: Ledger, quarantine: Quarantine) -> None:
    innocent, guilty = ledger.add([image("innocent")], deaths=0), ledger.add([image("guilty")], deaths=0)
    for epoch in range(1, 4):  # the ranks die of the second, in the first life before they have answered the first
        if innocent in send(ledger, epoch) and epoch > 1:
            answer(ledger, innocent)
            send(ledger, epoch)
        ledger.blame(epoch)
    assert (innocent.settled.exception(), "innocent" in quarantine) == (None, False)
    assert guilty.settled.exception() is not None
    assert "guilty" in quarantine


@with_ledger
def test_debts_without_waiters_are_not_sent(ledger: Ledger, quarantine: Quarantine) -> None:
    left, wanted = ledger.add([image()], deaths=1), ledger.add([image()], deaths=0)
    left.images[0].rows.cancel()
    assert send(ledger, 1) == [wanted]
    assert left.settled.result() is None

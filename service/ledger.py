"""What was handed to the worker group and not answered: its debts, in the order in which they were sent.

Batches end in that order, so when the group dies, the first debt is suspected, and goes by itself from then on. A batch
that the group died of twice is taken apart; an image that did so by itself is refused, and its mates get rows.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from distributed.messages import DTYPE_BYTES, Encode, Encoded, ImageSpec, ProtocolError, RowDtype, RowsSpec
from encoder.layout import num_layout_rows
from service.batcher import ImageRows, QueuedImage
from service.errors import ServiceError
from service.metrics import Metrics
from service.quarantine import Quarantine

log = logging.getLogger("patchgrid.ledger")

_DEATHS_TO_ACT_ON = 2


@dataclass(slots=True, eq=False)
class Debt:
    """A batch that the group owes.

    message, images: the same images, for the wire and with their waiters.
    settled: the answer, or None if the batch has to be taken apart or nobody waits for it any more.
    deaths: lives of the group that ended on it. epoch, sent_at: the life it was last sent to, and when.
    """

    message: Encode
    images: Sequence[QueuedImage]
    settled: "asyncio.Future[Encoded | None]"
    deaths: int
    epoch: int = 0
    sent_at: float = 0.0

    @property
    def buffers(self) -> list[memoryview]:
        """The pixels, one buffer per image."""
        return [image.canvas.pixels.data for image in self.images]


class Ledger:
    """The debts of one front end's group, whose rows are `out_width` wide."""

    def __init__(self, out_width: int, quarantine: Quarantine, metrics: Metrics) -> None:
        self._out_width = out_width
        self._quarantine = quarantine
        self._metrics = metrics
        self._batch_ids = itertools.count(1)
        self._debts: dict[int, Debt] = {}

    def add(self, images: Sequence[QueuedImage], deaths: int) -> Debt:
        """Owe these images."""
        message = Encode(batch_id=next(self._batch_ids), images=tuple(_spec(image) for image in images))
        debt = Debt(message, images, asyncio.get_running_loop().create_future(), deaths)
        self._debts[message.batch_id] = debt
        return debt

    def remove(self, debt: Debt) -> None:
        """Owe it no longer."""
        del self._debts[debt.message.batch_id]

    def next_to_send(self, epoch: int) -> Debt | None:
        """The first debt not sent to this life of the group, if it may go now; those without waiters are settled.

        A batch that the group may have died of goes by itself: ranks may be at two batches at once, and if they die
        again, there is no doubt of which.
        """
        sent = [debt for debt in self._debts.values() if debt.epoch == epoch and not debt.settled.done()]
        if any(debt.deaths for debt in sent):
            return None
        for debt in self._debts.values():
            if debt.epoch == epoch or debt.settled.done():
                continue
            if not all(image.rows.done() for image in debt.images):
                return None if debt.deaths and sent else debt
            debt.settled.set_result(None)
        return None

    def deliver(self, answer: Encoded, buffers: Sequence[memoryview]) -> bool:
        """Settle a debt and the images' waiters. Returns whether the tower gave finite rows only.

        Raises:
            ProtocolError: the answer is not one to the question.
        """
        debt = self._debts.get(answer.batch_id)
        if debt is None or debt.settled.done():
            raise ProtocolError(f"rank 0 answered batch {answer.batch_id}, which is not owed")
        if not len(debt.images) == len(answer.images) == len(buffers):
            raise ProtocolError(f"rank 0 answered {len(buffers)} of {len(debt.images)} images")
        for image, spec, buffer in zip(debt.images, answer.images, buffers, strict=True):
            self._check(image, spec, buffer)
            if spec.state == "not_finite":
                self._metrics.images_not_finite_total.inc()
            if image.rows.done():
                continue  # its waiter is gone: the rows are dropped
            if spec.state == "good":
                image.rows.set_result(ImageRows(spec.num_rows, spec.width, buffer))
            else:
                image.rows.set_exception(_unusable(spec, image.dtype))
        debt.settled.set_result(answer)
        return all(spec.state != "not_finite" for spec in answer.images)

    def _check(self, image: QueuedImage, spec: RowsSpec, buffer: memoryview) -> None:
        """One row too many takes a whole LLM engine down: the answer is held against the plan once more."""
        expected = num_layout_rows(image.layout, image.canvas.plan.llm_grid)
        if (spec.num_rows, spec.width) != (expected, self._out_width):
            raise ProtocolError(f"rank 0 sent {spec.num_rows} x {spec.width} for {expected} x {self._out_width}")
        num_bytes = expected * self._out_width * DTYPE_BYTES[image.dtype] if spec.state == "good" else 0
        if buffer.nbytes != num_bytes:
            raise ProtocolError(f"rank 0 sent {buffer.nbytes} bytes where {num_bytes} were due")

    def blame(self, epoch: int) -> bool:
        """The group's life ended: charge the batch that it was at. Returns whether an image was found guilty."""
        debt = next((debt for debt in self._debts.values() if debt.epoch == epoch and not debt.settled.done()), None)
        if debt is None:
            return False
        debt.deaths += 1
        if debt.deaths < _DEATHS_TO_ACT_ON:
            return False
        if len(debt.images) > 1:
            log.warning("a batch of %d images ended the group twice: they go alone now", len(debt.images))
            debt.settled.set_result(None)
            return False
        self._quarantine.add(debt.images[0].digest)
        self._metrics.images_quarantined_total.inc()
        log.error("an image crashes the ranks and is refused from now on: %s", debt.images[0].digest)
        debt.settled.set_exception(image_crashed_encoder())
        return True

    def fail(self, error: ServiceError) -> None:
        """Nothing of this will ever be paid."""
        for debt in self._debts.values():
            if not debt.settled.done():
                debt.settled.set_exception(error)


def image_crashed_encoder() -> ServiceError:
    """What an image in quarantine gets."""
    return ServiceError("image_crashed_encoder", "this image crashes the encoder and is refused for a while")


def _spec(image: QueuedImage) -> ImageSpec:
    height, width, _ = image.canvas.pixels.shape
    return ImageSpec(height=height, width=width, layout=image.layout, dtype=image.dtype)


def _unusable(spec: RowsSpec, dtype: RowDtype) -> ServiceError:
    if spec.state == "overflow":
        return ServiceError("dtype_overflow", f"the image's rows do not fit into {dtype}: ask for bfloat16 or float32")
    return ServiceError("non_finite", "the image's rows are not finite numbers")

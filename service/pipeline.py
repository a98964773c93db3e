"""One request's way, top to bottom: encoded images in, their rows out, in the order of the question.

All images of a request go their way side by side and share batches with everyone else's. One image that cannot be used
fails its request and no other.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from service.batcher import Batcher
from service.decode import DecodePool
from service.errors import ServiceError
from service.identity import content_id
from service.intake import EmbedJob
from service.metrics import Metrics
from service.reply import EmbeddedImage
from service.settings import Settings
from service.supervisor import GroupState, Supervisor


class Pipeline:
    """Ties decoding, queueing and encoding together for the routes."""

    def __init__(
        self,
        pool: DecodePool,
        batcher: Batcher,
        supervisor: Supervisor,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._pool = pool
        self._batcher = batcher
        self._supervisor = supervisor
        self._metrics = metrics
        self._request_timeout_s = settings.request_timeout_s
        self._profile = settings.image_profile
        self._id_key = settings.id_key.get_secret_value() if settings.id_key is not None else ""

    def admit(self) -> None:
        """Refuse work that the group cannot begin now.

        Raises:
            ServiceError: starting, restarting or draining, with a time to come back after.
        """
        match self._supervisor.state:
            case GroupState.READY:
                return
            case GroupState.STARTING:
                raise ServiceError("starting", "the model is loading", retry_after_s=5)
            case GroupState.RESTARTING:
                raise ServiceError("restarting", "the worker group is starting again", retry_after_s=5)
            case GroupState.STOPPED:
                raise ServiceError("draining", "the service is ending", retry_after_s=1)

    @asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Bounds what is awaited within: the time that a request may take.

        Raises:
            ServiceError: deadline_exceeded.
        """
        try:
            async with asyncio.timeout(self._request_timeout_s):
                yield
        except TimeoutError as error:
            raise ServiceError("deadline_exceeded", "the request took longer than this server allows") from error

    async def embed(self, job: EmbedJob) -> Sequence[EmbeddedImage]:
        """Embed a request's images.

        Raises:
            ServiceError: the first thing that went wrong, with the index of its image.
        """
        hello = self._supervisor.hello
        assert hello is not None, "admitted before"
        if job.layout not in hello.layouts:
            raise ServiceError("layout_unavailable", f"this model's weights lack the vectors that {job.layout} needs")
        fingerprint = hello.ranks[0].fingerprint
        tasks = [asyncio.create_task(self._embed_one(job, index, fingerprint)) for index in range(len(job.images))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _embed_one(self, job: EmbedJob, index: int, fingerprint: str) -> EmbeddedImage:
        canvas = await self._pool.canvas(job.images[index], index)
        image_id = await self._pool.run(
            content_id,
            canvas,
            fingerprint=fingerprint,
            profile=self._profile,
            layout=job.layout,
            dtype=job.dtype,
            key=self._id_key,
        )
        try:
            rows = await self._batcher.submit(canvas, job.layout, job.dtype)
        except ServiceError as error:
            raise error.at(index) from error
        self._metrics.images_total.inc()
        self._metrics.patches_total.inc(canvas.plan.num_patches)
        self._metrics.rows_total.inc(rows.num_rows)
        return EmbeddedImage(
            id=image_id,
            plan=canvas.plan,
            shape=(rows.num_rows, rows.width),
            data=rows.data,
            cached=False,
            client_id=job.client_ids[index],
        )

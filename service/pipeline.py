"""One request's way, top to bottom: encoded images in, their rows out, in the order of the question.

All images of a request go their way side by side and share batches with everyone else's. One image that cannot be used
fails its request and no other.
"""

from functools import partial

from service.admission import Ticket
from service.batcher import Batcher, ImageRows
from service.cache import KnownFile, RowCache
from service.decode import DecodePool
from service.errors import ServiceError
from service.identity import content_id, file_digest
from service.intake import EmbedJob
from service.ledger import image_crashed_encoder
from service.metrics import Metrics
from service.patience import all_or_nothing
from service.quarantine import Quarantine
from service.reply import EmbeddedImage
from service.settings import Settings
from service.supervisor import Supervisor

# A file's digest is sooner taken than the work handed to a thread, about 50 microseconds.
_SMALL_FILE_BYTES = 2**16


class Pipeline:
    """Ties decoding, queueing and encoding together for the routes."""

    def __init__(
        self,
        settings: Settings,
        pool: DecodePool,
        cache: RowCache,
        batcher: Batcher,
        supervisor: Supervisor,
        quarantine: Quarantine,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._batcher = batcher
        self._supervisor = supervisor
        self._quarantine = quarantine
        self._metrics = metrics
        self._profile = settings.image_profile
        self._key = settings.id_key.get_secret_value() if settings.id_key is not None else ""

    async def embed(self, job: EmbedJob, ticket: Ticket) -> list[EmbeddedImage]:
        """Embed a request's images. Cancelling it takes back whatever is not with the ranks yet.

        Raises:
            ServiceError: the first thing that went wrong, with the index of its image.
        """
        hello = self._supervisor.hello
        assert hello is not None, "admitted before"
        if job.layout not in hello.layouts:
            raise ServiceError("layout_unavailable", f"this model's weights lack the vectors that {job.layout} needs")
        make_id = partial(
            content_id,
            fingerprint=hello.ranks[0].fingerprint,
            profile=self._profile,
            layout=job.layout,
            dtype=job.dtype,
            key=self._key,
        )
        undecoded = set(range(len(job.images)))

        def is_decoded(index: int) -> None:
            undecoded.discard(index)
            if not undecoded:
                ticket.finish_decoding()

        async def embed_one(index: int) -> EmbeddedImage:
            file_id = ""
            if self._cache.keeps:
                file_id = make_id(await self._file_digest(job.images[index]))
                if (recalled := self._cache.recall(file_id)) is not None:
                    is_decoded(index)
                    known, rows = recalled
                    return _embedded(known, rows, job.client_ids[index], cached=True)
            drawing = await self._pool.draw(job.images[index], index)
            is_decoded(index)
            ticket.hold(drawing.canvas.pixels.nbytes)
            if drawing.digest in self._quarantine:
                raise image_crashed_encoder().at(index)
            known = KnownFile(make_id(drawing.digest), drawing.canvas.plan)
            compute = partial(self._batcher.submit, drawing.canvas, drawing.digest, job.layout, job.dtype)
            try:
                rows, cached = await self._cache.rows(known.image_id, compute)
            except ServiceError as error:
                raise error.at(index) from error
            ticket.hold(rows.data.nbytes)
            self._cache.remember(file_id, known)
            return _embedded(known, rows, job.client_ids[index], cached=cached)

        images = await all_or_nothing([embed_one(index) for index in range(len(job.images))])
        self._metrics.images_total.inc(len(images))
        self._metrics.patches_total.inc(sum(image.plan.num_patches for image in images))
        self._metrics.rows_total.inc(sum(image.shape[0] for image in images))
        return images

    async def _file_digest(self, image: bytes | memoryview) -> str:
        if len(image) <= _SMALL_FILE_BYTES:
            return file_digest(image)
        return await self._pool.run(file_digest, image)


def _embedded(known: KnownFile, rows: ImageRows, client_id: str | None, *, cached: bool) -> EmbeddedImage:
    return EmbeddedImage(
        id=known.image_id,
        plan=known.plan,
        shape=(rows.num_rows, rows.width),
        data=rows.data,
        cached=cached,
        client_id=client_id,
    )

"""The routes. Each says what it takes and gives; the work is the pipeline's.

Invariant: nothing here blocks the event loop, and every failure leaves through errors.py.
"""

import importlib.metadata

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Message

from encoder.checkpoint import Checkpoint
from encoder.geometry import plan
from service.access import RequireKey
from service.admission import Ticket
from service.errors import install_error_handling
from service.intake import read_embed, read_plan
from service.parts import Parts
from service.patience import deadline_s, time_limit, while_awaited
from service.reply import Answer, embed_response
from service.request_log import RequestLog
from service.schemas import (
    EmbedResponse,
    Health,
    Info,
    Limits,
    PlannedSize,
    PlanResponse,
    embed_openapi,
    embed_responses,
    error_responses,
    plan_openapi,
)


def create_app(parts: Parts) -> FastAPI:
    """The ASGI application over parts that someone else starts and stops."""
    app = _bare_app()
    if parts.foundation.keys:
        app.add_middleware(RequireKey, keys=parts.foundation.keys)
    app.add_middleware(RequestLog, metrics=parts.metrics)
    _add_work(app, parts)
    if parts.settings.probe_port is None:
        _add_probes(app, parts)
    return app


def create_probe_app(parts: Parts) -> FastAPI:
    """The probes alone, for a port of their own."""
    app = _bare_app()
    app.add_middleware(RequestLog, metrics=parts.metrics)
    _add_probes(app, parts)
    return app


def _bare_app() -> FastAPI:
    app = FastAPI(
        title="patchgrid",
        version=importlib.metadata.version("patchgrid"),
        description="Images in, the rows of the DeepSeek-V4 / V4.1 vision tower out.",
        redoc_url=None,
        redirect_slashes=False,  # Starlette would send clients to whatever host they named
    )
    install_error_handling(app)
    return app


def _add_work(app: FastAPI, parts: Parts) -> None:
    settings, checkpoint, pool = parts.settings, parts.foundation.checkpoint, parts.pool

    @app.post(
        "/embed",
        summary="Embed images",
        responses=embed_responses(),
        openapi_extra=embed_openapi(),
        response_model=EmbedResponse,
    )
    async def embed(request: Request) -> Response:
        """Rows of each image, in the order of the request."""
        parts.check_ready()
        seconds = deadline_s(request, settings.request_timeout_s)
        ticket = request.state.until_answered.enter_context(parts.admission.enter())
        async with time_limit(seconds):
            job = await read_embed(_counted(request, ticket), settings, pool, parts.foundation.fetcher, ticket.claim)
            ticket.hold(sum(len(image) for image in job.images))
            images = await while_awaited(request, parts.pipeline.embed(job, ticket))
            return await embed_response(
                Answer(model=parts.model_name, layout=job.layout, dtype=job.dtype, images=images),
                accept=request.headers.get("accept"),
                encoding_format=job.encoding_format,
                pool=pool,
                metrics=parts.metrics,
            )

    @app.post(
        "/plan",
        summary="Plan images by their size",
        responses=error_responses(
            "invalid_request", "body_too_large", "unsupported_media_type", "unsupported_encoding"
        ),
        openapi_extra=plan_openapi(),
    )
    async def plan_sizes(request: Request) -> PlanResponse:
        """Grids and token counts, without pixels."""
        asked = await read_plan(request, settings, pool)
        return await pool.run(_plan_all, checkpoint, asked.sizes)


def _add_probes(app: FastAPI, parts: Parts) -> None:
    @app.get("/health/live", summary="Is the process there?")
    async def live() -> Health:
        """200 as long as the event loop turns; what it says of readiness does not count."""
        return parts.health()

    @app.get("/health/ready", summary="Does it take work?", responses={503: {"model": Health}})
    @app.get("/health", summary="Both, with reasons", responses={503: {"model": Health}})
    async def ready() -> JSONResponse:
        """200 if the worker group is up, its heartbeat fresh and its last forward good, else 503 and the reasons."""
        report = parts.health()
        return JSONResponse(report.model_dump(), 200 if report.ready else 503)

    @app.get("/metrics", summary="For Prometheus", response_class=Response)
    async def render_metrics() -> Response:
        """Text exposition format."""
        parts.metrics.ready.set(parts.health().ready)
        body, media_type = parts.metrics.render()
        return Response(body, media_type=media_type)

    @app.get("/info", summary="What is served, and its limits")
    async def info() -> Info:
        """What only the worker group knows is null until it has said hello."""
        return _describe(parts)


def _counted(request: Request, ticket: Ticket) -> Request:
    """The same request, whose body is held by the ticket as it arrives."""

    async def receive() -> Message:
        message = await request.receive()
        ticket.claim(len(message.get("body", b"")))
        return message

    return Request(request.scope, receive)


def _plan_all(checkpoint: Checkpoint, sizes: tuple[tuple[int, int], ...]) -> PlanResponse:
    planned = (plan(checkpoint.config, width, height) for width, height in sizes)
    return PlanResponse(
        data=tuple(
            PlannedSize(
                size=each.image_size,
                resized=each.resized,
                vit_grid=each.vit_grid,
                llm_grid=each.llm_grid,
                num_tokens=each.num_tokens,
                rows=each.num_rows,
                patches=each.num_patches,
            )
            for each in planned
        )
    )


def _describe(parts: Parts) -> Info:
    settings, config, hello = parts.settings, parts.foundation.checkpoint.config, parts.supervisor.hello
    return Info(
        version=importlib.metadata.version("patchgrid"),
        model=parts.model_name,
        model_type=config.model_type,
        image_profile=settings.image_profile,
        patch_size=config.patch_size,
        merge_ratio=config.merge_ratio,
        max_image_tokens=config.max_image_tokens,
        dim=config.out_width,
        limits=Limits(
            body_bytes=settings.limit_body_bytes,
            images_per_request=settings.limit_images_per_request,
            image_bytes=settings.limit_image_bytes,
            image_pixels=settings.limit_image_pixels,
            decoding_requests=settings.limit_decoding_requests,
            queue_patches=settings.limit_queue_patches,
            held_bytes=settings.limit_held_bytes,
            request_timeout_s=settings.request_timeout_s,
            receive_timeout_s=settings.receive_timeout_s,
            decode_timeout_s=settings.decode_timeout_s,
            fetch_timeout_s=settings.fetch_timeout_s,
        ),
        ranks=len(hello.ranks) if hello else settings.num_local_ranks * settings.nnodes,
        layouts=hello.layouts if hello else None,
        fingerprint=hello.ranks[0].fingerprint if hello else None,
        devices=tuple(rank.device for rank in hello.ranks) if hello else None,
        dtype=hello.dtype if hello else None,
        attention=hello.ranks[0].attention if hello else None,
    )

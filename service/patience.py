"""How long an answer is worth anything: until the request's deadline, or until its client leaves.

Whichever comes first cancels the work, so that nothing is computed for nobody.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from service.errors import ServiceError

T = TypeVar("T")

TIMEOUT_HEADER = "x-timeout-ms"


def deadline_s(request: Request, longest_s: float) -> float:
    """Seconds that a request may take: what its x-timeout-ms asks for, at most `longest_s`.

    Raises:
        ServiceError: the header is not a whole number of milliseconds above 0.
    """
    asked = request.headers.get(TIMEOUT_HEADER)
    if asked is None:
        return longest_s
    if not (asked.isascii() and asked.isdigit() and len(asked) <= 12 and int(asked) > 0):
        raise ServiceError("invalid_request", f"{TIMEOUT_HEADER} must be a whole number of milliseconds above 0")
    return min(int(asked) / 1000, longest_s)


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[None]:
    """Bounds what is awaited within.

    Raises:
        ServiceError: deadline_exceeded; what was awaited has been cancelled.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ServiceError("deadline_exceeded", "the request took longer than it may") from error


async def while_awaited(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the client leaves. The request's body has been read.

    Raises:
        ClientDisconnect: it left; the work has been cancelled.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        await _cancelled([working, leaving])


async def all_or_nothing(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Do all parts side by side; the first that fails cancels the others, and its error is raised."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and see them end: what they held is given back by then."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

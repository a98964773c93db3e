"""Known rows, rows on their way, and a bound in bytes."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from server import Server

from encoder.config import DEMO
from encoder.geometry import plan
from service.batcher import ImageRows
from service.cache import KnownFile, RowCache
from service.errors import ServiceError
from service.metrics import Metrics


def rows_of(num_bytes: int) -> ImageRows:
    return ImageRows(1, num_bytes // 2, memoryview(bytes(num_bytes)))


class Oven:
    """Computes when it is let, and counts."""

    def __init__(self, result: ImageRows | Exception) -> None:
        self.started = self.cancelled = 0
        self.open = asyncio.Event()
        self._result = result

    async def compute(self) -> ImageRows:
        self.started += 1
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout=10))


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_rows_are_computed_once_and_kept() -> None:
    async def scenario() -> None:
        cache, oven = RowCache(1000, Metrics()), Oven(rows_of(100))
        oven.open.set()
        first, first_was_here = await cache.rows("a", oven.compute)
        again, again_was_here = await cache.rows("a", oven.compute)
        assert first is again
        assert (first_was_here, again_was_here, oven.started) == (False, True, 1)

    run(scenario)


def test_simultaneous_requests_share_one_computation_even_if_nothing_is_kept() -> None:
    async def scenario() -> None:
        cache, oven = RowCache(0, Metrics()), Oven(rows_of(100))
        waiting = [asyncio.create_task(cache.rows("a", oven.compute)) for _ in range(10)]
        await turn()
        oven.open.set()
        assert len({id(rows) for rows, _ in await asyncio.gather(*waiting)}) == 1
        assert oven.started == 1
        await cache.rows("a", oven.compute)
        assert oven.started == 2

    run(scenario)


def test_a_computation_outlives_whoever_came_first_but_not_the_last() -> None:
    async def scenario() -> None:
        cache, oven = RowCache(1000, Metrics()), Oven(rows_of(100))
        first, second = (asyncio.create_task(cache.rows("a", oven.compute)) for _ in range(2))
        await turn()
        first.cancel()
        await turn()
        assert oven.cancelled == 0
        second.cancel()
        await turn()
        assert oven.cancelled == 1
        third = asyncio.create_task(cache.rows("a", oven.compute))
        oven.open.set()
        assert (await third)[1] is False

    run(scenario)


def test_an_error_goes_to_all_and_is_not_kept() -> None:
    async def scenario() -> None:
        cache, oven = RowCache(1000, Metrics()), Oven(ServiceError("non_finite", "no"))
        oven.open.set()
        waiting = [cache.rows("a", oven.compute) for _ in range(3)]
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, ServiceError)
        with pytest.raises(ServiceError):
            await cache.rows("a", oven.compute)
        assert oven.started == 2

    run(scenario)


def test_the_least_recently_used_leaves_first_and_the_bound_holds() -> None:
    async def scenario() -> None:
        metrics = Metrics()
        cache, computed = RowCache(250, metrics), []

        async def get(name: str) -> bool:
            async def compute() -> ImageRows:
                computed.append(name)
                return rows_of(100)

            return (await cache.rows(name, compute))[1]

        await get("a")
        await get("b")
        assert await get("a")
        await get("c")
        assert await get("a")
        assert not await get("b")
        assert computed == ["a", "b", "c", "b"]
        assert metrics.registry.get_sample_value("patchgrid_cache_bytes") == 200
        oven = Oven(rows_of(300))
        oven.open.set()
        await cache.rows("too large", oven.compute)
        assert metrics.registry.get_sample_value("patchgrid_cache_bytes") == 200

    run(scenario)


def test_a_known_file_is_recalled_only_while_its_rows_are_here() -> None:
    async def scenario() -> None:
        cache, oven = RowCache(150, Metrics()), Oven(rows_of(100))
        oven.open.set()
        known = KnownFile("a", plan(DEMO, 100, 100))
        cache.remember("file", known)
        assert cache.recall("file") is None
        rows, _ = await cache.rows("a", oven.compute)
        assert cache.recall("file") == (known, rows)
        await cache.rows("b", oven.compute)
        assert cache.recall("file") is None

    run(scenario)


def test_an_image_that_comes_again_costs_the_ranks_nothing(start_server: Callable[..., Server], goldens: Path) -> None:
    server = start_server().wait_ready()
    image = (goldens / "images" / "640x700_RGB.jpeg").read_bytes()

    def embed(**options: str) -> dict[str, Any]:
        headers = {"content-type": "image/jpeg"}
        answer = server.client.post("/embed", content=image, params=options, headers=headers).raise_for_status()
        return dict(answer.json())

    first = embed()
    encoded = server.metric("patchgrid_rank_patches_total", rank="0")
    again = embed()
    assert server.metric("patchgrid_rank_patches_total", rank="0") == encoded
    assert server.metric("patchgrid_cache_lookups_total", result="known_file") == 1
    assert (first["usage"].pop("cached"), again["usage"].pop("cached")) == (0, 1)
    assert first == again
    assert embed(dtype="float32")["data"][0]["id"] != first["data"][0]["id"]
    assert server.metric("patchgrid_rank_patches_total", rank="0") == 2 * encoded
    assert server.end() == 0

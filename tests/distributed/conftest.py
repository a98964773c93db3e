"""Groups of real ranks for the tests of this folder."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from worker_group import Group

from distributed.launcher import LaunchOptions


@pytest.fixture(scope="module")
def start_group(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Group]]:
    """Starts groups of the tiny V4 checkpoint in float32; keyword arguments are those of LaunchOptions."""
    groups: list[Group] = []
    with asyncio.Runner() as runner:

        def start(num_ranks: int, **options: object) -> Group:
            launch = LaunchOptions(
                model=str(goldens / "tiny-deepseek_v4"),
                nproc_per_node=num_ranks,
                nnodes=1,
                rdzv_endpoint="",
                device="cpu",
                dtype="float32",
                attention="auto",
                max_patches_per_forward=None,
                graph_patches=None,
                collective_timeout_s=600.0,
                stall_timeout_s=120.0,
                worker_module="distributed.worker",
            )
            groups.append(Group(runner, replace(launch, **options), tmp_path_factory.mktemp("run")))
            return groups[-1]

        yield start
        for group in groups:
            group.close()

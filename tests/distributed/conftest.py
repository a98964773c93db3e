"""Groups of real ranks for the tests of this folder."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from worker_group import Group, Pixels

from distributed.launcher import LaunchOptions
from distributed.messages import Encode, Encoded, ImageSpec, Stop


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


@pytest.fixture(scope="session")
def encode_together() -> Callable[..., list[list[NDArray[np.float32]]]]:
    """Sends a group several batches at once, with `stop` the last message too, and gives the first answers' rows."""
    batch_ids = itertools.count(1001)

    def encode(
        group: Group, batches: Sequence[Sequence[Pixels]], *, stop: bool = False, num_answers: int | None = None
    ) -> list[list[NDArray[np.float32]]]:
        async def send_and_receive() -> list[list[NDArray[np.float32]]]:
            sent = []
            for canvases in batches:
                images = tuple(ImageSpec(canvas.shape[0], canvas.shape[1], "v41", "float32") for canvas in canvases)
                sent.append(Encode(next(batch_ids), images))
                await group.link.send(sent[-1], [canvas.data for canvas in canvases])
            if stop:
                await group.link.send(Stop())
            answers = []
            for batch in sent[:num_answers]:
                answer, buffers = await group.link.receive()
                assert isinstance(answer, Encoded)
                assert answer.batch_id == batch.batch_id
                answers.append(
                    [
                        np.frombuffer(buffer, np.float32).reshape(spec.num_rows, spec.width)
                        for spec, buffer in zip(answer.images, buffers, strict=True)
                    ]
                )
            return answers

        return group._run(send_and_receive())

    return encode

"""Servers to break, what they answer undisturbed, and what has to be true when a fault is over."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from load import Reference, noise
from server import Server

SUPPORT = Path(__file__).parents[1] / "support"
SHM = Path("/dev/shm")


def faulty_server(goldens: Path, folder: Path, *flags: str, ranks: int = 2, **environment: str) -> Server:
    return Server(
        folder,
        f"--model={goldens / 'tiny-deepseek_v4'}",
        "--dtype=float32",
        f"--nproc-per-node={ranks}",
        "--worker-module=faulty_worker",
        "--rank-timeout-s=2",
        "--restart-limit=1000",
        "--cache-bytes=0",  # every answer is to come from the ranks
        "--drain-pause-s=0.2",
        *flags,
        env=dict(os.environ, PYTHONPATH=str(SUPPORT), **environment),
    )


@pytest.fixture(scope="module")
def start_faulty(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers of the tiny V4 checkpoint in float32 whose ranks fail on the images of faulty_worker."""
    servers: list[Server] = []

    def start(*flags: str, **options: Any) -> Server:
        servers.append(faulty_server(goldens, tmp_path_factory.mktemp("serve"), *flags, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def reference(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    server = faulty_server(goldens, tmp_path_factory.mktemp("serve"), ranks=1)
    try:
        reference = Reference.of(server.wait_ready(), noise(24))
        assert server.end() == 0
        return reference
    finally:
        server.close()


@pytest.fixture
def settles() -> Callable[[Server], None]:
    """Asserts that a server is as it was: ready, nothing in progress, no process, descriptor or shm entry too many."""
    shm_before = set(SHM.iterdir())

    def check(server: Server) -> None:
        server.wait_ready()
        process = psutil.Process(server.process.pid)
        deadline = time.monotonic() + 20
        while True:
            state = {
                "requests": server.metric("patchgrid_in_progress_requests"),
                "held": server.metric("patchgrid_held_bytes"),
                "queue": server.metric("patchgrid_queue_images"),
                "patches": server.metric("patchgrid_queue_patches"),
                "ready": server.metric("patchgrid_ready"),
            }
            if state == {"requests": 0, "held": 0, "queue": 0, "patches": 0, "ready": 1}:
                break
            assert time.monotonic() < deadline, state
            time.sleep(0.1)
        zombies = [child for child in process.children(recursive=True) if child.status() == psutil.STATUS_ZOMBIE]
        assert zombies == []
        assert len(server.rank_pids()) == len(set(server.rank_pids()))
        assert set(SHM.iterdir()) <= shm_before
        assert process.num_fds() < 100

    return check

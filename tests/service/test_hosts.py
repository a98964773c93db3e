"""Two hosts, both this one: the command that the log gives for the other host makes it part of the group."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from load import noise
from server import Server, free_port


def test_a_second_host_joins_by_the_logged_command(start_server: Callable[..., Server], goldens: Path) -> None:
    server = start_server(
        f"--model={goldens / 'tiny-deepseek_v4'}",
        "--nnodes=2",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--nproc-per-node=1",
        "--batches-in-flight=1",  # so that all but the first image make one batch
        "--rank-timeout-s=3",
    )
    command = server.wait_for_log(r"on each other host, again whenever it ends: (.*)").group(1)
    torchrun, *arguments = shlex.split(command.replace("NODE_RANK", "1"))
    assert torchrun == "torchrun"
    other = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        server.wait_ready()
        assert server.client.get("/info").json()["ranks"] == 2
        files = [("files", (f"{number}.png", image)) for number, image in enumerate(noise(8))]
        assert server.client.post("/embed", files=files).status_code == 200
        assert server.metric("patchgrid_rank_patches_total", rank="1") > 0
        assert server.end() == 0
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
        other.wait()

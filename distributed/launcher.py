"""Start torchrun, watch it, end it: one `WorkerGroup` is one life of all ranks.

Each life is a new torchrun with `--max-restarts 0`: torchrun's own restart does not recover a gloo group. The front
end's environment is passed on, with the cores divided among the ranks.
"""

import asyncio
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from distributed.messages import Failure
from distributed.processes import kill_group


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What every life of the group is started with. None leaves a choice to the ranks."""

    model: str
    nproc_per_node: int
    nnodes: int
    rdzv_endpoint: str
    device: str
    dtype: str
    attention: str
    max_patches_per_forward: int | None
    graph_patches: int | None
    collective_timeout_s: float
    stall_timeout_s: float
    worker_module: str

    def torchrun_args(self, run_dir: Path, epoch: int) -> list[str]:
        """The command line of torchrun, ours being the first host where there are several."""
        rendezvous = ["--standalone"] if self.nnodes == 1 else self._meeting(node_rank="0")
        return [*rendezvous, *self._ranks(), f"--epoch={epoch}", f"--run-dir={run_dir}"]

    def other_host_command(self) -> str:
        """What to run on each other host, in a loop that starts it again when it ends; NODE_RANK counts them from 1."""
        return shlex.join(["torchrun", *self._meeting(node_rank="NODE_RANK"), *self._ranks()])

    def _meeting(self, node_rank: str) -> list[str]:
        endpoint = f"--rdzv-endpoint={self.rdzv_endpoint}"
        return [f"--nnodes={self.nnodes}", f"--node-rank={node_rank}", "--rdzv-backend=static", endpoint]

    def _ranks(self) -> list[str]:
        choices = {
            "--max-patches-per-forward": self.max_patches_per_forward,
            "--graph-patches": self.graph_patches,
        }
        return [
            f"--nproc-per-node={self.nproc_per_node}",
            "--max-restarts=0",
            "-m",
            self.worker_module,
            f"--model={self.model}",
            f"--device={self.device}",
            f"--dtype={self.dtype}",
            f"--attention={self.attention}",
            f"--collective-timeout-s={self.collective_timeout_s}",
            f"--stall-timeout-s={self.stall_timeout_s}",
            *(f"{flag}={value}" for flag, value in choices.items() if value is not None),
        ]


def rank_environment(num_ranks: int) -> dict[str, str]:
    """What the ranks of one host run fastest with, wherever the environment does not say otherwise."""
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        # OpenMP's threads spin for milliseconds while they wait for each other, which starves the decoders on the same
        # cores and, once those have one, the threads that are waited for: a tower beside two busy loops ran 3x slower.
        # Not to spin at all costs a tower by itself 10 to 20 %. A fraction of a millisecond costs neither.
        "GOMP_SPINCOUNT": "5000",
        # glibc gives large activations back to the kernel, which has to zero them again at the next layer: a forward of
        # 7840 patches spent a quarter of its time on that. Only the first of its arenas holds blocks so large.
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(2**32),
    }


class WorkerGroup:
    """One life of the group. Made by `start`; over when `wait` returns."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path, epoch: int) -> None:
        self._process = process
        self._run_dir = run_dir
        self._epoch = epoch

    @classmethod
    async def start(cls, options: LaunchOptions, run_dir: Path, epoch: int) -> "WorkerGroup":
        """Start torchrun. It runs on its own from here; rank 0 will knock at the link."""
        # Our own settings stay here: the ranks need none, and some are secret. torchrun and torch leave folders behind
        # in TMPDIR, which go with the run folder.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PATCHGRID_")}
        environment = rank_environment(options.nproc_per_node) | environment
        environment |= {"PYTHONSAFEPATH": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TMPDIR": str(run_dir)}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "distributed.agent",
            str(os.getpid()),
            *options.torchrun_args(run_dir, epoch),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is the front end's to handle
        )
        return cls(process, run_dir, epoch)

    async def wait(self) -> int:
        """Wait until torchrun has ended and give its exit code, negative for a signal."""
        return await self._process.wait()

    async def kill(self) -> None:
        """End torchrun and every rank, and return when they are gone."""
        await asyncio.to_thread(kill_group, self._process.pid)
        await self._process.wait()

    def failure(self) -> Failure | None:
        """The reason that ended the group, if a rank left one: the earliest phase, then the first rank to say so.

        What a rank reports while it serves or joins is often only that a peer went away.
        """
        files = sorted(self._run_dir.glob(f"failure-{self._epoch}-*.json"), key=lambda file: file.stat().st_mtime_ns)
        failures = [msgspec.json.decode(file.read_bytes(), type=Failure) for file in files]
        return min(failures, key=lambda failure: ("setup", "join", "serve").index(failure.phase), default=None)

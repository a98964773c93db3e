"""The process of one rank: `torchrun ... -m distributed.worker --model ... --run-dir ...`.

It loads first and joins second, so that a bad checkpoint is told by its own reason and not as a peer that went silent.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch

from distributed.lane import Lane, use_threads
from distributed.messages import Failure
from distributed.processes import PARENT_PID_VARIABLE, die_with_parent
from distributed.rank import GroupOptions, Rank
from encoder.attention import AttentionName
from encoder.checkpoint import open_checkpoint
from encoder.tower import Tower, choose_dtype
from encoder.weights import fingerprint, load_weights

log = logging.getLogger("patchgrid.worker")

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the command line of a rank says; the launcher writes it, on a second host its user does."""

    model: str
    device: DeviceName
    dtype: DtypeName
    attention: Literal["auto"] | AttentionName
    max_patches_per_forward: int | None
    graph_patches: int | None
    group: GroupOptions


def choose_device(name: DeviceName) -> torch.device:
    """The device of this rank: its own GPU by torchrun's local rank, or the CPU.

    Raises:
        ValueError: CUDA was asked for and this rank has no GPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; "
            "use --device cpu or fewer ranks (--nproc-per-node)"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def load_tower(options: WorkerOptions, device: torch.device) -> tuple[Tower, str]:
    """The tower on this rank's device, and its fingerprint: weights, config and the dtype it computes in."""
    checkpoint = open_checkpoint(options.model)
    weights = load_weights(checkpoint)
    dtype = choose_dtype(options.dtype, device)
    tower = Tower(
        checkpoint.config,
        weights,
        device=device,
        dtype=dtype,
        attention=options.attention,
        max_patches_per_forward=options.max_patches_per_forward,
        graph_patches=options.graph_patches,
    )
    return tower, f"{fingerprint(checkpoint.config, weights)}-{str(dtype).removeprefix('torch.')}"


def parse_options(argv: Sequence[str]) -> WorkerOptions:
    """Read a rank's command line."""
    parser = argparse.ArgumentParser(prog="distributed.worker", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=get_args(DeviceName), required=True)
    parser.add_argument("--dtype", choices=get_args(DtypeName), required=True)
    parser.add_argument("--attention", choices=["auto", *get_args(AttentionName)], required=True)
    parser.add_argument("--max-patches-per-forward", type=int)
    parser.add_argument("--graph-patches", type=int)
    parser.add_argument("--collective-timeout-s", type=float, required=True)
    parser.add_argument("--stall-timeout-s", type=float, required=True)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    found = parser.parse_args(argv)
    return WorkerOptions(
        model=found.model,
        device=found.device,
        dtype=found.dtype,
        attention=found.attention,
        max_patches_per_forward=found.max_patches_per_forward,
        graph_patches=found.graph_patches,
        group=GroupOptions(found.run_dir, found.epoch, found.collective_timeout_s, found.stall_timeout_s),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Load, join, serve. A failure's reason goes to the log and, for the front end, to a file in the run folder.

    After a failure it does not return: it ends the process, for threads that wait for other ranks do not end.
    """
    if PARENT_PID_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_PID_VARIABLE]))
    options = parse_options(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s")
    phase: Literal["setup", "join", "serve"] = "setup"
    try:
        device = choose_device(options.device)
        computing = Lane("compute", device, num_threads=torch.get_num_threads())
        use_threads(1)
        tower, weights_fingerprint = computing.do(partial(load_tower, options, device)).result()
        log.info("%s on %s, %s, attention %s", options.model, tower.device, tower.dtype, tower.attention)
        phase = "join"
        member = Rank(options.group, tower, weights_fingerprint, computing)
        phase = "serve"
        member.run()
    except Exception as error:  # the process border: every reason is told before this rank goes
        # What a user can mend is a ValueError with its whole story in the message.
        log.error("failed in %s: %s", phase, error, exc_info=not isinstance(error, ValueError))
        try:
            run_dir = options.group.run_dir
            if run_dir is not None and run_dir.is_dir():
                failure = Failure(rank=rank, phase=phase, reason=f"{type(error).__name__}: {error}")
                (run_dir / f"failure-{options.group.epoch}-{rank}.json").write_bytes(msgspec.json.encode(failure))
            logging.shutdown()
        finally:
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

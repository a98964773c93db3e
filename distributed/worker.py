"""One rank of the worker group: `torchrun ... -m distributed.worker --model ... --run-dir ...`.

Rank 0 takes batches from the front end and leads; the others follow its commands. A rank loads first and joins second,
so that a bad checkpoint is reported by its own reason and not as a peer that went silent.
"""

import argparse
import logging
import os
import queue
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
import torch
from torch import Tensor

from distributed.balance import balance, cut_apart, rank_loads
from distributed.exchange import Exchange
from distributed.heartbeat import Heartbeat
from distributed.link import Buffer, RankLink
from distributed.messages import Encode, Encoded, Failure, Hello, Idle, ImageSpec, RankInfo, RowsSpec, Stop
from distributed.processes import PARENT_PID_VARIABLE, die_with_parent
from encoder.attention import AttentionName
from encoder.checkpoint import open_checkpoint
from encoder.layout import num_layout_rows
from encoder.tower import Tower, choose_dtype
from encoder.weights import fingerprint, load_weights

log = logging.getLogger("patchgrid.worker")

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "bfloat16", "float32"]

_HEARTBEAT_S = 0.5
_TICKS_PER_TIMEOUT = 4


@dataclass(frozen=True, slots=True)
class RankOptions:
    """What the command line of a rank says; the launcher writes it, a second host's user may."""

    model: str
    device: DeviceName
    dtype: DtypeName
    attention: Literal["auto"] | AttentionName
    max_patches_per_forward: int | None
    collective_timeout_s: float
    epoch: int
    run_dir: Path | None


class Rank:
    """A loaded tower and this process's place in the group."""

    def __init__(self, options: RankOptions, tower: Tower, weights_fingerprint: str) -> None:
        self._options = options
        self._tower = tower
        self._exchange = Exchange.join(tower.device, options.collective_timeout_s)
        exchange = self._exchange
        self._heartbeat = Heartbeat(exchange.rank, exchange.num_ranks, options.epoch, interval_s=_HEARTBEAT_S)
        device = torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu"
        self._infos = exchange.introduce(
            RankInfo(exchange.rank, os.getpid(), socket.gethostname(), device, weights_fingerprint)
        )
        strangers = [info.rank for info in self._infos if info.fingerprint != weights_fingerprint]
        if strangers:
            raise RuntimeError(f"ranks {strangers} hold another model than rank {exchange.rank}: compare --model")

    def run(self) -> None:
        """Serve until told to stop."""
        if self._exchange.rank == 0:
            self._lead()
        else:
            self._follow()
        self._heartbeat.stop()
        self._exchange.leave()

    def _lead(self) -> None:
        assert self._options.run_dir is not None, "rank 0 runs beside the front end"
        link = RankLink(self._options.run_dir, self._options.epoch, self._heartbeat.silent_s)
        self._warm_up()
        link.send(
            Hello(
                epoch=self._options.epoch,
                ranks=self._infos,
                dtype=str(self._tower.dtype).removeprefix("torch."),
                attention=self._tower.attention,
                layouts=self._tower.layouts,
                max_patches_per_forward=self._tower.max_patches_per_forward,
            )
        )
        while True:
            try:
                delivery = link.inbox.get(timeout=self._options.collective_timeout_s / _TICKS_PER_TIMEOUT)
            except queue.Empty:
                self._send_command(Idle())
                continue
            wait_s = time.perf_counter() - delivery.arrived_at
            batch = delivery.message
            self._send_command(batch)
            if isinstance(batch, Stop):
                break
            answer, rows = self._encode_and_cut(batch, _canvases(batch.images, delivery.buffers), wait_s)
            link.send(answer, rows)
        link.close()

    def _follow(self) -> None:
        while True:
            command = self._exchange.receive_command()
            if isinstance(command, Stop):
                return
            if isinstance(command, Encode):
                self._encode(command, None)

    def _send_command(self, command: Encode | Idle | Stop) -> None:
        if self._exchange.num_ranks > 1:
            self._exchange.send_command(command)

    def _warm_up(self) -> None:
        """One small image per rank through the ordinary way: kernels and communicators exist before the hello."""
        side = 3 * self._tower.config.patch_size
        spec = ImageSpec(height=side, width=side, layout="rows", dtype="float32")
        batch = Encode(batch_id=0, images=(spec,) * self._exchange.num_ranks)
        self._send_command(batch)
        canvas = torch.zeros(side, side, 3, dtype=torch.uint8)
        answer, _ = self._encode_and_cut(batch, [canvas] * len(batch.images), wait_s=0.0)
        if not all(image.finite for image in answer.images):
            raise RuntimeError("the tower's first forward gave values that are not finite")

    def _encode(self, batch: Encode, canvases: Sequence[Tensor] | None) -> "_Gathered":
        """Every rank's part of a batch. `canvases` are all of the batch's on rank 0 and None elsewhere."""
        started = time.perf_counter()
        patch_area = self._tower.config.patch_size**2
        num_patches = [image.height * image.width // patch_area for image in batch.images]
        num_rows = [self._num_rows(image) for image in batch.images]
        shares = balance(num_patches, self._exchange.num_ranks)
        mine = self._exchange.scatter_pixels(batch.images, shares, canvases)
        rows_ND = self._tower.encode(mine, [batch.images[index].layout for index in shares[self._exchange.rank]])
        if self._tower.device.type == "cuda":
            torch.cuda.synchronize(self._tower.device)
        encoded = time.perf_counter()
        gathered_RMD = self._exchange.gather_rows(rows_ND, rank_loads(shares, num_rows))
        spans = cut_apart(shares, num_rows)
        return _Gathered(
            rows=[gathered_RMD[span.rank, span.start : span.stop] for span in spans],
            rank_patches=rank_loads(shares, num_patches),
            encode_s=encoded - started,
            gather_s=time.perf_counter() - encoded,
        )

    def _num_rows(self, image: ImageSpec) -> int:
        block = self._tower.config.patch_size * self._tower.config.merge_ratio
        return num_layout_rows(image.layout, (-(-image.height // block), -(-image.width // block)))

    def _encode_and_cut(self, batch: Encode, canvases: Sequence[Tensor], wait_s: float) -> tuple[Encoded, list[Buffer]]:
        """Rank 0: a batch's answer, each image's rows in the dtype that it asked for."""
        gathered = self._encode(batch, canvases)
        specs, buffers = [], []
        for image, rows_ND in zip(batch.images, gathered.rows, strict=True):
            rows_ND = rows_ND.to(getattr(torch, image.dtype)).contiguous()
            finite = bool(rows_ND.isfinite().all())
            specs.append(RowsSpec(num_rows=rows_ND.shape[0], width=rows_ND.shape[1], finite=finite))
            buffers.append(rows_ND.cpu().flatten().view(torch.uint8).numpy().data if finite else b"")
        answer = Encoded(
            batch_id=batch.batch_id,
            images=tuple(specs),
            rank_patches=gathered.rank_patches,
            wait_s=wait_s,
            encode_s=gathered.encode_s,
            gather_s=gathered.gather_s,
        )
        return answer, buffers


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A batch after the all-gather: every image's rows (N, D), in the order of the batch."""

    rows: list[Tensor]
    rank_patches: tuple[int, ...]
    encode_s: float
    gather_s: float


def _canvases(images: Sequence[ImageSpec], buffers: Sequence[memoryview]) -> list[Tensor]:
    return [
        torch.frombuffer(buffer, dtype=torch.uint8).view(image.height, image.width, 3)
        for image, buffer in zip(images, buffers, strict=True)
    ]


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
            f"local rank {local_rank} has no GPU: torch sees {torch.cuda.device_count()}; lower --nproc-per-node"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def load_tower(options: RankOptions) -> tuple[Tower, str]:
    """The tower on this rank's device, and its fingerprint: weights, config and the dtype it computes in."""
    device = choose_device(options.device)
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
    )
    return tower, f"{fingerprint(checkpoint.config, weights)}-{str(dtype).removeprefix('torch.')}"


def parse_options(argv: Sequence[str]) -> RankOptions:
    """Read a rank's command line."""
    parser = argparse.ArgumentParser(prog="distributed.worker", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", choices=get_args(DeviceName), default="auto")
    parser.add_argument("--dtype", choices=get_args(DtypeName), default="auto")
    parser.add_argument("--attention", choices=["auto", *get_args(AttentionName)], default="auto")
    parser.add_argument("--max-patches-per-forward", type=int)
    parser.add_argument("--collective-timeout-s", type=float, default=600.0)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    return RankOptions(**vars(parser.parse_args(argv)))


def main(argv: Sequence[str] | None = None) -> int:
    """Load, join, serve. A failure's reason goes to the log and, for the front end, to a file in the run folder."""
    if PARENT_PID_VARIABLE in os.environ:
        die_with_parent(int(os.environ[PARENT_PID_VARIABLE]))
    options = parse_options(sys.argv[1:] if argv is None else argv)
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s rank {rank}: %(message)s")
    phase: Literal["setup", "join", "serve"] = "setup"
    try:
        tower, weights_fingerprint = load_tower(options)
        log.info("%s on %s, %s, attention %s", options.model, tower.device, tower.dtype, tower.attention)
        phase = "join"
        member = Rank(options, tower, weights_fingerprint)
        phase = "serve"
        member.run()
    except Exception as error:  # the process border: every reason is told before this rank goes
        log.exception("failed in %s", phase)
        if options.run_dir is not None and options.run_dir.is_dir():
            failure = Failure(rank=rank, phase=phase, reason=f"{type(error).__name__}: {error}")
            (options.run_dir / f"failure-{options.epoch}-{rank}.json").write_bytes(msgspec.json.encode(failure))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
